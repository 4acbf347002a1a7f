"""What a run records: the format for everything that reads its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flatout.errors import Fix
from flatout.track.start_up import EVENT as START_UP
from flatout.track.start_up import describe_start

# all loads of 48 layers with 128 experts are 30 kB
MAX_EXPERT_MAPS = 16


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step over all ranks. `step` counts completed steps from 1; a later line replaces the same step's.

    `loss` is the objective's over the global step, such as the mean over label tokens; `token_accuracy` is None and
    `metrics` has other figures by name where the objective says so. `grad_norm` is the global L2 norm before clipping,
    `num_tokens` real tokens without padding, `padding_avoided` the share of what a naive loader would have made that is
    padding and was not computed, `padding_share` the share of padding in what was (rows), `shared_share` the share of
    `num_tokens` that was not computed again, as samples share it. `flops_per_s` are achieved over all ranks: real
    tokens, those that samples share once, attention by document, the head on label tokens only, no gradient of frozen
    weights, no recomputation, but forward passes that an objective needs before the step; `mfu` is their share of the
    devices' nominal peak (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), None if no peak is known. `balance` is
    mean / max of the ranks' planned FLOPs.

    Rates (`*_per_s`) and times (`*_s`) are means per step over the `num_recorded` steps since the last record.
    Processed tokens include filler tokens. Each part of a step is the mean over ranks, without those that had no pass
    (except in `data_wait_s`, the host waits for tokens): `forward_s`, `backward_s`, `gradient_sum_s` (what the backward
    pass does not hide), `checkpoint_wait_s` (a save's copy delays the update), `optimizer_s`. They come from device
    events that have already passed, so they describe a step up to two earlier. `rank_busy_s` has each rank's forward
    and backward seconds; empty for one rank. `busy_min_s` and `busy_max_s` are its extremes. Memory is in bytes, the
    maximum over ranks: allocated and reserved, now and at peak; `mean_peak_memory_bytes` is the mean of the ranks'
    peaks. On a CPU all are the resident size. `gpu_watts` is the power of all ranks'
    GPUs and `gpu_use` their mean share of time with a kernel running, as the driver counts them, read at most once a
    second; None where it does not. `eta_s` is the time to completion, without later evaluations and saves.

    Of routed experts, by layer: `expert_peak_load` is the largest load / mean, `expert_entropy` that of the shares of
    load relative to equal shares, and `expert_loads` each expert's load / mean, only in at most MAX_EXPERT_MAPS records
    of a run and the last. `balance_loss` and `z_loss` are the routers' losses without their factors, None unless
    trained; `loss` does not include them.
    """

    step: int
    num_steps: int
    epoch: float
    loss: float
    token_accuracy: float | None
    lr: float
    grad_norm: float
    num_samples: int
    num_tokens: int
    num_label_tokens: int
    num_micro_batches: int
    tokens_per_s: float
    label_tokens_per_s: float
    step_s: float
    data_wait_s: float
    flops_per_s: float
    mfu: float | None
    padding_avoided: float
    balance: float
    peak_memory_bytes: int
    elapsed_s: float
    busy_min_s: float | None = None
    busy_max_s: float | None = None
    rank_busy_s: tuple[float, ...] = ()
    num_recorded: int = 1
    num_ranks: int = 1
    processed_tokens_per_s: float = 0.0
    tokens_per_s_per_rank: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    gradient_sum_s: float = 0.0
    checkpoint_wait_s: float = 0.0
    optimizer_s: float = 0.0
    memory_bytes: int = 0
    reserved_memory_bytes: int = 0
    peak_reserved_memory_bytes: int = 0
    mean_peak_memory_bytes: int = 0
    gpu_watts: float | None = None
    gpu_use: float | None = None
    eta_s: float = 0.0
    balance_loss: float | None = None
    z_loss: float | None = None
    expert_peak_load: tuple[float, ...] = ()
    expert_entropy: tuple[float, ...] = ()
    expert_loads: tuple[tuple[float, ...], ...] = ()
    padding_share: float = 0.0
    shared_share: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvalFigures:
    """Figures over one evaluation data set; `token_accuracy` and `metrics` as in StepRecord."""

    loss: float
    token_accuracy: float | None
    num_label_tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    def of(self, name: str) -> float | None:
        return {**self.metrics, "loss": self.loss, "token_accuracy": self.token_accuracy}.get(name)


