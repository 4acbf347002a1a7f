"""What stops a run in good order: a signal, or a loss or gradient that is not finite."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from flatout.errors import NumericError, PreemptedError, ResourceError
from flatout.parallel.strategy import local_part
from flatout.train.storage import Storage

SIGNALS = (signal.SIGTERM, signal.SIGINT)
MAX_NAMED_SAMPLES = 8


class StopRequest:
    """SIGTERM or Ctrl-C as a flag: `with StopRequest() as stop: ... if stop.requested: save and leave`.

    The first signal sets the flag, which the loop reads between micro-batches. A second one raises KeyboardInterrupt
    where the program stands; a save under way then leaves only debris, never half a checkpoint. A launcher and a
    terminal often both pass on one Ctrl-C: signals within `settle_s` seconds of the first are the same request.
    Enter it in the main thread. The handlers found are put back on leaving, but after a SIGTERM that ended in a
    PreemptedError another one changes nothing: the process is on its way out, and a launcher that asks again (torch's,
    when another node leaves) would turn "stopped and saved" into "killed".
    """

    def __init__(self, *, settle_s: float = 0.5) -> None:
        self._settle_s = settle_s
        self._first_signal: int | None = None
        self._first_time_s = 0.0
        self._found: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """True once a stop was asked for."""
        return self._first_signal is not None

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._found[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._first_signal == signal.SIGTERM and isinstance(error, PreemptedError):
            # a handler, not SIG_IGN, which programs started from here would inherit
            self._found[signal.SIGTERM] = _already_leaving
        for number, handler in self._found.items():
            signal.signal(number, handler)
        self._found.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._first_signal is None:
            self._first_signal, self._first_time_s = number, time.monotonic()
        elif time.monotonic() - self._first_time_s >= self._settle_s:
            raise KeyboardInterrupt


def _already_leaving(number: int, frame: FrameType | None) -> None:
    return None


def first_non_finite(named: Mapping[str, Tensor]) -> str | None:
    """Name of the first parameter whose gradient has a NaN or an infinity on this rank; None when all are finite."""
    for name, parameter in named.items():
        if parameter.grad is not None and not bool(torch.isfinite(local_part(parameter.grad)).all()):
            return name
    return None


def require_finite(
    loss: float,
    grad_norm: float,
    *,
    step: int,
    sample_ids: Sequence[int],
    named: Mapping[str, Tensor],
    origin_of: Callable[[int], str],
    dump: Path | None = None,
    storage: Storage | None = None,
) -> None:
    """Raise NumericError unless the loss and the gradient's global norm are finite; call it before the update.

    The message names the step (as people count it, from 1), the samples with their file and row, and the first
    parameter with a non-finite gradient; `dump` is a JSON file to write with all of them. `named` (name -> parameter)
    and `origin_of` (sample id -> file:row) are looked at only then.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    parameter = first_non_finite(named)
    origins = {sample_id: origin_of(sample_id) for sample_id in sample_ids}
    shown = ", ".join(f"{sample_id} ({origins[sample_id]})" for sample_id in sample_ids[:MAX_NAMED_SAMPLES])
    more = f" and {len(sample_ids) - MAX_NAMED_SAMPLES} more" if len(sample_ids) > MAX_NAMED_SAMPLES else ""
    where = f"; first non-finite gradient: {parameter}" if parameter else ""
    written = ""
    if dump is not None:
        facts = {
            "step": step,
            "loss": str(loss),  # JSON has no NaN
            "grad_norm": str(grad_norm),
            "first_non_finite_gradient": parameter,
            "samples": origins,
        }
        try:
            (storage or Storage()).write_json(dump, facts)
            written = f"; written to {dump}"
        except ResourceError as error:
            written = f"; could not be written down: {error}"
    raise NumericError(
        f"step {step}: loss {loss}, gradient norm {grad_norm}{where}; the weights were not updated; samples {shown}"
        f"{more}{written}; look at these rows, or lower optim.lr or use model.precision=fp32"
    )
