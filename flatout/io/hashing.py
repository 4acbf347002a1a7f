"""Sizes and xxh3 hashes of files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import xxhash
from pydantic import ConfigDict, Field, with_config

CHUNK_BYTES = 8 * 2**20


@with_config(ConfigDict(strict=True, extra="forbid"))
@dataclass(frozen=True, slots=True)
class FileFacts:
    """A file's size and its xxh3_128 hash (32 hex digits)."""

    size_bytes: Annotated[int, Field(ge=0)]
    xxh3: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class Hasher:
    """Computes size and hash of content that comes in pieces."""

    def __init__(self) -> None:
        self._xxh3, self._size_bytes = xxhash.xxh3_128(), 0

    def update(self, piece: bytes | memoryview) -> None:
        """Add the next piece."""
        self._xxh3.update(piece)
        self._size_bytes += len(piece)

    @property
    def facts(self) -> FileFacts:
        """Size and hash of all pieces so far."""
        return FileFacts(self._size_bytes, self._xxh3.hexdigest())


def digest(path: Path) -> FileFacts:
    """Return the size and xxh3_128 hash of a file. Raises OSError."""
    hasher = Hasher()
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            hasher.update(piece)
    return hasher.facts
