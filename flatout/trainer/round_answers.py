"""Sample and score the answers of a round, or to held-out prompts, by the current weights; all ranks take part."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_128_hexdigest

from flatout.checkpoint.resume_check import numerics_of
from flatout.checkpoint.write import saved_steps
from flatout.config.folders import round_folder
from flatout.config.objective import ADVANTAGE, SAMPLER_LOGPROB
from flatout.config.section import with_paths
from flatout.data.token_store import TokenStore
from flatout.errors import Fix, ResourceError
from flatout.io.durable_io import DurableIO
from flatout.io.redact import redacted
from flatout.models.stops import stop_token_ids
from flatout.objectives.policy import Policy
from flatout.planner.steps.packing import partition
from flatout.rollout.advantages import make_advantages
from flatout.rollout.collect import GROUPS, Group, Journal, journal_folder, round_identity, unscored, write_round
from flatout.rollout.rewards.pool import Item
from flatout.rollout.sampler import Completion, NoRoomError, SamplingParams
from flatout.track.record import HeldOutRecord, RatedAnswer, RoundRecord
from flatout.trainer.answers import StopRequested, make_room_for_steps, sampling
from flatout.trainer.passes import PassesStopped
from flatout.trainer.rollout_prompts import RolloutPrompts
from flatout.trainer.state import TrainingRun

# groups that are scored, and then in the journal, at once
SCORED_GROUPS = 16
# sampled tokens between two signs of life
TOLD_TOKENS = 64
# answers that a record shows: the best, and as many of the worst
NUM_SHOWN = 3
# characters of each that are shown
MAX_SHOWN = 2000


@dataclass(frozen=True, slots=True)
class RoundFile:
    """What `round-N.json` says of a complete round."""

    digest: str | None
    """What identifies its answers; None: none is trained."""
    identity: Any
    """`identity_of` the round."""
    record: RoundRecord


def collect_round(
    run: TrainingRun, prompts: RolloutPrompts, index: int, lengths: Mapping[int, float]
) -> tuple[str | None, str]:
    """Sample and score a round; return what identifies the written answers to train, or None and why. Collective.

    Each rank samples and scores its own prompts, of about the same expected number of tokens, and waits for the others
    only once its answers are on disk. Raises PassesStopped, ResourceError, and what `Rewards.score` raises.
    """
    group = run.checkpoints.group
    folder = round_folder(run.config.folder, index + 1)
    numbers = prompts.train_ids[prompts.rounds.places(index, run.config.seed)]
    identity = identity_of(run, prompts, index)
    journal = Journal(journal_folder(folder), identity, run.rank.index)

    def look() -> list[list[int]]:
        if differs := journal.drop_others():
            why = f"{journal.folder}: its answers were sampled with another value of: {differs}"
            run.reporter.event("round_again", {"round": index + 1, "why": why})
        if known := journal.groups():
            counts = [len(known) * run.config.rollout.group, len(numbers) * run.config.rollout.group]
            run.reporter.stage("round", f"{index + 1}: {counts[0]:,} of {counts[1]:,} answers from the journal")
        return [[*known], [at for at, one in known.items() if one.rewards]]

    sampled, scored = group.run_on_first_rank(look)
    journal.open()

    def work() -> dict[str, Any]:
        with closing(journal):
            started, doing = time.perf_counter(), f"round {index + 1}: sampling answer"
            mine = _deal(run, sorted({*range(len(numbers))} - {*scored}), numbers, lengths)
            asked = [(at, int(numbers[at]), index * len(numbers) + at) for at in mine if at not in sampled]
            num_tokens = _sample(run, prompts, asked, run.config.rollout.group, doing, journal.add)
            ended, groups, problems = time.perf_counter(), journal.groups(), Counter[str]()
            for first in range(0, len(mine), SCORED_GROUPS):
                some = [groups[at] for at in mine[first : first + SCORED_GROUPS]]
                problems += _score(run, prompts, some, journal.add)
        score_s = time.perf_counter() - ended
        return {"sample_s": ended - started, "score_s": score_s, "num_tokens": num_tokens, "problems": problems}

    by_rank = _unless_stopped(run, work)

    def write() -> tuple[str | None, str]:
        groups = [one for _, one in sorted(journal.groups().items())]
        digest, record = _write(run, prompts, index, groups, by_rank)
        DurableIO().write_json(folder.with_suffix(".json"), asdict(RoundFile(digest, identity, record)))
        DurableIO().remove_tree(journal.folder)
        _remove_old(run, index)
        run.reporter.record(record)
        _tell_unscored(run, groups, record.problems)
        return digest, record.why_untrained

    written: tuple[str | None, str] = group.run_on_first_rank(write)
    return written


def held_out_reward(run: TrainingRun, prompts: RolloutPrompts) -> float | None:
    """Sample and score one answer to each held-out prompt, always with the same draws; record and return the mean.

    Collective. None without a scored answer. Raises PassesStopped.
    """
    started = time.perf_counter()

    def work() -> Any:
        sampled, scored = list[Group](), list[Group]()
        mine = prompts.held_out_ids[run.rank.index :: run.rank.world].tolist()
        # drawn by numbers that no round draws by
        asked = [(number, number, -1 - number) for number in mine]
        _sample(run, prompts, asked, 1, "sampling answer to a held-out prompt", sampled.append)
        problems = _score(run, prompts, sorted(sampled, key=lambda one: one.place), scored.append)
        return problems, GROUPS.dump_python(scored, mode="json")

    by_rank = _unless_stopped(run, work)
    groups = [one for _, own in by_rank for one in GROUPS.validate_python(own)]
    figures, scored = _figures(run, prompts, groups), [one.totals[0] for one in groups if one.totals[0] is not None]
    stderr = float(np.std(scored, ddof=1)) / len(scored) ** 0.5 if len(scored) > 1 else None
    eval_s = time.perf_counter() - started
    run.reporter.record(HeldOutRecord(run.progress.step, **figures, eval_s=eval_s, reward_stderr=stderr))
    _tell_unscored(run, groups, sum((Counter(one) for one, _ in by_rank), Counter[str]()))
    reward: float | None = figures["reward"]
    return reward


def _unless_stopped(run: TrainingRun, work: Callable[[], Any]) -> list[Any]:
    """Return what `work` returns on each rank. Collective. Raises PassesStopped if a rank was asked to stop."""
    group = run.checkpoints.group

    def until_stopped() -> Any:
        try:
            return work()
        except StopRequested:
            return None

    group.run_on_first_rank(lambda: DurableIO().remove_tree(_stop_file(run)))  # that of a start before this one
    if None in (by_rank := group.run_on_all_ranks(until_stopped)):
        raise PassesStopped
    return by_rank


def _stop_file(run: TrainingRun) -> Path:
    """Return the file by which ranks hear that one was asked to stop: while they sample, they share no collective."""
    return run.config.folder / ".stop.tmp"


def _tell(run: TrainingRun, doing: str, done: int, total: int) -> None:
    """Say how far this rank is, and that it lives. Raises StopRequested if a rank was asked to stop."""
    run.reporter.phase(doing, done, total)
    run.watch.alive()
    if run.stop.requested:
        with suppress(OSError):  # the others then hear of it after their answers
            _stop_file(run).touch()
    elif not _stop_file(run).exists():
        return
    raise StopRequested


def identity_of(run: TrainingRun, prompts: RolloutPrompts, index: int) -> dict[str, Any]:
    """Return what decides the answers of a round and their scores: all that changes numbers in the run so far."""
    config = with_paths(run.config, lambda path: Path(path).name)
    return {
        **redacted(numerics_of(config.model_dump(mode="json"))),
        **round_identity(run.config.lora, run.planned.fingerprints),
        "the prompts": prompts.prompts.fingerprint,
        "the number of the round": index,
        "the answers of the round before": run.progress.round_store,
    }


def digest_of(store: TokenStore) -> str:
    """Return what identifies the answers of a round, and what is learnt from them."""
    names = ("token_ids", "loss_mask", "offsets", ADVANTAGE, SAMPLER_LOGPROB)
    return xxh3_128_hexdigest(" ".join(store.columns[name].fingerprint for name in names).encode())


def _deal(run: TrainingRun, places: Sequence[int], numbers: Any, lengths: Mapping[int, float]) -> list[int]:
    """Return this rank's places, so that ranks expect about as many tokens: as many as the last answers had."""
    usual = sum(lengths.values()) / len(lengths) if lengths else 1.0
    costs = [lengths.get(int(numbers[at]), usual) for at in places]
    return [places[index] for index in partition(costs, run.rank.world)[run.rank.index]] if places else []


