"""Identify a base model by content: a run resumed with other weights would compute another loss."""

from __future__ import annotations

import json
from pathlib import Path

import xxhash
from pydantic import TypeAdapter

from flatout.config.schema import ModelConfig
from flatout.environment import cache_folder
from flatout.errors import CheckpointError
from flatout.io.hash_cache import cached_file_hash
from flatout.io.hub import hub_file
from flatout.io.json_file import read_json, validated
from flatout.models.load.source import read_model_config

_WEIGHT_MAP = TypeAdapter(dict[str, str])


def fingerprint_model(model: ModelConfig) -> dict[str, str]:
    """Return xxh3 digests of config.json and every weight file, by file name; one flipped bit changes them.

    Random weights come from the seed, so they have no files. Raises like `read_model_config`, and CheckpointError for
    an unreadable file.
    """
    config = json.dumps(read_model_config(model.name, model.revision), sort_keys=True)
    digests = {"config.json": xxhash.xxh3_128_hexdigest(config.encode())}
    if model.init == "random":
        return digests
    for file in _weight_files(model.name, model.revision):
        try:
            digests[file.name] = cached_file_hash(file, cache_folder() / "digests").xxh3
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror}; download or copy it again") from error
    return digests


def _weight_files(name: str, revision: str | None) -> list[Path]:
    """Return the safetensors files that loading reads: model.safetensors, else those in the index, else all."""
    single, index = hub_file(name, "model.safetensors", revision), None
    if single is not None:
        return [single]
    if (index := hub_file(name, "model.safetensors.index.json", revision)) is None:
        return sorted(Path(name).glob("*.safetensors"))
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else content
    shards = set(validated(_WEIGHT_MAP, weight_map, f"{index}: weight_map").values())
    found = [hub_file(name, shard, revision) for shard in sorted(shards)]
    return [file for file in found if file is not None]
