"""What one optimizer step consists of: the interface between planning and training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass on one rank: these samples, in this order, as one flat stream of tokens.

    A filler equalizes the number of micro-batches across ranks; its labels are masked, as its sample counts elsewhere.
    """

    sample_ids: tuple[int, ...]
    num_tokens: int
    num_label_tokens: int
    is_filler: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step over all ranks.

    `index` counts steps from 0 over the whole run, `epoch` counts passes from 0. `num_label_tokens` is the divisor of
    the summed loss, on every rank. `ranks[r]` are rank r's micro-batches (may be empty if there are fewer samples than
    ranks; in lockstep all ranks have the same number, including fillers). `balance` is mean / max of the ranks' FLOPs
    without fillers (1.0 is perfect).
    """

    index: int
    epoch: int
    sample_ids: tuple[int, ...]
    num_tokens: int
    num_label_tokens: int
    ranks: tuple[tuple[MicroBatch, ...], ...]
    balance: float