def _sample(
    run: TrainingRun, prompts: RolloutPrompts, asked: Sequence[tuple[int, int, int]], size: int, doing: str,
    on_group: Callable[[Group], None],
) -> int:  # fmt: skip
    """Sample `size` answers to each prompt, given by place, number and the number that it is drawn by.

    `on_group` gets a group once its last answer ends. Returns the number of tokens. Raises StopRequested, and
    ResourceError if memory has no room for the answers.
    """
    finished: dict[int, dict[int, Completion]] = {}
    num_tokens = num_done = 0

    def on_token(prompt: int, completion: int, token_id: int) -> None:
        nonlocal num_tokens
        num_tokens += 1
        if run.stop.requested or not num_tokens % TOLD_TOKENS:
            _tell(run, doing, num_done, len(asked) * size)

    def on_answer(prompt: int, completion: int, answer: Completion) -> None:
        nonlocal num_done
        num_done += 1
        answers = finished.setdefault(prompt, {})
        answers[completion] = answer
        if len(answers) == size:
            place, number, _ = asked[prompt]
            on_group(Group(place, number, tuple(answers[each] for each in range(size))))

    texts, rollout = [prompts.prompts.ids_of(number).tolist() for _, number, _ in asked], run.config.rollout
    _tell(run, doing, 0, len(asked) * size)
    stops = frozenset(stop_token_ids(run.model, prompts.tokenizer, prompts.prompts.stop_tokens))
    params = SamplingParams(
        rollout.max_new_tokens, temperature=rollout.temperature, seed=run.config.seed, stop_ids=stops,
        max_positions=run.planned.shape.max_positions,
    )  # fmt: skip
    try:
        with sampling(run) as sampler:
            if texts:
                sampler.prove(texts)
            sampler.sample(texts, size, params, on_token, [key for _, _, key in asked], on_answer=on_answer)
    except (NoRoomError, torch.OutOfMemoryError) as error:
        why = "out of memory while sampling; lower rollout.max_new_tokens, or the memory that training takes"
        fix = Fix({"recompute": "full"})
        raise ResourceError(why, [fix]) from error
    finally:
        make_room_for_steps(run)
    return num_tokens


