"""Sample and score the answers of a round, or to held-out prompts, by the current weights; all ranks take part."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_128_hexdigest

from flatout.checkpoint.write import saved_steps
from flatout.config.folders import round_folder
from flatout.config.objective import ADVANTAGE, SAMPLER_LOGPROB
from flatout.data.prompts import RunPrompt
from flatout.data.token_store import TokenStore
from flatout.errors import Fix, ResourceError
from flatout.io.durable_io import DurableIO
from flatout.models.stops import stop_token_ids
from flatout.objectives.policy import Policy
from flatout.planner.steps.packing import partition
from flatout.rollout.advantages import make_advantages
from flatout.rollout.collect import Group, Journal, journal_folder, write_round
from flatout.rollout.rewards.pool import Item, Scores
from flatout.rollout.sampler import Completion, NoRoomError, SamplingParams
from flatout.track.record import HeldOutRecord, RatedAnswer, RoundRecord
from flatout.trainer.answers import release_slots, sampling
from flatout.trainer.passes import PassesStopped
from flatout.trainer.rollout_prompts import RolloutPrompts
from flatout.trainer.state import TrainingRun

# groups that are scored, and then in the journal, at once
SCORED_GROUPS = 16
# answers that a record shows: the best, and as many of the worst
NUM_SHOWN = 3
# characters of each that are shown
MAX_SHOWN = 2000


class _StopRequested(Exception):  # noqa: N818  (a request, not an error)
    """This rank was asked to stop, which ranks agree on after their answers."""


def collect_round(
    run: TrainingRun, prompts: RolloutPrompts, index: int, lengths: Mapping[int, float]
) -> TokenStore | None:
    """Sample and score a round, and write the answers to train; None if none has a signal. Collective.

    Each rank samples and scores its own prompts, of about the same expected number of tokens, and waits for the others
    only once its answers are on disk. Raises PassesStopped, ResourceError, and what `Rewards.score` raises.
    """
    run.watch.set_phase("sample", run.progress.step)
    group = run.checkpoints.group
    folder, numbers = round_folder(run.config.folder, index + 1), prompts.prompt_ids(index, run.config.seed)
    identity = identity_of(run, prompts, index)
    journal = Journal(journal_folder(folder), identity, run.rank.index)
    known = journal.groups()
    done = group.run_on_first_rank(lambda: [sorted(known), sorted(at for at, one in known.items() if one.rewards)])

    def work() -> dict[str, Any]:
        with closing(journal):
            started = time.perf_counter()
            mine = _deal(run, sorted({*range(len(numbers))} - {*done[0]}), numbers, lengths)
            num_tokens = _sample(run, prompts, index, [(at, int(numbers[at])) for at in mine], journal)
            sampled = time.perf_counter()
            unscored = _deal(run, sorted({*done[0]} - {*done[1]}), numbers, lengths)
            groups = journal.groups()
            counts = _score(run, prompts, [groups[at] for at in sorted({*mine, *unscored})], journal)
        return {
            "sample_s": sampled - started, "score_s": time.perf_counter() - sampled, "num_tokens": num_tokens,
            "problems": counts,
        }  # fmt: skip

    by_rank = _unless_stopped(run, work)

    def write() -> str | None:
        groups = [one for _, one in sorted(journal.groups().items())]
        digest, record = _write(run, prompts, index, groups, by_rank)
        facts = {"digest": digest, "identity": identity, "record": asdict(record)}
        DurableIO().write_json(folder.with_suffix(".json"), facts)
        DurableIO().remove_tree(journal.folder)
        _remove_old(run, index)
        run.reporter.record(record)
        return digest

    return TokenStore.open(folder) if group.run_on_first_rank(write) is not None else None


def held_out_reward(run: TrainingRun, prompts: RolloutPrompts) -> float | None:
    """Sample and score one answer to each held-out prompt, always with the same draws; record and return the mean.

    Collective. None without a scored answer. Raises PassesStopped.
    """
    started, names = time.perf_counter(), _names(run)

    def work() -> dict[str, Any]:
        own = prompts.held_out_ids[run.rank.index :: run.rank.world].tolist()
        asked = [prompts.prompts[number] for number in own]

        def on_token(prompt: int, completion: int, token_id: int) -> None:
            if run.stop.requested:
                raise _StopRequested

        run.reporter.phase("sampling answers to held-out prompts")
        # numbers that no round draws by
        keys = [-1 - number for number in own]
        answers = _sampled(run, [one.token_ids for one in asked], 1, _params(run, prompts), keys, on_token)
        pairs = [(prompt, completions[0]) for prompt, completions in zip(asked, answers, strict=True)]
        scores = _rate(run, prompts, pairs)
        rewards = [tuple(map(_number, row)) for row in scores.values.tolist()]
        totals = [_number(total) for total in scores.total.tolist()]
        groups = [
            Group(at, at, (pair[1],), (row,), (total,))
            for at, pair, row, total in zip(own, pairs, rewards, totals, strict=True)
        ]
        return {
            "totals": totals,
            "rewards": rewards,
            "shown": [asdict(one) for one in _shown(prompts, groups, names)],
        }

    by_rank = _unless_stopped(run, work)
    totals = np.array([total for one in by_rank for total in one["totals"]], np.float64)
    rewards = np.array([row for one in by_rank for row in one["rewards"]], np.float64)
    figures = _figures(totals, rewards, names)
    shown = tuple(RatedAnswer(**one) for one in by_rank[0]["shown"])
    run.reporter.record(
        HeldOutRecord(
            run.progress.step, **figures, num_answers=len(totals), eval_s=time.perf_counter() - started, shown=shown
        )
    )
    reward: float | None = figures["reward"]
    return reward


def _unless_stopped(run: TrainingRun, work: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what `work` returns on each rank. Collective. Raises PassesStopped if a rank was asked to stop."""

    def until_stopped() -> dict[str, Any] | None:
        try:
            return work()
        except _StopRequested:
            return None

    by_rank = run.checkpoints.group.run_on_all_ranks(until_stopped)
    if None in by_rank:
        raise PassesStopped
    return by_rank


