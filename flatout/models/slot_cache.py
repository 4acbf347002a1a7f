"""Keys and values of many answers at once: a fixed number of slots, each with room for a prompt and its answer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache


def autocast_dtype(values: Tensor) -> torch.dtype:
    """Return the dtype in which autocast computes products of `values`; without autocast, their own."""
    kind = values.device.type
    lower = torch.is_autocast_enabled(kind) and values.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if lower else values.dtype


class SlotReads(NamedTuple):
    """What layers read of N slots in a pass over one new token of each.

    `lengths` int32 (N,) are the tokens of each slot, the new one included, `longest` an upper bound on them.
    """

    lengths: Tensor
    longest: int


class SlotCache(Cache):  # type: ignore[misc]  # transformers has no types for it
    """The keys and values (slots * length, heads, size) of every attention layer, made when a layer first writes.

    Passes are packed, as in training: a row of prompts, whose keys are copied to the slots of all their answers, or of
    the newest tokens of the first N slots. What a slot has not written yet is finite.
    """

    def __init__(self, num_slots: int, length: int) -> None:
        super().__init__(layers=[])
        self.num_slots, self.length = num_slots, length
        self.reads: SlotReads | None = None
        self._held: dict[int, tuple[Tensor, Tensor]] = {}
        # rows of the stream, None for all of them in their order, and the rows of the cache that they are written to
        self._writes: tuple[Tensor | None, Tensor] | None = None

    def fill(self, source: Tensor, target: Tensor) -> None:
        """Let the next pass write rows `source` (W,) of its stream to rows `target` (W,) of the cache; int64 both."""
        self.reads, self._writes = None, (source, target)

    def append(self, positions: Tensor, longest: int) -> None:
        """Let the next pass write a token at `positions` int64 (N,) of the first N slots, and read these slots."""
        rows = torch.arange(len(positions), device=positions.device) * self.length + positions
        self.reads, self._writes = SlotReads((positions + 1).int(), longest), (None, rows)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values (1, heads, T, size) of a layer; return those that its queries attend to."""
        assert self._writes is not None
        source, target = self._writes
        new_states = key_states, value_states
        if layer_idx not in self._held:
            dtype = autocast_dtype(value_states)
            self._held[layer_idx] = self._make(key_states, dtype), self._make(value_states, dtype)
        for slots, states in zip(self._held[layer_idx], new_states, strict=True):
            rows = states[0].transpose(0, 1)
            rows = rows if source is None else rows.index_select(0, source)
            slots.index_copy_(0, target, rows.to(slots.dtype))
        if self.reads is None:
            return new_states
        num_rows = len(self.reads.lengths) * self.length
        key, value = (slots[:num_rows].transpose(0, 1)[None] for slots in self._held[layer_idx])
        return key, value

    def _make(self, states: Tensor, dtype: torch.dtype) -> Tensor:
        rows, (_, heads, _, size) = self.num_slots * self.length, states.shape
        return torch.zeros(rows, heads, size, dtype=dtype, device=states.device)

    def move(self, pairs: list[tuple[int, int]]) -> None:
        """Copy slots (from, to); no slot is both."""
        for tensor in (slots for both in self._held.values() for slots in both):
            slots = tensor.unflatten(0, (self.num_slots, self.length))
            for old, new in pairs:
                slots[new].copy_(slots[old])

    @property
    def num_bytes(self) -> int:
        return sum(slots.nbytes for both in self._held.values() for slots in both)

    # transformers asks these to make masks, which packed attention does not use: the positions are given

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        # with more keys than a layer's window holds, `window_marker` requires that the layer passes its window on
        return (query_length if self.reads is None else self.length), 0