def _score(
    run: TrainingRun, prompts: RolloutPrompts, groups: Sequence[Group], on_group: Callable[[Group], None]
) -> Counter[str]:
    """Score the answers of groups by the reward functions; return how many problems each function had.

    `on_group` gets each group with what they said. Raises StopRequested.
    """
    prompts_of = [(prompts.prompts[one.prompt], one) for one in groups]
    items = [
        Item(prompt, prompts.text_of(answer), answer.token_ids) for prompt, one in prompts_of for answer in one.answers
    ]
    assert run.state.rewards is not None
    scores = run.state.rewards.score(items, lambda num_done: _tell(run, "scoring answer", num_done, len(items)))
    none = np.array(None, object)
    rows, totals = (iter(np.where(np.isnan(one), none, one).tolist()) for one in (scores.values, scores.total))
    for one in groups:
        rewards = tuple(map(tuple, islice(rows, len(one.answers))))
        on_group(replace(one, rewards=rewards, totals=tuple(islice(totals, len(one.answers)))))
    return scores.problems


def _write(
    run: TrainingRun, prompts: RolloutPrompts, index: int, groups: Sequence[Group], by_rank: Sequence[Mapping[str, Any]]
) -> tuple[str | None, RoundRecord]:
    """Write the answers to train; return what identifies them, and the record of the round."""
    answers = [answer for one in groups for answer in one.answers]
    totals = np.array([total for one in groups for total in one.totals], np.float64)  # None becomes NaN
    is_cut = np.array([answer.ending != "stop" for answer in answers])
    objective = run.planned.objective
    assert isinstance(objective, Policy)
    sizes = np.array([len(one.answers) for one in groups], np.int64)
    masked = is_cut if run.config.rollout.too_long == "mask" else None
    advantages = make_advantages(totals, sizes, objective.advantage, is_masked=masked)
    store = None
    if advantages.is_kept.any():
        texts = [prompts.prompts.ids_of(one.prompt).tolist() for one in groups]
        meta = replace(prompts.prompts.meta, files=("rollouts",), name=f"round {index + 1}")
        place, num_ids = round_folder(run.config.folder, index + 1), run.planned.shape.vocab_size
        titles = [reward.title for reward in run.config.rollout.rewards]
        store = write_round(place, groups, texts, advantages, meta, titles, num_ids)
    sampling = [one["sample_s"] for one in by_rank]
    record = RoundRecord(
        step=run.progress.step,
        round=index + 1,
        **_figures(run, prompts, groups),
        mean_answer_tokens=sum(len(answer.token_ids) for answer in answers) / len(answers),
        cut_share=float(is_cut.mean()),
        no_signal_share=advantages.num_dropped / len(groups),
        num_trained=int(advantages.is_kept.sum()),
        problems=dict(sum((Counter(one["problems"]) for one in by_rank), Counter[str]())),
        sample_s=max(sampling),
        score_s=max(one["score_s"] for one in by_rank),
        wait_s=max(sampling) - sum(sampling) / len(sampling),
        new_tokens_per_s=sum(one["num_tokens"] for one in by_rank) / max(max(sampling), 1e-9) or None,
    )
    return None if store is None else digest_of(store), record


