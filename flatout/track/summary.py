"""What a run came to: a summary of its folder, as figures and as lines for a terminal."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Literal

from flatout.config.folders import SETTINGS_FILES
from flatout.errors import CheckpointError, DataError, UsageError
from flatout.io.redact import printable
from flatout.io.redact import rows as screen_rows
from flatout.track.figures import gib, named, short_count, short_time
from flatout.track.record import BAD_RESULTS, FIGURES, HELD_OUT, KINDS, STEP, StepRecord
from flatout.track.run_log import RunLog

# steps after each start that allocate, compile and fill caches; rates leave them out
WARM_UP_STEPS = 3
# events of every healthy run; all others are counted in the summary
ROUTINE_EVENTS = {
    "saved", "compiled", "changed", "stopped", "removed", "kept", "rows", "start_up", "learning_rate",
    "few_steps", "few_held_out",
}  # fmt: skip
_MENDED_FIRST = (UsageError, DataError, CheckpointError)
# losses of single steps are noisy: compare means of this share of the records, at least MIN_COMPARED
COMPARED_SHARE, MIN_COMPARED = 0.1, 3
# an evaluation counts as worse if it lost more than this share of what training had gained, and a reward if it also
# lost more than so many standard errors of the difference (docs/rollouts.md)
NOTABLE_SHARE, NOTABLE_STDERRS = 0.01, 2.0
# shares of steps without anything to learn from, and of answers that were cut in the last round, that are warned of
IDLE_SHARE, NOTABLE_CUT_SHARE = 0.5, 0.9
# what a run is judged by: the field of its records of a kind
JUDGED = {"step": "loss", "eval": "eval_loss", "round": "reward", "held_out": "reward"}
JUDGED_ROWS = {kind: FIGURES[KINDS[kind]][name] for kind, name in JUDGED.items()}


@dataclass(frozen=True, slots=True)
class EvalSummary:
    """A figure that a run is judged by."""

    first: float
    last: float
    best: float
    best_step: int
    """The steps that were complete before the best one."""
    kind: str = "eval"
    """That of their records."""
    stderrs: tuple[float | None, ...] = (None, None, None)
    """The standard errors of the first, the last and the best, which rewards of held-out prompts have."""

    @property
    def texts(self) -> list[str]:
        """The first, the last and the best, with their standard errors."""
        values = zip((self.first, self.last, self.best), self.stderrs, strict=True)
        return [judged_text(self.kind, *one) for one in values]


@dataclass(frozen=True, slots=True)
class LostTime:
    """Seconds of a run that trained nothing; parts can overlap."""

    padding_s: float
    """The share of filler tokens in the forward and backward passes."""
    imbalance_s: float
    """What the slowest rank took longer than the mean."""
    data_wait_s: float
    compile_s: float
    """Compilations during steps."""
    checkpoint_s: float
    """What training waited for."""
    eval_s: float
    sample_s: float
    """Time of all rounds until the last rank had its answers."""
    score_s: float
    """Time of all rounds until the last rank had their rewards."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a run came to, or has come to so far."""

    name: str
    outcome: Literal["complete", "stopped", "failed"] | None
    """None for a run that wrote no end."""
    state: str
    """As in RunLog."""
    why: str | None
    num_steps: int
    num_planned_steps: int
    saved_step: int
    """The last checkpoint's."""
    continues: bool
    """Whether the same command goes on from there: not if settings, data or checkpoints have to be mended first."""
    trained: EvalSummary | None
    """The loss of steps, or the reward of rounds, whose loss says nothing."""
    last_metrics: Mapping[str, float]
    """None of a run of rounds."""
    evaluation: EvalSummary | None
    """The loss, or the reward of held-out prompts."""
    evaluation_by_data: Mapping[str, EvalSummary]
    num_tokens: int
    num_label_tokens: int
    train_s: float
    tokens_per_s: float | None
    """The mean over time, without warm-up; so is `mfu`."""
    mfu: float | None
    num_warm_up_records: int
    """Records that are left out of both."""
    peak_memory_bytes: int
    planned_memory_bytes: int
    """0 where none was planned, as on a CPU."""
    lost: LostTime
    events: Mapping[str, int]
    """The number of each kind that a healthy run does not have."""
    warnings: tuple[str, ...]


