"""What adds to an objective's loss with a normalizer and sums of its own, such as the losses on routers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flatout.models.packed import PackedBatch


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What a term may know of a step before its first pass; counts are over all ranks and micro-batches.

    `normalizer` is what the objective's loss is divided by, `sum_values` sums a tensor over ranks (collective).
    """

    index: int
    num_tokens: int
    normalizer: float
    device: torch.device
    sum_values: Callable[[Tensor], Tensor]


class Observer(Protocol):
    """Reads passes without computing a loss."""

    def observe(self, model: PreTrainedModel, batch: PackedBatch, states: Tensor) -> None:
        """Read one of these passes; `states` (T, D) are the last hidden states."""


class Term(Observer, Protocol):
    """One addition to the loss. Every rank has equal terms, and takes their passes together."""

    @property
    def num_sums(self) -> int:
        """The length of `sums`."""

    @property
    def sums(self) -> Tensor:
        """This rank's part of the step, fp64 (num_sums,), to be summed over ranks."""

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """Tensors of the model that updates move, by full name: checkpoints and exports keep them."""

    def start_step(self, step: StepFacts) -> None:
        """Start a step; also to repeat it, after an out-of-memory error."""

    def passes_before(self, num_micro_batches: int) -> bool:
        """Whether the step needs passes without gradients over its micro-batches before the others."""

    def end_passes(self) -> None:
        """End these passes; may sum over ranks."""

    def add(self, loss_sum: Tensor, model: PreTrainedModel, batch: PackedBatch) -> Tensor:
        """Return a micro-batch's loss with the gradients of the term; its value stays the same."""

    def kept(self) -> list[Tensor]:
        """Return what `add` and `observe` read of the layers' last pass; a recorded pass copies it to fixed places."""

    def keep(self, kept: Iterator[Tensor]) -> None:
        """Take one's own of what `kept` returned for every term: the pass was a recorded one."""

    def end_pass(self) -> None:
        """Drop what was read in a forward pass that ends or fails: it may hold the pass's graph."""

    def after_update(self, sums: Tensor, skip: Tensor | None) -> None:
        """Follow an update; `sums` are over ranks. Nothing may change if `skip` (0-d) is not 0."""

    def report(self, sums: Tensor, *, whole: bool) -> Mapping[str, Any]:
        """Return figures of the step's record by name; `whole` asks for those that take much room."""

    def forget_step(self) -> None:
        """Forget the last step, so that the next one starts anew even if its index is the same."""

    def hold_buffers(self) -> None:
        """Put `buffers` back in their places in the model: DeepSpeed casts a model's buffers."""


class Terms:
    """All terms of a run, in a fixed order; their sums stand one after another."""

    def __init__(self, *every: Term) -> None:
        self.every = every
        # those that only observe the passes now, before a step
        self.observing: tuple[Observer, ...] = ()
        # what `Objective.estimates` names, of this step or evaluation set
        self.estimates: dict[str, Tensor] = {}
        self._nothing = torch.zeros(0, dtype=torch.float64)

    @property
    def num_sums(self) -> int:
        """The length of the sums of all terms."""
        return sum(term.num_sums for term in self.every)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers of all terms by name."""
        return {name: buffer for term in self.every for name, buffer in term.buffers.items()}

    @property
    def need_passes(self) -> bool:
        """Whether a step of several micro-batches takes passes without gradients first."""
        return any(term.passes_before(2) for term in self.every)

    @contextmanager
    def passes_before(self, step: StepFacts, num_micro_batches: int) -> Iterator[bool]:
        """Start a step; say whether passes without gradients, in this context, have to come first."""
        self._nothing = torch.zeros(0, dtype=torch.float64, device=step.device)
        for term in self.every:
            term.start_step(step)
        observing = tuple(term for term in self.every if term.passes_before(num_micro_batches))
        with self.observed_by(*observing):
            yield bool(observing)
        for term in observing:
            term.end_passes()

    @contextmanager
    def observed_by(self, *observers: Observer) -> Iterator[None]:
        """Let observers read the passes within, which compute no loss."""
        self.observing = observers
        try:
            yield
        finally:
            self.observing = ()

    def kept(self) -> list[Tensor]:
        """Return what the terms read of the last pass, one after another."""
        return [one for term in self.every for one in term.kept()]

    def keep(self, kept: Iterable[Tensor]) -> None:
        """Give the terms what `kept` returned in an equal pass, with other values."""
        left = iter(kept)
        for term in self.every:
            term.keep(left)

    def end_pass(self) -> None:
        """Let all terms drop what they read in a pass."""
        for term in self.every:
            term.end_pass()

    @property
    def sums(self) -> Tensor:
        """The sums of all terms, fp64 (num_sums,), on the device of the step."""
        return torch.cat([self._nothing, *(term.sums for term in self.every)])

    def of_each(self, sums: Tensor) -> Iterator[tuple[Term, Tensor]]:
        """Yield each term with its part of the sums of all."""
        return zip(self.every, sums.split([term.num_sums for term in self.every]), strict=True)

    def after_update(self, sums: Tensor, skip: Tensor | None = None) -> None:
        """Let each term follow an update by its own sums over ranks."""
        for term, own in self.of_each(sums):
            term.after_update(own, skip)
