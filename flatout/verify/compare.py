"""Compare a loss and its gradients with the reference, as one row of the table that `flatout verify` prints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flatout.io.durable_io import DurableIO
from flatout.io.json_file import read_json

GRADIENTS, FACTS = "gradients.safetensors", "facts.json"
# a parameter's difference is relative to the norm of its gradient, but at least to this share of the global norm:
# some gradients are zero by symmetry (the bias of keys), so only rounding is left of them
FLOOR_SHARE = 0.01

Verdict = Literal["ok", "FAIL", "left out", "noise"]


@dataclass(frozen=True, slots=True)
class Row:
    """One way of computing the step, compared with the reference.

    Differences are relative; `cosine` is over all gradients. `worst_parameter` has the largest difference of all
    gradients, `worst_difference`. `limit` bounds the three differences. `note` says why a row failed or was left out. A
    `noise` row is only reported.
    """

    case: str
    num_ranks: int = 1
    num_micro_batches: int = 1
    loss: float | None = None
    loss_difference: float | None = None
    worst_difference: float | None = None
    worst_parameter: str | None = None
    norm_difference: float | None = None
    cosine: float | None = None
    limit: float = 0.0
    verdict: Verdict = "FAIL"
    note: str = ""

    @property
    def largest(self) -> float:
        """The largest of the three differences; infinite when one is missing or not finite."""
        found = (self.loss_difference, self.worst_difference, self.norm_difference)
        values = [math.inf if value is None or not math.isfinite(value) else value for value in found]
        return max(values)

    def judged(self, limit: float) -> Row:
        """Return the row with its verdict under this limit; a row with a note, such as on missing gradients, fails."""
        return replace(self, limit=limit, verdict="ok" if self.largest <= limit and not self.note else "FAIL")

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; non-finite numbers become None."""
        values = asdict(self)
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }


@dataclass(frozen=True, slots=True)
class Reference:
    """The reference in a folder: every gradient as a tensor, loss and norm as JSON."""

    folder: Path
    loss: float
    norm: float

    @classmethod
    def write(cls, folder: Path, loss: float, gradients: Mapping[str, Tensor]) -> Reference:
        """Write a reference to a new folder."""
        folder.mkdir()
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        save_file({name: gradient.detach().contiguous() for name, gradient in gradients.items()}, folder / GRADIENTS)
        DurableIO().write_json(folder / FACTS, {"loss": loss, "norm": norm})
        return cls(folder, loss, norm)

    @classmethod
    def read(cls, folder: Path) -> Reference:
        """Read a reference from its folder. Raises CheckpointError if its facts are missing."""
        facts = read_json(folder / FACTS)
        return cls(folder, facts["loss"], facts["norm"])

    def compare(self, case: str, loss: float, norm: float, gradients: Iterable[tuple[str, Tensor | None]]) -> Row:
        """Compare a loss, a gradient norm and named gradients (None: all zeros) with the reference; no name twice."""
        worst, worst_name, dot, ours_squared = 0.0, None, 0.0, 0.0
        with safe_open(self.folder / GRADIENTS, "pt") as file:
            missing, odd = set(file.keys()), []
            for name, gradient in gradients:
                if name not in missing:
                    odd.append(name)
                    continue
                missing.remove(name)
                truth = file.get_tensor(name)
                ours = torch.zeros_like(truth) if gradient is None else gradient.detach()
                truth, ours = truth.to(ours.device, torch.float64), ours.double()
                floor = max(float(truth.norm()), FLOOR_SHARE * self.norm, torch.finfo(torch.float64).tiny)
                difference = float((ours - truth).norm()) / floor
                # comparisons with NaN are always false, so count it as infinite
                difference = difference if math.isfinite(difference) else math.inf
                dot += float((ours * truth).sum())
                ours_squared += float(ours.square().sum())
                if difference > worst or worst_name is None:
                    worst, worst_name = difference, name
            # a missing gradient counts as zeros: text does not reach a vision tower, for example
            odd += [name for name in missing if file.get_tensor(name).any()]
        unlike = sorted(odd)
        return Row(
            case=case,
            loss=loss,
            loss_difference=abs(loss - self.loss) / max(abs(self.loss), 1e-12),
            worst_difference=worst,
            worst_parameter=worst_name,
            norm_difference=abs(norm - self.norm) / max(self.norm, 1e-300),
            cosine=dot / max(math.sqrt(ours_squared) * self.norm, 1e-300),
            note=f"{len(unlike)} gradients have no counterpart, such as {unlike[0]}" if unlike else "",
        )
