"""Launch the kernel of gradient.cu: gradients of an adapter's matrices from float8 rows."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.kernels import cuda_source
from flatout.kernels.cuda_source import TensorMap, describe, in_aligned_rows

# as in gradient.cu
_THREADS, _WARPS, _CLUSTER, _TILE, _STEP, _BLOCK_RANKS = 256, 8, 8, 128, 32, 16
# fp32 sums that a thread of 8 or 16 columns keeps at most; more would leave too few registers
_MAX_SUMS = 96


class _Params(ctypes.Structure):
    # the last field only pads the structure to a multiple of 64 bytes, as the compiler does
    _fields_ = (
        ("part", TensorMap),
        ("low", TensorMap),
        ("row_scale", TensorMap),
        ("column_scale", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("column_pitch", ctypes.c_int),
        ("rank_pitch", ctypes.c_int),
        ("num_tokens", ctypes.c_int),
        ("num_columns", ctypes.c_int),
        ("num_ranks", ctypes.c_int),
        ("padding", ctypes.c_int * 7),
    )


def launch(part: Tensor, row_scale: Tensor, low: Tensor, column_scale: Tensor | None, by_column: Tensor) -> None:
    """Compute `flatout.kernels.low_rank.reference.narrow_gradient` into `by_column` fp32 (C, R) of any strides.

    part e4m3 (T, C) with C a multiple of 16, row_scale fp32 (T, 1), low bfloat16 (T, R), column_scale contiguous
    fp32 (C,) or None. Raises RuntimeError if the driver refuses.
    """
    assert low.dtype == torch.bfloat16
    assert by_column.dtype == torch.float32
    (num_tokens, num_columns), num_ranks = part.shape, low.shape[1]
    # TMA needs rows at multiples of 16 bytes
    part, low = in_aligned_rows(part), in_aligned_rows(F.pad(low, (0, -num_ranks % 8)) if num_ranks % 8 else low)
    scales = row_scale.contiguous()
    scales = scales.clone() if scales.data_ptr() % 16 else scales
    # also of a single row, whose pitch nothing reads
    scales = scales.as_strided((1, num_tokens), (-(-num_tokens // 4) * 4, 1))
    with torch.cuda.device(part.device):
        kernel, shared_bytes = _kernel(part.device.index, -(-num_ranks // _BLOCK_RANKS) * _BLOCK_RANKS)
        params = cuda_source.make_params(_Params)
        describe(params.part, part, (_STEP, _TILE), _TILE)
        describe(params.low, low, (_STEP, _BLOCK_RANKS), _BLOCK_RANKS * low.element_size())
        describe(params.row_scale, scales, (1, _STEP), 0)
        params.column_scale = None if column_scale is None else column_scale.data_ptr()
        params.out = by_column.data_ptr()
        params.column_pitch, params.rank_pitch = by_column.stride()
        params.num_tokens, params.num_columns, params.num_ranks = num_tokens, num_columns, num_ranks
        num_tiles = -(-num_columns // _TILE)
        cuda_source.launch(kernel, _CLUSTER * num_tiles, _THREADS, shared_bytes, params)


@cache
def _kernel(device_index: int, num_ranks: int) -> tuple[int, int]:
    """Return the function, compiled for the current device, which has this index, and its shared memory in bytes."""
    # columns of a thread, which keeps their sums of a quarter of the ranks
    vector = next(size for size in (16, 8, 4) if size == 4 or size * num_ranks // 4 <= _MAX_SUMS)
    # as many as let two CTAs share a multiprocessor's memory, where their registers let them
    num_stages, num_teams = 2 if vector == 16 else 4, _WARPS * vector // 16
    stage_bytes = _STEP * (_TILE + 2 * num_ranks + 4)
    # tiles begin at a multiple of 1,024 bytes; the sums of all teams take the place of their stages
    shared_bytes = 1024 + num_teams * max(num_stages * stage_bytes, _TILE * num_ranks * 4)
    macros = {"VEC": vector, "RANKS": num_ranks, "STAGES": num_stages}
    source = Path(__file__).with_name("gradient.cu")
    return cuda_source.load(source, "narrow_gradient", macros, shared_bytes), shared_bytes