def identity_of(run: TrainingRun, prompts: RolloutPrompts, index: int) -> dict[str, Any]:
    """Return what decides the answers of a round and their scores, besides the steps before it."""
    settings = run.config.rollout.model_dump(mode="json", exclude={"rounds", "keep", "max_mismatch", "rewards"})
    rewards = [reward.model_dump(mode="json", exclude={"path"}) for reward in run.config.rollout.rewards]
    fingerprints = {name: run.planned.fingerprints.get(name) for name in ("model", "objective", "rewards")}
    weights = {**fingerprints, "prompts": prompts.prompts.fingerprint, "seed": run.config.seed}
    return {**settings, **weights, "scored_by": rewards, "method": run.config.method, "round": index}


def digest_of(store: TokenStore) -> str:
    """Return what identifies the answers of a round, and what is learnt from them."""
    names = ("token_ids", "loss_mask", "offsets", ADVANTAGE, SAMPLER_LOGPROB)
    return xxh3_128_hexdigest(" ".join(store.columns[name].fingerprint for name in names).encode())


def _deal(run: TrainingRun, places: Sequence[int], numbers: Any, lengths: Mapping[int, float]) -> list[int]:
    """Return this rank's places, so that ranks expect about as many tokens: as many as the last answers had."""
    usual = sum(lengths.values()) / len(lengths) if lengths else 1.0
    costs = [lengths.get(int(numbers[at]), usual) for at in places]
    return [places[index] for index in partition(costs, run.rank.world)[run.rank.index]] if places else []


def _params(run: TrainingRun, prompts: RolloutPrompts) -> SamplingParams:
    rollout = run.config.rollout
    return SamplingParams(
        rollout.max_new_tokens,
        temperature=rollout.temperature,
        seed=run.config.seed,
        stop_ids=frozenset(stop_token_ids(run.model, prompts.tokenizer, prompts.prompts.stop_tokens)),
        max_positions=run.planned.shape.max_positions,
    )


def _sample(
    run: TrainingRun, prompts: RolloutPrompts, index: int, mine: Sequence[tuple[int, int]], journal: Journal
) -> int:
    """Sample this rank's groups, given by place and prompt; a group is in the journal once its last answer ends."""
    size, rounds = run.config.rollout.group, prompts.rounds
    finished: dict[int, dict[int, Completion]] = {}
    num_tokens = num_done = 0

    def on_token(prompt: int, completion: int, token_id: int) -> None:
        nonlocal num_tokens
        num_tokens += 1
        if not num_tokens % 64:
            run.reporter.phase(f"round {index + 1}: sampling answer", num_done, len(mine) * size)
        if run.stop.requested:
            raise _StopRequested

    def on_answer(prompt: int, completion: int, answer: Completion) -> None:
        nonlocal num_done
        num_done += 1
        answers = finished.setdefault(prompt, {})
        answers[completion] = answer
        if len(answers) == size:
            place, number = mine[prompt]
            journal.add(Group(place, number, tuple(answers[each] for each in range(size))))

    texts = [prompts.prompts.ids_of(number).tolist() for _, number in mine]
    # the same draws for any number of ranks: by the prompt's place among those of all rounds
    keys = [index * rounds.prompts + place for place, _ in mine]
    run.reporter.phase(f"round {index + 1}: sampling answer", 0, len(mine) * size)
    _sampled(run, texts, size, _params(run, prompts), keys, on_token, on_answer)
    return num_tokens


