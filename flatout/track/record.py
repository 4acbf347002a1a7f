"""What a run records: the format for everything that reads its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal

from flatout.errors import Fix
from flatout.track.figures import SAME, Figure, figures_of, gib, log_line, short_time
from flatout.track.start_up import EVENT as START_UP
from flatout.track.start_up import describe_start

# all loads of 48 layers with 128 experts are 30 kB
MAX_EXPERT_MAPS = 16

# z: a loss that rounds to zero has no sign
_loss, _percent, _count = "{:z.4f}".format, "{:.1%}".format, "{:,.0f}".format
# rows that differ in few columns
_counted = partial(Figure, ranks="sum")
_rate = partial(Figure, unit="tokens/s", ranks="sum", steps="rate", write=_count, chart="Throughput")
_part = partial(Figure, unit="s", ranks="mean of busy", steps="mean", chart="Step time", measured=SAME)
_memory = partial(Figure, unit="bytes", ranks="max", write=gib, is_smooth=True, measured=SAME)
_of_routers = partial(Figure, ranks="sum", chart="Losses of routers")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step over all ranks. A later line of metrics.jsonl replaces an earlier one of the same step."""

    step: Annotated[int, Figure("steps that are complete, from 1", "steps")]
    num_steps: Annotated[int, Figure("steps of the whole run", "steps")]
    epoch: Annotated[float, Figure("passes over the data so far", "epochs")]
    loss: Annotated[float | None, Figure(
        "the objective's loss over the global step, such as the mean over label tokens; without losses of routers; "
        "null, as lr, grad_norm and the objective's figures, if the step had nothing to learn from and was skipped",
        "nats per label token, or the objective's unit", ranks="sum", better="less", write=_loss, line="loss {}",
        console=1, chart="Loss", label="training", has_log=True,
    )]  # fmt: skip
    token_accuracy: Annotated[float | None, Figure(
        "share of label tokens whose most likely token is the label; null if the objective has none",
        "share", ranks="sum", better="more", write=_percent, line="acc {}", chart="Token accuracy", label="training",
    )]  # fmt: skip
    lr: Annotated[float | None, Figure(
        "learning rate of the update", write="{:.2e}".format, line="lr {}", chart="Learning rate",
        label="learning rate", from_zero=True, is_smooth=True,
    )]  # fmt: skip
    grad_norm: Annotated[float | None, Figure(
        "L2 norm of all gradients before clipping", "before clipping", ranks="sum", write="{:.2f}".format,
        line="norm {}", chart="Gradient norm", label="gradient norm", has_log=True,
    )]  # fmt: skip
    num_samples: Annotated[int, _counted("samples of the step", "samples")]
    num_tokens: Annotated[int, _counted("tokens of the step, without padding", "tokens")]
    num_label_tokens: Annotated[int, _counted("tokens of the step that carry loss", "tokens")]
    num_micro_batches: Annotated[int, _counted("micro-batches of the step", "micro-batches")]
    tokens_per_s: Annotated[float, _rate(
        "tokens without padding, of steps that computed something", better="more", line="{} tok/s", console=4,
        label="tokens", from_zero=True,
    )]  # fmt: skip
    label_tokens_per_s: Annotated[float, _rate("tokens that carry loss", line="{} label tok/s", label="label tokens")]
    step_s: Annotated[float, Figure("time of a step", "s", steps="mean", better="less", write=short_time)]
    data_wait_s: Annotated[float, _part("time the host waits for tokens", ranks="mean")]
    flops_per_s: Annotated[float, Figure(
        "useful FLOPs: real tokens, shared ones once, attention by document, the head on label tokens only, no "
        "gradient of frozen weights, no recomputation, but forward passes that the objective needs before the step",
        "FLOP/s", ranks="sum", steps="rate", better="more",
    )]  # fmt: skip
    mfu: Annotated[float | None, Figure(
        "flops_per_s as a share of the devices' nominal peak (Chowdhery et al. 2022, arXiv:2204.02311, appendix B); "
        "null if no peak is known", "share", steps="rate", better="more", write=_percent, line="MFU {}", console=5,
        chart="Model FLOPs utilization", label="MFU", from_zero=True,
    )]  # fmt: skip
    padding_avoided: Annotated[float, Figure(
        "share of padding in what a loader of padded batches would have computed, which was not computed", "share",
        write="{:.0%}".format, line="padding avoided {}",
    )]  # fmt: skip
    balance: Annotated[float, Figure("mean / max of the ranks' planned FLOPs", "share", write=_percent)]
    peak_memory_bytes: Annotated[int, _memory(
        "memory allocated at peak; on a CPU, the resident size for all figures of memory", better="less", line="{}",
        console=6, chart="Memory", label="peak", from_zero=True,
    )]  # fmt: skip
    elapsed_s: Annotated[float, Figure("time of all steps of the run so far", "s", steps="sum", write=short_time)]
    busy_min_s: Annotated[float | None, Figure("least of rank_busy_s", "s")] = None
    busy_max_s: Annotated[float | None, Figure("greatest of rank_busy_s", "s")] = None
    rank_busy_s: Annotated[tuple[float, ...], Figure(
        "time in forward and backward passes; empty for one rank", "s", ranks="each",
    )] = ()  # fmt: skip
    num_recorded: Annotated[int, Figure("steps since the last record, which this one stands for", "steps")] = 1
    num_ranks: Annotated[int, Figure("ranks", "ranks")] = 1
    processed_tokens_per_s: Annotated[float, _rate(
        "tokens with fillers and padding", measured="num_processed_tokens", label="with filler",
    )] = 0.0  # fmt: skip
    tokens_per_s_per_rank: Annotated[float, Figure("tokens_per_s / num_ranks", "tokens/s", steps="rate")] = 0.0
    forward_s: Annotated[float, _part(
        "forward passes. Times of passes and updates come from device events that have passed, so they are those of "
        "a step up to two earlier",
    )] = 0.0  # fmt: skip
    backward_s: Annotated[float, _part("backward passes")] = 0.0
    gradient_sum_s: Annotated[float, _part(
        "the sum of gradients over ranks, as far as the backward pass does not hide it",
    )] = 0.0  # fmt: skip
    checkpoint_wait_s: Annotated[float, _part("time the update waits for a save's copy")] = 0.0
    optimizer_s: Annotated[float, _part("the update")] = 0.0
    memory_bytes: Annotated[int, _memory("memory allocated at the end of the step", chart="Memory", label="now")] = 0
    reserved_memory_bytes: Annotated[int, _memory("memory reserved at the end of the step")] = 0
    peak_reserved_memory_bytes: Annotated[int, _memory(
        "memory reserved at peak", chart="Memory", label="peak reserved",
    )] = 0  # fmt: skip
    mean_peak_memory_bytes: Annotated[int, _memory(
        "memory allocated at peak", ranks="mean", measured="peak_memory_bytes",
    )] = 0  # fmt: skip
    gpu_watts: Annotated[float | None, Figure(
        "power as the driver counts it, read at most once a second; null where it does not", "W", ranks="sum",
        chart="GPU power", label="power", from_zero=True, measured=SAME,
    )] = None  # fmt: skip
    gpu_use: Annotated[float | None, Figure(
        "share of time with a kernel running, as the driver counts it; null where it does not", "share",
        ranks="mean", write=_percent, chart="GPU use", label="use", from_zero=True, measured=SAME,
    )] = None  # fmt: skip
    eta_s: Annotated[float, Figure(
        "time to completion, without later evaluations and saves", "s", write=short_time, line="{} left", console=2,
    )] = 0.0  # fmt: skip
    balance_loss: Annotated[float | None, _of_routers(
        "the routers' balance loss without its factor; null unless trained", label="balance",
    )] = None  # fmt: skip
    z_loss: Annotated[float | None, _of_routers(
        "the routers' z loss without its factor; null unless trained", label="z",
    )] = None  # fmt: skip
    expert_peak_load: Annotated[tuple[float, ...], _counted("by layer of experts: the largest load / mean")] = ()
    expert_entropy: Annotated[tuple[float, ...], _counted(
        "by layer of experts: entropy of the shares of load, relative to that of equal shares", "share",
    )] = ()  # fmt: skip
    expert_loads: Annotated[tuple[tuple[float, ...], ...], _counted(
        f"by layer: each expert's load / mean, only in at most {MAX_EXPERT_MAPS} records of a run and the last",
    )] = ()  # fmt: skip
    padding_share: Annotated[float, Figure("share of padding in what was computed (padded rows)", "share")] = 0.0
    shared_share: Annotated[float, Figure(
        "share of num_tokens that was not computed again, as samples share it", "share",
    )] = 0.0  # fmt: skip
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other figures that the objective names."""

    @property
    def measured_balance(self) -> float | None:
        """Mean / max of rank_busy_s; None for one rank, or before it is known."""
        busy = self.rank_busy_s
        return sum(busy) / len(busy) / max(busy) if max(busy, default=0.0) > 1e-9 else None


@dataclass(frozen=True, slots=True)
class EvalFigures:
    """Figures over one evaluation data set."""

    loss: Annotated[float, Figure("as eval_loss", write=_loss, chart="Loss")]
    token_accuracy: Annotated[float | None, Figure("as eval_token_accuracy", "share", write=_percent)]
    num_label_tokens: Annotated[int, Figure("as num_label_tokens", "tokens")]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other figures that the objective names."""

    def of(self, name: str) -> float | None:
        return {**self.metrics, "loss": self.loss, "token_accuracy": self.token_accuracy}.get(name)


