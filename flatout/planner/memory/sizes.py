"""What the memory model counts of a micro-batch, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Widths(NamedTuple):
    """Bytes per element: in computation, of trained weights and their gradients, and of hidden states.

    `copies` is for a narrower copy of each trained weight that is used to compute, 0 if there is none.
    """

    compute: int
    trained: int
    copies: int
    hidden: int


@dataclass(frozen=True, slots=True)
class MicroBatchSize:
    """The counts of one forward pass."""

    num_tokens: int
    num_label_tokens: int
    num_documents: int


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes allocated at the peak of one step on one rank.

    `activations_bytes` are saved for the backward pass; `working_bytes` is the larger of the temporaries of the head
    and of one layer's backward pass. `in_turn`: gradients are allocated as activations are freed, so only the larger of
    the two counts. The CUDA context and allocator waste are not included.
    """

    weights_bytes: int
    adapter_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    working_bytes: int
    in_turn: bool = False

    @property
    def state_bytes(self) -> int:
        return self.weights_bytes + self.adapter_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        never_together = min(self.gradients_bytes, self.activations_bytes) if self.in_turn else 0
        return self.state_bytes + self.activations_bytes + self.working_bytes - never_together
