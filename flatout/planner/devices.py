"""GPUs by name: their memory, to plan for one that is not present, and their peak FLOP/s, for utilization (MFU)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from flatout.errors import UsageError
from flatout.planner.memory.sizes import Correction

GIB = 1 << 30
# used by the CUDA context and loaded kernels, which torch's count of allocated bytes does not include
CONTEXT_BYTES = int(0.6 * GIB)


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU to plan for."""

    name: str
    memory_bytes: int
    """What training may use."""
    has_bf16: bool = True
    has_fp8: bool = True
    """Whether it has this arithmetic in hardware."""
    corrections: Mapping[str, Correction] = field(default_factory=dict, hash=False)
    """What passes on it have measured, by `MemoryModel.kind_of_pass`."""


def weakest(devices: Sequence[Device]) -> Device:
    """Return the least capable device: the smallest memory, and bf16, float8 and Hopper only if all have it."""
    smallest = min(devices, key=lambda device: device.memory_bytes)
    among = "" if len({device.name for device in devices}) == 1 else f" (the smallest of {len(devices)} GPUs)"
    return Device(
        smallest.name + among,
        smallest.memory_bytes,
        has_bf16=all(device.has_bf16 for device in devices),
        has_fp8=all(device.has_fp8 for device in devices),
    )


# for a plan without a named GPU
ANY_DEVICE = Device("a GPU", 0)


def _device(name: str, total_gib: float, *, has_bf16: bool = True, has_fp8: bool = True) -> Device:
    return Device(name, int(total_gib * GIB) - CONTEXT_BYTES, has_bf16, has_fp8)


# total memory as the driver reports it, which is less than the name says
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "b200": _device("B200", 178.3),
        "h200": _device("H200", 139.8),
        "h100": _device("H100", 79.1),
        "a100-80": _device("A100 80GB", 79.1, has_fp8=False),
        "a100-40": _device("A100 40GB", 39.4, has_fp8=False),
        "l40s": _device("L40S", 44.3),
        "5090": _device("RTX 5090", 31.3),
        "4090": _device("RTX 4090", 23.5),
        "3090": _device("RTX 3090", 23.5, has_fp8=False),
        "a10g": _device("A10G", 22.0, has_fp8=False),
        "l4": _device("L4", 22.0),
        "t4": _device("T4", 14.5, has_bf16=False, has_fp8=False),
    }
)


def find_device(name: str) -> Device:
    """Return a GPU by its name, or one of a size such as 12GB, with all arithmetic. Raises UsageError for another."""
    size = re.fullmatch(r"(\d{1,4}(?:\.\d+)?) ?gi?b", name.lower())
    # drivers report a little less than a card's name says
    if size and (total_gib := 0.98 * float(size[1])) * GIB > CONTEXT_BYTES:
        return _device(f"a GPU of {size[1]} GB", total_gib)
    if (device := DEVICES.get(name.lower().removeprefix("rtx").strip())) is None:
        near, number = near_device(name)
        of = f"; the number of GPUs, {number}, is ranks" if number else ""
        raise UsageError(
            f"device {name!r} is unknown; choose one of {', '.join(DEVICES)}, or a size such as 12GB{of}; "
            f"did you mean {near}?"
        )
    return device


def near_device(name: str) -> tuple[str, str]:
    """Return the name of the GPU that is meant by an unknown one, and of how many: 8xH100, H100x8; "" if of one."""
    # RTX4090 has no number of GPUs
    of = re.fullmatch(r"(\d{1,3}) ?[x*] ?(.+)|(.*[^t ]) ?[x*] ?(\d{1,3})", name.lower())
    plain = re.sub(r"rtx|geforce|nvidia|[ _-]", "", (of[2] or of[3]) if of else name.lower())
    number = (of[1] or of[4]) if of else ""
    if size := re.fullmatch(r"(\d+)(?:gb?)?", plain):
        return f"{size[1]}GB", number
    near = [one for one in DEVICES if plain and one.startswith(plain)]
    near = [plain] if plain in DEVICES else near or difflib.get_close_matches(plain, DEVICES, n=1)
    return (near or ["12GB"])[0], number


# dense TFLOP/s with fp32 accumulation, from the vendors' data sheets: name pattern -> arithmetic -> peak
# the first pattern found in the device's name counts, so specific patterns come before general ones
_TERA = {
    r"H[12]00 NVL": {"bf16": 835.0, "fp16": 835.0, "fp8": 1671.0},
    r"H100 PCIe": {"bf16": 756.0, "fp16": 756.0, "fp8": 1513.0},
    r"G?H[12]00|H800": {"bf16": 989.0, "fp16": 989.0, "fp8": 1979.0},
    r"G?B200": {"bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0},
    r"A[18]00": {"bf16": 312.0, "fp16": 312.0},
    r"A10G": {"bf16": 70.0, "fp16": 70.0},
    r"L40S": {"bf16": 362.0, "fp16": 362.0, "fp8": 733.0},
    r"L4": {"bf16": 121.0, "fp16": 121.0, "fp8": 242.0},
    r"T4": {"fp16": 65.0},
    r"RTX 5090": {"bf16": 209.0, "fp16": 209.0, "fp8": 419.0},
    r"RTX 4090": {"bf16": 165.0, "fp16": 165.0, "fp8": 330.0},
    r"RTX 3090(?! Ti)": {"bf16": 71.0, "fp16": 71.0},
}


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak dense FLOP/s of one device in one arithmetic (bf16, fp16 or fp8)."""

    device_name: str
    arithmetic: str
    flops_per_s: float

    def describe(self) -> str:
        """Return text such as `989 TFLOP/s, bf16 dense, NVIDIA H200`."""
        return f"{self.flops_per_s / 1e12:,.0f} TFLOP/s, {self.arithmetic} dense, {self.device_name}"


def nominal_peak(device_name: str, arithmetic: str) -> Peak | None:
    """Return a device's peak by its driver's name for it; None if unknown (a CPU, fp32, a laptop GPU)."""
    for pattern, peaks in _TERA.items():
        # a laptop GPU has the desktop GPU's name but half its units
        if re.search(rf"\b({pattern})\b", device_name) and not re.search("Laptop|Max-Q|MIG", device_name):
            tera = peaks.get(arithmetic)
            return None if tera is None else Peak(device_name, arithmetic, tera * 1e12)
    return None
