"""GPUs by name, to plan for one that is not present."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

GIB = 1 << 30
# used by the CUDA context and loaded kernels, which torch's count of allocated bytes does not include
CONTEXT_BYTES = int(0.6 * GIB)


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU to plan for. `memory_bytes` is what training may use; `has_bf16` means in hardware."""

    name: str
    memory_bytes: int
    has_bf16: bool = True


def weakest(devices: Sequence[Device]) -> Device:
    """Return the least capable device: the smallest memory, and bf16 only if all have it."""
    smallest = min(devices, key=lambda device: device.memory_bytes)
    among = "" if len({device.name for device in devices}) == 1 else f" (the smallest of {len(devices)} GPUs)"
    return Device(smallest.name + among, smallest.memory_bytes, all(device.has_bf16 for device in devices))


# for a plan without a named GPU
ANY_DEVICE = Device("a GPU", 0)


def _device(name: str, total_gib: float, *, has_bf16: bool = True) -> Device:
    return Device(name, int(total_gib * GIB) - CONTEXT_BYTES, has_bf16)


# total memory as the driver reports it, which is less than the name says
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "b200": _device("B200", 178.3),
        "h200": _device("H200", 139.8),
        "h100": _device("H100", 79.1),
        "a100-80": _device("A100 80GB", 79.1),
        "a100-40": _device("A100 40GB", 39.4),
        "l40s": _device("L40S", 44.3),
        "5090": _device("RTX 5090", 31.3),
        "4090": _device("RTX 4090", 23.5),
        "3090": _device("RTX 3090", 23.5),
        "a10g": _device("A10G", 22.0),
        "l4": _device("L4", 22.0),
        "t4": _device("T4", 14.5, has_bf16=False),
    }
)
