"""Write checkpoints synchronously, or from a copy in host memory while training continues."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from flatout.checkpoint.host_staging import CopyHandle, Staging
from flatout.checkpoint.write import Checkpoints, Snapshot
from flatout.errors import ResourceError
from flatout.track.tracker import Tracker


@dataclass(frozen=True, slots=True)
class _Save:
    """One save in progress; `staged_s` is how long `save` blocked training, None if it blocks until the end."""

    snapshot: Snapshot
    best: bool
    required: bool
    started_s: float
    staged_s: float | None = None


class Saver:
    """Saves a run's checkpoints, collectively over its ranks; with `staging`, in the background.

    The state may be copied during the next forward and backward passes, which only read it, so call `before_update`
    before weights or optimizer state change.

    A save that fails because of the disk is reported to `tracker` on every rank, and training continues. Any other
    failure is reported and raised by the next `save` or `wait`, which all ranks call at the same point.
    """

    def __init__(self, checkpoints: Checkpoints, tracker: Tracker, staging: Staging | None = None) -> None:
        self._checkpoints, self._tracker, self._staging = checkpoints, tracker, staging
        self._copying: CopyHandle | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(self, snapshot: Snapshot, *, best: bool = False, required: bool = False) -> None:
        """Save; return when it is published, or, if staged and not `required`, as soon as the copy has started.

        Raises ResourceError on every rank when a `required` save fails.
        """
        started_s = time.perf_counter()
        self.wait()
        if self._staging is None:
            self._write(_Save(snapshot, best, required, started_s))
            return
        staging, places = self._staging, []
        try:
            self._checkpoints.group.run_on_all_ranks(lambda: places.append(staging.lay_out(snapshot)))
        except ResourceError as error:
            self._tell(snapshot, error)
            if required:
                raise
            return
        staged = places[0]
        self._copying = staging.copy(snapshot, staged)
        staged_s = None if required else time.perf_counter() - started_s
        save = _Save(staged, best, required, started_s, staged_s)
        self._thread = threading.Thread(
            target=self._write_copied, args=(save, self._copying), name="checkpoint", daemon=True
        )
        self._thread.start()
        if required:
            self.wait()

    def reserve(self, sizes: Sequence[int]) -> None:
        """Allocate host memory in the background for copies of tensors of about these sizes in bytes.

        A thread pins the memory, so do not call this while a CUDA graph is being captured.
        """
        if self._staging is not None:
            self._staging.reserve(sizes)

    def wait_reserved(self) -> None:
        """Wait until the memory that `reserve` asked for is allocated."""
        if self._staging is not None:
            self._staging.wait_reserved()

    def before_update(self) -> None:
        """Make the device finish a pending copy before weights or optimizer state change; call it before every update.

        The host does not wait.
        """
        if self._copying is not None:
            self._copying.hold_device()
            self._copying = None

    def _tell(self, snapshot: Snapshot, error: BaseException) -> None:
        self._tracker.event("not_saved", {"step": snapshot.step, "why": str(error) or type(error).__name__})

    def wait(self) -> None:
        """Wait for the pending save; raise its failure, unless it was one that is only reported."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait for the pending save; its errors were already reported."""
        if self._thread is not None:
            self._thread.join()

    def _write_copied(self, save: _Save, copying: CopyHandle) -> None:
        try:
            self._write(save, copying.wait())
        except BaseException as error:  # noqa: BLE001  (`wait` raises it; otherwise it would be lost with the thread)
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
            "staged_s": round(save_s if save.staged_s is None else save.staged_s, 3),
            "copied_s": round(copied_s, 3),
            "save_s": round(save_s, 3),
        }
        self._tracker.event("saved", facts)


def choose_saver(
    wanted: bool | str,
    checkpoints: Checkpoints,
    tracker: Tracker,
    *,
    device: torch.device,
    num_bytes: int,
    available_bytes: int | None,
) -> Saver:
    """Return the saver for a state of about `num_bytes` on this rank, and log the decision and its reason.

    `wanted` is checkpoint.asynchronous; auto saves in the background on a GPU if the host has twice the memory that the
    copies of all ranks take. `available_bytes` is the host's free memory (None: unknown).
    """
    world = checkpoints.group.rank.world
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
    """Return how much memory of this host is available to programs now, in bytes; None if unknown."""
    try:
        lines: Mapping[str, str] = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