def _figures(run: TrainingRun, prompts: RolloutPrompts, groups: Sequence[Group]) -> dict[str, Any]:
    """Return what records of scored groups have in common: means, None where nothing is scored, and answers to show."""
    answers = [(total, one, at) for one in groups for at, total in enumerate(one.totals)]
    names = [reward.title for reward in run.config.rollout.rewards]
    scored = [answer for answer in answers if answer[0] is not None]
    ranked = sorted(scored, key=lambda answer: answer[0] or 0.0, reverse=True) or answers
    ends = ranked if len(ranked) <= 2 * NUM_SHOWN else [*ranked[:NUM_SHOWN], *ranked[-NUM_SHOWN:]]

    def mean(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if known else None

    by_name = zip(names, zip(*(row for one in groups for row in one.rewards), strict=True), strict=True)
    means = {f"reward/{name}": mean(values) for name, values in by_name}
    return {
        "reward": mean(total for total, _, _ in scored),
        "num_answers": len(answers),
        "num_unscored": len(answers) - len(scored),
        "metrics": {name: value for name, value in means.items() if value is not None},
        "shown": tuple(
            RatedAnswer(
                prompts.prompts[one.prompt].text[-MAX_SHOWN:], prompts.text_of(one.answers[at])[:MAX_SHOWN], total,
                dict(zip(names, one.rewards[at], strict=True)),
            )
            for total, one, at in ends
        ),
    }  # fmt: skip


def _tell_unscored(run: TrainingRun, groups: Sequence[Group], problems: Mapping[str, int]) -> None:
    """Warn, once a function, of one that returned None for answers that no other function scored either."""
    for title, why in unscored(run.config.rollout.rewards, groups, problems).items():
        if title not in run.state.told_unscored:
            run.state.told_unscored.add(title)
            run.reporter.event("unscored", {"why": why})


def _remove_old(run: TrainingRun, index: int) -> None:
    """Remove the answers of rounds before the newest `rollout.keep`, but none that a checkpoint may need."""
    if (keep := run.config.rollout.keep) is None:
        return
    steps = saved_steps(run.checkpoints.folder)
    needed = min(steps, default=0) // run.planned.data.rollouts.rounds.steps  # type: ignore[union-attr]
    for old in range(min(index + 1 - keep, needed) - 1, -1, -1):
        folder = round_folder(run.config.folder, old + 1)
        if not folder.with_suffix(".json").exists():
            break
        DurableIO().remove_tree(folder)
        folder.with_suffix(".json").unlink()
