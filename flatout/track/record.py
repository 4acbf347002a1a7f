"""What a run records: the format for everything that reads its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step over all ranks. `step` counts completed steps from 1; a later line replaces the same step's.

    `loss` is the mean over label tokens of the global step, `grad_norm` the global L2 norm before clipping,
    `num_tokens` real tokens without padding, `padding_avoided` the share of padding in what a naive loader would have
    made, `data_wait_s` how long the host was blocked waiting for tokens. `flops_per_s` are achieved over all ranks:
    real tokens, attention by document, the head on label tokens only, no gradient of frozen weights, no recomputation;
    `mfu` is their share of the devices' nominal peak (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), None if no
    peak is known. `balance` is mean / max of the ranks' planned FLOPs; `busy_min_s` and `busy_max_s` are the times of
    the least and the most busy rank in the passes of one of the last steps, None for one rank.
    """

    step: int
    num_steps: int
    epoch: float
    loss: float
    token_accuracy: float
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


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """One evaluation after `step` completed steps: mean loss over all label tokens of the evaluation set."""

    step: int
    eval_loss: float
    eval_token_accuracy: float
    num_label_tokens: int
    is_best: bool
    eval_s: float


Record = StepRecord | EvalRecord


def describe_record(record: Record) -> tuple[str, str]:
    """Return a record as a name and a line of train.log."""
    if isinstance(record, EvalRecord):
        best = " (best)" if record.is_best else ""
        text = f"loss {record.eval_loss:.4f}  accuracy {record.eval_token_accuracy:.1%}"
        return "eval", f"step {record.step}: {text}{best}"
    mfu = "" if record.mfu is None else f"MFU {record.mfu:.1%}  "
    return "step", (
        f"{record.step}/{record.num_steps}  loss {record.loss:.4f}  acc {record.token_accuracy:.1%}  "
        f"lr {record.lr:.2e}  norm {record.grad_norm:.2f}  "
        f"{record.tokens_per_s:,.0f} tok/s ({record.label_tokens_per_s:,.0f} label)  "
        f"{mfu}padding avoided {record.padding_avoided:.0%}  {record.peak_memory_bytes / 2**30:.2f} GiB"
    )


def describe_event(kind: str, facts: Mapping[str, Any]) -> str:
    """Return an event as a readable line; figures that only matter for a study of saves are left to events.jsonl."""
    hidden = ("staged_s", "copied_s") if kind == "saved" else ()
    return "  ".join(f"{name} {value}" for name, value in facts.items() if name not in hidden)
