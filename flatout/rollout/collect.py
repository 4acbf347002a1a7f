"""One round on disk: a journal of what is sampled and scored, the whole round as a token store, and its identity."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter
from xxhash import xxh3_64_hexdigest

from flatout.config.describe import settings
from flatout.config.model import LoraConfig
from flatout.config.objective import ADVANTAGE, ANSWERS, SAMPLER_LOGPROB
from flatout.config.own_code import OwnCode
from flatout.config.rewards import RewardConfig
from flatout.data.columns import PREFIX_TOKENS, Column
from flatout.data.rollout_columns import ENDINGS
from flatout.data.rows.converter import files_of
from flatout.data.store_writer import new_store
from flatout.data.token_store import StoreMeta, TokenStore
from flatout.errors import ResourceError
from flatout.io.durable_io import DurableIO
from flatout.io.json_file import open_plain
from flatout.io.kept_facts import hashes_of
from flatout.io.own_files import AppendFile
from flatout.models.lora.adapter_file import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from flatout.rollout.advantages import Advantages
from flatout.rollout.sampler import Completion

COLUMNS: Mapping[str, Column] = {
    PREFIX_TOKENS: Column("int32", "unit", "tokens of the prompt that the answers share"),
    ADVANTAGE: Column("float32", "token", "advantage of a sampled token"),
    SAMPLER_LOGPROB: Column("float32", "token", "log-probability of a token in the distribution it was drawn from"),
    ANSWERS: Column("float32", "sample", "for how many answers of its round it counts"),
    "reward": Column("float64", "sample", "weighted sum of the rewards; NaN: not scored", partial=True),
    "ending": Column("int8", "sample", "why the answer ended: 0 stop token, 1 length, 2 positions"),
}
"""What the store of a round has; a column `reward_NAME` a reward function comes to it."""


@dataclass(frozen=True, slots=True)
class Group:
    """All answers to one prompt of a round."""

    place: int
    """The prompt's place in the round."""
    prompt: int
    """The prompt's number among all."""
    answers: tuple[Completion, ...]
    rewards: tuple[tuple[float | None, ...], ...] = ()
    """Of each answer what each function gave it, None for no score; empty before the group is scored."""
    totals: tuple[float | None, ...] = ()
    """The weighted sum of each answer's rewards; None for an answer that nothing has scored."""


_GROUP, GROUPS = TypeAdapter(Group), TypeAdapter(list[Group])


def journal_folder(folder: Path) -> Path:
    """Return where a round's journals are until its answers are in `folder`."""
    return folder.with_name(f".{folder.name}")


class Journal:
    """What one rank has sampled and scored of a round: a line a group, on disk before the next one.

    All ranks' journals of a round lie in one folder, which another number of ranks can read. Each line begins with a
    hash of the rest: one that is damaged, or that a crash cut off, is left out, and so are journals of another
    `identity`. Add groups once it is open.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], rank: int) -> None:
        self.folder, self._identity, self._path = folder, identity, folder / f"rank-{rank}.journal"
        self._first = json.dumps(identity, sort_keys=True).encode()

    def drop_others(self) -> str:
        """Remove journals of another identity, of any rank; return what differs. One rank may, before any opens."""
        differs = dict[str, None]()
        for path in self.folder.glob("rank-*.journal"):
            if (first := next(self._lines(path), self._first)) != self._first:
                differs[what_differs(json.loads(first) if first[:1] == b"{" else None, self._identity)] = None
                DurableIO().remove_tree(path)
        return "; ".join(differs)

    def open(self) -> None:
        """Go on behind what a start before this one has left. Raises ResourceError."""
        DurableIO().make_dir(self.folder)
        if is_new := next(self._lines(self._path), None) != self._first:
            DurableIO().remove_tree(self._path)
        self._file = AppendFile(self._path)
        if is_new:
            self._write(self._first)

    def groups(self) -> dict[int, Group]:
        """Return what all ranks have, by place: the newest line of each group."""
        groups: dict[int, Group] = {}
        for path in sorted(self.folder.glob("rank-*.journal")):
            lines = self._lines(path)
            for line in lines if next(lines, None) == self._first else ():
                group = _GROUP.validate_json(line)
                if group.place not in groups or group.rewards:
                    groups[group.place] = group
        return groups

    def _lines(self, path: Path) -> Iterator[bytes]:
        """Yield the intact lines of a journal without their hashes, its identity first; none without one."""
        with suppress(OSError), open_plain(path) as file:
            for number, content in enumerate(file):
                digest, _, line = content.rstrip(b"\n").partition(b" ")
                is_intact = digest == xxh3_64_hexdigest(line).encode()
                if number == 0 and not is_intact:
                    return
                if is_intact:
                    yield line

    def add(self, group: Group) -> None:
        """Append a group, which the system has once this returns. Raises ResourceError."""
        self._write(_GROUP.dump_json(group))

    def _write(self, line: bytes) -> None:
        self._file.write(f"{xxh3_64_hexdigest(line)} {line.decode()}")
        if self._file.trouble is not None:
            raise ResourceError(self._file.trouble)

    def close(self) -> None:
        self._file.close()


def write_round(
    folder: Path,
    groups: Sequence[Group],
    prompts: Sequence[Sequence[int]],
    advantages: Advantages,
    meta: StoreMeta,
    reward_names: Sequence[str],
    num_ids: int,
) -> TokenStore:
    """Write those answers of a round that are trained as a token store with a unit per group; atomic.

    `prompts` are the token ids of each group's prompt, `advantages` those of all answers, group by group. The model can
    draw `num_ids` tokens, also those that its tokenizer lacks. Raises ResourceError.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    by_reward = {f"reward_{name}": replace(COLUMNS["reward"], meaning=f"by {name}") for name in reward_names}
    end = 0
    with new_store(folder, num_ids, columns={**COLUMNS, **by_reward}) as writer:
        for group, prompt in zip(groups, prompts, strict=True):
            start, end = end, end + len(group.answers)
            kept = np.flatnonzero(advantages.is_kept[start:end])
            if not len(kept):
                continue
            answers = [group.answers[index] for index in kept]
            counts, ids = [len(answer.token_ids) for answer in answers], [answer.token_ids for answer in answers]
            rewards = np.array([group.rewards[index] for index in kept], np.float64)
            values: dict[str, NDArray[Any]] = {
                PREFIX_TOKENS: np.array([len(prompt) - 1], np.int32),
                ADVANTAGE: _after(prompt, np.repeat(advantages.values[start:end][kept], counts), counts),
                SAMPLER_LOGPROB: _after(prompt, np.concatenate([answer.logprobs for answer in answers]), counts),
                ANSWERS: np.full(len(kept), advantages.count, np.float32),
                "reward": np.array(group.totals, np.float64)[kept],
                "ending": np.array([ENDINGS.index(answer.ending) for answer in answers], np.int8),
                **{name: rewards[:, index] for index, name in enumerate(by_reward)},
            }
            writer.append(
                np.concatenate([np.array([*prompt, *own], np.int32) for own in ids]),
                _after(prompt, np.ones(sum(counts)), counts).astype(bool),
                np.array(counts, np.int64) + len(prompt),
                np.zeros(len(kept), np.int32),
                np.full(len(kept), group.prompt + 1),
                np.array([len(kept)], np.int64),
                values,
            )
        writer.finish(replace(meta, max_token_id=writer.max_token_id), {})
    return TokenStore.open(folder)


