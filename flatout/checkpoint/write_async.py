"""Write checkpoints synchronously, or from a copy in host memory while training continues."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from flatout.checkpoint.write import Checkpoints, Snapshot
from flatout.errors import Fix, ResourceError
from flatout.io.host_memory import available_host_bytes
from flatout.track.callback import Reporter

# powers of two, since torch rounds pinned allocations up to them
BLOCK_BYTES, SMALL_BLOCK_BYTES = 2**30, 2**26
_LINE_BYTES = 128
# (destination in host memory, live tensor)
Pairs = Sequence[tuple[Tensor, Tensor]]


class HostCopy:
    """A synchronous copy to host memory, for training on the CPU."""

    def __init__(self, pairs: Pairs) -> None:
        started_s = time.perf_counter()
        for place, live in pairs:
            place.copy_(live)
        self._took_s = time.perf_counter() - started_s

    def hold_device(self) -> None:
        """Make the current stream wait for the copy; the host does not block."""

    def wait(self) -> float:
        """Block until the copy is done, in any thread, and return how long it took in seconds."""
        return self._took_s


class StreamCopy(HostCopy):
    """A copy from a GPU to pinned memory on `stream`, after queued work and concurrently with later work.

    Tensors in host memory are copied immediately.
    """

    def __init__(self, stream: torch.cuda.Stream, pairs: Pairs) -> None:
        self._device = stream.device
        # keep references until the copy is done, or the allocator could reuse the memory that it reads
        self._live = [live for _, live in pairs if live.is_cuda]
        # the update of the step being saved may still be running
        stream.wait_stream(torch.cuda.current_stream(self._device))
        # with a blocking event, the waiting thread sleeps instead of spinning
        self._began, self._ended = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        with torch.cuda.stream(stream):
            self._began.record()
            for place, live in pairs:
                place.copy_(live, non_blocking=True)
            self._ended.record()

    def hold_device(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._ended)

    def wait(self) -> float:
        # a new thread starts on GPU 0, and a call there would allocate a CUDA context
        with torch.cuda.device(self._device):
            self._ended.synchronize()
            took_s: float = self._began.elapsed_time(self._ended) / 1e3
        self._live.clear()
        return took_s


class Staging:
    """Host memory for copies of a state, in `blocks`; reused by the next save, and pinned if the state is on a GPU."""

    def __init__(
        self, device: torch.device, copier: Callable[[Pairs], HostCopy] | None = None, sizes: Sequence[int] = ()
    ) -> None:
        self._is_pinned, self._sizes = device.type == "cuda", sizes
        if copier is None:
            copier = partial(StreamCopy, torch.cuda.Stream(device)) if self._is_pinned else HostCopy
        self.copier = copier
        self.blocks: list[Tensor] = []
        self._reserving: threading.Thread | None = None

    def reserve(self) -> None:
        """Allocate memory in the background for tensors of the expected sizes, since pinning takes seconds.

        A thread pins the memory, so do not call this while a CUDA graph is being captured.
        """
        sizes = self._sizes
        usual_bytes = BLOCK_BYTES if sum(sizes) > BLOCK_BYTES else SMALL_BLOCK_BYTES

        # torch rounds pinned allocations up to powers of two
        largest_bytes = 1 << max(0, max(sizes, default=0) - 1).bit_length()

        def get() -> None:
            used: list[int] = []
            with suppress(ResourceError):  # the save that needs the memory raises it again
                for num_bytes in sorted(sizes, reverse=True):
                    self._room(num_bytes, used, max(usual_bytes, largest_bytes))

        self._reserving = threading.Thread(target=get, daemon=True)
        self._reserving.start()

    def wait_reserved(self) -> None:
        """Wait until the reserved memory is allocated."""
        if self._reserving is not None:
            self._reserving.join()

    def lay_out(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with destinations in this memory, to be filled by `copier`; valid until the next call.

        Raises ResourceError when the host lacks the memory.
        """
        self.wait_reserved()
        used = [0] * len(self.blocks)
        tensors: dict[str, dict[str, Tensor]] = {stem: {} for stem in snapshot.tensors}
        live = [(stem, name, tensor) for stem, of_stem in snapshot.tensors.items() for name, tensor in of_stem.items()]
        # large ones first; small ones then fill the gaps, so little memory is wasted
        for stem, name, tensor in sorted(live, key=lambda item: -item[2].nbytes):
            block, begin = self._room(tensor.nbytes, used, SMALL_BLOCK_BYTES)
            tensors[stem][name] = block[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return dataclasses.replace(snapshot, tensors=tensors)

    def _room(self, num_bytes: int, used: list[int], block_bytes: int) -> tuple[Tensor, int]:
        """Return a block with `num_bytes` free and the offset where they begin, and mark them as used.

        `used` counts the bytes taken from each block. If none has room, a block of at least `block_bytes` is allocated.
        """
        needed = -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        used += [0] * (len(self.blocks) - len(used))
        fits = (index for index, block in enumerate(self.blocks) if used[index] + needed <= block.nbytes)
        index = next(fits, len(self.blocks))
        if index == len(self.blocks):
            try:
                block = torch.empty(max(block_bytes, needed), dtype=torch.uint8, pin_memory=self._is_pinned)
            except RuntimeError as error:
                raise ResourceError(
                    f"no {max(block_bytes, needed):,} bytes of host memory for a copy of the state",
                    [Fix({"checkpoint.asynchronous": False})],
                ) from error
            self.blocks.append(block)
            used.append(0)
        begin = used[index]
        used[index] += needed
        return self.blocks[index], begin


class Saver:
    """Saves a run's checkpoints, collectively over its ranks; with `staging`, in the background.

    The state may be copied during the next forward and backward passes, which only read it, so call `before_update`
    before weights or optimizer state change.

    A save that fails because of the disk is reported to `reporter` on every rank, and training continues. Any other
    failure is reported and raised by the next `save` or `wait`, which all ranks call at the same point. What a callback
    raised about a complete save is raised by the next `before_update`, too.
    """

    def __init__(self, checkpoints: Checkpoints, reporter: Reporter, staging: Staging | None = None) -> None:
        self._checkpoints, self._reporter, self.staging = checkpoints, reporter, staging
        self._copying: HostCopy | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._callback_failed = False

    def save(self, snapshot: Snapshot, *, best: bool = False, required: bool = False) -> None:
        """Save; return when it is published, or, if staged and not `required`, as soon as the copy has started.

        Raises ResourceError on every rank when a `required` save fails.
        """
        started_s = time.perf_counter()
        self.wait()
        staging, destinations = self.staging, list[Snapshot]()
        if staging is None:
            self._write(snapshot, best, required, started_s)
            return
        try:
            self._checkpoints.group.run_on_all_ranks(lambda: destinations.append(staging.lay_out(snapshot)))
        except ResourceError as error:
            self._report(snapshot.step, error)
            if required:
                raise
            return
        (staged,) = destinations
        pairs: list[tuple[Tensor, Tensor]] = []
        for stem, live in snapshot.tensors.items():
            pairs += [(staged.tensors[stem][name], tensor.detach()) for name, tensor in live.items()]
        copying = self._copying = staging.copier(pairs)
        staged_s = None if required else time.perf_counter() - started_s

        # this must not refer to `snapshot`, whose live tensors the run may free before the save ends
        def write_copied() -> None:
            try:
                copied_s = copying.wait()
                self._write(staged, best, required, started_s, staged_s, copied_s)
            except BaseException as error:  # noqa: BLE001  (`wait` raises it; otherwise it would be lost)
                self._failure = error
                self._report(staged.step, error, "callback_failed" if self._callback_failed else "not_saved")

        self._thread = threading.Thread(target=write_copied, name="checkpoint", daemon=True)
        self._thread.start()
        if required:
            self.wait()

    def reserve(self) -> None:
        """Call `Staging.reserve`; nothing without staging."""
        if self.staging is not None:
            self.staging.reserve()

    def before_update(self) -> None:
        """Make the device finish a pending copy before weights or optimizer state change; call it before every update.

        The host does not wait.
        """
        if self._callback_failed:
            self.wait()
        if self._copying is not None:
            self._copying.hold_device()
            self._copying = None

    def wait(self) -> None:
        """Wait for the pending save; raise its failure, unless it was one that is only reported."""
        self.close()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait for the pending save; its errors were already reported."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _report(self, step: int, error: BaseException, kind: str = "not_saved") -> None:
        self._reporter.event(kind, {"step": step, "why": str(error) or type(error).__name__})

    def _write(
        self,
        snapshot: Snapshot,
        best: bool,
        required: bool,
        started_s: float,
        staged_s: float | None = None,
        copied_s: float = 0.0,
    ) -> None:
        """Write and report a save that blocked training for `staged_s`; None if it blocks until the end."""
        try:
            path = self._checkpoints.save(snapshot, best=best)
        except ResourceError as error:
            if required:
                raise
            self._report(snapshot.step, error)
            return
        save_s = time.perf_counter() - started_s
        facts = {
            "best": best,
            "staged_s": round(save_s if staged_s is None else staged_s, 3),
            "copied_s": round(copied_s, 3),
            "save_s": round(save_s, 3),
        }
        try:
            self._reporter.saved(snapshot.step, path, facts)
        except BaseException:
            self._callback_failed = True
            raise


def choose_saver(
    wanted: bool | str, checkpoints: Checkpoints, reporter: Reporter, *, device: torch.device, sizes: Sequence[int]
) -> Saver:
    """Return the saver for tensors of about these `sizes` in bytes on this rank, and log the decision and its reason.

    `wanted` is checkpoint.asynchronous; auto saves in the background on a GPU if the host has twice the memory that the
    copies of all ranks take. Raises ResourceError if the disk cannot hold a checkpoint.
    """
    num_bytes, world, free_bytes = sum(sizes), checkpoints.group.rank.world, available_host_bytes()
    checkpoints.require_room(num_bytes)
    size = f"{num_bytes / 2**30:.1f} GiB of host memory per rank"
    if wanted == "auto" and device.type != "cuda":
        wanted, why = False, "training runs on the CPU"
    elif wanted == "auto" and free_bytes is not None and 2 * world * num_bytes > free_bytes:
        wanted, why = False, f"a copy needs {size}, but the host has {free_bytes / 2**30:.1f} GiB free"
    else:
        why = f"from a copy in {size}" if wanted else "as configured"
    reporter.stage("checkpoint", f"{'asynchronous' if wanted else 'training waits for each save'}: {why}")
    return Saver(checkpoints, reporter, Staging(device, sizes=sizes) if wanted else None)
