"""Sizes and xxh3 hashes of files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import xxhash
from pydantic import ConfigDict, Field, with_config


@with_config(ConfigDict(strict=True, extra="forbid"))
@dataclass(frozen=True, slots=True)
class FileFacts:
    """A file's size and its xxh3_128 hash (32 hex digits)."""

    size_bytes: Annotated[int, Field(ge=0)]
    xxh3: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


def digest(path: Path) -> FileFacts:
    """Return the size and xxh3_128 hash of a file. Raises OSError."""
    with path.open("rb") as file:
        hasher = hashlib.file_digest(file, xxhash.xxh3_128)
        return FileFacts(file.tell(), hasher.hexdigest())