def unscored(rewards: Sequence[RewardConfig], groups: Sequence[Group], problems: Mapping[str, int]) -> dict[str, str]:
    """Return what to tell of functions that returned None for answers that no other function scored, by title."""
    answers = [answer for one in groups for answer in zip(one.rewards, one.totals, strict=True)]
    whys = dict[str, str]()
    for index, reward in enumerate(rewards):
        num_scored = sum(row[index] is not None for row, _ in answers)
        num_failed = problems.get(reward.title, 0) if reward.on_error == "skip" else 0
        num_lost = sum(row[index] is None and total is None for row, total in answers)
        if reward.function is None or not reward.weight or num_lost <= num_failed:
            continue
        others = (f", failed on {num_failed:,}" if num_failed else "") + " and returned None for the others"
        if num_lost < len(answers) - num_scored:
            others += f", {num_lost:,} of which no function scored"
        said = f"{reward.title} scored {num_scored:,} of {len(answers):,} answers{others}"
        whys[reward.title] = f"{said}; if it means 0, return 0.0"
    return whys


def _after(prompt: Sequence[int], values: NDArray[Any], counts: Sequence[int]) -> NDArray[np.float32]:
    """Return values of the tokens of answers, with a 0 for each token of the prompt before every answer."""
    parts = np.split(values, np.cumsum(counts)[:-1])
    return np.concatenate([np.concatenate([np.zeros(len(prompt)), part]) for part in parts]).astype(np.float32)


def round_identity(lora: LoraConfig, fingerprints: Mapping[str, Any]) -> dict[str, Any]:
    """Return the code and weights that files have, wherever they lie, by what a person calls them.

    `fingerprints` are those of the run. Raises UsageError or ResourceError for files of an adapter that are gone.
    """
    files = {"rewards": fingerprints["rewards"], "model": fingerprints["model"]}
    if (folder := lora.continue_from) is not None:
        files["first adapter"] = hashes_of({name: folder / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)})
    if lora.init_path is not None:
        files["adapter start"] = files_of(OwnCode.read(lora.init_path, "lora.init_path", "adapter start"))
    named = ((f"{Path(file).name} of the {of}", digest) for of, own in files.items() for file, digest in own.items())
    by_name = {name: [digest for _, digest in same] for name, same in groupby(sorted(named), itemgetter(0))}
    return {**by_name, "the loss": fingerprints.get("objective"), "the optimizer's file": fingerprints.get("optim")}


def what_differs(saved: Any, now: Mapping[str, Any]) -> str:
    """Name the parts in which two identities of a round differ; a setting that one lacks is of another flatout."""
    version = "the version of flatout"
    if not isinstance(saved, Mapping):
        return version
    names = (name for name in sorted({*saved, *now}) if saved.get(name) != now.get(name) or name not in saved)
    return ", ".join(dict.fromkeys(version if name in settings() and name not in saved else name for name in names))
