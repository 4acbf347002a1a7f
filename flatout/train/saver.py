"""When a checkpoint is written: at once, or from a copy in host memory while training goes on."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from flatout.errors import ResourceError
from flatout.track.record import Tracker
from flatout.train.checkpoint import Checkpoints, Snapshot

# powers of two, since pinned memory is given out in such sizes
BLOCK_BYTES, SMALL_BLOCK_BYTES = 2**30, 2**26
_LINE_BYTES = 128


class Staging:
    """Host memory that a state is copied to while training waits; kept for the next save, pinned for a GPU's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: list[Tensor] = []
        self._reserving: threading.Thread | None = None

    def reserve(self, num_bytes: int) -> None:
        """Get memory in the background (pinning takes seconds), so that the first save does not wait for it."""

        def get() -> None:
            with suppress(ResourceError):  # the save that needs it raises it again
                self._grow(num_bytes)

        self._reserving = threading.Thread(target=get, daemon=True)
        self._reserving.start()

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot in this memory; once it returns, the live tensors may change. It holds until the next copy."""
        if self._reserving is not None:
            self._reserving.join()
        used = [0] * len(self._blocks)
        tensors = {
            stem: {name: self._copy(tensor, used) for name, tensor in held.items()}
            for stem, held in snapshot.tensors.items()
        }
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return dataclasses.replace(snapshot, tensors=tensors)

    def _copy(self, tensor: Tensor, used: list[int]) -> Tensor:
        tensor = tensor.detach()
        room_bytes = -(-tensor.nbytes // _LINE_BYTES) * _LINE_BYTES
        fits = (index for index, block in enumerate(self._blocks) if used[index] + room_bytes <= block.nbytes)
        index = next(fits, len(self._blocks))
        if index == len(self._blocks):
            self._grow(max(room_bytes, 1), whole=True)
            used.append(0)
        begin = used[index]
        used[index] += room_bytes
        place = self._blocks[index][begin : begin + tensor.nbytes]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)

    def _grow(self, num_bytes: int, *, whole: bool = False) -> None:
        """More blocks; `whole` in one piece."""
        while num_bytes > 0:
            smallest = SMALL_BLOCK_BYTES if whole or num_bytes < BLOCK_BYTES // 2 else BLOCK_BYTES
            size_bytes = max(num_bytes, smallest) if whole else smallest
            try:
                block = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            except RuntimeError as error:
                raise ResourceError(
                    f"no {size_bytes:,} bytes of host memory to copy the state to; set checkpoint.asynchronous: false"
                ) from error
            self._blocks.append(block)
            num_bytes -= size_bytes


class Saver:
    """Saves of one run, collective over its ranks, told to `tracker`. With `staging` they run in the background.

    A save that fails because a disk is full or refuses is told as an event, on every rank, and training goes on; any
    other failure is told and raised by the next `save` or `wait`, where all ranks stand at the same place.
    """

    def __init__(self, checkpoints: Checkpoints, tracker: Tracker, staging: Staging | None = None) -> None:
        self._checkpoints, self._tracker, self._staging = checkpoints, tracker, staging
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(self, snapshot: Snapshot, *, best: bool = False, required: bool = False) -> None:
        """Save; returns when it is published, or in the background as soon as it is staged and not `required`.

        Raises ResourceError on every rank when a `required` save fails.
        """
        self.wait()
        started_s = time.perf_counter()
        if self._staging is None:
            self._write(snapshot, best, required, started_s)
            return
        staged = self._staged(snapshot, required)
        if staged is None:
            return
        self._thread = threading.Thread(
            target=self._write_kept, args=(staged, best, required, started_s), name="checkpoint", daemon=True
        )
        self._thread.start()
        if required:
            self.wait()

    def _staged(self, snapshot: Snapshot, required: bool) -> Snapshot | None:
        """The copy, once every rank has its own; None when one of them could not, which is told."""
        copies: list[Snapshot] = []

        def copy() -> None:
            assert self._staging is not None
            copies.append(self._staging.copy(snapshot))

        try:
            self._checkpoints.messages.agree(copy)
        except ResourceError as error:
            self._tell(snapshot, error)
            if required:
                raise
            return None
        return copies[0]

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

    def _write_kept(self, snapshot: Snapshot, best: bool, required: bool, started_s: float) -> None:
        staged_s = time.perf_counter() - started_s
        try:
            self._write(snapshot, best, required, started_s, staged_s)
        except BaseException as error:  # noqa: BLE001  (it would be lost with its thread: `wait` raises it)
            self._failure = error
            self._tell(snapshot, error)

    def _write(
        self, snapshot: Snapshot, best: bool, required: bool, started_s: float, staged_s: float | None = None
    ) -> None:
        try:
            path = self._checkpoints.save(snapshot, best=best)
        except ResourceError as error:
            if required:
                raise
            self._tell(snapshot, error)
            return
        save_s = time.perf_counter() - started_s
        facts = {
            "path": str(path),
            "best": best,
            "staged_s": _rounded(save_s if staged_s is None else staged_s),
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
    staging = Staging(device)
    staging.reserve(num_bytes)
    return Saver(checkpoints, tracker, staging)


def available_host_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Memory of this host that programs may take now; None where it is not told."""
    try:
        lines: Mapping[str, str] = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