def summarize(log: RunLog) -> RunSummary:
    """Return what a run's folder says about it, complete or not."""
    steps, start = log.steps, log.start
    # a run that was started again keeps the older end until its first step
    end = None if log.state == "running" else log.end
    rated = after_warm_up(log)
    rated_s = sum(map(seconds_of, rated))
    of_peak = [step.mfu * seconds_of(step) for step in rated if step.mfu is not None]
    events = Counter(str(event.get("kind")) for event in log.events)
    marked = [one.step for one in log.evals if one.is_best]
    trained, evaluation, rounds, held_out = (
        _summarize(kind, judged_values(log, kind), marked if kind == "eval" else (), _stderrs(log, kind))
        for kind in JUDGED
    )
    return RunSummary(
        name=start.name if start else log.folder.name,
        outcome=end.outcome if end else None,
        state=log.state,
        why=end.why if end else None,
        num_steps=steps[-1].step if steps else 0,
        num_planned_steps=steps[-1].num_steps if steps else start.plan.num_steps if start else 0,
        saved_step=int(max(_numbers(log, "saved", "step"), default=0)),
        continues=continues(log),
        trained=rounds or trained,
        last_metrics=steps[-1].metrics if steps and not log.rounds else {},
        evaluation=evaluation or held_out,
        evaluation_by_data={
            name: summary
            for name in dict.fromkeys(name for one in log.evals for name in one.by_data)
            if (summary := _summarize("eval", {e.step: e.by_data[name].loss for e in log.evals if name in e.by_data}))
        },
        num_tokens=round(sum(step.tokens_per_s * seconds_of(step) for step in steps)),
        num_label_tokens=round(sum(step.label_tokens_per_s * seconds_of(step) for step in steps)),
        train_s=steps[-1].elapsed_s if steps else 0.0,
        tokens_per_s=sum(step.tokens_per_s * seconds_of(step) for step in rated) / rated_s if rated_s else None,
        mfu=sum(of_peak) / rated_s if of_peak and rated_s else None,
        num_warm_up_records=len(steps) - len(rated),
        peak_memory_bytes=max((step.peak_memory_bytes for step in steps), default=0),
        planned_memory_bytes=(start and start.plan.memory_bytes) or 0,
        lost=lost_time(log),
        events={kind: count for kind, count in events.items() if kind not in ROUTINE_EVENTS},
        warnings=tuple(_warnings(log, evaluation or held_out)),
    )


def seconds_of(record: StepRecord) -> float:
    """Return the seconds of all steps that a record stands for."""
    return record.step_s * record.num_recorded


def after_warm_up(log: RunLog) -> list[StepRecord]:
    """Return the records without a warm-up step, which follow step 0 and each resume; all records if none is left."""
    starts = [0, *_numbers(log, "resumed", "step")]

    def is_warm(record: StepRecord) -> bool:
        first = record.step - record.num_recorded + 1
        return not any(first <= start + WARM_UP_STEPS and record.step > start for start in starts)

    return list(filter(is_warm, log.steps)) or log.steps


def lost_time(log: RunLog) -> LostTime:
    """Add up the seconds of a run that trained nothing."""

    def total(seconds: Callable[[StepRecord], float]) -> float:
        return sum(seconds(step) * step.num_recorded for step in log.steps)

    def padding_s(step: StepRecord) -> float:
        share = 1 - step.tokens_per_s / step.processed_tokens_per_s if step.processed_tokens_per_s else 0.0
        return max(0.0, share) * (step.forward_s + step.backward_s)

    return LostTime(
        padding_s=total(padding_s),
        imbalance_s=total(lambda step: max(step.rank_busy_s) - fmean(step.rank_busy_s) if step.rank_busy_s else 0.0),
        data_wait_s=total(lambda step: step.data_wait_s),
        compile_s=sum(_numbers(log, "compiled", "seconds")),
        checkpoint_s=total(lambda step: step.checkpoint_wait_s) + sum(_numbers(log, "saved", "staged_s")),
        eval_s=sum(one.eval_s for one in log.evals) + sum(one.eval_s for one in log.held_out),
        sample_s=sum(one.sample_s for one in log.rounds),
        score_s=sum(one.score_s for one in log.rounds),
    )


def _numbers(log: RunLog, kind: str, name: str) -> list[float]:
    """Return a number of each event of a kind; a damaged or foreign line has none."""
    values = [event.get(name) for event in log.events if event.get("kind") == kind]
    return [float(value) for value in values if isinstance(value, int | float)]


