"""Manifests of checkpoints and of final results: which run wrote them, their files and hashes; results published."""

from __future__ import annotations

import dataclasses
import json
import platform
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, TypeVar

import xxhash
from pydantic import ConfigDict, Field, with_config

from flatout import __version__
from flatout.checkpoint.tensor_file import TENSOR_SUFFIX, open_tensor_file
from flatout.errors import CheckpointError
from flatout.io.durable_io import DurableIO, FileFacts, digest
from flatout.io.json_file import encode_json, now_utc, read_as, read_json, validated
from flatout.parallel.rank import Rank

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 3

# plain names only, so that a manifest cannot point outside its folder
_FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
_Id = Annotated[str, Field(pattern=r"^[0-9a-f]{8,32}$")]


class OtherFormatError(CheckpointError):
    """A checkpoint in another format version; it is refused, since skipping it would silently lose its progress."""


@with_config(ConfigDict(strict=True, extra="forbid"))
@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a checkpoint except its content. `step` counts completed optimizer steps; `created` is UTC."""

    run_id: _Id
    save_id: _Id
    step: Annotated[int, Field(ge=0)]
    best: bool
    world_size: Annotated[int, Field(ge=1)]
    files: Mapping[_FileName, FileFacts]
    versions: Mapping[str, str]
    created: str
    format_version: int = FORMAT_VERSION


_Kind = TypeVar("_Kind", bound=Manifest)


@cache
def versions(packages: tuple[str, ...] = ("torch", "transformers", "peft", "safetensors")) -> dict[str, str]:
    """Return the versions of flatout, Python and these packages, as far as they are installed; imports none."""
    known = {"flatout": __version__, "python": platform.python_version()}
    for name in packages:
        with suppress(PackageNotFoundError):
            known[name] = version(name)
    return known


def encode_manifest(manifest: Manifest) -> bytes:
    """Render a manifest as JSON with a hash of its own fields, so that every edit is detected."""
    body = dataclasses.asdict(manifest)
    return encode_json({**body, "xxh3": _hash(body)})


def read_manifest(folder: Path) -> Manifest:
    """Read and check a checkpoint's manifest.

    Raises OtherFormatError for a format version other than this one, and CheckpointError with file and field for
    anything else that is wrong.
    """
    path = folder / MANIFEST_NAME
    if not path.exists():
        raise CheckpointError(f"{folder}: {MANIFEST_NAME} is missing; the folder is not a complete checkpoint")
    return decode_manifest(read_json(path), str(path), Manifest)


def decode_manifest(body: Any, path: str, kind: type[_Kind]) -> _Kind:
    """Return the manifest that `encode_manifest` rendered. Raises as `read_manifest`."""
    if not isinstance(body, dict):
        raise CheckpointError(f"{path}: found a {type(body).__name__}, expected an object")
    own_hash = body.pop("xxh3", None)
    if own_hash != _hash(body):
        raise CheckpointError(f"{path}: xxh3: the manifest's own hash does not match; the file was damaged or edited")
    if (version := body.get("format_version")) != FORMAT_VERSION:
        raise OtherFormatError(
            f"{path}: format_version: a different flatout wrote this checkpoint (format {version!r}, this one reads "
            f"{FORMAT_VERSION}); resume with that version, or choose a different run_dir to start over"
        )
    return validated(kind, body, path)


def _hash(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def verify_files(folder: Path, manifest: Manifest, rank: Rank) -> None:
    """Check that this rank's share of a manifest's files exist and have their size and hash. Raises CheckpointError."""
    for name in shares(manifest.files, rank.world)[rank.index]:
        verify_file(folder / name, manifest.files[name], partial(_refuse_header_of_other_save, folder / name, manifest))


def _refuse_header_of_other_save(path: Path, manifest: Manifest) -> None:
    if path.suffix != TENSOR_SUFFIX:
        return
    try:
        identity = open_tensor_file(path).metadata() or {}
    except CheckpointError:  # the size or the hash explains why it is unreadable
        return
    refuse_other_save(path, identity, manifest)


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
        raise CheckpointError(f"{path}: it belongs to a different save: found {identity}, expected {expected}")


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
            write(half_done)
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
