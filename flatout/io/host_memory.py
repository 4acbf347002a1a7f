"""How much memory the host has left, and what Python, torch and the kernel raise when there is none, as one error."""

from __future__ import annotations

import ctypes
import errno
from contextlib import suppress
from pathlib import Path

from flatout.errors import ResourceError, first_line


def host_memory_error(error: BaseException) -> ResourceError | None:
    """Return a ResourceError in place of one with which Python, torch or the kernel refuses host memory, else None."""
    is_refused = (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))
        or "(os error 12)" in str(error)
    )
    if not is_refused:
        return None
    said = first_line(error) if str(error).strip() else "no more memory"
    return ResourceError(
        f"the host has too little memory ({said[:200]}); close other programs, raise the limit of this process "
        "(ulimit -v, the job's or container's memory), or use fewer processes"
    )


def map_blocks(num_bytes: int) -> None:
    """Let glibc map each block of so many bytes by itself: its heap, with those of up to 32 MiB, has holes."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(-3, num_bytes)  # M_MMAP_THRESHOLD of malloc.h


# where a container sees the limit of its own group
_CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes() -> int | None:
    """Return how much memory programs may still take here, in bytes: of the host and its container; None if unknown."""
    free: list[int] = []
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):  # without a limit, memory.max is a word
        most, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        # cached files make room
        free.append(max(0, most - used + int(stat.get("file", 0))))
    return min(free, default=None)
