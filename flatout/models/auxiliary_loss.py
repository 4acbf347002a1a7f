"""What passes add to an objective's loss with a normalizer and sums of its own, such as the losses on routers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flatout.models.packed import PackedBatch


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What an auxiliary loss may know of a step before its first pass; counts are over all ranks and micro-batches.

    `normalizer` is what the objective's loss is divided by, `sum_values` sums a tensor over ranks (collective).
    """

    index: int
    num_tokens: int
    normalizer: float
    device: torch.device
    sum_values: Callable[[Tensor], Tensor]


Observer = Callable[[PreTrainedModel, PackedBatch, Tensor], None]
"""Reads a pass that computes no loss; the tensor (T, D) has its last hidden states."""


class AuxiliaryLoss:
    """A loss added to the objective's, with its own normalizer and sums; this one is 0.

    It may also read passes that compute no loss (`observing`), before a step or over an evaluation set.
    Every rank has an equal one, and takes its passes together. `buffers` are tensors of the model that updates move,
    by full name: checkpoints and exports keep them.
    """

    buffers: Mapping[str, Tensor]

    def __init__(self) -> None:
        self.buffers = {}
        # those that only observe the passes now, before a step
        self.observing: tuple[Observer, ...] = ()
        # what `Objective.estimates` names, of this step or evaluation set
        self.estimates: dict[str, Tensor] = {}
        self._step: StepFacts | None = None

    @property
    def sums(self) -> Tensor:
        """This rank's part of the step, fp64 (num_aux_sums,), to be summed over ranks."""
        return torch.zeros(0, dtype=torch.float64, device=self._step.device if self._step else None)

    @contextmanager
    def pre_step_passes(self, step: StepFacts, num_micro_batches: int) -> Iterator[bool]:
        """Start a step; say whether passes without gradients, in this context, have to come first."""
        self.start_step(step)
        needed = self.needs_passes(num_micro_batches)
        with self.observed_by(*((self.observe,) if needed else ())):
            yield needed
        if needed:
            self.end_passes()

    @contextmanager
    def observed_by(self, *observers: Observer) -> Iterator[None]:
        """Let observers read the passes within, which compute no loss."""
        self.observing = observers
        try:
            yield
        finally:
            self.observing = ()

    def start_step(self, step: StepFacts) -> None:
        """Start a step; also to repeat it, after an out-of-memory error."""
        self._step = step

    def forget_step(self) -> None:
        """Forget the last step, so that the next one starts anew even if its index is the same."""
        self._step = None

    def needs_passes(self, num_micro_batches: int) -> bool:
        """Whether the step needs passes without gradients over its micro-batches before the others."""
        return False

    def observe(self, model: PreTrainedModel, batch: PackedBatch, states: Tensor) -> None:
        """Read a pass of those that a step needs before; see `Observer`."""

    def end_passes(self) -> None:
        """End these passes; may sum over ranks."""

    def add(self, loss_sum: Tensor, model: PreTrainedModel, batch: PackedBatch) -> Tensor:
        """Return a micro-batch's loss with the gradients of this one added; its value stays the same."""
        return loss_sum

    def graph_outputs(self) -> list[Tensor]:
        """Return what `add` and `observe` read of the layers' last pass; a recorded pass copies it to fixed places."""
        return []

    def load_graph_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Take what `graph_outputs` returned in an equal pass, with other values: the pass was a recorded one."""

    def end_pass(self) -> None:
        """Drop what was read in a forward pass that ends or fails: it may hold the pass's graph."""

    def after_update(self, sums: Tensor, skip: Tensor | None = None) -> None:
        """Follow an update; `sums` are over ranks. Nothing may change if `skip` (0-d) is not 0."""

    def report(self, sums: Tensor, *, with_maps: bool) -> Mapping[str, Any]:
        """Return figures of the step's record by name; `with_maps` asks for those that take much room."""
        return {}

    def hold_buffers(self) -> None:
        """Put `buffers` back in their places in the model: DeepSpeed casts a model's buffers."""
