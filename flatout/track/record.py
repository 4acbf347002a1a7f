"""What a run writes down: the contract between a run and everything that reads its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from threading import RLock
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step over all ranks. `step` counts completed steps from 1; a later line for a step replaces it.

    `loss` is the mean over label tokens of the global step, `grad_norm` the global L2 norm before clipping,
    `num_tokens` real tokens without padding, `padding_avoided` the share of a naive loader's tokens that were padding,
    `data_wait_s` how long the host was blocked for tokens. `flops_per_s` are achieved over all ranks: real tokens,
    attention by document, the head on label tokens only, no gradient of frozen weights, nothing recomputed; `mfu` is
    their share of the devices' nominal peak (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), None where no peak
    is known. `balance` is mean / max of the ranks' planned FLOPs; `busy_min_s` and `busy_max_s` are what the
    least and the most busy rank measured in the passes of one of the last steps, None for one rank.
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


def to_json(record: Record) -> dict[str, Any]:
    """One line of metrics.jsonl; `kind` tells step from eval."""
    return {"kind": "step" if isinstance(record, StepRecord) else "eval", **asdict(record)}


class Tracker(Protocol):
    """Where a run tells what happens."""

    def stage(self, name: str, text: str) -> None:
        """One line at start-up: what was decided or done."""

    def record(self, record: Record) -> None:
        """One step's or evaluation's figures."""

    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
        """A skip, drop, retry, fallback or save: anything a person may ask about later."""

    def close(self) -> None:
        """The run ended; nothing follows."""


class Trackers:
    """Several trackers as one, for several threads: a save in the background tells its events too."""

    def __init__(self, *trackers: Tracker) -> None:
        self._trackers = trackers
        self._lock = RLock()

    def stage(self, name: str, text: str) -> None:
        with self._lock:
            for tracker in self._trackers:
                tracker.stage(name, text)

    def record(self, record: Record) -> None:
        with self._lock:
            for tracker in self._trackers:
                tracker.record(record)

    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
        with self._lock:
            for tracker in self._trackers:
                tracker.event(kind, facts)

    def close(self) -> None:
        with self._lock:
            for tracker in self._trackers:
                tracker.close()
