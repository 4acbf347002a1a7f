"""When a checkpoint is written: at once, or from a copy in host memory while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from flatout.errors import ResourceError
from flatout.track.record import Tracker
from flatout.train.checkpoint import Checkpoints, Snapshot
from flatout.train.staging import Copying, Staging


@dataclass(frozen=True, slots=True)
class _Save:
    """One save under way; `staged_s` is what training waited in the call, None where it waits to the end."""

    snapshot: Snapshot
    best: bool
    required: bool
    started_s: float
    staged_s: float | None = None


class Saver:
    """Saves of one run, collective over its ranks, told to `tracker`. With `staging` they run in the background.

    The copy of the state may run beside the passes of the next step, which only read it: whoever changes weights or
    optimizer state calls `before_update` first.

    A save that fails because a disk is full or refuses is told as an event, on every rank, and training goes on; any
    other failure is told and raised by the next `save` or `wait`, where all ranks stand at the same place.
    """

    def __init__(self, checkpoints: Checkpoints, tracker: Tracker, staging: Staging | None = None) -> None:
        self._checkpoints, self._tracker, self._staging = checkpoints, tracker, staging
        self._copying: Copying | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(self, snapshot: Snapshot, *, best: bool = False, required: bool = False) -> None:
        """Save; returns when it is published, or as soon as its copy has begun when it is staged and not `required`.

        Raises ResourceError on every rank when a `required` save fails.
        """
        started_s = time.perf_counter()
        self.wait()
        if self._staging is None:
            self._write(_Save(snapshot, best, required, started_s))
            return
        staged = self._laid_out(self._staging, snapshot, required)
        if staged is None:
            return
        self._copying = self._staging.copy(snapshot, staged)
        staged_s = None if required else time.perf_counter() - started_s
        save = _Save(staged, best, required, started_s, staged_s)
        self._thread = threading.Thread(
            target=self._write_copied, args=(save, self._copying), name="checkpoint", daemon=True
        )
        self._thread.start()
        if required:
            self.wait()

    def reserve(self, sizes: Sequence[int]) -> None:
        """Get host memory for copies of tensors of about so many bytes, in the background.

        A thread pins it, so this is not for when CUDA graphs are being recorded.
        """
        if self._staging is not None:
            self._staging.reserve(sizes)

    def wait_reserved(self) -> None:
        """Wait until that memory is there; a usual first save comes minutes after it."""
        if self._staging is not None:
            self._staging.wait_reserved()

    def before_update(self) -> None:
        """To be called before weights or optimizer state change: the device then first ends the copy under way.

        The host does not wait.
        """
        if self._copying is not None:
            self._copying.hold_device()
            self._copying = None

    def _laid_out(self, staging: Staging, snapshot: Snapshot, required: bool) -> Snapshot | None:
        """The places for the copy, once every rank has its own; None when one of them could not, which is told."""
        places: list[Snapshot] = []
        try:
            self._checkpoints.messages.agree(lambda: places.append(staging.lay_out(snapshot)))
        except ResourceError as error:
            self._tell(snapshot, error)
            if required:
                raise
            return None
        return places[0]

    def _tell(self, snapshot: Snapshot, error: BaseException) -> None:
        self._tracker.event("not_saved", {"step": snapshot.step, "why": str(error) or type(error).__name__})

    def wait(self) -> None:
        """Wait for the save under way; raises what it failed of, unless that was only told."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Let a save under way end, whatever it comes to: that was told."""
        if self._thread is not None:
            self._thread.join()

    def _write_copied(self, save: _Save, copying: Copying) -> None:
        try:
            self._write(save, copying.wait())
        except BaseException as error:  # noqa: BLE001  (it would be lost with its thread: `wait` raises it)
            self._failure = error
            self._tell(save.snapshot, error)

    def _write(self, save: _Save, copied_s: float = 0.0) -> None:
        try:
            path = self._checkpoints.save(save.snapshot, best=save.best)
        except ResourceError as error:
            if save.required:
                raise
            self._tell(save.snapshot, error)
            return
        save_s = time.perf_counter() - save.started_s
        facts = {
            "path": str(path),
            "best": save.best,
            "staged_s": _rounded(save_s if save.staged_s is None else save.staged_s),
            "copied_s": _rounded(copied_s),
            "save_s": _rounded(save_s),
        }
        self._tracker.event("saved", facts)


def _rounded(seconds: float) -> float:
    return round(seconds, 3)


def choose_saver(
    wanted: bool | str,
    checkpoints: Checkpoints,
    tracker: Tracker,
    *,
    device: torch.device,
    num_bytes: int,
    available_bytes: int | None,
) -> Saver:
    """The saver for a state of about `num_bytes` on this rank; tells in a line what was decided and why.

    `wanted` is checkpoint.asynchronous: auto is in the background on a GPU whose host has twice the memory that all
    ranks' copies take (`available_bytes`, None: unknown).
    """
    world = checkpoints.messages.rank.world
    size = f"{num_bytes / 2**30:.1f} GiB of host memory a rank"
    if wanted == "auto" and device.type != "cuda":
        wanted, why = False, "training runs on the CPU itself"
    elif wanted == "auto" and available_bytes is not None and 2 * world * num_bytes > available_bytes:
        wanted, why = False, f"a copy needs {size}, and the host has {available_bytes / 2**30:.1f} GiB free"
    else:
        why = f"from a copy in {size}" if wanted else "as asked"
    tracker.stage("checkpoint", f"{'asynchronous' if wanted else 'training waits for each save'}: {why}")
    if not wanted:
        return Saver(checkpoints, tracker)
    return Saver(checkpoints, tracker, Staging(device))


def available_host_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Memory of this host that programs may take now; None where it is not told."""
    try:
        lines: Mapping[str, str] = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
