"""A model's files: checked before anything is loaded (data only, no code, no damage), and identified by content."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError, safe_open

from flatout.config.folders import is_run_folder
from flatout.config.schema import ModelConfig
from flatout.environment import cache_folder
from flatout.errors import CheckpointError, Fix, ResourceError, SecurityError, UsageError
from flatout.io.durable_io import FileFacts, digest
from flatout.io.hub import hub_file, is_folder, is_path
from flatout.io.json_file import read_json, validated
from flatout.io.kept_facts import read_own, write_own
from flatout.io.near_path import other_model

# smaller files hash quickly enough
REMEMBERED_BYTES = 64 * 2**20
ALL_RANDOM = Fix({"model.init": "random"}, "train from random weights")
# config fields that make a loader fetch and run code (CVE-2026-4372, CVE-2026-5241)
_CODE_FIELDS = ("auto_map", "trust_remote_code", "custom_pipelines", "use_kernels", "kernel_config")
# also written with a leading underscore, and then with the suffix _internal
_INTERFACE_FIELDS = ("attn_implementation", "experts_implementation")
_PLAIN_INTERFACES = (None, "eager", "sdpa", "flash_attention_2", "flex_attention", "grouped_mm", "batched_mm")
_WIDE_INTEGERS = ("I16", "U16", "I32", "U32", "I64", "U64", "BOOL")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def check_source(name: str, revision: str | None, *, needs_weights: bool = True) -> None:
    """Refuse a model whose files would run code or are damaged, before transformers opens them.

    `name` is a folder or a hub id, of which only config.json is fetched here. Raises SecurityError (code in
    config.json, pickled weights, paths outside the folder), CheckpointError (damaged safetensors) or UsageError.
    """
    read_model_config(name, revision)
    if needs_weights and Path(name).is_dir():
        check_weights(Path(name))
        # transformers would silently ignore an unreadable one
        if (generation_config := Path(name) / "generation_config.json").is_file():
            _read_object(generation_config)


def read_model_config(name: str, revision: str | None) -> dict[str, Any]:
    """Read config.json of a folder or hub id as plain data.

    Raises UsageError (missing, or not a model), ResourceError if the hub does not answer, or SecurityError if it
    requests code at any depth: remote classes, hub kernels, internals.
    """
    folder = Path(name)
    if not is_folder(name) and is_path(name):
        url = re.fullmatch(r"https?://[^/]+/([\w.-]+/[\w.-]+)(?:/.*)?", name)
        near = f"; did you mean {url[1]}?" if url else other_model(name)
        raise UsageError(
            f"model.name: there is no folder {name}; give a folder or a hub id such as Qwen/Qwen3-0.6B{near}"
        )
    if revision is not None and is_folder(name):
        raise UsageError(f"model.revision: {revision!r:.100} is for hub ids, but {name} is a folder; remove it")
    if is_run_folder(folder) and not (folder / "config.json").is_file():
        merge = shlex.join(["flatout", "merge", str(folder), "--out", f"{folder.name}-merged"])
        raise UsageError(f"{name} is a run, not a model; write its model: {merge}")
    file = hub_file(name, "config.json", revision)
    if file is None and (folder / "adapter_config.json").is_file():
        content = read_json(folder / "adapter_config.json", UsageError)
        base = str(content.get("base_model_name_or_path") or "BASE") if isinstance(content, dict) else "BASE"
        further = Fix({"model.name": base, "lora.continue_from": str(folder)}, "train it further")
        raise UsageError(f"{folder} is an adapter, not a model; name its base model", [further])
    if file is None:
        raise UsageError(
            f"{name} has no config.json; give a folder or a hub id of a transformers model{other_model(name)}"
        )
    config = _read_object(file)
    for field, value in _walk(config):
        asks_for_code = field in _CODE_FIELDS and value not in (None, False)
        is_interface = field.removeprefix("_").removesuffix("_internal") in _INTERFACE_FIELDS
        if asks_for_code or (is_interface and _names_a_kernel(value)):
            raise SecurityError(
                f"{name}/config.json: {field} = {value!r} would run code from outside, which flatout never does. "
                "If transformers has this architecture, use a copy of the folder without that field"
            )
    return config


def _names_a_kernel(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_names_a_kernel, value.values()))
    return value not in _PLAIN_INTERFACES


def check_weights(folder: Path) -> None:
    """Check that a model folder has intact safetensors files and nothing that must be unpickled.

    Reads the headers only. Raises SecurityError, CheckpointError (names the file) or UsageError.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
        if pickles:
            raise SecurityError(
                f"{folder} has only pickled weights ({', '.join(pickles[:3])}), which can run code when loaded; "
                "convert them safely: torch.load(file, weights_only=True), then safetensors.torch.save_file"
            )
        raise UsageError(f"{folder} has no *.safetensors weights; give a model folder", [ALL_RANDOM])
    index = folder / "model.safetensors.index.json"
    if index.exists():
        _check_index(index)
    for file in files:
        check_safetensors(file)