def _sampled(
    run: TrainingRun, texts: Sequence[Sequence[int]], size: int, params: SamplingParams, keys: Sequence[int],
    on_token: Any = None, on_answer: Any = None,
) -> list[list[Completion]]:  # fmt: skip
    """Call the run's sampler with its current weights. Raises ResourceError if memory has no room for the answers."""
    try:
        with sampling(run) as sampler:
            if texts:
                sampler.prove(texts)
            return sampler.sample(texts, size, params, on_token, keys, on_answer=on_answer)
    except (NoRoomError, torch.OutOfMemoryError) as error:
        why = "out of memory while sampling; lower rollout.max_new_tokens, or the memory that training takes"
        fix = Fix({"recompute": "full"})
        raise ResourceError(why, [fix]) from error
    finally:
        release_slots(run)


def _rate(run: TrainingRun, prompts: RolloutPrompts, asked: Sequence[tuple[RunPrompt, Completion]]) -> Scores:
    """Score answers in the processes of the reward functions. Raises _StopRequested."""
    items = [Item(prompt, prompts.text_of(answer), answer.token_ids) for prompt, answer in asked]

    def on_progress(num_done: int) -> None:
        run.reporter.phase("scoring answer", num_done, len(items))
        if run.stop.requested:
            raise _StopRequested

    assert run.state.rewards is not None
    return run.state.rewards.score(items, on_progress)


def _score(run: TrainingRun, prompts: RolloutPrompts, groups: Sequence[Group], journal: Journal) -> Counter[str]:
    """Score groups, each of which is in the journal once it is; return how many problems each function had."""
    problems = Counter[str]()
    for first in range(0, len(groups), SCORED_GROUPS):
        some = groups[first : first + SCORED_GROUPS]
        asked = [(prompts.prompts[one.prompt], one) for one in some]
        scores = _rate(run, prompts, [(prompt, answer) for prompt, one in asked for answer in one.answers])
        ends = np.cumsum([len(one.answers) for one in some])
        for one, end in zip(some, ends, strict=True):
            own = slice(end - len(one.answers), end)
            rewards = tuple(tuple(map(_number, row)) for row in scores.values[own].tolist())
            journal.add(replace(one, rewards=rewards, totals=tuple(map(_number, scores.total[own].tolist()))))
        problems += scores.problems
    return problems


def _names(run: TrainingRun) -> list[str]:
    return [reward.title for reward in run.config.rollout.rewards]


def _number(value: float) -> float | None:
    return None if np.isnan(value) else value


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
    names, store = _names(run), None
    if advantages.is_kept.any():
        texts = [prompts.prompts.ids_of(one.prompt).tolist() for one in groups]
        meta = replace(prompts.prompts.meta, files=("rollouts",), name=f"round {index + 1}")
        place, num_ids = round_folder(run.config.folder, index + 1), run.planned.shape.vocab_size
        store = write_round(place, groups, texts, advantages, meta, names, num_ids)
    rewards = np.array([row for one in groups for row in one.rewards or ()], np.float64)
    lengths = np.array([len(answer.token_ids) for answer in answers])
    sampling = [one["sample_s"] for one in by_rank]
    record = RoundRecord(
        step=run.progress.step,
        round=index + 1,
        **_figures(totals, rewards, names),
        num_answers=len(answers),
        num_unscored=advantages.num_unscored,
        mean_answer_tokens=float(lengths.mean()),
        cut_share=float(is_cut.mean()),
        no_signal_share=advantages.num_dropped / len(groups),
        num_trained=int(advantages.is_kept.sum()),
        problems=dict(sum((Counter(one["problems"]) for one in by_rank), Counter[str]())),
        sample_s=max(sampling),
        score_s=max(one["score_s"] for one in by_rank),
        wait_s=max(sampling) - sum(sampling) / len(sampling),
        new_tokens_per_s=sum(one["num_tokens"] for one in by_rank) / max(max(sampling), 1e-9),
        shown=_shown(prompts, groups, names),
    )
    return None if store is None else digest_of(store), record


def _figures(totals: Any, rewards: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the means of scored answers; None where none is."""

    def mean(values: Any) -> float | None:
        return None if np.isnan(values).all() else float(np.nanmean(values))

    by_name = {f"reward/{name}": mean(rewards[:, at]) for at, name in enumerate(names)}
    return {"reward": mean(totals), "metrics": {name: value for name, value in by_name.items() if value is not None}}


def _shown(prompts: RolloutPrompts, groups: Sequence[Group], names: Sequence[str]) -> tuple[RatedAnswer, ...]:
    """Return the answers with the greatest and the least rewards."""
    ranked = sorted(
        ((total, one, at) for one in groups for at, total in enumerate(one.totals) if total is not None),
        key=lambda item: -item[0],
    )
    chosen = ranked if len(ranked) <= 2 * NUM_SHOWN else [*ranked[:NUM_SHOWN], *ranked[-NUM_SHOWN:]]
    return tuple(
        RatedAnswer(
            prompts.prompts[one.prompt].text[-MAX_SHOWN:],
            prompts.text_of(one.answers[at])[:MAX_SHOWN],
            total,
            dict(zip(names, (one.rewards or ())[at], strict=True)),
        )
        for total, one, at in chosen
    )


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
