"""Resolve a run folder, adapter, model folder or hub id to its base model, adapter and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoTokenizer, PreTrainedModel

from flatout.errors import CheckpointError, ResourceError, UsageError, reason_of
from flatout.io.hub import hub_errors, hub_source
from flatout.io.json_file import read_json
from flatout.models.load.device_map import describe_devices
from flatout.models.load.model import library_errors, load_for_inference
from flatout.models.lora.adapter import ADAPTER_CONFIG, apply_adapter

FINAL_DIR = "final"


@dataclass(frozen=True, slots=True)
class ModelPaths:
    """A base model (folder or hub id, revision), an adapter folder if any, and where the tokenizer is."""

    base: str
    revision: str | None
    adapter: Path | None
    tokenizer: str


def resolve_model_paths(target: str, *, base: str | None = None) -> ModelPaths:
    """Resolve a run folder, adapter folder, model folder or hub id; `base` overrides the adapter's base model.

    A run folder has `final/` (adapter or model) and `config.yaml` (the base model's name and revision).
    Raises UsageError (unfinished run, unknown base) or CheckpointError (unreadable adapter_config.json).
    """
    folder, revision = Path(target), None
    try:
        is_run = (folder / "config.yaml").is_file()
    except OSError as error:
        raise UsageError(f"{target:.100}: {reason_of(error)}; give a folder or a hub id such as org/model") from error
    if is_run:
        if not (folder / FINAL_DIR).is_dir():
            raise UsageError(f"{folder} has no {FINAL_DIR}/: the run is not finished; resume it with flatout train")
        file, folder = folder / "config.yaml", folder / FINAL_DIR
        if base is None and (folder / ADAPTER_CONFIG).is_file():
            try:
                section = yaml.safe_load(file.read_text(encoding="utf-8"))["model"]
                base, revision = section["name"], section.get("revision")
                if not isinstance(base, str) or not isinstance(revision, str | None):
                    raise TypeError("no text")
            except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointError(f"{file} does not name the run's model (model.name); give --base") from error
    if not (folder / ADAPTER_CONFIG).is_file():
        name = str(folder) if folder.is_dir() else target
        return ModelPaths(base=name, revision=None, adapter=None, tokenizer=name)
    if base is None:
        file = folder / ADAPTER_CONFIG
        content = read_json(file)
        base = content.get("base_model_name_or_path") if isinstance(content, dict) else None
        if not base or not isinstance(base, str):
            raise UsageError(f"{file} names no base model; give it with --base, or copy the adapter again")
    tokenizer = str(folder) if (folder / "tokenizer_config.json").is_file() else base
    return ModelPaths(base=base, revision=revision, adapter=folder, tokenizer=tokenizer)


def load_trained(
    trained: ModelPaths, *, device: torch.device, device_map: str | None = None
) -> tuple[PreTrainedModel, Any]:
    """Load the model with its adapter, frozen and in eval mode, and its tokenizer.

    Raises like load_for_inference, ResourceError for an adapter on a model that does not fit on the mapped GPUs, and
    UsageError if there is no tokenizer.
    """
    model = load_for_inference(trained.base, revision=trained.revision, device=device, device_map=device_map)
    if trained.adapter is not None:
        # weights that are offloaded are copied to the device that computes with them in each pass
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ResourceError(
                f"{trained.base} does not fit on these GPUs ({describe_devices(model)}), and an adapter needs its "
                "weights in place; use more GPUs, or merge the adapter with flatout merge and chat with the result"
            )
        apply_adapter(model, trained.adapter)
        model.eval()
    with library_errors(f"{trained.tokenizer} has no usable tokenizer"):
        source, _ = hub_source(trained.tokenizer, None)
        with hub_errors(trained.tokenizer):
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UsageError(f"{trained.tokenizer} has no tokenizer: tokenizer.json is missing or empty; copy it again")
    return model, tokenizer
