"""Narrow products of float8 rows, and all copies of adapters' matrices in one launch."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.kernels.low_rank.reference import SECOND_TERM, MatrixCopy

_ROWS, _STEP = 64, 128
_COPIED_ROWS, _COPIED_COLUMNS = 16, 256
# numbers of a matrix in the table of copies
_FIELDS = tl.constexpr(17)


@triton.jit
def _low_rank_product(
    part, row_scale, terms, scales, out, num_rows, num_columns, pitch, term_pitch, second, out_pitch, rank,
    ROWS: tl.constexpr, STEP: tl.constexpr, RANK: tl.constexpr, SECOND_TERM: tl.constexpr,
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


def low_rank_product(
    parts: Sequence[Tensor], row_scales: Sequence[Tensor], terms: Tensor, scales: Tensor, ranks: Sequence[int],
    out: Tensor,
) -> None:  # fmt: skip
    """Compute `flatout.kernels.low_rank.low_rank_product` into `out`."""
    num_rows, column, first_rank = out.shape[0], 0, 0
    with torch.cuda.device(out.device):
        for part, row_scale, scale, rank in zip(parts, row_scales, scales, ranks, strict=True):
            padded, num_columns = max(16, triton.next_power_of_2(rank)), part.shape[1]
            part = part if part.stride(1) == 1 else part.contiguous()
            _low_rank_product[(triton.cdiv(num_rows, _ROWS),)](
                part, row_scale, terms[:, :, column:], scale, out[:, first_rank:], num_rows, num_columns,
                part.stride(0), terms.stride(1), terms.stride(0), out.stride(0), rank,
                ROWS=_ROWS, STEP=_STEP, RANK=padded, SECOND_TERM=SECOND_TERM,
                num_warps=4, num_stages=6 if padded <= 32 else 4,
            )  # fmt: skip
            column, first_rank = column + num_columns, first_rank + rank


@triton.jit
def _values(sources, step, factor, columns, mask):
    return tl.load(sources + columns * step, mask=mask, other=0.0) * factor


@triton.jit
def _divided(values, divisor, columns, mask):
    return values / tl.load(divisor + columns, mask=mask & (divisor.to(tl.int64) != 0), other=1.0)


@triton.jit
def _write_lora_copies(
    table, like,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SECOND_TERM: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    entry, num_rows = table + tl.program_id(0) * _FIELDS, tl.load(table + tl.program_id(0) * _FIELDS)
    if tl.program_id(1) * ROWS < num_rows:
        rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        within = tl.arange(0, COLUMNS)[None, :].to(tl.int64)
        is_row, num_columns = rows < num_rows, tl.load(entry + 1)
        sources = tl.load(entry + 2).to(tl.pointer_type(tl.float32)) + rows * tl.load(entry + 3)
        step, factor = tl.load(entry + 4), tl.load(entry + 5).to(tl.int32).to(tl.float32, bitcast=True)
        for start in range(0, num_columns, COLUMNS):
            mask = is_row & (start + within < num_columns)
            values = _values(sources, step, factor, start + within, mask)
            for target in tl.static_range(2):
                address = tl.load(entry + 11 + 3 * target)
                place = address.to(tl.pointer_type(like.dtype.element_ty)) + rows * tl.load(entry + 12 + 3 * target)
                place += (start + within) * tl.load(entry + 13 + 3 * target)
                tl.store(place, values.to(like.dtype.element_ty), mask=mask & (address != 0))
        # triton cannot compile float8e4nv for GPUs without float8
        if TERMS:
            terms = tl.load(entry + 7)
            if terms != 0:
                divisor = tl.load(entry + 6).to(tl.pointer_type(tl.float32))
                largest = tl.zeros((ROWS, COLUMNS), tl.float32)
                for start in range(0, num_columns, COLUMNS):
                    mask = is_row & (start + within < num_columns)
                    values = _values(sources, step, factor, start + within, mask)
                    largest = tl.maximum(largest, tl.abs(_divided(values, divisor, start + within, mask)))
                scale = tl.maximum(tl.max(largest, 1, keep_dims=True), 1e-12) / 448.0
                tl.store(tl.load(entry + 10).to(tl.pointer_type(tl.float32)) + rows, scale, mask=is_row)
                first_terms = terms.to(tl.pointer_type(tl.float8e4nv)) + rows * tl.load(entry + 8)
                second_terms = first_terms + tl.load(entry + 9)
                for start in range(0, num_columns, COLUMNS):
                    mask = is_row & (start + within < num_columns)
                    values = _values(sources, step, factor, start + within, mask)
                    scaled = _divided(values, divisor, start + within, mask) / scale
                    first = scaled.to(tl.float8e4nv)
                    rest = (scaled - first.to(tl.float32)) / SECOND_TERM
                    tl.store(first_terms + start + within, first, mask=mask)
                    tl.store(second_terms + start + within, rest.to(tl.float8e4nv), mask=mask)


def make_writer(copies: Sequence[MatrixCopy]) -> Callable[[], None]:
    """Return what writes all copies in one launch, from and to where they are now."""
    assert len({target.dtype for copy in copies for target in copy.targets}) == 1
    assert len({copy.master.device for copy in copies}) == 1
    rows = []
    for copy in copies:
        source = copy.source
        (factor,) = struct.unpack("i", struct.pack("f", copy.factor))
        divisor = 0 if copy.divisor is None else copy.divisor.data_ptr()
        terms = (0, 0, 0, 0)
        if copy.terms is not None and copy.scales is not None:
            assert copy.terms.stride(2) == copy.scales.stride(0) == 1
            terms = (copy.terms.data_ptr(), copy.terms.stride(1), copy.terms.stride(0), copy.scales.data_ptr())
        assert 1 <= len(copy.targets) <= 2
        targets = [field for own in copy.targets for field in (own.data_ptr(), *own.stride())]
        row = [*source.shape, source.data_ptr(), *source.stride(), factor, divisor, *terms, *targets]
        rows.append(row + [0] * (_FIELDS.value - len(row)))
    table = torch.tensor(rows, dtype=torch.int64, device=copies[0].master.device)
    grid = len(rows), triton.cdiv(max(num_rows for num_rows, *_ in rows), _COPIED_ROWS)
    has_terms = any(copy.terms is not None for copy in copies)

    def write() -> None:
        with torch.cuda.device(table.device):
            _write_lora_copies[grid](
                table, copies[0].targets[0], ROWS=_COPIED_ROWS, COLUMNS=_COPIED_COLUMNS, SECOND_TERM=SECOND_TERM,
                TERMS=has_terms,
            )  # fmt: skip

    return write
