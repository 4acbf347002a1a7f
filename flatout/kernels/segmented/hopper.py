"""Launch the kernel of hopper.cu, with tiles described by TMA's tensor maps."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from flatout.kernels import cuda_source
from flatout.kernels.cuda_source import check, driver
from flatout.kernels.segmented.reference import Segments

# rows and columns of a CTA's tile, bytes of K in a stage; as in hopper.cu
ROWS, COLUMNS, STEP_BYTES = 128, 256, 128
MAX_SEGMENTS = 3
# as many stages as fit beside 64 KiB that stage the output
_STAGES = 3
_SHARED_BYTES = _STAGES * (ROWS + COLUMNS) * STEP_BYTES + ROWS * COLUMNS * 2 + 1024
# cluster tiles that are traversed together, for the L2 cache
_RASTER_ROWS = 8
_THREADS = 384
# CUtensorMapDataType: bytes, bfloat16; CUtensorMapSwizzle and L2 promotion of 128 bytes and 256 bytes
_BYTES, _BFLOAT16, _SWIZZLE_128, _PROMOTE_256 = 0, 9, 3, 3


class _Map(ctypes.Structure):
    _fields_ = (("words", ctypes.c_uint64 * 16),)


class _Params(ctypes.Structure):
    # the last field only pads the structure to a multiple of 64 bytes, as the compiler does
    _fields_ = (
        ("x", _Map * 4),
        ("w", _Map * 4),
        ("out", _Map * 3),
        ("row_scale", ctypes.c_void_p * 3),
        ("column_scale", ctypes.c_void_p),
        ("m", ctypes.c_int),
        ("n", ctypes.c_int),
        ("num_segments", ctypes.c_int),
        ("k_steps", ctypes.c_int * 3),
        ("first_column", ctypes.c_int * 4),
        ("first_rank", ctypes.c_int * 4),
        ("first_tile", ctypes.c_int * 3),
        ("tiles_across", ctypes.c_int),
        ("padding", ctypes.c_int * 6),
    )


def num_tiles(num_rows: int, widths: Sequence[int]) -> int:
    """Return the number of cluster tiles (256 x 256, two CTAs) of results (num_rows, widths_i)."""
    return -(-num_rows // (2 * ROWS)) * sum(-(-width // COLUMNS) for width in widths)


def load(device: torch.device, *, fp8: bool) -> None:
    """Compile the kernel for weights (N, K) and load it on a GPU. Raises ImportError, OSError or RuntimeError."""
    with torch.cuda.device(device):
        _kernel(torch.cuda.current_device(), fp8=fp8, weights_kn=False)


def launch(outs: Sequence[Tensor], own: Segments) -> None:
    """Compute the sum of `Segments` into `outs` (M, N_i) bfloat16, contiguous, on the current stream of their GPU.

    Raises RuntimeError if the driver refuses.
    """
    assert own.low.dtype == own.wide.dtype == torch.bfloat16
    device, num_rows, num_columns = own.low.device, own.low.shape[0], own.wide.shape[0]
    with torch.cuda.device(device):
        kernel = _kernel(device.index, fp8=own.column_scale is not None, weights_kn=own.weights_kn)
        # tensor maps must begin at multiples of 64 bytes
        buffer = ctypes.create_string_buffer(ctypes.sizeof(_Params) + 64)
        params = _Params.from_buffer(buffer, -ctypes.addressof(buffer) % 64)
        for i, (part, weight) in enumerate(zip(own.parts, own.weights, strict=True)):
            _describe(params.x[i], part, ROWS)
            # each CTA of the pair loads half of the weight tile and multicasts it
            _describe(params.w[i], weight, 64 if own.weights_kn else COLUMNS // 2)
            params.k_steps[i] = -(-part.shape[1] * part.element_size() // STEP_BYTES)
        for i, scale in enumerate(own.row_scales):
            params.row_scale[i] = scale.data_ptr()
        params.column_scale = None if own.column_scale is None else own.column_scale.data_ptr()
        _describe(params.x[3], own.low, ROWS)
        _describe(params.w[3], own.wide, COLUMNS // 2)
        for i, out in enumerate(outs):
            _describe(params.out[i], out, 64)
        params.m, params.n = num_rows, num_columns
        params.num_segments = len(own.parts)
        tiles = [num_tiles(1, [width]) for width in own.widths]
        params.tiles_across = sum(tiles)
        for i in range(MAX_SEGMENTS + 1):
            params.first_column[i] = own.first_columns[i] if i < len(tiles) else num_columns
            params.first_rank[i] = own.first_ranks[min(i, len(tiles))]
        for i in range(MAX_SEGMENTS):
            # unused entries start after the last tile
            params.first_tile[i] = sum(tiles[:i]) if i < len(tiles) else 2**31 - 1
        num_blocks = torch.cuda.get_device_properties(device).multi_processor_count // 2 * 2
        num_blocks = min(num_blocks, 2 * num_tiles(num_rows, own.widths))
        cuda_source.launch(kernel, num_blocks, _THREADS, _SHARED_BYTES, params)


def _describe(target: _Map, tensor: Tensor, box_rows: int) -> None:
    """Describe a matrix with contiguous rows, read or written in boxes of 128 bytes of `box_rows` rows."""
    size, is_bytes = tensor.element_size(), tensor.element_size() == 1
    rows, columns = tensor.shape
    check(
        driver().cuTensorMapEncodeTiled(
            ctypes.addressof(target), _BYTES if is_bytes else _BFLOAT16, 2, tensor.data_ptr(),
            (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(tensor.stride(0) * size),
            (ctypes.c_uint32 * 2)(STEP_BYTES // size, box_rows), (ctypes.c_uint32 * 2)(1, 1),
            0, _SWIZZLE_128, _PROMOTE_256, 0,
        )
    )  # fmt: skip


@cache
def _kernel(device_index: int, *, fp8: bool, weights_kn: bool) -> int:
    macros = {"FP8": int(fp8), "WEIGHTS_KN": int(weights_kn), "STAGES": _STAGES, "RASTER_ROWS": _RASTER_ROWS}
    return cuda_source.load(Path(__file__).with_name("hopper.cu"), "segmented_product", macros, _SHARED_BYTES)