def _check_index(index: Path) -> None:
    content = _read_object(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map is not an object of file names; download or copy it again")
    if not weight_map:
        raise CheckpointError(f"{index}: weight_map lists no weights; download or copy it again")
    for shard in sorted(set(weight_map.values())):
        if Path(shard).suffix in _PICKLES:
            raise SecurityError(f"{index}: weight file {shard} is pickled, which can run code when loaded")
        if not shard or Path(shard).name != shard:
            raise SecurityError(f"{index}: weight file {shard!r} is outside the folder; only plain names are allowed")
        if not (index.parent / shard).is_file():
            raise CheckpointError(f"{index}: weight file {shard} is missing; download or copy it again")
    # transformers requires it
    if not isinstance(content.get("metadata"), dict):
        raise CheckpointError(f"{index}: metadata is not an object; download or copy it again")


def check_safetensors(file: Path) -> None:
    """Open a safetensors file's header. Raises CheckpointError with the file's name if it is damaged."""
    try:
        with safe_open(file, framework="pt") as opened:
            kinds = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118  (no mapping)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a valid safetensors file ({error}); download or copy it again") from error
    # quantized weights are bytes, I8 or U8; transformers would silently cast wider integers
    odd = [f"{name} is {kind}" for name, kind in kinds.items() if name.endswith(".weight") and kind in _WIDE_INTEGERS]
    if odd:
        raise CheckpointError(f"{file}: {odd[0]}, but weights must be floating point; download or copy it again")


def _read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object as transformers writes it, with Infinity allowed as a number. Raises UsageError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"), object_hook=_as_float)
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: byte {error.start} is not UTF-8; download or copy it again") from error
    except RecursionError as error:
        raise UsageError(f"{file}: nested too deeply to read; download or copy it again") from error
    except ValueError as error:
        raise UsageError(f"{file} is not valid JSON ({error}); download or copy it again") from error
    if not isinstance(content, dict):
        raise UsageError(f"{file} is not a JSON object; download or copy it again")
    return content


def _as_float(values: dict[str, Any]) -> Any:
    """Return the number that transformers writes as {"__float__": "Infinity"}, and other objects as they are."""
    is_special = list(values) == ["__float__"] and values["__float__"] in ("Infinity", "-Infinity", "NaN")
    return float(values["__float__"]) if is_special else values


def _walk(value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for field, inner in value.items():
            yield str(field), inner
            yield from _walk(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _walk(inner)


def fingerprint_model(model: ModelConfig) -> dict[str, str]:
    """Return xxh3 digests of config.json and every weight file, by file name; one flipped bit changes them.

    A run resumed with other weights would compute another loss. Random weights come from the seed, so they have no
    files. Raises like `read_model_config`, and CheckpointError for an unreadable file.
    """
    name, revision = model.name, model.revision
    config = json.dumps(read_model_config(name, revision), sort_keys=True)
    digests = {"config.json": xxhash.xxh3_128_hexdigest(config.encode())}
    if model.init == "random":
        return digests
    for file in weight_files(name, revision):
        try:
            digests[file.name] = cached_file_hash(file, cache_folder() / "digests").xxh3
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror}; download or copy it again") from error
    return digests


def weight_files(name: str, revision: str | None) -> list[Path]:
    """Return the weight files that loading reads: model.safetensors, else the files in the index, else all.

    Raises like `read_model_config`.
    """
    if single := hub_file(name, "model.safetensors", revision):
        return [single]
    if index := hub_file(name, "model.safetensors.index.json", revision):
        content = read_json(index)
        weight_map = content.get("weight_map") if isinstance(content, dict) else content
        shards = validated(dict[str, str], weight_map, f"{index}: weight_map").values()
        files = {shard: hub_file(name, shard, revision) for shard in sorted(set(shards))}
        if absent := [shard for shard, file in files.items() if file is None]:
            raise CheckpointError(f"{index}: weight file {absent[0]} is missing; download or copy it again")
        return [file for file in files.values() if file]
    if not is_folder(name):
        raise UsageError(f"{name} has no *.safetensors weights; choose a model with them", [ALL_RANDOM])
    return sorted(Path(name).glob("*.safetensors"))


def cached_file_hash(path: Path, memory: Path) -> FileFacts:
    """Return `digest(path)`; a large file is read again only if its size, times or inode have changed.

    Its hash is kept in a small file in the folder `memory`, which is created if missing; if it is not writable, the
    file is hashed every time. Raises OSError.
    """
    stat = path.stat()
    if stat.st_size < REMEMBERED_BYTES:
        return digest(path)
    # ctime changes with every write and rename, even if a program restores the old mtime
    stamp = [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    note = memory / f"{xxhash.xxh3_128_hexdigest(str(path.resolve()).encode())}.json"
    with suppress(CheckpointError, KeyError, TypeError):
        known = read_own(note)
        if known["stamp"] == stamp:
            return FileFacts(stat.st_size, str(known["xxh3"]))
    facts = digest(path)
    with suppress(ResourceError):
        write_own(note, {"path": str(path), "stamp": stamp, "xxh3": facts.xxh3})
    return facts
