"""What a user points at, a run folder, an adapter, a model folder or a hub id, resolved to base, adapter, tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoTokenizer, PreTrainedModel

from flatout.errors import CheckpointError, ResourceError, UsageError
from flatout.models.device_map import describe_devices, waits_elsewhere
from flatout.models.export import ADAPTER_CONFIG, apply_adapter
from flatout.models.load import load_for_inference

FINAL_DIR = "final"


@dataclass(frozen=True, slots=True)
class Trained:
    """A base model (folder or hub id, revision), an adapter folder if any, and where the tokenizer is."""

    base: str
    revision: str | None
    adapter: Path | None
    tokenizer: str


def find_trained(target: str, *, base: str | None = None) -> Trained:
    """Resolve a run folder, adapter folder, model folder or hub id; `base` overrides the adapter's base model.

    A run folder has `final/` (adapter or model) and `config.yaml` (the base model's name and revision).
    Raises UsageError (unfinished run, no base named) or CheckpointError (unreadable adapter_config.json).
    """
    folder, revision = Path(target), None
    if (folder / "config.yaml").is_file():
        if not (folder / FINAL_DIR).is_dir():
            raise UsageError(f"{folder} has no {FINAL_DIR}/: the run is not finished; resume it with flatout train")
        model_section = _run_model(folder / "config.yaml")
        folder = folder / FINAL_DIR
        if base is None and (folder / ADAPTER_CONFIG).is_file():
            base, revision = model_section["name"], model_section.get("revision")
    if not (folder / ADAPTER_CONFIG).is_file():
        name = str(folder) if folder.is_dir() else target
        return Trained(base=name, revision=None, adapter=None, tokenizer=name)
    base = base or _adapter_base(folder / ADAPTER_CONFIG)
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    return Trained(base=base, revision=revision, adapter=folder, tokenizer=str(folder) if has_tokenizer else base)


def load_trained(
    trained: Trained, *, device: torch.device, dtype: torch.dtype | None = None, device_map: str | None = None
) -> tuple[PreTrainedModel, Any]:
    """The model with its adapter on it, frozen and in eval mode, and its tokenizer.

    Raises as load_for_inference, and ResourceError for an adapter on a model that does not fit on the mapped GPUs.
    """
    model = load_for_inference(
        trained.base, revision=trained.revision, device=device, dtype=dtype, device_map=device_map
    )
    if trained.adapter is not None:
        if waits_elsewhere(model):
            raise ResourceError(
                f"{trained.base} does not fit on these GPUs ({describe_devices(model)}), and an adapter needs its "
                "weights in place; use more GPUs, or merge the adapter with flatout merge and chat with the result"
            )
        apply_adapter(model, trained.adapter)
        model.eval()
    return model, load_tokenizer(trained)


def load_tokenizer(trained: Trained) -> Any:
    """The tokenizer beside the adapter or model; raises UsageError when there is none."""
    try:
        return AutoTokenizer.from_pretrained(trained.tokenizer, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"{trained.tokenizer} has no usable tokenizer: {str(error).splitlines()[0]}") from error


def _run_model(file: Path) -> dict[str, Any]:
    try:
        section = yaml.safe_load(file.read_text(encoding="utf-8"))["model"]
        return {"name": str(section["name"]), "revision": section.get("revision")}
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} does not name the run's model (model.name); give --base") from error


def _adapter_base(file: Path) -> str:
    try:
        name = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged ({error}); copy the adapter again") from error
    if not name:
        raise UsageError(f"{file} names no base model; give it with --base")
    return str(name)
