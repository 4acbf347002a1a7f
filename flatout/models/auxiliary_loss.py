"""What passes add to an objective's loss with a normalizer and sums of its own, such as the losses on routers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flatout.models.packed import PackedBatch


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What an auxiliary loss may know of a step before its first pass."""

    index: int
    num_tokens: int
    """Tokens of all ranks and micro-batches."""
    normalizer: float
    """What the objective's loss is divided by."""
    device: torch.device
    sum_values: Callable[[Tensor], Tensor]
    """Sums a tensor over ranks; collective."""


class AuxiliaryLoss:
    """A loss added to the objective's, with its own normalizer and sums; this one is 0.

    Every rank has an equal one, and takes its passes together.
    """

    buffers: Mapping[str, Tensor]
    """Tensors of the model that updates move, by full name: checkpoints and exports keep them."""

    def __init__(self) -> None:
        self.buffers = {}
        self._step: StepFacts | None = None

    @property
    def sums(self) -> Tensor:
        """This rank's part of the step, fp64 (num_aux_sums,), to be summed over ranks."""
        return torch.zeros(0, dtype=torch.float64, device=self._step.device if self._step else None)

    def start_step(self, step: StepFacts) -> None:
        """Start a step; also to repeat it, after an out-of-memory error."""
        self._step = step

    def forget_step(self) -> None:
        """Forget the last step, so that the next one starts anew even if its index is the same."""
        self._step = None

    def needs_passes(self, num_micro_batches: int) -> bool:
        """Whether the step needs passes without gradients over its micro-batches before the others."""
        return False

    def observe(self, model: PreTrainedModel, batch: PackedBatch) -> None:
        """Read what the layers computed in one of these passes."""

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
