"""Cached hashes of large files, so that a base model is not read in full at every start."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import xxhash

from flatout.errors import CheckpointError, ResourceError
from flatout.io.durable_io import DurableIO, FileFacts, digest
from flatout.io.json_file import read_json

# smaller files hash quickly enough
REMEMBERED_BYTES = 64 * 2**20


def cached_file_hash(path: Path, memory: Path) -> FileFacts:
    """Return `digest(path)`; a large file is read again only if its size, times or inode have changed.

    Its hash is kept in a small file in the folder `memory`, which is created if missing; if it is not writable, the
    file is hashed every time. Raises OSError.
    """
    found = path.stat()
    if found.st_size < REMEMBERED_BYTES:
        return digest(path)
    # ctime changes with every write and rename, even if a program restores the old mtime
    stamp = [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
    note = memory / f"{xxhash.xxh3_128_hexdigest(str(path.resolve()).encode())}.json"
    with suppress(CheckpointError, KeyError, TypeError):
        known = read_json(note)
        if known["stamp"] == stamp:
            return FileFacts(found.st_size, str(known["xxh3"]))
    facts = digest(path)
    with suppress(ResourceError):
        durable_io = DurableIO()
        durable_io.make_dir(memory)
        durable_io.write_json(note, {"path": str(path), "stamp": stamp, "xxh3": facts.xxh3})
    return facts
