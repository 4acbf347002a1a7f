"""Check a checkpoint's files against its manifest: size, hash, and the identity stored in each file."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flatout.checkpoint.manifest import Manifest
from flatout.checkpoint.tensor_file import TENSOR_SUFFIX, read_metadata
from flatout.errors import CheckpointError
from flatout.io.hashing import FileFacts, digest


def verify_files(folder: Path, manifest: Manifest, *, index: int = 0, world: int = 1) -> None:
    """Check that the files in a manifest exist and have the recorded size and hash.

    Rank `index` of `world` checks only its share. Raises CheckpointError.
    """
    for name in shares(manifest.files, world)[index]:
        path, facts = folder / name, manifest.files[name]
        try:
            found = digest(path)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: the file is missing; the checkpoint is not resumable without it") from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        if found == facts:
            continue
        if name.endswith(TENSOR_SUFFIX):
            identity = None
            # if the header is unreadable, the size or the hash below explains why
            with suppress(CheckpointError):
                identity = read_metadata(path)
            if identity is not None:
                refuse_other_save(path, identity, manifest)
        if found.size_bytes != facts.size_bytes:
            why = f"found {found.size_bytes:,} bytes, expected {facts.size_bytes:,}; it was cut off or replaced"
        else:
            why = f"its content does not match its hash (found xxh3 {found.xxh3}, expected {facts.xxh3})"
        raise CheckpointError(f"{path}: {why}")


def shares(files: Mapping[str, FileFacts], world: int) -> list[list[str]]:
    """Assign files to ranks, so that each rank reads about the same number of bytes."""
    taken: list[list[str]] = [[] for _ in range(world)]
    num_bytes = [0] * world
    # + 1 below: an empty file still has to be opened
    for name in sorted(files, key=lambda name: (-files[name].size_bytes, name)):
        rank = num_bytes.index(min(num_bytes))
        taken[rank].append(name)
        num_bytes[rank] += files[name].size_bytes + 1
    return taken


def refuse_other_save(path: Path, identity: Any, manifest: Manifest) -> None:
    """Raise CheckpointError when the identity in a file (run_id, save_id, step) differs from the manifest's."""
    expected = {"run_id": manifest.run_id, "save_id": manifest.save_id, "step": str(manifest.step)}
    if isinstance(identity, Mapping):
        identity = {key: identity.get(key) for key in expected}
    if identity != expected:
        raise CheckpointError(f"{path}: it is of another save: found {identity}, expected {expected}")
