"""Attention of suffixes to their shared prefixes, merged in place: one program per tile of rows and head.

The formulas are those of `shared_prefix`. FlashAttention's backward pass has one program per tile of keys and head,
which leaves most of a GPU idle for a prefix of a few hundred tokens; here several share the queries of one tile of
keys, and their sums are added in a fixed order, so equal inputs have equal results to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# programs per processor for the gradients of keys and values
_WAVES = 4
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(ptr, rows, head, columns, end, HEADS: tl.constexpr, SIZE: tl.constexpr):
    """Rows before `end` of one head of a contiguous (T, HEADS, SIZE), zeros elsewhere."""
    inside = (rows < end)[:, None] & (columns < SIZE)[None, :]
    return tl.load(ptr + rows.to(tl.int64)[:, None] * HEADS * SIZE + head * SIZE + columns, mask=inside, other=0.0)


@triton.jit
def _store(ptr, values, rows, head, columns, end, HEADS: tl.constexpr, SIZE: tl.constexpr):
    inside = (rows < end)[:, None] & (columns < SIZE)[None, :]
    places = ptr + rows.to(tl.int64)[:, None] * HEADS * SIZE + head * SIZE + columns
    tl.store(places, values.to(ptr.dtype.element_ty), mask=inside)


# Triton would compile a second kernel for sizes and addresses that are multiples of 16, in the middle of a run
@triton.jit(do_not_specialize=["log_sums_ptr", "sum_row", "sum_head"])
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, output_ptr, log_sums_ptr, prefix_ptr, suffix_ptr, scale, sum_row, sum_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    head, group = tl.program_id(1), tl.program_id(2)
    kv_head = head // (HEADS // KV_HEADS)
    start, end = tl.load(suffix_ptr + group) + tl.program_id(0) * ROWS, tl.load(suffix_ptr + group + 1)
    if start < end:
        first, last = tl.load(prefix_ptr + group), tl.load(prefix_ptr + group + 1)
        rows, columns = start + tl.arange(0, ROWS), tl.arange(0, WIDTH)
        q = _load(q_ptr, rows, head, columns, end, HEADS, SIZE)
        highest = tl.full((ROWS,), float("-inf"), tl.float32)
        weight_sum = tl.zeros((ROWS,), tl.float32)
        total = tl.zeros((ROWS, WIDTH), tl.float32)
        for key in range(first, last, KEYS):
            keys = key + tl.arange(0, KEYS)
            k = _load(k_ptr, keys, kv_head, columns, last, KV_HEADS, SIZE)
            scores = tl.where((keys < last)[None, :], tl.dot(q, tl.trans(k)) * (scale * _LOG2_E), float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 1))
            weights, change = tl.exp2(scores - higher[:, None]), tl.exp2(highest - higher)
            v = _load(v_ptr, keys, kv_head, columns, last, KV_HEADS, SIZE)
            total = tl.dot(weights.to(v.dtype), v, total * change[:, None])
            weight_sum = weight_sum * change + tl.sum(weights, 1)
            highest = higher
        other, other_sums = total / weight_sum[:, None], (highest + tl.log2(weight_sum)) / _LOG2_E
        sums_ptrs = log_sums_ptr + rows.to(tl.int64) * sum_row + head.to(tl.int64) * sum_head
        own_sums = tl.load(sums_ptrs, mask=rows < end, other=0.0)
        output = _load(output_ptr, rows, head, columns, end, HEADS, SIZE).to(tl.float32)
        output += tl.sigmoid(other_sums - own_sums)[:, None] * (other - output)
        _store(output_ptr, output, rows, head, columns, end, HEADS, SIZE)
        higher, distance = tl.maximum(own_sums, other_sums), tl.abs(own_sums - other_sums)
        tl.store(sums_ptrs, higher + tl.log(1.0 + tl.exp(-distance)), mask=rows < end)


@triton.jit(do_not_specialize=["log_sums_ptr", "sum_row", "sum_head", "num_rows"])
def _query_gradient_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, output_ptr, log_sums_ptr, q_grad_ptr, row_sums_ptr, prefix_ptr, suffix_ptr, scale,
    sum_row, sum_head, num_rows,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    head, group = tl.program_id(1), tl.program_id(2)
    kv_head = head // (HEADS // KV_HEADS)
    start, end = tl.load(suffix_ptr + group) + tl.program_id(0) * ROWS, tl.load(suffix_ptr + group + 1)
    if start < end:
        first, last = tl.load(prefix_ptr + group), tl.load(prefix_ptr + group + 1)
        rows, columns = start + tl.arange(0, ROWS), tl.arange(0, WIDTH)
        grad = _load(grad_ptr, rows, head, columns, end, HEADS, SIZE)
        output = _load(output_ptr, rows, head, columns, end, HEADS, SIZE)
        row_sums = tl.sum(grad.to(tl.float32) * output.to(tl.float32), 1)
        tl.store(row_sums_ptr + head.to(tl.int64) * num_rows + rows, row_sums, mask=rows < end)
        sums_ptrs = log_sums_ptr + rows.to(tl.int64) * sum_row + head.to(tl.int64) * sum_head
        log_sums = tl.load(sums_ptrs, mask=rows < end, other=0.0) * _LOG2_E
        q = _load(q_ptr, rows, head, columns, end, HEADS, SIZE)
        total = tl.zeros((ROWS, WIDTH), tl.float32)
        for key in range(first, last, KEYS):
            keys = key + tl.arange(0, KEYS)
            k = _load(k_ptr, keys, kv_head, columns, last, KV_HEADS, SIZE)
            v = _load(v_ptr, keys, kv_head, columns, last, KV_HEADS, SIZE)
            scores = tl.where((keys < last)[None, :], tl.dot(q, tl.trans(k)) * (scale * _LOG2_E), float("-inf"))
            weights = tl.exp2(scores - log_sums[:, None])
            score_grad = weights * (tl.dot(grad, tl.trans(v)) - row_sums[:, None])
            total = tl.dot(score_grad.to(k.dtype), k, total)
        own = _load(q_grad_ptr, rows, head, columns, end, HEADS, SIZE).to(tl.float32)
        _store(q_grad_ptr, own + total * scale, rows, head, columns, end, HEADS, SIZE)


@triton.jit(do_not_specialize=["log_sums_ptr", "sum_row", "sum_head", "num_rows", "num_keys", "num_parts"])
def _key_gradient_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, log_sums_ptr, row_sums_ptr, k_parts_ptr, v_parts_ptr, prefix_ptr, suffix_ptr, scale,
    sum_row, sum_head, num_rows, num_keys, num_parts,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    kv_head, part, group = tl.program_id(1) // num_parts, tl.program_id(1) % num_parts, tl.program_id(2)
    first, last = tl.load(prefix_ptr + group) + tl.program_id(0) * KEYS, tl.load(prefix_ptr + group + 1)
    if first < last:
        begin, stop = tl.load(suffix_ptr + group), tl.load(suffix_ptr + group + 1)
        part_rows = tl.cdiv(tl.cdiv(stop - begin, ROWS), num_parts) * ROWS
        start = begin + part * part_rows
        end = tl.minimum(start + part_rows, stop)
        keys, columns = first + tl.arange(0, KEYS), tl.arange(0, WIDTH)
        k = _load(k_ptr, keys, kv_head, columns, last, KV_HEADS, SIZE)
        v = _load(v_ptr, keys, kv_head, columns, last, KV_HEADS, SIZE)
        k_grad, v_grad = tl.zeros((KEYS, WIDTH), tl.float32), tl.zeros((KEYS, WIDTH), tl.float32)
        for member in range(HEADS // KV_HEADS):
            head = kv_head * (HEADS // KV_HEADS) + member
            for row in range(start, end, ROWS):
                rows = row + tl.arange(0, ROWS)
                # rows beyond the end have gradients of zero, and so is their part
                q = _load(q_ptr, rows, head, columns, end, HEADS, SIZE)
                grad = _load(grad_ptr, rows, head, columns, end, HEADS, SIZE)
                sums_ptrs = log_sums_ptr + rows.to(tl.int64) * sum_row + head.to(tl.int64) * sum_head
                log_sums = tl.load(sums_ptrs, mask=rows < end, other=0.0) * _LOG2_E
                row_sums_ptrs = row_sums_ptr + head.to(tl.int64) * num_rows + rows
                row_sums = tl.load(row_sums_ptrs, mask=rows < end, other=0.0)
                weights = tl.exp2(tl.dot(k, tl.trans(q)) * (scale * _LOG2_E) - log_sums[None, :])
                v_grad = tl.dot(weights.to(grad.dtype), grad, v_grad)
                score_grad = weights * (tl.dot(v, tl.trans(grad)) - row_sums[None, :])
                k_grad = tl.dot(score_grad.to(q.dtype), q, k_grad)
        offset = part.to(tl.int64) * num_keys * KV_HEADS * SIZE
        _store(k_parts_ptr + offset, k_grad * scale, keys, kv_head, columns, last, KV_HEADS, SIZE)
        _store(v_parts_ptr + offset, v_grad, keys, kv_head, columns, last, KV_HEADS, SIZE)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    log_sums: Tensor,
    documents: tuple[Tensor, Tensor, int, int],
    scale: float,
) -> None:
    """Merge attention of q (T, H, D) to k and v (S, K, D) into `output` (T, H, D) and `log_sums` (T, H), in place.

    `documents` are boundaries of queries and keys, int32 (G+1,), and the longest of each. `output` is contiguous.
    """
    suffixes, prefixes, max_queries, _ = documents
    options = _options(q, k)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    grid = (triton.cdiv(max_queries, options["ROWS"]), q.shape[1], len(suffixes) - 1)
    _attend_kernel[grid](
        q, k, v, output, log_sums, prefixes, suffixes, scale, *log_sums.stride(), **options
    )  # fmt: skip


def add_gradients(
    gradients: tuple[Tensor, Tensor, Tensor],
    output_grad: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    output: Tensor,
    log_sums: Tensor,
    documents: tuple[Tensor, Tensor, int, int],
    scale: float,
    *,
    num_processors: int,
) -> None:
    """Add to the contiguous gradients of q, k and v, in place; arguments as in `attend`, after it."""
    suffixes, prefixes, max_queries, max_keys = documents
    q, k, v = (tensor.contiguous() for tensor in qkv)
    output_grad, output = output_grad.contiguous(), output.contiguous()
    (num_rows, num_heads, _), (num_keys, num_kv_heads, _) = q.shape, k.shape
    options, num_groups = _options(q, k), len(suffixes) - 1
    row_sums = torch.empty(num_heads, num_rows, dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(max_queries, options["ROWS"]), num_heads, num_groups)
    strides = log_sums.stride()
    _query_gradient_kernel[grid](
        output_grad, q, k, v, output, log_sums, gradients[0], row_sums, prefixes, suffixes, scale, *strides, num_rows,
        **options,
    )  # fmt: skip
    num_tiles = triton.cdiv(max_keys, options["KEYS"])
    wanted = triton.cdiv(_WAVES * num_processors, num_tiles * num_kv_heads * num_groups)
    num_parts = max(1, min(wanted, grid[0]))
    parts = torch.empty(2, num_parts, *k.shape, dtype=torch.float32, device=q.device)
    _key_gradient_kernel[(num_tiles, num_kv_heads * num_parts, num_groups)](
        output_grad, q, k, v, log_sums, row_sums, *parts, prefixes, suffixes, scale, *strides, num_rows, num_keys,
        num_parts, **options,
    )  # fmt: skip
    for gradient, part in zip(gradients[1:], parts, strict=True):
        gradient += part.sum(0)


def _options(q: Tensor, k: Tensor) -> dict[str, Any]:
    size = q.shape[2]
    width = max(16, triton.next_power_of_2(size))
    # what a program holds fits into the shared memory of GPUs that have 100 KiB
    side = 64 if width <= 128 else 32
    sizes = {"HEADS": q.shape[1], "KV_HEADS": k.shape[1], "SIZE": size, "WIDTH": width}
    return {**sizes, "ROWS": side, "KEYS": side, "num_warps": 4, "num_stages": 2}
