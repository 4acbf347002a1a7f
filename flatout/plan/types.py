"""The plan's values: what one optimizer step holds. The contract between plan and train."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass on one rank: the samples flattened into one stream of tokens, in this order.

    A filler only keeps step with other ranks: its sample counts elsewhere, so here it carries no loss.
    """

    sample_ids: tuple[int, ...]
    num_tokens: int
    num_label_tokens: int
    is_filler: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step over all ranks.

    `index` counts steps from 0 over the whole run, `epoch` counts passes from 0. `num_label_tokens` is the divisor of
    the summed loss, on every rank. `ranks[r]` are rank r's micro-batches (empty when there are fewer samples than
    ranks; in lockstep every rank has equally many, fillers included). `balance` is mean / max of the ranks' FLOPs
    without fillers (1.0 is perfect).
    """

    index: int
    epoch: int
    sample_ids: tuple[int, ...]
    num_tokens: int
    num_label_tokens: int
    ranks: tuple[tuple[MicroBatch, ...], ...]
    balance: float