@dataclass(frozen=True, slots=True)
class WorstSample:
    """One evaluation sample, or a unit of a loss over whole answers, with a great loss."""

    data: str
    source: str
    row: int
    """The row of `source` that it came from."""
    loss: float
    """The mean over its label tokens, or the unit's."""
    num_label_tokens: int
    context: str
    """What precedes its first label token, shortened."""
    text: str
    """What follows, shortened; of a pair, both answers."""
    pictures: tuple[str, ...] = ()
    """Small copies of its first pictures, as data URIs."""


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """One evaluation: figures over all label tokens of all evaluation data sets."""

    step: Annotated[int, Figure("steps that were complete", "steps")]
    eval_loss: Annotated[float, Figure(
        "the objective's loss", "nats per label token, or the objective's unit", ranks="sum", better="less",
        write=_loss, line="loss {}", chart="Loss", label="evaluation",
    )]  # fmt: skip
    eval_token_accuracy: Annotated[float | None, Figure(
        "share of label tokens whose most likely token is the label; null if the objective has none", "share",
        ranks="sum", better="more", write=_percent, line="accuracy {}", chart="Token accuracy", label="evaluation",
    )]  # fmt: skip
    num_label_tokens: Annotated[int, Figure("tokens that carry loss", "tokens", ranks="sum")]
    is_best: bool
    """Whether it is the best so far by `eval.best`."""
    eval_s: Annotated[float, Figure("time of the evaluation", "s")]
    eval_tokens_per_s: Annotated[float, Figure("tokens without padding", "tokens/s", ranks="sum")] = 0.0
    by_data: Mapping[str, EvalFigures] = field(default_factory=dict)
    """The figures of each data set, if there are several."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other figures that the objective names."""
    worst: tuple[WorstSample, ...] = ()
    """The samples with the greatest losses."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model answered to one prompt."""

    prompt: str
    answer: str
    reference: str | None = None
    """The data set's own answer; None for a prompt of a file."""
    pictures: tuple[str, ...] = ()
    """Small copies of the prompt's first pictures, as data URIs."""


