"""Narrow products of float8 rows, and all copies of adapters' matrices in one launch."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.kernels.low_rank.reference import SECOND_TERM, MatrixCopy

_ROWS, _STEP = 64, 128
_COPIED_ROWS, _COPIED_COLUMNS = 16, 256
# numbers of a matrix in the table of copies
_FIELDS = tl.constexpr(18)


@triton.jit  # type: ignore[untyped-decorator]
def _low_product(  # type: ignore[no-untyped-def]
    part, row_scale, terms, scales, out, num_rows, num_columns, pitch, term_pitch, second, out_pitch, rank,
    ROWS: tl.constexpr, STEP: tl.constexpr, RANK: tl.constexpr, SECOND_TERM: tl.constexpr,  # noqa: N803
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ranks, within = tl.arange(0, RANK), tl.arange(0, STEP)
    has_row, has_rank = rows < num_rows, ranks < rank
    starts, term_starts = rows.to(tl.int64)[:, None] * pitch, ranks[:, None] * term_pitch
    first_sum, second_sum = tl.zeros((ROWS, RANK), tl.float32), tl.zeros((ROWS, RANK), tl.float32)
    for start in range(0, num_columns, STEP):
        columns = start + within
        has_column = columns < num_columns
        own = tl.load(part + starts + columns, mask=has_row[:, None] & has_column, other=0.0)
        is_term = has_rank[:, None] & has_column
        first_term = tl.load(terms + term_starts + columns, mask=is_term, other=0.0)
        second_term = tl.load(terms + second + term_starts + columns, mask=is_term, other=0.0)
        first_sum = tl.dot(own, first_term.T, first_sum)
        second_sum = tl.dot(own, second_term.T, second_sum)
    total = (first_sum + second_sum * SECOND_TERM) * tl.load(scales + ranks, mask=has_rank, other=0.0)
    total *= tl.load(row_scale + rows, mask=has_row, other=0.0)[:, None]
    place = rows.to(tl.int64)[:, None] * out_pitch + ranks
    tl.store(out + place, total.to(out.dtype.element_ty), mask=has_row[:, None] & has_rank)


def low_product(
    parts: Sequence[Tensor], row_scales: Sequence[Tensor], terms: Tensor, scales: Tensor, ranks: Sequence[int],
    out: Tensor,
) -> None:  # fmt: skip
    """Compute `flatout.kernels.low_rank.low_product` into `out`."""
    num_rows, column, first_rank = out.shape[0], 0, 0
    with torch.cuda.device(out.device):
        for part, row_scale, scale, rank in zip(parts, row_scales, scales, ranks, strict=True):
            padded, num_columns = max(16, triton.next_power_of_2(rank)), part.shape[1]
            part = part if part.stride(1) == 1 else part.contiguous()
            _low_product[(triton.cdiv(num_rows, _ROWS),)](
                part, row_scale, terms[:, :, column:], scale, out[:, first_rank:], num_rows, num_columns,
                part.stride(0), terms.stride(1), terms.stride(0), out.stride(0), rank,
                ROWS=_ROWS, STEP=_STEP, RANK=padded, SECOND_TERM=SECOND_TERM,
                num_warps=4, num_stages=6 if padded <= 32 else 4,
            )  # fmt: skip
            column, first_rank = column + num_columns, first_rank + rank


@triton.jit
def _values(sources, divisor, step, factor, columns, mask):  # type: ignore[no-untyped-def]
    """Return a tile of the source times its factor, and the same divided by the divisor of its columns, if any."""
    values = tl.load(sources + columns.to(tl.int64) * step, mask=mask, other=0.0) * factor
    has_divisor = mask & (divisor.to(tl.int64) != 0)
    return values, values / tl.load(divisor + columns, mask=has_divisor, other=1.0)


# triton interprets annotations itself, and writes constants in capitals
@triton.jit  # type: ignore[untyped-decorator]
def _write(table, like, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SECOND_TERM: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    entry, num_rows = table + tl.program_id(0) * _FIELDS, tl.load(table + tl.program_id(0) * _FIELDS)
    if tl.program_id(1) * ROWS < num_rows:
        rows, within = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
        is_row, num_columns = rows < num_rows, tl.load(entry + 1)
        rows = rows.to(tl.int64)
        sources = tl.load(entry + 2).to(tl.pointer_type(tl.float32)) + rows * tl.load(entry + 3)
        step, factor = tl.load(entry + 4), tl.load(entry + 5).to(tl.int32).to(tl.float32, bitcast=True)
        divisor = tl.load(entry + 6).to(tl.pointer_type(tl.float32))
        terms = tl.load(entry + 7)
        scale = tl.full((ROWS, 1), 1.0, tl.float32)
        if terms != 0:
            largest = tl.zeros((ROWS, COLUMNS), tl.float32)
            for start in range(0, num_columns, COLUMNS):
                mask = is_row & (start + within < num_columns)
                _, values = _values(sources, divisor, step, factor, start + within, mask)
                largest = tl.maximum(largest, tl.abs(values))
            scale = tl.maximum(tl.max(largest, 1, keep_dims=True), 1e-12) / 448.0
            tl.store(tl.load(entry + 10).to(tl.pointer_type(tl.float32)) + rows, scale, mask=is_row)
        first_terms = terms.to(tl.pointer_type(tl.float8e4nv)) + rows * tl.load(entry + 8)
        second_terms = first_terms + tl.load(entry + 9)
        for start in range(0, num_columns, COLUMNS):
            columns = (start + within).to(tl.int64)
            mask = is_row & (columns < num_columns)
            plain, values = _values(sources, divisor, step, factor, columns, mask)
            for target in tl.static_range(2):
                address = tl.load(entry + 11 + 3 * target)
                place = address.to(tl.pointer_type(like.dtype.element_ty)) + rows * tl.load(entry + 12 + 3 * target)
                place += columns * tl.load(entry + 13 + 3 * target)
                tl.store(place, plain.to(like.dtype.element_ty), mask=mask & (address != 0))
            scaled = values / scale
            first = scaled.to(tl.float8e4nv)
            rest = (scaled - first.to(tl.float32)) / SECOND_TERM
            is_term = mask & (terms != 0)
            tl.store(first_terms + columns, first, mask=is_term)
            tl.store(second_terms + columns, rest.to(tl.float8e4nv), mask=is_term)


def make_table(copies: Sequence[MatrixCopy]) -> Tensor:
    """Return what the kernel reads of each copy: sizes, addresses and strides, int64 (number of copies, fields)."""
    rows = []
    for copy in copies:
        (num_rows, num_columns), source = copy.source.shape, copy.source
        (factor,) = struct.unpack("i", struct.pack("f", copy.factor))
        divisor = 0 if copy.divisor is None else copy.divisor.data_ptr()
        terms = (0, 0, 0, 0)
        if copy.terms is not None and copy.scales is not None:
            terms = (copy.terms.data_ptr(), copy.terms.stride(1), copy.terms.stride(0), copy.scales.data_ptr())
        targets = [field for own in copy.targets for field in (own.data_ptr(), *own.stride())]
        row = [num_rows, num_columns, source.data_ptr(), *source.stride(), factor, divisor, *terms, *targets]
        rows.append(row + [0] * (_FIELDS.value - len(row)))
    return torch.tensor(rows, dtype=torch.int64, device=copies[0].source.device)


def write(copies: Sequence[MatrixCopy], table: Tensor) -> None:
    """Write all copies, with the table of their present addresses."""
    num_rows = max(copy.source.shape[0] for copy in copies)
    with torch.cuda.device(table.device):
        _write[len(copies), triton.cdiv(num_rows, _COPIED_ROWS)](
            table, copies[0].targets[0], ROWS=_COPIED_ROWS, COLUMNS=_COPIED_COLUMNS, SECOND_TERM=SECOND_TERM
        )