def continues(log: RunLog) -> bool:
    """Return whether the same command goes on, as `RunSummary.continues`."""
    return log.end is None or log.end.exit_code not in (error.exit_code for error in _MENDED_FIRST)


def next_commands(log: RunLog) -> list[str]:
    """Return at most three commands worth typing next, by how the run ended."""
    folder = shlex.quote(str(log.folder))
    files = [file for name in SETTINGS_FILES if (file := log.folder / name).is_file()]
    again = [f"flatout train {shlex.quote(str(file))}" for file in files[:1] if continues(log)]
    watch, report = f"flatout watch {folder}", f"flatout report {folder}"
    if log.state in ("running", "not ended"):
        return [watch, report, *again]
    if log.state != "complete":
        return [*again, report, watch]
    if any(event.get("kind") == "random_base" for event in log.events):
        return [report]  # nothing loads this adapter: no file keeps its base model
    first = f"flatout chat {folder}"
    if log.start is not None and log.start.scores:
        first = f"flatout eval {folder} --rows FILE"
    elif log.rounds:
        first = f"flatout rollouts {folder} --round {log.rounds[-1].round}"
    if log.start is not None and log.start.method != "lora":
        return [first, report]
    return [first, report, f"flatout merge {folder} --out {shlex.quote(str(log.folder / 'merged'))}"]


def summary_lines(summary: RunSummary, commands: Sequence[str], *, is_short: bool = False) -> list[str]:
    """Return the summary as lines of 80 columns; only a command, which stays whole, can be longer.

    A short one has the steps, the loss and the commands only.
    """
    time = f" in {short_time(summary.train_s)} of training" if summary.num_steps else ""
    rows = [("summary", f"{summary.state}, {summary.num_steps:,} of {summary.num_planned_steps:,} steps{time}")]
    rows += [("why", summary.why)] if summary.why is not None else []
    if summary.state not in ("complete", "running") and summary.num_steps:
        saved, again = "never", ": the same command begins again at step 0"
        if summary.saved_step:
            saved, again = f"at step {summary.saved_step:,}", ", where the same command continues"
        rows.append(("saved", saved + again * summary.continues))
    if one := summary.trained:
        rows.append((JUDGED[one.kind], "{} first, {} last".format(*one.texts)))
    rows += [(name, f"{named(name).write(value)} last") for name, value in summary.last_metrics.items()]
    if one := summary.evaluation:
        rows.append((one.kind, _describe(one)))
    rows += [("", f"{name}: {_describe(one)}") for name, one in summary.evaluation_by_data.items()]
    if summary.tokens_per_s is not None:
        mfu = "" if summary.mfu is None else f", {STEP['mfu'].text(summary.mfu)}"
        without = f" (without {summary.num_warm_up_records} warm-up records)" if summary.num_warm_up_records else ""
        label = short_count(summary.num_label_tokens)
        rows.append(("tokens", f"{short_count(summary.num_tokens)}, {label} of them label tokens"))
        rows.append(("speed", f"{STEP['tokens_per_s'].write(summary.tokens_per_s)} tokens/s{mfu}{without}"))
        planned = f", {gib(summary.planned_memory_bytes)} planned" if summary.planned_memory_bytes else ""
        rows.append(("memory", f"{STEP['peak_memory_bytes'].write(summary.peak_memory_bytes)} at peak{planned}"))
        lost = {name.removesuffix("_s"): seconds for name, seconds in asdict(summary.lost).items() if seconds}
        # no-break spaces keep a number and its unit on one line
        parts = (f"{name} {short_time(one)}".translate({ord("_"): " ", ord(" "): "\xa0"}) for name, one in lost.items())
        rows.append(("time lost", ", ".join(parts) or "none"))
    if summary.events:
        rows.append(("events", ", ".join(f"{count} {kind}" for kind, count in summary.events.items())))
    rows += [("warning", warning) for warning in summary.warnings]
    if is_short:
        rows = [(name, text) for name, text in rows if name in ("summary", "saved", "loss", "reward", "held_out")]
    lines = screen_rows(rows, 11).replace("\xa0", " ").splitlines()
    # a command stays on one line, to be copied
    return lines + [printable(f"{'' if index else 'next':<10} {command}") for index, command in enumerate(commands)]


def judged_values(log: RunLog, kind: str) -> dict[int, float]:
    """Return what records of a kind are judged by, by step, as far as it is known."""
    return {one.step: value for one in log.by_kind[kind] if (value := getattr(one, JUDGED[kind])) is not None}


