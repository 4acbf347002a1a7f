"""What the memory model counts of a micro-batch, what it returns, and what measured passes say about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

# the fitted constants stay where they predict the peak this well, and a line through two passes holds if it does
TOLERANCE = 0.05
# a measured slope beyond these comes from passes that are too small to measure, or from memory that is not theirs
LEAST_SCALE, MOST_SCALE = 0.5, 2.0
# passes that differ by less than this share of their bytes have no slope
LEAST_GROWTH = 0.02


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
    """Bytes allocated at the peak of one step on one rank, without the CUDA context and allocator waste."""

    weights_bytes: int
    adapter_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    """What is saved for the backward pass."""
    working_bytes: int
    """The larger of the temporaries of the head and of one layer's backward pass."""
    in_turn: bool = False
    """Whether gradients are allocated as activations are freed, so that only the larger of the two counts."""
    reward_models_bytes: int = 0
    """Weights beside the model, which stay between rounds."""
    process_bytes: int = 0
    """On a CPU, what the process holds beside its tensors: code, and freed memory that its allocator keeps."""

    @property
    def parts(self) -> dict[str, int]:
        """Its bytes by name, in their order."""
        return {name.removesuffix("_bytes"): size for name, size in asdict(self).items() if name.endswith("_bytes")}

    @property
    def state_bytes(self) -> int:
        trained = self.weights_bytes + self.adapter_bytes + self.gradients_bytes + self.optimizer_bytes
        return trained + self.reward_models_bytes

    @property
    def total_bytes(self) -> int:
        never_together = min(self.gradients_bytes, self.activations_bytes) if self.in_turn else 0
        return self.state_bytes + self.activations_bytes + self.working_bytes - never_together + self.process_bytes


@dataclass(frozen=True, slots=True)
class Correction:
    """A pass takes `scale` times the bytes by the fitted constants, and `offset_bytes` more; the default changes none.

    The bytes of a pass are the activations and working bytes of a `MemoryEstimate`.
    """

    scale: float = 1.0
    offset_bytes: int = 0

    def __str__(self) -> str:
        change = f"{abs(self.scale - 1):.1%} {'more' if self.scale >= 1 else 'less'} per token"
        sign = "more" if self.offset_bytes >= 0 else "less"
        return f"{change} and {abs(self.offset_bytes) / 2**30:.2f} GiB {sign} per pass"

    def of(self, activations_bytes: int, working_bytes: int) -> tuple[int, int]:
        """Return the corrected activations and working bytes."""
        working = int(self.scale * working_bytes) + self.offset_bytes
        return int(self.scale * activations_bytes), max(0, working)


@dataclass(frozen=True, slots=True)
class MeasuredPass:
    """A forward and backward pass over `num_tokens`: its peak by the fitted constants, and as measured, in bytes.

    `planned_pass_bytes` is the part of `planned_bytes` that is not state. Both peaks count all state.
    """

    num_tokens: int
    planned_bytes: int
    planned_pass_bytes: int
    measured_bytes: int

    def __str__(self) -> str:
        measured, planned = self.measured_bytes / 2**30, self.planned_bytes / 2**30
        return f"measured {measured:.2f} GiB at {self.num_tokens:,} tokens, planned {planned:.2f}"

    @property
    def pass_bytes(self) -> int:
        """What the measured peak holds beyond the planned state."""
        return self.measured_bytes - (self.planned_bytes - self.planned_pass_bytes)


def fit_correction(passes: Sequence[MeasuredPass], *, most_bytes: int, most_pass_bytes: int) -> Correction | str:
    """Return the line through two or more measured passes of ascending sizes, or why they correct nothing.

    They do if the passes differ in size, those in between lie on the line, and another GPU can explain its slope.
    `most_bytes` and `most_pass_bytes` are planned for the run's largest pass. Where the line is within `TOLERANCE` of
    that peak, the constants hold on this GPU, and the result changes nothing: so a start that finds it kept plans
    exactly as the start that measured it.
    """
    small, *between, large = passes
    less, more = small.planned_pass_bytes, large.planned_pass_bytes
    if more - less <= LEAST_GROWTH * more:
        return "passes of two lengths cannot be told apart"
    scale = round((large.pass_bytes - small.pass_bytes) / (more - less), 4)
    if not LEAST_SCALE <= scale <= MOST_SCALE:
        return "the difference is too large for any GPU"
    # exact at the larger pass
    offset_bytes = round(large.pass_bytes - scale * more)
    for one in between:
        if abs(scale * one.planned_pass_bytes + offset_bytes - one.pass_bytes) > TOLERANCE * one.measured_bytes:
            return "passes of different lengths do not agree"
    change = (scale - 1) * most_pass_bytes + offset_bytes
    return Correction(scale, offset_bytes) if abs(change) > TOLERANCE * most_bytes else Correction()
