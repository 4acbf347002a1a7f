"""What happens to rows between the products: sums of a token's rows, SwiGLU, float8 and transposed bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.kernels.moe.reference import Routing, empty_float8

# the largest finite float8 e4m3fn
_FP8_MAX = tl.constexpr(448.0)


@triton.jit
def _sum_kernel(
    rows_ptr, inverse_ptr, weights_ptr, end_ptr, out_ptr, num_columns, num_slots,
    WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_columns
    end = tl.load(end_ptr)
    total = tl.zeros((COLUMNS,), tl.float32)
    for slot in range(num_slots):
        row = tl.load(inverse_ptr + token * num_slots + slot).to(tl.int64)
        # rows from `end` on have no expert, and are not written
        values = tl.load(rows_ptr + row * num_columns + columns, mask=inside & (row < end), other=0.0).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weights_ptr + token * num_slots + slot).to(tl.float32)
        total += values
    tl.store(out_ptr + token * num_columns + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _input_scales(row, in_scale_ptr, offsets_ptr, num_experts, width, EXPERTS: tl.constexpr):
    """Return where the scales (width,) of a sorted row's expert start."""
    experts = tl.arange(0, EXPERTS)
    ends = tl.load(offsets_ptr + 1 + experts, mask=experts < num_experts, other=0)
    expert = tl.sum(((ends <= row) & (experts < num_experts)).to(tl.int32), 0)
    # rows after the last expert's are not read
    return in_scale_ptr + tl.minimum(expert, num_experts - 1).to(tl.int64) * width


