"""The manifest of a checkpoint: who wrote it, which files it has and what they must hash to; and the run's identity."""

from __future__ import annotations

import dataclasses
import json
import platform
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from flatout import __version__
from flatout.errors import CheckpointError
from flatout.train.storage import FileFacts, Storage, encode_json, read_json

# version 2 is of ranks that each wrote their part; a flatout that knows only whole files must not pass it over
WHOLE_FORMAT_VERSION, SHARDED_FORMAT_VERSION = 1, 2
FORMAT_VERSION = SHARDED_FORMAT_VERSION
MANIFEST_NAME = "manifest.json"
RUN_NAME = "run.json"

# plain names only: a manifest can never point outside its folder
_FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
_Id = Annotated[str, Field(pattern=r"^[0-9a-f]{8,32}$")]


class NewerFormatError(CheckpointError):
    """A checkpoint of a newer flatout: refused, never skipped, or its progress would be lost unseen."""


@with_config(ConfigDict(strict=True, extra="forbid"))
@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a checkpoint but its content. `step` counts completed optimizer steps; `created` is UTC."""

    run_id: _Id
    save_id: _Id
    step: Annotated[int, Field(ge=0)]
    best: bool
    world_size: Annotated[int, Field(ge=1)]
    files: Mapping[_FileName, FileFacts]
    versions: Mapping[str, str]
    created: str
    format_version: int = WHOLE_FORMAT_VERSION


_ADAPTER = TypeAdapter(Manifest)


def now_utc() -> str:
    """The time, as ISO 8601 in UTC with seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@cache
def versions() -> dict[str, str]:
    """Versions that a resumed run may want to compare, by package name; nothing heavy is imported."""
    packages = ("torch", "transformers", "peft", "safetensors")
    known = {"flatout": __version__, "python": platform.python_version()}
    return known | {name: version(name) for name in packages}


def encode_manifest(manifest: Manifest) -> bytes:
    """Render a manifest as JSON that carries its own hash, so that no field can change unseen."""
    body = dataclasses.asdict(manifest)
    return encode_json({**body, "xxh3": _hash(body)})


def read_manifest(folder: Path) -> Manifest:
    """Read and check a checkpoint's manifest.

    Raises NewerFormatError for a format this flatout does not know, else CheckpointError naming file and field.
    """
    path = folder / MANIFEST_NAME
    if not path.exists():
        raise CheckpointError(f"{folder}: {MANIFEST_NAME} is missing; the folder is no complete checkpoint")
    body = read_json(path)
    if not isinstance(body, dict):
        raise CheckpointError(f"{path}: found a {type(body).__name__}, expected an object")
    found = body.pop("xxh3", None)
    if found != _hash(body):
        raise CheckpointError(f"{path}: xxh3: its own hash does not match; the file was damaged or edited")
    _refuse_newer(path, body.get("format_version"))
    try:
        return _ADAPTER.validate_json(json.dumps(body))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{path}: {field}: {first['msg']}; found {first['input']!r}") from error


def _refuse_newer(path: Path, found: Any) -> None:
    if isinstance(found, int) and found > FORMAT_VERSION:
        raise NewerFormatError(
            f"{path}: format_version: a newer flatout wrote this checkpoint (format {found}, this one reads up to "
            f"{FORMAT_VERSION}); upgrade flatout, or move the folder away to go on from an older checkpoint"
        )


def _hash(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def run_identity(run_dir: Path, storage: Storage) -> str:
    """The run's id from `run_dir/run.json`, which is made on first use.

    Raises CheckpointError when the file is damaged, or missing beside checkpoints that carry an id.
    """
    path = run_dir / RUN_NAME
    if path.exists():
        content = read_json(path)
        run_id = content.get("run_id") if isinstance(content, dict) else None
        if not isinstance(run_id, str) or not re.fullmatch(r"[0-9a-f]{8,32}", run_id):
            raise CheckpointError(f"{path}: run_id: found {run_id!r}, expected 8 to 32 hex digits")
        return run_id
    # a crash can leave neither: this file is written before the first checkpoint
    orphans = sorted(run_dir.glob(f"checkpoints/step-*/{MANIFEST_NAME}"))
    if orphans:
        raise CheckpointError(
            f'{path}: missing, though there are checkpoints; put back {{"run_id": the run_id in {orphans[-1]}}}, '
            "or move the checkpoints folder away to start anew"
        )
    run_id = secrets.token_hex(8)
    write_identity(run_dir, run_id, storage)
    return run_id


def write_identity(run_dir: Path, run_id: str, storage: Storage) -> None:
    """Put the run's id into `run_dir/run.json`. Raises ResourceError."""
    storage.write_json(run_dir / RUN_NAME, {"run_id": run_id, "created": now_utc()})
