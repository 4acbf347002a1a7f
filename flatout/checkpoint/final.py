"""Final results (adapter or model): written to a temporary folder, synced to disk, hashed, and renamed into place."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, with_config
from safetensors import SafetensorError

from flatout.errors import CheckpointError, ResourceError
from flatout.io.durable_io import DurableIO, FileFacts, digest
from flatout.io.json_file import now_utc, read_as

MANIFEST_NAME = "manifest.json"


@with_config(ConfigDict(strict=True, extra="forbid"))
@dataclass(frozen=True, slots=True)
class FinalManifest:
    """The manifest of a results folder: sizes and hashes of its files by relative name, and the run's progress."""

    files: Mapping[str, FileFacts]
    progress: Mapping[str, Any]
    created: str


def publish(
    folder: Path,
    write: Callable[[Path], None],
    progress: Mapping[str, Any],
    on_event: Callable[[str, Mapping[str, Any]], None],
) -> None:
    """Have `write` fill a new folder, and move it to `folder` atomically, with a manifest of its files.

    Nothing that was in `folder` is removed: files that are not results stay there, and earlier results are moved to a
    sibling folder, which is reported to `on_event`. Raises ResourceError when the disk is full or a write fails.
    """
    durable_io = DurableIO()
    aside = folder.with_name(f"{folder.name}.old-{secrets.token_hex(4)}")
    with durable_io.replace_dir(folder, aside=aside) as half_done:
        with durable_io.resource_errors("write", folder):
            try:
                write(half_done)
            except Exception as error:
                # libraries written in Rust raise their own errors for a full disk
                if isinstance(error, SafetensorError) or "(os error " in str(error):
                    raise ResourceError(
                        f"cannot write {folder}: {error}; the checkpoint is intact: free some space, then run the same "
                        "command to export it"
                    ) from error
                raise
        files = {name: digest(half_done / name) for name in durable_io.sync_tree(half_done)}
        manifest = FinalManifest(files, progress, now_utc())
        durable_io.write_json(half_done / MANIFEST_NAME, dataclasses.asdict(manifest))
    if not aside.exists():
        return
    # move back the files that no export wrote; after a crash they stay in `aside`
    with suppress(CheckpointError):  # without a manifest, there is no telling which files are results
        before = read_as(FinalManifest, aside / MANIFEST_NAME)
        results = {name.partition("/")[0] for name in before.files}
        for path in aside.iterdir():
            if path.name not in results and not (folder / path.name).exists():
                durable_io.rename(path, folder / path.name)
    on_event("kept", {"path": str(aside), "why": f"the previous content of {folder.name}/, which is kept"})


def verify_final(folder: Path) -> FinalManifest:
    """Check a results folder's manifest and the files it names. Raises CheckpointError with the first that changed."""
    manifest = read_as(FinalManifest, folder / MANIFEST_NAME)
    for name, facts in manifest.files.items():
        verify_file(folder / name, facts)
    return manifest


def verify_file(path: Path, facts: FileFacts, explain: Callable[[], None] = lambda: None) -> None:
    """Raise CheckpointError unless a file exists with this size and hash; `explain` may raise a better reason first."""
    try:
        digest_now = digest(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: the file is missing; the rest is not usable without it") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    if digest_now == facts:
        return
    explain()
    if digest_now.size_bytes != facts.size_bytes:
        why = f"found {digest_now.size_bytes:,} bytes, expected {facts.size_bytes:,}"
    else:
        why = f"its content does not match its hash (found xxh3 {digest_now.xxh3}, expected {facts.xxh3})"
    raise CheckpointError(f"{path}: {why}; it was damaged or edited")