def judged_texts(log: RunLog, kind: str) -> dict[int, str]:
    """Return the same as text, with standard errors."""
    errors = _stderrs(log, kind)
    return {step: judged_text(kind, value, errors[step]) for step, value in judged_values(log, kind).items()}


def _stderrs(log: RunLog, kind: str) -> dict[int, float | None]:
    return {one.step: getattr(one, "reward_stderr", None) for one in log.by_kind[kind]}


def judged_text(kind: str, value: float, stderr: float | None = None) -> str:
    """Return what a run is judged by as text, with its standard error if that is known."""
    return f"{JUDGED_ROWS[kind].write(value)} {HELD_OUT['reward_stderr'].write(stderr or 0.0)}".rstrip()


def _summarize(
    kind: str, values: Mapping[int, float], marked: Sequence[int] = (), errors: Mapping[int, float | None] | None = None
) -> EvalSummary | None:
    """Return the summary of values by step; the last of `marked` is what the run itself took for the best."""
    if not values:
        return None
    best_of = min if JUDGED_ROWS[kind].better == "less" else max
    best_step = marked[-1] if marked else best_of(values, key=lambda step: values[step])
    (first, *_), (*_, last) = values, values
    stderrs = tuple((errors or {}).get(step) for step in (first, last, best_step))
    return EvalSummary(values[first], values[last], values[best_step], best_step, kind, stderrs)


def _describe(one: EvalSummary) -> str:
    first, last, best = one.texts
    same = "no change" if first == last else "the best"
    best = same if last == best else f"{best} best, after step {one.best_step:,}"
    return f"{first} first, {last} last, {best}"


def _warnings(log: RunLog, evaluation: EvalSummary | None) -> list[str]:
    warnings, losses = [], [] if log.rounds else list(judged_values(log, "step").values())
    num = max(MIN_COMPARED, int(COMPARED_SHARE * len(log.steps)))
    kind, sign = ("eval", 1) if log.evals else ("held_out", -1)
    costs = [sign * value for value in judged_values(log, kind).values()]
    if evaluation and len(costs) > 1:
        (first, last, best), least = evaluation.texts, sign * evaluation.best
        # without standard errors, no reward is known to be worse than another
        known = [one for one in evaluation.stderrs[1:] if one is not None]
        noise = 0.0 if log.evals else NOTABLE_STDERRS * math.hypot(*known) if len(known) == 2 else math.inf
        if min(costs[1:]) >= costs[0]:
            remedy = ": lower optim.lr" if log.evals else "; `flatout rollouts` shows what was sampled"
            warnings.append(f"no evaluation was better than the first, {first}{remedy}")
        elif costs[-1] - least > max(NOTABLE_SHARE * (costs[0] - least), noise):
            where = f"step {evaluation.best_step:,}, {best} to {last}"
            warnings.append(f"the evaluation got worse after {where}: train fewer steps, or use best/")
    if len(losses) >= 2 * num and sum(losses[-num:]) >= sum(losses[:num]):
        warnings.append(f"the loss of the last {num} records is not lower than of the first {num}")
    warnings += dict.fromkeys(str(event.get("why")) for event in log.events if event.get("kind") in BAD_RESULTS)
    num_idle = sum(step.num_recorded for step in log.steps if step.loss is None)
    if log.steps and num_idle >= IDLE_SHARE * log.steps[-1].step:
        whys = dict.fromkeys(str(event.get("why")) for event in log.events if event.get("kind") == "skipped")
        some = f"{num_idle:,} of {log.steps[-1].step:,} steps changed nothing"
        what = some if any(step.loss is not None for step in log.steps) else "no step changed the model"
        warnings.append(f"{what}: {'; '.join(whys)}")
    if log.rounds and (share := log.rounds[-1].cut_share) >= NOTABLE_CUT_SHARE:
        many = f"{share:.0%} of the answers of round {log.rounds[-1].round:,}"
        warnings.append(f"{many} were cut at rollout.max_new_tokens; raise it, or reward shorter answers")
    slow = dict.fromkeys(str(event.get("rank")) for event in log.events if event.get("kind") == "straggler")
    if slow:
        warnings.append(f"slow for many steps: rank {', '.join(slow)}; all ranks wait for it")
    if log.num_bad_lines:
        warnings.append(f"{log.num_bad_lines} lines of this run's files could not be read")
    return [*warnings, *log.problems.values()]
