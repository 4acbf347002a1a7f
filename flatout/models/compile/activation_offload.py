"""Offload tensors saved for backward to host memory: copied on a separate stream, prefetched one layer ahead."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

# concurrent copies to the host while later layers run; each holds its GPU memory until it is done
MAX_IN_FLIGHT = 2


class ActivationOffload:
    """Saved-tensor hooks that move hidden states (1, T, `width`) to pinned host memory and back.

    Copies to the host overlap the next layers; with `MAX_IN_FLIGHT` copies in flight, the GPU waits for the oldest. In
    the backward pass, the previous layer's tensor is prefetched while a layer computes. CPU tensors are cloned.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._open: ExitStack | None = None
        self._slots: list[_Slot] = []
        self._in_flight: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._stream: torch.cuda.Stream | None = None

    def open(self) -> None:
        """Begin a forward pass: from now on, saved hidden states are moved to the host."""
        if self._stream is not None:
            # copies of an abandoned pass may still be running
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._slots, self._open = [], ExitStack()
        self._in_flight.clear()
        self._open.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))

    def close(self) -> None:
        """End a forward pass, successful or not."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _pack(self, tensor: Tensor) -> Tensor | _Slot:
        if tensor.dim() != 3 or tensor.shape[-1] != self._width or not tensor.is_floating_point():
            return tensor
        slot = _Slot(len(self._slots), self._to_host(tensor), tensor.device)
        self._slots.append(slot)
        return slot

    def _unpack(self, packed: Tensor | _Slot) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        while self._in_flight:
            torch.cuda.current_stream(packed.device).wait_event(self._in_flight.popleft()[1])
        self._fetch(packed)
        if packed.index and packed.device.type == "cuda":
            self._fetch(self._slots[packed.index - 1])
        tensor, packed.fetched = packed.fetched, None
        assert tensor is not None
        if packed.ready is not None:
            torch.cuda.current_stream(packed.device).wait_event(packed.ready)
        return tensor

    def _to_host(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor.clone()
        stream = self._copy_stream(tensor.device)
        current = torch.cuda.current_stream(tensor.device)
        if len(self._in_flight) == MAX_IN_FLIGHT:
            # the memory may be reused after the copy, so the GPU waits, not the host
            current.wait_event(self._in_flight.popleft()[1])
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
        self._in_flight.append((tensor, stream.record_event()))
        return host

    def _fetch(self, slot: _Slot) -> None:
        """Start the copy back to the device, unless it was already started."""
        if slot.fetched is not None:
            return
        if slot.device.type != "cuda":
            slot.fetched = slot.host.clone()
            return
        stream = self._copy_stream(slot.device)
        # allocated on the compute stream, whose earlier work may still use this memory
        slot.fetched = torch.empty_like(slot.host, device=slot.device)
        stream.wait_stream(torch.cuda.current_stream(slot.device))
        with torch.cuda.stream(stream):
            slot.fetched.copy_(slot.host, non_blocking=True)
        slot.ready = stream.record_event()

    def _copy_stream(self, device: torch.device) -> torch.cuda.Stream:
        self._stream = self._stream or torch.cuda.Stream(device)
        return self._stream


@dataclass(slots=True, eq=False)
class _Slot:
    """One saved tensor: its host copy, and its device copy once that is being fetched."""

    index: int
    host: Tensor
    device: torch.device
    fetched: Tensor | None = None
    ready: torch.cuda.Event | None = None
