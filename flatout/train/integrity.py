"""Is a checkpoint's file what its manifest says? By size, hash and the identity that every file carries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.errors import CheckpointError
from flatout.train.manifest import Manifest
from flatout.train.storage import FileFacts, digest
from flatout.train.tensor_file import TENSOR_SUFFIX, read_metadata


def verify_files(folder: Path, manifest: Manifest, *, index: int = 0, world: int = 1) -> None:
    """Check that files which a manifest names are there, of their size and hash; rank `index` of `world` its share.

    Raises CheckpointError.
    """
    for name in shares(manifest.files, world)[index]:
        path, facts = folder / name, manifest.files[name]
        try:
            found = digest(path)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: the file is missing; the checkpoint is not resumable without it") from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        if found != facts:
            raise CheckpointError(f"{path}: {_damage(path, found, facts, manifest)}")


def shares(files: Mapping[str, FileFacts], world: int) -> list[list[str]]:
    """Which files each rank reads, so that all read about the same number of bytes."""
    taken: list[list[str]] = [[] for _ in range(world)]
    num_bytes = [0] * world
    # a file of no bytes is an open and a look as well
    for name in sorted(files, key=lambda name: (-files[name].size_bytes, name)):
        rank = num_bytes.index(min(num_bytes))
        taken[rank].append(name)
        num_bytes[rank] += files[name].size_bytes + 1
    return taken


def _damage(path: Path, found: FileFacts, expected: FileFacts, manifest: Manifest) -> str:
    if path.name.endswith(TENSOR_SUFFIX):
        try:
            other = other_save(read_metadata(path), manifest)
        except CheckpointError:
            other = None  # not even its header can be read: the size or the hash tells what happened
        if other:
            return other
    if found.size_bytes != expected.size_bytes:
        return f"found {found.size_bytes:,} bytes, expected {expected.size_bytes:,}; it was cut off or replaced"
    return f"its content does not match its hash (found xxh3 {found.xxh3}, expected {expected.xxh3})"


def other_save(identity: Any, manifest: Manifest) -> str | None:
    """How a file's own identity (run_id, save_id, step) differs from its manifest's; None when it does not."""
    expected = {"run_id": manifest.run_id, "save_id": manifest.save_id, "step": str(manifest.step)}
    if isinstance(identity, Mapping):
        identity = {key: identity.get(key) for key in expected}
    if identity == expected:
        return None
    return f"it is of another save: found {identity}, expected {expected}"


def refuse_other_save(path: Path, identity: Any, manifest: Manifest) -> None:
    """Raise CheckpointError when a file's own identity is not its manifest's."""
    if other := other_save(identity, manifest):
        raise CheckpointError(f"{path}: {other}")
