"""Attention of one new token of each slot in Triton: one program for the heads of a slot that share keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.kernels.cross_entropy.triton import shaped_logits

# keys of a tile; the smallest side of a product
_KEYS, _MIN_SIDE = 64, 16
_LOG2_E = tl.constexpr(1.4426950408889634)


# Triton would compile other kernels for numbers that are multiples of 16, in the middle of a run
@triton.jit(do_not_specialize=["slot_places", "window"])
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, output_ptr, lengths_ptr, sinks_ptr, scale, softcap, slot_places, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, OUT_SIZE: tl.constexpr,
    OUT_WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    slot, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths_ptr + slot)
    rows, columns, out_columns = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, OUT_WIDTH)
    heads = kv_head * (HEADS // KV_HEADS) + rows
    is_head = rows < HEADS // KV_HEADS
    q_places = q_ptr + (slot * HEADS + heads)[:, None] * SIZE + columns[None, :]
    q = tl.load(q_places, mask=is_head[:, None] & (columns < SIZE)[None, :], other=0.0)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    weight_sum = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, OUT_WIDTH), tl.float32)
    for start in range(tl.maximum(length - window, 0), length, KEYS):
        keys = start + tl.arange(0, KEYS)
        is_key = keys < length
        own = (slot * slot_places + keys) * KV_HEADS + kv_head
        k_places = k_ptr + own[:, None] * SIZE + columns[None, :]
        k = tl.load(k_places, mask=is_key[:, None] & (columns < SIZE)[None, :], other=0.0)
        scores = shaped_logits(tl.dot(q, tl.trans(k)), scale, softcap, CAPPED)
        scores = tl.where(is_key[None, :], scores * _LOG2_E, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights, change = tl.exp2(scores - higher[:, None]), tl.exp2(highest - higher)
        v_places = v_ptr + own[:, None] * OUT_SIZE + out_columns[None, :]
        v = tl.load(v_places, mask=is_key[:, None] & (out_columns < OUT_SIZE)[None, :], other=0.0)
        total = tl.dot(weights.to(v.dtype), v, total * change[:, None])
        weight_sum = weight_sum * change + tl.sum(weights, 1)
        highest = higher
    if SINKS:
        sinks = tl.load(sinks_ptr + heads, mask=is_head, other=0.0).to(tl.float32) * _LOG2_E
        # a sink far above the scores leaves an output of 0
        higher = tl.maximum(highest, sinks)
        change = tl.exp2(highest - higher)
        total *= change[:, None]
        weight_sum = weight_sum * change + tl.exp2(sinks - higher)
    output = total / weight_sum[:, None]
    places = output_ptr + (slot * HEADS + heads)[:, None] * OUT_SIZE + out_columns[None, :]
    inside = is_head[:, None] & (out_columns < OUT_SIZE)[None, :]
    tl.store(places, output.to(output_ptr.dtype.element_ty), mask=inside)


def attend(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scale: float, window: int | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute `slot_attention` of 16-bit tensors, reading no key beyond `lengths` or before the window."""
    (num_slots, num_heads, size), (num_keys, kv_heads, out_size) = query.shape, value.shape
    output, slot_places = query.new_empty(num_slots, num_heads, out_size), num_keys // num_slots
    tensors = query.contiguous(), key.contiguous(), value.contiguous(), output, lengths
    width, out_width, rows = (_side(number) for number in (size, out_size, num_heads // kv_heads))
    with torch.cuda.device_of(query):
        _attend_kernel[(num_slots, kv_heads)](
            *tensors, lengths if sinks is None else sinks, scale, softcap or 1.0, slot_places, window or slot_places,
            HEADS=num_heads, KV_HEADS=kv_heads, SIZE=size, WIDTH=width, OUT_SIZE=out_size, OUT_WIDTH=out_width,
            ROWS=rows, KEYS=_KEYS, CAPPED=softcap is not None, SINKS=sinks is not None, num_warps=4, num_stages=3,
        )  # fmt: skip
    return output


def _side(number: int) -> int:
    return max(_MIN_SIDE, int(triton.next_power_of_2(number)))
