"""What each rank of a node does now, in memory that outlives it: its launcher and the ranks beside it read it."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

NAME = "flatout-status"
SLOT_BYTES = 64


class StatusBoard:
    """A slot for each rank of a node, in anonymous memory: a write costs no system call and waits for no disk.

    The launcher makes it before its ranks and passes `fd` on. What a rank wrote stays when it is killed; its last
    heartbeat may be half a second older. The mapping outlives `fd`, which the launcher closes.
    """

    def __init__(self, fd: int) -> None:
        """Map the board of an open file. Raises OSError or ValueError for anything else."""
        if NAME not in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise ValueError(f"file {fd} is not a status board")
        self.fd = fd
        self._slots = mmap.mmap(fd, os.fstat(fd).st_size)

    @classmethod
    def new(cls, num_slots: int) -> StatusBoard | None:
        """Make a board; None where the system has no anonymous files."""
        with suppress(OSError, AttributeError):
            fd = os.memfd_create(NAME)
            os.ftruncate(fd, num_slots * SLOT_BYTES)
            return cls(fd)
        return None

    def write(self, slot: int, step: int, phase: str) -> None:
        """Say what a rank does now, after `step` completed steps."""
        begin = slot * SLOT_BYTES
        self._slots[begin : begin + SLOT_BYTES] = f"{step} {phase}".encode()[:SLOT_BYTES].ljust(SLOT_BYTES)

    def read(self, slot: int) -> tuple[int, str] | None:
        """Return what a rank wrote last, its completed steps and its phase; None if it has not begun to."""
        begin = slot * SLOT_BYTES
        step, _, phase = self._slots[begin : begin + SLOT_BYTES].decode(errors="replace").strip().partition(" ")
        return (int(step), phase) if step.isdecimal() and phase else None
