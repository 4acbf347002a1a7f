"""Where a model comes from, checked before anything is loaded: data only, never code, no damaged files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from flatout.errors import CheckpointError, SecurityError, UsageError

# config fields by which a model repository makes a loader fetch and run code (CVE-2026-4372, CVE-2026-5241)
_CODE_FIELDS = ("auto_map", "trust_remote_code", "custom_pipelines", "use_kernels", "kernel_config")
_INTERFACE_FIELDS = (
    "_attn_implementation_internal",
    "_experts_implementation_internal",
    "_attn_implementation",
    "_experts_implementation",
    "attn_implementation",
    "experts_implementation",
)
_PLAIN_INTERFACES = (None, "eager", "sdpa", "flash_attention_2", "flex_attention", "grouped_mm", "batched_mm")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def check_source(name: str, revision: str | None, *, needs_weights: bool = True) -> None:
    """Refuse a model whose files would run code or are damaged, before transformers touches them.

    `name` is a folder or a hub id; of a hub id only config.json is fetched here. Raises SecurityError (code in
    config.json, pickled weights, paths that leave the folder), CheckpointError (damaged safetensors) or UsageError.
    """
    read_model_config(name, revision)
    if needs_weights and Path(name).is_dir():
        check_weights(Path(name))


def read_model_config(name: str, revision: str | None) -> dict[str, Any]:
    """The config.json of a folder or hub id as plain data, checked to ask for no code; without torch.

    Raises UsageError (nothing there, not a model) or SecurityError.
    """
    folder = Path(name)
    if folder.is_dir():
        config = _folder_config(folder)
    elif folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise UsageError(f"model.name: there is no folder {name}; give a folder or a hub id such as org/model")
    else:
        config = _hub_config(name, revision)
    check_config(config, f"{name}/config.json")
    return config


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Raise SecurityError when a config.json, at any depth, asks for code: remote classes, hub kernels, internals."""
    for field, value in _walk(config):
        asks_for_code = field in _CODE_FIELDS and value not in (None, False)
        names_a_kernel = field in _INTERFACE_FIELDS and not isinstance(value, dict) and value not in _PLAIN_INTERFACES
        if asks_for_code or names_a_kernel:
            raise SecurityError(
                f"{where}: {field} = {value!r} would run code from outside; flatout never does. "
                "If transformers itself has this architecture, use a copy of the folder without that field"
            )


def check_weights(folder: Path) -> None:
    """Check that a model folder has whole safetensors files and nothing that must be unpickled.

    Reads the headers only. Raises SecurityError, CheckpointError (names the file) or UsageError.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
        if pickles:
            raise SecurityError(
                f"{folder} has only pickled weights ({', '.join(pickles[:3])}), which run code when opened; convert "
                "them where that is safe: torch.load(file, weights_only=True), then safetensors.torch.save_file"
            )
        raise UsageError(f"{folder} has no *.safetensors weights; give a model folder or set model.init: random")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        for shard in set(_read_json(index).get("weight_map", {}).values()):
            if Path(shard).name != shard:
                raise SecurityError(
                    f"{index}: weight file {shard!r} lies outside the folder; only plain names are read"
                )
            if not (folder / shard).is_file():
                raise CheckpointError(f"{index}: weight file {shard} is missing; download or copy it again")
    for file in files:
        check_safetensors(file)


def check_safetensors(file: Path) -> None:
    """Open a safetensors file's header; raises CheckpointError naming the file when it is damaged."""
    try:
        with safe_open(file, framework="pt") as opened:
            opened.keys()
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is no readable safetensors file ({error}); download or copy it again") from error


def _folder_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if file.is_file():
        return _read_json(file)
    if (folder / "adapter_config.json").is_file():
        raise UsageError(f"{folder} is an adapter, not a model; give its base model, and the adapter as such")
    raise UsageError(f"{folder} has no config.json; give a folder of a transformers model")


def _hub_config(name: str, revision: str | None) -> dict[str, Any]:
    from huggingface_hub import hf_hub_download

    try:
        return _read_json(Path(hf_hub_download(name, "config.json", revision=revision)))
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"model.name: there is no folder {name}, and the hub gives no config.json for it: {reason}"
        ) from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is no readable JSON ({error}); download or copy it again") from error
    if not isinstance(content, dict):
        raise UsageError(f"{file} holds {type(content).__name__}, not an object; download or copy it again")
    return content


def _walk(value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for field, inner in value.items():
            yield str(field), inner
            yield from _walk(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _walk(inner)
