"""Safetensors files: written as a stream of chunks; a header's size is checked before it is read."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flatout.errors import CheckpointError
from flatout.io.json_file import open_plain

CHUNK_BYTES = 8 * 2**20
# safetensors' own limit; checked here first so that the error can name the file
MAX_HEADER_BYTES = 100_000_000

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
TENSOR_SUFFIX = ".safetensors"


def encode_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[int, Iterator[memoryview]]:
    """Encode tensors as a safetensors file; return its size in bytes and its content in chunks of at most 8 MiB.

    Tensors (any device, shape and stride) are copied to the CPU one at a time, so the host needs memory for only one
    of them. Aliases are written in full. Raises TypeError for a dtype that the format lacks and ValueError for a header
    over the limit of 100 MB. Format: https://huggingface.co/docs/safetensors
    """
    # widest elements first, as safetensors does, which aligns every tensor
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPE_NAMES:
            raise TypeError(f"tensor {name!r} has dtype {tensor.dtype}, which safetensors does not support")
        begin, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"{len(tensors):,} tensors need a header of {len(header):,} bytes; limit {MAX_HEADER_BYTES:,}")
    head = struct.pack("<Q", len(header)) + header

    def chunks() -> Iterator[memoryview]:
        yield memoryview(head)
        for name in order:
            content = tensors[name].detach().cpu().reshape(-1).view(torch.uint8).numpy().data
            for begin in range(0, len(content), CHUNK_BYTES):
                yield content[begin : begin + CHUNK_BYTES]

    return len(head) + end, chunks()


def open_tensor_file(path: Path) -> Any:
    """Open a safetensors file on the CPU; its header is not read if it claims more than its file or 100 MB.

    Raises CheckpointError with the file.
    """
    try:
        size_bytes = path.stat().st_size
        with open_plain(path) as file:
            head = file.read(8)
        if len(head) < 8:
            raise CheckpointError(f"{path}: {size_bytes} bytes is too short for a safetensors file; it was truncated")
        header_bytes: int = struct.unpack("<Q", head)[0]
        limit_bytes = min(size_bytes - 8, MAX_HEADER_BYTES)
        if header_bytes > limit_bytes:
            raise CheckpointError(
                f"{path}: its header claims {header_bytes:,} bytes, but at most {limit_bytes:,} are possible"
            )
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from error
