"""What a run of rounds knows before the first: its prompts, and a data set as large as a round can be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase
from xxhash import xxh3_64_intdigest

from flatout.config.objective import ANSWERS
from flatout.config.schema import Config
from flatout.data.columns import PREFIX_TOKENS
from flatout.data.prompts import PromptSet, read_prompts
from flatout.data.rollout_columns import with_rollout_columns
from flatout.data.token_store import TokenStore
from flatout.data.tokenizer import tokenizer_of
from flatout.errors import counted
from flatout.planner.steps.rounds import Rounds
from flatout.planner.steps.training_plan import split_held_out
from flatout.rollout.collect import COLUMNS
from flatout.rollout.sampler import Completion
from flatout.track.callback import Reporter


@dataclass(frozen=True, slots=True)
class RolloutPrompts:
    """The prompts of a run of rounds: some are trained on, and those that `eval.fraction` holds out are evaluated."""

    prompts: PromptSet
    train_ids: NDArray[np.int64]
    held_out_ids: NDArray[np.int64]
    tokenizer: PreTrainedTokenizerBase
    rounds: Rounds

    def longest_answer(self, max_new_tokens: int, max_positions: int | None) -> int:
        """Return the most tokens of an answer with its prompt."""
        longest = int(self.prompts.lengths.max()) + max_new_tokens
        return min(longest, max_positions or longest)

    def text_of(self, answer: Completion) -> str:
        """Return what an answer says, without special tokens."""
        return str(self.tokenizer.decode(list(answer.answer_ids), skip_special_tokens=True))


def open_prompts(config: Config, max_positions: int | None, reporter: Reporter) -> tuple[RolloutPrompts, TokenStore]:
    """Read the prompts of a run of rounds; return them, and the bounds of a round.

    Raises DataError for sources without a usable prompt, or with pictures.
    """
    rollout = config.rollout
    assert rollout.rounds is not None
    reporter.phase("reading prompts")
    limits = {"rollout.max_prompt_tokens": rollout.max_prompt_tokens, "": max_positions and max_positions - 1}
    prompts = read_prompts(
        config.data, config.model.name, limits=limits,
        progress=lambda done, total: reporter.phase("reading prompt", done, total or 0),
        log=lambda text: reporter.stage("prompts", text),
    )  # fmt: skip
    for fix in prompts.longer:
        reporter.event("rows", {**{name: prompts.counts[name] for name in ("too_long", "rows")}, "try": str(fix)})
    train_ids, held_out_ids = np.arange(len(prompts)), np.zeros(0, np.int64)
    if config.eval.fraction:
        each = map(prompts.ids_of, range(len(prompts)))
        same = np.array([xxh3_64_intdigest(ids.tobytes()) for ids in each], np.uint64)
        train_ids, held_out_ids = split_held_out(train_ids, config.eval.fraction, config.seed, same)
    rounds = Rounds(rollout.rounds, rollout.prompts, rollout.group, rollout.steps, len(train_ids))
    opened = RolloutPrompts(prompts, train_ids, held_out_ids, tokenizer_of(config.data, config.model.name), rounds)
    held_out = f", {len(held_out_ids):,} held out" if len(held_out_ids) else ""
    reporter.stage("prompts", f"{len(train_ids):,} of up to {prompts.lengths.max():,} tokens{held_out}")
    # of 25, the standard error of a reward of 0 or 1 is 0.1
    if 0 < len(held_out_ids) < 25:
        few = f"{counted(len(held_out_ids), 'held-out prompt')} (eval.fraction={config.eval.fraction:g})"
        reporter.event("few_held_out", {"why": f"{few} may choose best/ by chance; 25 or more are better"})
    return opened, bounds_store(opened, rollout.max_new_tokens, max_positions)


def bounds_store(prompts: RolloutPrompts, max_new_tokens: int, max_positions: int | None) -> TokenStore:
    """Return a store in memory of one step's answers, each as long as any can be, to the longest prompt.

    It is what memory and compiled shapes of all rounds are planned for.
    """
    rounds, meta = prompts.rounds, prompts.prompts.meta
    longest = prompts.prompts.ids_of(int(np.argmax(prompts.prompts.lengths)))
    num_prompt, num_units = len(longest), rounds.units_per_step
    length = prompts.longest_answer(max_new_tokens, max_positions)
    count = num_units * rounds.group
    per: dict[str, int] = {"token": length * count, "sample": count, "unit": num_units}
    extra = {name: np.zeros(per[column.per], column.stored) for name, column in COLUMNS.items()}
    extra[PREFIX_TOKENS][:], extra[ANSWERS][:] = num_prompt - 1, 1
    columns = {name: replace(column, fingerprint=meta.fingerprint) for name, column in COLUMNS.items()}
    numbers, ids = np.arange(count), np.resize(longest, length)
    store = TokenStore(
        folder=Path("bounds of a round"), token_ids=np.tile(ids, count),
        loss_mask=np.tile(np.arange(length) >= num_prompt, count), offsets=np.arange(count + 1) * length,
        num_label_tokens=np.full(count, length - num_prompt), hashes=numbers.astype(np.uint64),
        files=np.zeros(count, np.int32), rows=numbers + 1, unit_starts=numbers % rounds.group == 0,
        meta=replace(meta, files=("rollouts",), max_token_id=int(prompts.prompts.token_ids.max())),
        columns=columns, extra=extra,
    )  # fmt: skip
    return with_rollout_columns(store)
