"""Launch the kernel of gradient.cu: gradients of an adapter's matrices from float8 rows."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.kernels import cuda_source
from flatout.kernels.cuda_source import in_aligned_rows

# as in gradient.cu
_THREADS, _WARPS, _CLUSTER, _TILE, _STEP = 256, 8, 8, 128, 16
# fp32 sums that a thread of 8 or 16 columns keeps at most; more would leave too few registers
_MAX_SUMS = 96


class _Params(ctypes.Structure):
    _fields_ = (
        ("part", ctypes.c_void_p),
        ("row_scale", ctypes.c_void_p),
        ("low", ctypes.c_void_p),
        ("column_scale", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("part_pitch", ctypes.c_uint),
        ("low_pitch", ctypes.c_uint),
        ("column_pitch", ctypes.c_int),
        ("rank_pitch", ctypes.c_int),
        ("num_tokens", ctypes.c_int),
        ("num_columns", ctypes.c_int),
        ("num_ranks", ctypes.c_int),
    )


def load(device: torch.device, num_ranks: int) -> None:
    """Compile the kernel for so many ranks and load it on a GPU. Raises ImportError, OSError or RuntimeError."""
    with torch.cuda.device(device):
        _kernel(torch.cuda.current_device(), num_ranks)


def launch(part: Tensor, row_scale: Tensor, low: Tensor, column_scale: Tensor | None, by_column: Tensor) -> None:
    """Compute `flatout.kernels.low_rank.reference.lora_weight_grad` into `by_column` fp32 (C, R) of any strides.

    part e4m3 (T, C) with C a multiple of 16, row_scale fp32 (T, 1), low bfloat16 (T, R), column_scale contiguous
    fp32 (C,) or None. Raises RuntimeError if the driver refuses.
    """
    assert low.dtype == torch.bfloat16
    assert by_column.dtype == torch.float32
    (num_tokens, num_columns), num_ranks = part.shape, low.shape[1]
    # the kernel copies 16 bytes at a time
    part, low = in_aligned_rows(part), in_aligned_rows(F.pad(low, (0, -num_ranks % 8)) if num_ranks % 8 else low)
    row_scale = row_scale.contiguous()
    row_scale = row_scale.clone() if row_scale.data_ptr() % 16 else row_scale
    with torch.cuda.device(part.device):
        kernel, shared_bytes = _kernel(part.device.index, num_ranks)
        params = _Params(
            part.data_ptr(), row_scale.data_ptr(), low.data_ptr(),
            None if column_scale is None else column_scale.data_ptr(), by_column.data_ptr(),
            part.stride(0), low.stride(0) * low.element_size(), *by_column.stride(), num_tokens, num_columns, num_ranks,
        )  # fmt: skip
        num_tiles = -(-num_columns // _TILE)
        cuda_source.launch(kernel, _CLUSTER * num_tiles, _THREADS, shared_bytes, params)


@cache
def _kernel(device_index: int, num_ranks: int) -> tuple[int, int]:
    padded = -(-num_ranks // 16) * 16
    # columns of a thread, which keeps their sums of a quarter of the ranks
    vector = next(size for size in (16, 8, 4) if size == 4 or size * padded // 4 <= _MAX_SUMS)
    # a power of two, and few enough for two CTAs on a multiprocessor where registers allow two
    num_stages, num_teams = 4 if vector == 16 else 8, _WARPS * vector // 16
    stage_bytes = _STEP * (_TILE + 2 * padded) + 128
    shared_bytes = num_teams * max(num_stages * stage_bytes, _TILE * padded * 4)
    macros = {"VEC": vector, "RANKS": padded, "STAGES": num_stages}
    source = Path(__file__).with_name("gradient.cu")
    return cuda_source.load(source, "lora_weight_grad", macros, shared_bytes), shared_bytes
