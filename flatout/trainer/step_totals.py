"""What ranks sum in a step: one vector, packed and unpacked here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from flatout.optim.update import copy_to_host_async
from flatout.parallel.rank import Rank
from flatout.trainer.rank_meter import RankFigures, gathered_figures, scatter_figures


@dataclass(frozen=True, slots=True)
class HostTotals:
    """A step's totals over ranks, read by the host."""

    sums: tuple[float, ...]
    """The objective's sums in the order of `Objective.sum_names`; empty for a step without label tokens."""
    num_stopping: float
    """The number of ranks that were asked to stop."""
    rank_figures: tuple[RankFigures, ...]
    """What each rank measured, in the order of ranks; empty for one rank."""
    aux_loss_sums: tuple[float, ...]
    """Those of `AuxiliaryLoss.sums`."""
    grad_norm: float
    """The global L2 norm before clipping; 0 for a step without label tokens."""


class StepTotals(NamedTuple):
    """A step's totals on the device, fp64: this rank's part, or their sum over ranks."""

    sums: Tensor
    """(num_sums,): the objective's sums in the order of `Objective.sum_names`."""
    num_stopping: Tensor
    """(1,): the number of ranks that were asked to stop."""
    rank_figures: Tensor
    """(world * NUM_FIGURES,): what each rank measured, see `scatter_figures`."""
    aux_loss_sums: Tensor
    """(num_aux_sums,): those of `AuxiliaryLoss.sums`."""
    grad_norm: Tensor
    """(1,): the global L2 norm before clipping, which is no sum; (0,) until it is known."""

    @classmethod
    def of_rank(cls, rank: Rank, figures: RankFigures, *, stops: bool, sums: Tensor, aux_loss_sums: Tensor) -> Self:
        """Return a rank's part of a step; `stops` says whether it was asked to stop."""
        device = sums.device
        # filled on the device, so that the host does not wait
        stop = torch.full((1,), float(stops), dtype=torch.float64, device=device)
        nothing = torch.zeros(0, dtype=torch.float64, device=device)
        return cls(sums, stop, scatter_figures(figures, rank, device), aux_loss_sums, nothing)

    def summed(self, sum_values: Callable[[Tensor], Tensor]) -> Self:
        """Return the sum over ranks, in one collective."""
        return type(self)(*sum_values(torch.cat(self)).split(self._lengths))

    def is_unusable(self) -> Tensor:
        """Return whether no update may be made (0-d): the loss or the norm is not finite, or a rank stops."""
        is_finite = torch.stack([self.sums[0], self.grad_norm[0]]).isfinite().all()
        return ~is_finite | (self.num_stopping[0] > 0)

    def read(self) -> HostTotals:
        """Wait for the device, and return the totals."""
        return self._unpack(torch.cat(self).tolist())

    def read_later(self) -> tuple[Callable[[], HostTotals], torch.cuda.Event | float]:
        """Start copying to the host; return what waits for the totals, and when the copy ended on the device."""
        read, ended = copy_to_host_async(torch.cat(self))
        return lambda: self._unpack(read()), ended

    @property
    def _lengths(self) -> list[int]:
        return [len(part) for part in self]

    def _unpack(self, values: Sequence[float]) -> HostTotals:
        remaining = iter(values)
        parts = [tuple(next(remaining) for _ in range(length)) for length in self._lengths]
        sums, (num_stopping,), figures, aux_loss_sums, grad_norm = parts
        return HostTotals(sums, num_stopping, gathered_figures(figures), aux_loss_sums, *(grad_norm or (0.0,)))
