"""Tells whether anything opened, changed or listed a tree of files, by inotify: libraries in C and children too."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

import pytest

_ACCESS, _MODIFY, _ATTRIB, _MOVED, _CREATE, _DELETE, _OPEN = 0x1, 0x2, 0x4, 0xC0, 0x100, 0x200, 0x20
_HEADER = struct.Struct("iIII")


class Watched:
    """Watches the folders below `root` from now on."""

    def __init__(self, root: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "inotify_init1"):
            pytest.skip("needs inotify")
        self._fd, self._folders = libc.inotify_init1(os.O_NONBLOCK), dict[int, Path]()
        events = _ACCESS | _MODIFY | _ATTRIB | _MOVED | _CREATE | _DELETE | _OPEN
        for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
            self._folders[libc.inotify_add_watch(self._fd, os.fsencode(folder), events)] = folder
        self.events()
        next(path for path in root.rglob("*") if path.is_file()).read_bytes()
        assert self.events(), "nothing is seen"

    def events(self) -> set[str]:
        """Return the files and folders that were touched since the last call."""
        found = set[str]()
        try:
            while content := os.read(self._fd, 1 << 20):
                at = 0
                while at < len(content):
                    watch, _, _, length = _HEADER.unpack_from(content, at)
                    name = content[at + _HEADER.size : at + _HEADER.size + length].rstrip(b"\0")
                    found.add(str(self._folders[watch] / os.fsdecode(name)))
                    at += _HEADER.size + length
        except BlockingIOError:
            return found
        raise AssertionError("an inotify instance has no end")
