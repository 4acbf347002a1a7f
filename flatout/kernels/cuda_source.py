"""Compile CUDA C++ files with NVRTC, and launch their kernels through the driver."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_ARCHITECTURE = b"--gpu-architecture=sm_90a"
# addresses and row strides that TMA and 16-byte copies can read
ALIGN_BYTES = 16


@cache
def driver() -> ctypes.CDLL:
    """The CUDA driver with the types of the functions that are called on every step."""
    library = ctypes.CDLL("libcuda.so.1")
    number, pointer = ctypes.c_uint, ctypes.c_void_p
    library.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    library.cuTensorMapEncodeTiled.argtypes = [pointer, ctypes.c_int, number, *[pointer] * 5, *[ctypes.c_int] * 4]
    return library


def check(code: int) -> None:
    """Raise RuntimeError if a function of `driver` returned an error code."""
    if code:
        raise RuntimeError(f"the driver refused a kernel of flatout with CUDA error {code}; please report this")


def launch(function: int, num_blocks: int, num_threads: int, shared_bytes: int, params: ctypes.Structure) -> None:
    """Launch a kernel whose only parameter is a structure, on the current stream of the current device."""
    check(
        driver().cuLaunchKernel(
            function, num_blocks, 1, 1, num_threads, 1, 1, shared_bytes, torch.cuda.current_stream().cuda_stream,
            (ctypes.c_void_p * 1)(ctypes.addressof(params)), None,
        )
    )  # fmt: skip


def in_aligned_rows(tensor: Tensor) -> Tensor:
    """Return a matrix as it is if its rows are contiguous and begin at multiples of 16 bytes, else a copy."""
    pitch, size = tensor.stride(0) * tensor.element_size(), tensor.shape[1] * tensor.element_size()
    aligned = pitch % ALIGN_BYTES == 0 and tensor.data_ptr() % ALIGN_BYTES == 0
    fits = aligned and tensor.stride(1) == 1 and pitch >= size
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def load(source: Path, kernel: str, macros: Mapping[str, int], shared_bytes: int) -> int:
    """Compile `source` and return its function `kernel` for the current device, a Hopper GPU.

    Raises ImportError or OSError without CUDA's libraries, and RuntimeError if they refuse.
    """
    from cuda.bindings import driver as bindings

    driver()
    module = _ok(bindings.cuModuleLoadData(_machine_code(source, tuple(macros.items()))))
    function = _ok(bindings.cuModuleGetFunction(module, kernel.encode()))
    shared = bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _ok(bindings.cuFuncSetAttribute(function, shared, shared_bytes))
    return int(function)


@cache
def _machine_code(source: Path, macros: tuple[tuple[str, int], ...]) -> bytes:
    """Return the machine code, from triton's cache if it is there, as compiling takes about 0.5 s.

    A cache that cannot be read or written is left out.
    """
    from cuda.bindings import nvrtc

    text, name = source.read_bytes(), source.with_suffix(".cubin").name
    options = [_ARCHITECTURE, b"-std=c++17", *(f"-D{key}={value}".encode() for key, value in macros)]
    if find_spec("triton") is None:
        return _compile(source.name, text, options)
    from triton.runtime.cache import get_cache_manager

    version = repr(_ok(nvrtc.nvrtcVersion())).encode()
    key = hashlib.sha256(b"\0".join([text, version, *options])).hexdigest()
    with suppress(OSError):
        if path := get_cache_manager(key).get_file(name):
            return Path(path).read_bytes()
    code = _compile(source.name, text, options)
    with suppress(OSError):
        get_cache_manager(key).put(code, name, binary=True)
    return code


def _compile(name: str, text: bytes, options: list[bytes]) -> bytes:
    from cuda.bindings import nvrtc

    program = _ok(nvrtc.nvrtcCreateProgram(text, name.encode(), 0, [], []))
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(result):
        log = b" " * _ok(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{name} does not compile ({result}); please report this: {log.decode()}")
    code: bytes = b" " * _ok(nvrtc.nvrtcGetCUBINSize(program))
    _ok(nvrtc.nvrtcGetCUBIN(program, code))
    _ok(nvrtc.nvrtcDestroyProgram(program))
    return code


def _ok(result: tuple[Any, ...]) -> Any:
    code, *values = result
    if int(code):
        raise RuntimeError(f"CUDA refused to load a kernel of flatout ({code}); please report this")
    return values[0] if len(values) == 1 else tuple(values)
