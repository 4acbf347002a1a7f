"""Host memory for copies of the training state; a GPU copies on its own stream, overlapping with computation."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from flatout.checkpoint.write import Snapshot
from flatout.errors import ResourceError

# powers of two, since torch rounds pinned allocations up to them
BLOCK_BYTES, SMALL_BLOCK_BYTES = 2**30, 2**26
_LINE_BYTES = 128


class CopyHandle(Protocol):
    """A copy to host memory, pending or done."""

    def hold_device(self) -> None:
        """Make the current stream wait for the copy; the host does not block."""

    def wait(self) -> float:
        """Block until the copy is done, in any thread, and return how long it took in seconds."""


# starts copying pairs of (destination in host memory, live tensor)
Copier = Callable[[Sequence[tuple[Tensor, Tensor]]], CopyHandle]


class SynchronousCopy:
    """A synchronous copy, for training on the CPU."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        started_s = time.perf_counter()
        for place, live in pairs:
            place.copy_(live)
        self._took_s = time.perf_counter() - started_s

    def hold_device(self) -> None:
        return None

    def wait(self) -> float:
        return self._took_s


class AsyncCopier:
    """A Copier from a GPU to pinned memory; it waits for work that is already queued and overlaps with later work.

    Tensors in host memory are copied immediately.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def __call__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> CopyHandle:
        device = self._stream.device
        # the update of the step being saved may still be running
        self._stream.wait_stream(torch.cuda.current_stream(device))
        # with a blocking event, the waiting thread sleeps instead of spinning
        began, ended = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            began.record()
            for place, live in pairs:
                place.copy_(live, non_blocking=True)
            ended.record()
        return _CopyingBeside(device, began, ended, [live for _, live in pairs if live.is_cuda])


class _CopyingBeside:
    def __init__(
        self, device: torch.device, began: torch.cuda.Event, ended: torch.cuda.Event, live: list[Tensor]
    ) -> None:
        self._device, self._began, self._ended = device, began, ended
        # keep references until the copy is done, or the allocator could reuse the memory that it reads
        self._live = live

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

    def __init__(self, device: torch.device, copier: Copier | None = None) -> None:
        self._is_pinned = device.type == "cuda"
        self._copier: Copier = copier or (AsyncCopier(device) if device.type == "cuda" else SynchronousCopy)
        self.blocks: list[Tensor] = []
        self._reserving: threading.Thread | None = None

    def reserve(self, sizes: Sequence[int]) -> None:
        """Allocate memory in the background for tensors of these sizes in bytes, since pinning takes seconds."""
        usual_bytes = BLOCK_BYTES if sum(sizes) > BLOCK_BYTES else SMALL_BLOCK_BYTES

        def get() -> None:
            used: list[int] = []
            with suppress(ResourceError):  # the save that needs the memory raises it again
                # torch rounds pinned allocations up to powers of two
                largest_bytes = 1 << max(0, max(sizes, default=0) - 1).bit_length()
                for num_bytes in sorted(sizes, reverse=True):
                    self._room(num_bytes, used, max(usual_bytes, largest_bytes))

        self._reserving = threading.Thread(target=get, daemon=True)
        self._reserving.start()

    def wait_reserved(self) -> None:
        """Wait until the reserved memory is allocated."""
        if self._reserving is not None:
            self._reserving.join()

    def lay_out(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with destinations in this memory, for `copy` to fill; valid until the next call.

        Raises ResourceError when the host lacks the memory.
        """
        self.wait_reserved()
        used = [0] * len(self.blocks)
        tensors: dict[str, dict[str, Tensor]] = {stem: {} for stem in snapshot.tensors}
        live = [(stem, name, tensor) for stem, held in snapshot.tensors.items() for name, tensor in held.items()]
        # large ones first; small ones then fill the gaps, so little memory is wasted
        for stem, name, tensor in sorted(live, key=lambda item: -item[2].nbytes):
            block, begin = self._room(tensor.nbytes, used, SMALL_BLOCK_BYTES)
            tensors[stem][name] = block[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return dataclasses.replace(snapshot, tensors=tensors)

    def copy(self, snapshot: Snapshot, staged: Snapshot) -> CopyHandle:
        """Start copying the live tensors to the destinations from `lay_out`."""
        return self._copier(
            [
                (staged.tensors[stem][name], tensor.detach())
                for stem, held in snapshot.tensors.items()
                for name, tensor in held.items()
            ]
        )

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
                    f"no {max(block_bytes, needed):,} bytes of host memory to copy the state to; "
                    "set checkpoint.asynchronous: false"
                ) from error
            self.blocks.append(block)
            used.append(0)
        begin = used[index]
        used[index] += needed
        return self.blocks[index], begin
