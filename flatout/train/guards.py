"""Orderly ways to stop a run: on a signal, or on a loss or gradient that is not finite."""

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
from flatout.io.durable_io import DurableIO
from flatout.parallel.strategies.protocol import local_part

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MAX_NAMED_SAMPLES = 8


class StopRequest:
    """SIGTERM, SIGHUP or Ctrl-C as a flag: `with StopRequest() as stop: ... if stop.requested: save and leave`.

    The first signal sets the flag, which the loop reads between micro-batches. A second one raises KeyboardInterrupt
    immediately; a save in progress then leaves only temporary files, never a partial checkpoint. A launcher and a
    terminal often both forward one Ctrl-C, so signals within `settle_s` seconds of the first count as one request.
    Enter it in the main thread. Ignored signals stay ignored (SIGHUP under nohup). The previous handlers are restored
    on exit, except after a SIGTERM or SIGHUP that ended in a PreemptedError: further ones are then ignored, because
    the process is exiting, and a launcher that signals again (torch's does when another node leaves) would turn
    "stopped and saved" into "killed".
    """

    def __init__(self, *, settle_s: float = 0.5) -> None:
        self._settle_s = settle_s
        self._first_signal: int | None = None
        self._first_time_s = 0.0
        self._found: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a stop was requested."""
        return self._first_signal is not None

    def __enter__(self) -> Self:
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._found[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._first_signal in (signal.SIGTERM, signal.SIGHUP) and isinstance(error, PreemptedError):
            # not SIG_IGN, which child processes would inherit
            self._found |= dict.fromkeys(self._found.keys() - {signal.SIGINT}, _already_leaving)
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
    """Return the name of the first parameter whose gradient on this rank is not finite; None if all are finite."""
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
    storage: DurableIO | None = None,
) -> None:
    """Raise NumericError unless the loss and the gradient's global norm are finite; call it before the update.

    The message names the step (counted from 1), the samples with their file and row, and the first parameter with a
    non-finite gradient; all of it is also written to the JSON file `dump`. `named` (name -> parameter) and `origin_of`
    (sample id -> file:row) are only used in that case.
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
            (storage or DurableIO()).write_json(dump, facts)
            written = f"; written to {dump}"
        except ResourceError as error:
            written = f"; could not be written down: {error}"
    raise NumericError(
        f"step {step}: loss {loss}, gradient norm {grad_norm}{where}; the weights were not updated; samples {shown}"
        f"{more}{written}; look at these rows, or lower optim.lr or use model.precision=fp32"
    )