@dataclass(frozen=True, slots=True)
class WorstSample:
    """One evaluation sample with a great mean loss over its label tokens, and the row of `source` that it came from.

    For an objective over whole answers, a sample or unit with a great loss; `text` then has the answers of a pair.
    `context` is what precedes its first label token and `text` what follows, both shortened. `pictures` are small
    copies of its first pictures, as data URIs.
    """

    data: str
    source: str
    row: int
    loss: float
    num_label_tokens: int
    context: str
    text: str
    pictures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """One evaluation after `step` completed steps: means over all label tokens of all evaluation data sets.

    `by_data` has the figures of each data set if there are several; `worst` has the samples with the greatest losses.
    """

    step: int
    eval_loss: float
    eval_token_accuracy: float | None
    num_label_tokens: int
    is_best: bool
    eval_s: float
    eval_tokens_per_s: float = 0.0
    by_data: Mapping[str, EvalFigures] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    worst: tuple[WorstSample, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model answered to one prompt. `reference` is the data set's own answer, None for a prompt of a file.

    `pictures` are small copies of the prompt's first pictures, as data URIs.
    """

    prompt: str
    answer: str
    reference: str | None = None
    pictures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswersRecord:
    """The answers to `eval.prompts` after `step` completed steps; `skipped` says why there are none."""

    step: int
    answers: tuple[Answer, ...]
    answer_s: float
    skipped: str | None = None


Record = StepRecord | EvalRecord | AnswersRecord


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One rank's GPU."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """What the plan promises. Counts are over the whole run; `padding_avoided` and `balance` are from sampled steps.

    `length_edges` (n + 1,) and `length_counts` (n,) are the histogram of sample lengths in tokens. `packing` holds the
    first steps: for each step, for each rank, for each micro-batch the lengths of its samples, or of a prefix that they
    share and of what is left of each; `shared_share` is the share of tokens that this saves. `padded` has the batches
    of a padding loader for the same steps. `layout` is packed or rows; `padding_share` is of the tokens computed.
    `memory_bytes` is the planned peak of one rank, None on a CPU.
    """

    num_steps: int
    num_samples: int
    num_eval_samples: int
    samples_per_step: int
    micro_batch_tokens: int
    epochs: float
    num_tokens: int
    num_label_tokens: int
    padding_avoided: float
    balance: float
    memory_bytes: int | None
    length_edges: tuple[int, ...]
    length_counts: tuple[int, ...]
    packing: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    padded: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...] = ()
    layout: str = "packed"
    padding_share: float = 0.0
    shared_share: float = 0.0


@dataclass(frozen=True, slots=True)
class RunStart:
    """What is known when a run starts or resumes: written to start.json, given to every callback.

    `started_at` is the Unix time of this start, `first_started_at` the run's first; `resumed_step` is None for a run
    from step 0. `settings` is the whole configuration by dotted name, without secrets. `model_text` is how the model
    prints; `scores` says that it scores texts and does not write.
    """

    name: str
    folder: str
    method: str
    model: str
    data: str
    started_at: float
    first_started_at: float
    resumed_step: int | None
    num_ranks: int
    device: str
    gpus: tuple[GpuFacts, ...]
    dtype: str
    strategy: str
    num_parameters: int
    num_trained_parameters: int
    model_text: str
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    plan: PlanFacts
    scores: bool = False


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended, at Unix time `ended_at`. `why` is the error, None for a complete run, and `fixes` mend it.

    `final_dir` holds the exported weights of a complete run.
    """

    outcome: Literal["complete", "stopped", "failed"]
    exit_code: int
    ended_at: float
    why: str | None = None
    final_dir: str | None = None
    fixes: tuple[Fix, ...] = ()


def describe_record(record: Record) -> tuple[str, str]:
    """Return a record as a name and a line of train.log."""
    if isinstance(record, AnswersRecord):
        done = record.skipped or f"{len(record.answers)} prompts answered in {record.answer_s:.1f} s"
        return "answers", f"step {record.step}: {done}"
    if isinstance(record, EvalRecord):
        best = " (best)" if record.is_best else ""
        accuracy = "" if record.eval_token_accuracy is None else f"  accuracy {record.eval_token_accuracy:.1%}"
        text = f"loss {record.eval_loss:.4f}{accuracy}{describe_metrics(record.metrics)}"
        each = "".join(f"  {name} {one.loss:.4f}" for name, one in record.by_data.items())
        return "eval", f"step {record.step}: {text}{best}{each}"
    mfu = "" if record.mfu is None else f"MFU {record.mfu:.1%}  "
    accuracy = "" if record.token_accuracy is None else f"  acc {record.token_accuracy:.1%}"
    return "step", (
        f"{record.step}/{record.num_steps}  loss {record.loss:.4f}{accuracy}{describe_metrics(record.metrics)}  "
        f"lr {record.lr:.2e}  norm {record.grad_norm:.2f}  "
        f"{record.tokens_per_s:,.0f} tok/s ({record.label_tokens_per_s:,.0f} label)  "
        f"{mfu}padding avoided {record.padding_avoided:.0%}  {record.peak_memory_bytes / 2**30:.2f} GiB"
    )


def describe_metrics(metrics: Mapping[str, float]) -> str:
    """Return the figures that an objective names as text behind others; empty without any."""
    return "".join(f"  {name} {value:.4g}" for name, value in metrics.items())


# events whose `why` says what is wrong with a run's result
BAD_RESULTS = {"adapter_differs", "diverged"}


def describe_event(kind: str, facts: Mapping[str, Any]) -> str:
    """Return an event as a readable line; figures that only matter for a study of saves are left to events.jsonl."""
    if kind == START_UP:
        return describe_start(facts)
    if kind == "overlap":
        where = f"{facts['data']}: " if "data" in facts else ""
        count = facts["eval_samples_also_trained_on"]
        return f"{where}{count:,} evaluation samples are also in the training data; remove the duplicate rows"
    if kind in BAD_RESULTS or facts.keys() == {"why"}:
        return str(facts["why"])
    hidden = ("staged_s", "copied_s", "step") if kind == "saved" else ()
    return "  ".join(f"{name} {value}" for name, value in facts.items() if name not in hidden)