@dataclass(frozen=True, slots=True)
class AnswersRecord:
    """The answers to `eval.prompts` after `step` completed steps."""

    step: int
    answers: tuple[Answer, ...]
    answer_s: float
    skipped: str | None = None
    """Why there are none."""


@dataclass(frozen=True, slots=True)
class RatedAnswer:
    """A sampled answer with its reward."""

    prompt: str
    answer: str
    reward: float | None
    """None: not scored."""
    rewards: Mapping[str, float | None]
    """What each function gave it; null: no score."""

    @property
    def scores(self) -> str:
        """Its reward, and what each function gave it, as text."""
        each = ", ".join(f"{name} {'-' if value is None else f'{value:.4g}'}" for name, value in self.rewards.items())
        return f"{'not scored' if self.reward is None else f'reward {self.reward:.4g}'} ({each})"


_reward = partial(
    Figure, "mean reward of the answers; null if none was scored", ranks="sum", better="more", line="reward {}",
    chart="Reward",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round of rollouts: the answers that the steps after `step` are trained on."""

    step: Annotated[int, Figure("steps that were complete when the round was sampled", "steps")]
    round: Annotated[int, Figure("the round, from 1", "rounds")]
    reward: Annotated[float | None, _reward(label="round")]
    num_answers: Annotated[int, _counted("answers", "answers")]
    num_unscored: Annotated[int, _counted("answers without a score", "answers")]
    num_trained: Annotated[int, _counted("answers that are trained", "answers")]
    mean_answer_tokens: Annotated[float, Figure(
        "tokens of an answer", "tokens", ranks="sum", write=_count, line="{} tokens", chart="Length of answers",
        label="mean",
    )]  # fmt: skip
    cut_share: Annotated[float, Figure(
        "share of answers that ended without a stop token", "share", ranks="sum", write=_percent, line="{} cut",
        chart="Shares of answers", label="cut",
    )]  # fmt: skip
    no_signal_share: Annotated[float, Figure(
        "share of groups whose rewards are equal or missing, which are not trained", "share", ranks="sum",
        write=_percent, line="{} no signal", chart="Shares of answers", label="groups without signal",
    )]  # fmt: skip
    sample_s: Annotated[float, Figure("time until the last rank had its answers", "s", ranks="max", write=short_time)]
    score_s: Annotated[float, Figure("time until the last rank had its scores", "s", ranks="max", write=short_time)]
    wait_s: Annotated[float, Figure("time that ranks waited for the one with the longest answers", "s", ranks="mean")]
    new_tokens_per_s: Annotated[float | None, _rate("sampled tokens", line="{} tok/s", label="sampled tokens")]
    problems: Mapping[str, int] = field(default_factory=dict)
    """Answers that a reward function failed on, by function."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The mean of each reward function, as reward/NAME."""
    shown: tuple[RatedAnswer, ...] = ()
    """The answers with the greatest and the least rewards; some of all if none was scored."""

    @property
    def why_untrained(self) -> str:
        """Why none of its answers is trained, if none is."""
        if self.num_unscored == self.num_answers:
            why = "no answer was scored"
        elif self.no_signal_share == 1:
            why = "all rewards of each group were equal" + (" or missing" if self.num_unscored else "")
        else:
            why = "no group had different rewards of answers that are trained"
        return f"{why}, so there was nothing to learn from"


@dataclass(frozen=True, slots=True)
class HeldOutRecord:
    """The rewards of answers to held-out prompts, one each, always drawn with the same random numbers."""

    step: Annotated[int, Figure("steps that were complete", "steps")]
    reward: Annotated[float | None, _reward(label="held out")]
    num_answers: Annotated[int, _counted("answers", "answers")]
    eval_s: Annotated[float, Figure("time of the evaluation", "s")]
    num_unscored: Annotated[int, _counted("answers without a score", "answers")] = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The mean of each reward function, as reward/NAME."""
    shown: tuple[RatedAnswer, ...] = ()
    """As those of a round."""
    reward_stderr: Annotated[float | None, Figure(
        "standard error of `reward`: the standard deviation of the scored answers' rewards / the root of their number; "
        "null for fewer than two; not shown if 0", ranks="sum", line="{}", write=lambda x: f"± {x:.2g}" if x else "",
    )] = None  # fmt: skip


RewardsRecord = RoundRecord | HeldOutRecord
MeasuredRecord = StepRecord | EvalRecord | RewardsRecord
Record = MeasuredRecord | AnswersRecord
# by the kind of a line of metrics.jsonl or answers.jsonl
KINDS: Mapping[str, type[Record]] = {
    "step": StepRecord, "eval": EvalRecord, "answers": AnswersRecord, "round": RoundRecord, "held_out": HeldOutRecord,
}  # fmt: skip
FIGURES = {one: figures_of(one) for one in (*KINDS.values(), EvalFigures)}
STEP, EVAL, EVAL_OF_DATA = FIGURES[StepRecord], FIGURES[EvalRecord], FIGURES[EvalFigures]
ROUND, HELD_OUT = FIGURES[RoundRecord], FIGURES[HeldOutRecord]
# the parts of a step's time, in their order
STEP_PARTS = {name: row for name, row in STEP.items() if row.chart == "Step time"}


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One rank's GPU."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """What the plan promises over the whole run."""

    num_steps: int
    num_samples: int
    num_eval_samples: int
    samples_per_step: int
    micro_batch_tokens: int
    epochs: float
    num_tokens: int
    num_label_tokens: int
    padding_avoided: float
    """Of sampled steps, as in StepRecord."""
    balance: float
    """Of sampled steps, as in StepRecord."""
    memory_bytes: int | None
    """The peak of one rank; None on a CPU."""
    length_edges: tuple[int, ...]
    """(n + 1,) edges of the histogram of sample lengths, in tokens."""
    length_counts: tuple[int, ...]
    """(n,) samples between them."""
    packing: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    """Of the first steps, by step, rank and micro-batch: lengths of samples, of a shared prefix and what it leaves."""
    padded: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...] = ()
    """The batches of a padding loader for the same steps."""
    layout: str = "packed"
    """packed or rows."""
    padding_share: float = 0.0
    """Share of padding in what is computed."""
    shared_share: float = 0.0
    """Share of tokens that shared prefixes save."""


@dataclass(frozen=True, slots=True)
class RunStart:
    """What is known when a run starts or resumes: written to start.json, given to every callback."""

    name: str
    folder: str
    method: str
    model: str
    data: str
    started_at: float
    """Unix time of this start."""
    first_started_at: float
    """Unix time of the run's first start."""
    resumed_step: int | None
    """None for a run from step 0."""
    num_ranks: int
    device: str
    gpus: tuple[GpuFacts, ...]
    dtype: str
    strategy: str
    num_parameters: int
    num_trained_parameters: int
    model_text: str
    """How the model prints."""
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    """The whole configuration by dotted name, without secrets."""
    plan: PlanFacts
    scores: bool = False
    """Whether the model scores texts and does not write."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended."""

    outcome: Literal["complete", "stopped", "failed"]
    exit_code: int
    ended_at: float
    """Unix time."""
    why: str | None = None
    """The error; None for a complete run."""
    final_dir: str | None = None
    """The exported weights of a complete run."""
    fixes: tuple[Fix, ...] = ()
    """What mends the error."""


def describe_record(record: Record) -> tuple[str, str]:
    """Return a record as a name and a line of train.log."""
    if isinstance(record, AnswersRecord):
        done = record.skipped or f"{len(record.answers)} prompts answered in {record.answer_s:.1f} s"
        return "answers", f"step {record.step}: {done}"
    if isinstance(record, RewardsRecord):
        # the only function's mean is the reward, but for its weight
        shown = replace(record, metrics={}) if len(record.metrics) == 1 else record
        unscored = f"{record.num_unscored:,} of {record.num_answers:,} unscored" if record.num_unscored else ""
        if isinstance(record, RoundRecord):
            failed = (f"{name} failed on {count:,}" for name, count in record.problems.items() if count)
            return "round", f"{record.round}: {'  '.join(filter(None, (log_line(shown, ROUND), unscored, *failed)))}"
        parts = log_line(shown, HELD_OUT), unscored or f"{record.num_answers:,} answers"
        return "held_out", f"step {record.step}: {'  '.join(filter(None, parts))}"
    if isinstance(record, EvalRecord):
        best = " (best)" if record.is_best else ""
        each = "".join(f"  {name} {EVAL['eval_loss'].write(one.loss)}" for name, one in record.by_data.items())
        return "eval", f"step {record.step}: {log_line(record, EVAL)}{best}{each}"
    return "step", f"{record.step}/{record.num_steps}  {log_line(record, STEP)}"


# events whose `why` says what is wrong with a run's result
BAD_RESULTS = {"adapter_differs", "diverged", "unscored"}


def describe_event(kind: str, facts: Mapping[str, Any]) -> str:
    """Return an event, with or without `time` and `kind`, as a readable line.

    Figures that only matter for a study of saves are left to events.jsonl.
    """
    facts = {name: value for name, value in facts.items() if name not in ("time", "kind")}
    if kind == START_UP:
        return describe_start(facts)
    if kind == "overlap":
        where = f"{facts['data']}: " if "data" in facts else ""
        count = facts["eval_samples_also_trained_on"]
        return f"{where}{count:,} evaluation samples are also in the training data; remove the duplicate rows"
    if kind in BAD_RESULTS or facts.keys() == {"why"}:
        return str(facts["why"])
    if kind == "saved":
        took = f" in {facts['save_s']} s" if "save_s" in facts else ""
        return f"{facts.get('path')}{took}{' (best)' if facts.get('best') else ''}"
    if facts.keys() == {"step", "why"}:
        return f"step {facts['step']}: {facts['why']}"
    return "  ".join(f"{name} {value}" for name, value in facts.items())