@triton.jit
def _swiglu_kernel(
    gate_up_ptr, out_ptr, offsets_ptr, in_scale_ptr, bytes_ptr, scale_ptr, width, num_experts,
    FLOAT8: tl.constexpr, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(offsets_ptr + num_experts):
        columns = tl.arange(0, COLUMNS)
        inside = columns < width
        gate = tl.load(gate_up_ptr + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
        product = (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * width + columns, product, mask=inside)
        if FLOAT8:
            scales = _input_scales(row, in_scale_ptr, offsets_ptr, num_experts, width, EXPERTS)
            values = product.to(tl.float32) * tl.load(scales + columns, mask=inside, other=0.0)
            scale = tl.maximum(tl.max(tl.abs(values), 0), 1e-12) / _FP8_MAX
            tl.store(scale_ptr + row, scale)
            tl.store(bytes_ptr + row * width + columns, (values / scale).to(bytes_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward_kernel(
    gate_up_ptr, grad_ptr, weights_ptr, product_ptr, grad_gate_up_ptr, grad_weights_ptr, offsets_ptr, in_scale_ptr,
    bytes_ptr, scale_ptr, width, num_experts,
    FLOAT8: tl.constexpr, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(offsets_ptr + num_experts):
        columns = tl.arange(0, COLUMNS)
        inside = columns < width
        gates, ups = row * 2 * width + columns, row * 2 * width + width + columns
        gate = tl.load(gate_up_ptr + gates, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + ups, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        product = silu * up
        tl.store(product_ptr + row * width + columns, product.to(product_ptr.dtype.element_ty), mask=inside)
        tl.store(grad_weights_ptr + row, tl.sum(product * grad, 0))
        grad *= tl.load(weights_ptr + row).to(tl.float32)
        kind = grad_gate_up_ptr.dtype.element_ty
        grad_gate = (grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(kind)
        grad_up = (grad * silu).to(kind)
        tl.store(grad_gate_up_ptr + gates, grad_gate, mask=inside)
        tl.store(grad_gate_up_ptr + ups, grad_up, mask=inside)
        if FLOAT8:
            scales = _input_scales(row, in_scale_ptr, offsets_ptr, num_experts, 2 * width, EXPERTS)
            gate_values = grad_gate.to(tl.float32) * tl.load(scales + columns, mask=inside, other=0.0)
            up_values = grad_up.to(tl.float32) * tl.load(scales + width + columns, mask=inside, other=0.0)
            largest = tl.maximum(tl.max(tl.abs(gate_values), 0), tl.max(tl.abs(up_values), 0))
            scale = tl.maximum(largest, 1e-12) / _FP8_MAX
            tl.store(scale_ptr + row, scale)
            tl.store(bytes_ptr + gates, (gate_values / scale).to(bytes_ptr.dtype.element_ty), mask=inside)
            tl.store(bytes_ptr + ups, (up_values / scale).to(bytes_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _quantize_kernel(
    values_ptr, in_scale_ptr, offsets_ptr, bytes_ptr, scale_ptr, width, num_experts,
    SCALED: tl.constexpr, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < width
    values = tl.load(values_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        scales = _input_scales(row, in_scale_ptr, offsets_ptr, num_experts, width, EXPERTS)
        values *= tl.load(scales + columns, mask=inside, other=0.0)
    scale = tl.maximum(tl.max(tl.abs(values), 0), 1e-12) / _FP8_MAX
    tl.store(scale_ptr + row, scale)
    tl.store(bytes_ptr + row * width + columns, (values / scale).to(bytes_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _transpose_kernel(
    source_ptr, target_ptr, num_rows, num_columns,
    TILE: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(2).to(tl.int64) * num_rows * num_columns
    rows, columns = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    tile = tl.load(source_ptr + start + rows[:, None] * num_columns + columns[None, :], mask=inside, other=0)
    tl.store(target_ptr + start + columns[:, None] * num_rows + rows[None, :], tl.trans(tile), mask=tl.trans(inside))


def sum_slots(rows: Tensor, routing: Routing, num_slots: int, weights: Tensor | None = None) -> Tensor:
    """Return each token's sum of `num_slots` sorted rows, (T, N), optionally weighted; see `reference.sum_slots`."""
    num_tokens, num_columns = len(routing.order) // num_slots, rows.shape[1]
    out = rows.new_empty(num_tokens, num_columns)
    columns = min(2048, triton.next_power_of_2(num_columns))
    _sum_kernel[(num_tokens, triton.cdiv(num_columns, columns))](
        rows, routing.inverse, routing.inverse if weights is None else weights, routing.offsets[-1:], out,
        num_columns, num_slots,
        WEIGHTED=weights is not None, COLUMNS=columns, num_warps=8 if columns > 1024 else 4,
    )  # fmt: skip
    return out


def swiglu(gate_up: Tensor, routing: Routing, in_scale: Tensor | None = None) -> list[Tensor]:
    """Return silu(gate) * up (S, I) of sorted rows `gate_up` (S, 2 I), contiguous; see `reference.swiglu`."""
    width = gate_up.shape[1] // 2
    out = gate_up.new_empty(len(gate_up), width)
    quantized = [] if in_scale is None else empty_float8(out)
    columns, num_experts = triton.next_power_of_2(width), len(routing.offsets) - 1
    _swiglu_kernel[(len(gate_up),)](
        gate_up, out, routing.offsets, *_or_unused(in_scale, quantized, routing), width, num_experts,
        FLOAT8=in_scale is not None, EXPERTS=triton.next_power_of_2(num_experts), COLUMNS=columns,
        num_warps=_row_warps(columns),
    )  # fmt: skip
    return [out, *quantized]


def swiglu_backward(
    gate_up: Tensor, grad: Tensor, row_weights: Tensor, routing: Routing, in_scale: Tensor | None = None
) -> list[Tensor]:
    """Return the product again, and the gradients of rows and of their weights; see `reference.swiglu_backward`."""
    num_rows, width = grad.shape
    product, rows_grad = torch.empty_like(grad), torch.empty_like(gate_up)
    weights_grad = grad.new_empty(num_rows, dtype=torch.float32)
    quantized = [] if in_scale is None else empty_float8(rows_grad)
    columns, num_experts = triton.next_power_of_2(width), len(routing.offsets) - 1
    _swiglu_backward_kernel[(num_rows,)](
        gate_up, grad, row_weights, product, rows_grad, weights_grad, routing.offsets,
        *_or_unused(in_scale, quantized, routing), width, num_experts,
        FLOAT8=in_scale is not None, EXPERTS=triton.next_power_of_2(num_experts), COLUMNS=columns,
        num_warps=_row_warps(columns),
    )  # fmt: skip
    return [product, rows_grad, weights_grad, *quantized]


def _or_unused(in_scale: Tensor | None, quantized: list[Tensor], routing: Routing) -> list[Tensor]:
    """Return the tensors of float8 output for a kernel; unused pointers must point somewhere."""
    return [routing.offsets] * 3 if in_scale is None else [in_scale, *quantized]


def quantize_rows(values: Tensor, routing: Routing, in_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return values (R, C), times their expert's `in_scale` fp32 (E, C) if given, in float8 with scales fp32 (R,).

    With `in_scale`, the rows are sorted. The scales are those of `flatout.kernels.fp8_matmul.quantize_rows`.
    """
    num_rows, width = values.shape
    quantized, scale = empty_float8(values)
    num_experts, columns = len(routing.offsets) - 1, triton.next_power_of_2(width)
    _quantize_kernel[(num_rows,)](
        values, routing.offsets if in_scale is None else in_scale, routing.offsets, quantized, scale, width,
        num_experts, SCALED=in_scale is not None, EXPERTS=triton.next_power_of_2(num_experts), COLUMNS=columns,
        num_warps=_row_warps(columns),
    )  # fmt: skip
    return quantized, scale


def transpose_bytes(weight: Tensor) -> Tensor:
    """Return a contiguous transposed copy (E, K, N) of 8-bit values (E, N, K)."""
    num_experts, num_rows, num_columns = weight.shape
    out = weight.new_empty(num_experts, num_columns, num_rows)
    tile = 128
    _transpose_kernel[(triton.cdiv(num_rows, tile), triton.cdiv(num_columns, tile), num_experts)](
        weight.view(torch.uint8), out.view(torch.uint8), num_rows, num_columns, TILE=tile, num_warps=8
    )
    return out


def _row_warps(columns: int) -> int:
    return 4 if columns <= 1024 else 8
