"""Host memory that a state is copied to: on a GPU beside what it computes next, in a stream of its own."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from flatout.errors import ResourceError
from flatout.train.checkpoint import Snapshot

# powers of two, since pinned memory is given out in such sizes
BLOCK_BYTES, SMALL_BLOCK_BYTES = 2**30, 2**26
_LINE_BYTES = 128


class Copying(Protocol):
    """A copy to host memory, under way or done."""

    def hold_device(self) -> None:
        """What training gives the device from now on runs after the copy; the host does not wait."""

    def wait(self) -> float:
        """Wait on the host, in any thread, until the copy is done; the seconds that it took."""


# starts copying (place in host memory, live tensor) pairs
Copier = Callable[[Sequence[tuple[Tensor, Tensor]]], Copying]


class CopiedAtOnce:
    """A copy made on the spot: where training runs on the CPU, there is nothing to run beside."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        started_s = time.perf_counter()
        for place, live in pairs:
            place.copy_(live)
        self._took_s = time.perf_counter() - started_s

    def hold_device(self) -> None:
        return None

    def wait(self) -> float:
        return self._took_s


class SideStream:
    """A Copier from a GPU to pinned memory, after all that the device was given before and beside what comes next.

    Tensors in host memory are copied at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def __call__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Copying:
        device = self._stream.device
        # the update of the step that is saved may still be under way
        self._stream.wait_stream(torch.cuda.current_stream(device))
        # a blocking event lets the thread that waits for it sleep
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
        # until the copy has passed, no memory that it reads may be given to another tensor
        self._live = live

    def hold_device(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._ended)

    def wait(self) -> float:
        # a new thread starts on GPU 0, where a call would take memory for a context
        with torch.cuda.device(self._device):
            self._ended.synchronize()
            took_s: float = self._began.elapsed_time(self._ended) / 1e3
        self._live.clear()
        return took_s


class Staging:
    """Host memory for copies of a state; kept for the next save, pinned for a GPU's."""

    def __init__(self, device: torch.device, copier: Copier | None = None) -> None:
        self._is_pinned = device.type == "cuda"
        self._copier: Copier = copier or (SideStream(device) if device.type == "cuda" else CopiedAtOnce)
        self._blocks: list[Tensor] = []
        self._reserving: threading.Thread | None = None

    @property
    def held_bytes(self) -> int:
        """Host memory that this holds."""
        return sum(block.nbytes for block in self._blocks)

    def reserve(self, sizes: Sequence[int]) -> None:
        """Get memory for tensors of so many bytes each, in the background: pinning takes seconds, for which the first
        save would wait."""
        usual_bytes = BLOCK_BYTES if sum(sizes) > BLOCK_BYTES else SMALL_BLOCK_BYTES

        def get() -> None:
            used: list[int] = []
            with suppress(ResourceError):  # the save that needs it raises it again
                for num_bytes in sorted(sizes, reverse=True):
                    self._room(num_bytes, used, max(usual_bytes, _power_of_two(max(sizes))))

        self._reserving = threading.Thread(target=get, daemon=True)
        self._reserving.start()

    def wait_reserved(self) -> None:
        """Wait until the memory asked for is there; a first save would do so."""
        if self._reserving is not None:
            self._reserving.join()

    def lay_out(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot's places in this memory, to be filled by `copy`; they hold until the next call.

        Raises ResourceError when the host has no memory for them.
        """
        self.wait_reserved()
        used = [0] * len(self._blocks)
        tensors: dict[str, dict[str, Tensor]] = {stem: {} for stem in snapshot.tensors}
        live = [(stem, name, tensor) for stem, held in snapshot.tensors.items() for name, tensor in held.items()]
        # large ones first, and small ones into what they leave: hardly more memory than their sum
        for stem, name, tensor in sorted(live, key=lambda item: -item[2].nbytes):
            tensors[stem][name] = self._place(tensor, used)
        return dataclasses.replace(snapshot, tensors=tensors)

    def copy(self, snapshot: Snapshot, staged: Snapshot) -> Copying:
        """Start copying the live tensors to their places, which `lay_out` gave."""
        return self._copier(
            [
                (staged.tensors[stem][name], tensor.detach())
                for stem, held in snapshot.tensors.items()
                for name, tensor in held.items()
            ]
        )

    def _place(self, tensor: Tensor, used: list[int]) -> Tensor:
        block, begin = self._room(tensor.nbytes, used, SMALL_BLOCK_BYTES)
        return block[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def _room(self, num_bytes: int, used: list[int], block_bytes: int) -> tuple[Tensor, int]:
        """A block with so many bytes beyond those `used` of each, and where they begin; else a new one of at least
        `block_bytes`."""
        needed = -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        used += [0] * (len(self._blocks) - len(used))
        fits = (index for index, block in enumerate(self._blocks) if used[index] + needed <= block.nbytes)
        index = next(fits, len(self._blocks))
        if index == len(self._blocks):
            self._grow(max(block_bytes, needed))
            used.append(0)
        begin = used[index]
        used[index] += needed
        return self._blocks[index], begin

    def _grow(self, num_bytes: int) -> None:
        try:
            block = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
        except RuntimeError as error:
            raise ResourceError(
                f"no {num_bytes:,} bytes of host memory to copy the state to; set checkpoint.asynchronous: false"
            ) from error
        self._blocks.append(block)


def _power_of_two(number: int) -> int:
    """The smallest one that is no less."""
    return 1 << max(0, number - 1).bit_length()
