"""Merge adapters into their base, and write plain Hugging Face folders; from folder to folder, too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel

from flatout.errors import FlatoutError, ResourceError, UsageError, reason_of
from flatout.io.durable_io import DurableIO
from flatout.io.gpu_driver import require_gpu_driver
from flatout.io.hub import hub_file
from flatout.models.load.auto_class import is_scoring
from flatout.models.load.inference import ModelPaths, load_trained, resolve_model_paths
from flatout.models.lora.layer import adapted_modules, remove_adapter
from flatout.models.lora.saved import untie
from flatout.models.stops import set_stops, stop_token_ids

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""What comes with a model that reads pictures, beside its tokenizer."""


@torch.no_grad()
def merge(model: PreTrainedModel) -> int:
    """Merge every adapter into its base weight, in fp32 (fp64 over fp64), cast to the base's dtype; return how many.

    All that `add_lora` replaced is put back, so the plain model's names and classes are restored. Tied embeddings and
    head that were trained apart are no longer tied.
    """
    untie(model)
    layers = adapted_modules(model)
    for layer in layers.values():
        layer.merge()
    remove_adapter(model)
    return len(layers)


def save_model(
    model: PreTrainedModel,
    tokenizer: Any,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    state: dict[str, torch.Tensor] | None = None,
    keep: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Write a plain Hugging Face folder: safetensors, config with its dtype, generation config, tokenizer.

    Floating weights are cast to `dtype` (None: not cast). Tied weights are written once and stay tied. `tokenizer` may
    be None. `state` is the model's full state, already in `dtype`, if its own tensors are sharded. Those of `keep`
    replace the ones of the same name, uncast. Raises UsageError for a model with LoRA layers (merge first).
    """
    if adapted_modules(model):
        raise UsageError("this model still has LoRA layers; merge it, or save the adapter")
    dtype = dtype or model.dtype
    if state is None and dtype != model.dtype:
        tensors = model.state_dict(keep_vars=True)
        # a tied tensor is cast once, so that its entries still share one
        cast = {old: old.detach().to(dtype if old.is_floating_point() else old.dtype) for old in set(tensors.values())}
        state = {name: cast[old] for name, old in tensors.items()}
    # a copy, as transformers removes what it has written
    model.save_pretrained(folder, state_dict=None if state is None else {**state, **keep})
    if state is not None:
        config_file = folder / "config.json"
        content = json.loads(config_file.read_text(encoding="utf-8"))
        content["dtype"] = str(dtype).removeprefix("torch.")
        config_file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def copy_processor(name: str, folder: Path, revision: str | None = None) -> None:
    """Copy the files of a hub id's or folder's image processor, if it has one, beside a model or adapter."""
    for file in PROCESSOR_FILES:
        if (path := hub_file(name, file, revision)) is not None:
            (folder / file).write_bytes(path.read_bytes())


def publish_model(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Call `save_model` for a folder that is empty or missing, durably and atomically.

    It is first written next to the folder; leftovers of a killed call are removed. Raises ResourceError.
    """
    durable_io = DurableIO()
    with durable_io.replace_dir(folder) as new:
        tensors = {tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}
        durable_io.require_free(folder.parent, sum(tensors.values()))
        with durable_io.resource_errors("write", folder):
            save_model(model, tokenizer, new)
            if hasattr(model.config, "vision_config"):
                # what a model in memory was loaded from may be gone
                with suppress(FlatoutError) if tokenizer is None else nullcontext():
                    # transformers keeps the commit of weights from the hub
                    copy_processor(model.name_or_path, new, getattr(model.config, "_commit_hash", None))
                if name := getattr(tokenizer, "name_or_path", ""):
                    copy_processor(name, new)


def merge_adapter(target: str, out: Path, *, base: str | None = None, device: str = "cpu") -> str:
    """Merge the adapter of a run or adapter folder, and write a plain Hugging Face folder to `out`; say what was done.

    Raises UsageError if there is no adapter, and ResourceError if `out` is not empty or cannot be written, or without
    the device.
    """
    if device == "cuda":
        require_gpu_driver("--device cuda")
    require_empty(out)
    # fail before the model is loaded if the folder cannot be created
    DurableIO().make_dir(out)
    trained = resolve_model_paths(target, base=base)
    if trained.adapter is None:
        raise UsageError(f"{target} has no adapter to merge: it is a plain model already; use it as it is")
    model, tokenizer, num_layers = load_merged(trained, device=device)
    publish_model(model, tokenizer, out)
    dtype = str(model.dtype).removeprefix("torch.")
    return f"{out}: {trained.base} with {num_layers} layers of {trained.adapter} merged ({dtype})"


def require_empty(out: Path) -> None:
    """Raise ResourceError for an output folder with content and for a link, UsageError for one that cannot be read."""
    try:
        if out.is_symlink():
            raise ResourceError(f"out: {out} is a link, which the folder would replace; name the folder itself")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ResourceError(f"out: {out} already exists and is not empty; choose a different folder")
    except OSError as error:
        raise UsageError(f"out: {out}: {reason_of(error)}; choose a different folder") from error


def load_merged(trained: ModelPaths, *, device: str = "cpu") -> tuple[PreTrainedModel, Any, int]:
    """Return a plain model with the adapter merged in, its tokenizer, and the number of merged layers (0: no adapter).

    Its generation_config stops where the chat template ends an answer. Raises as `load_trained`.
    """
    model, tokenizer = load_trained(trained, device=torch.device(device), writes=False)
    if is_scoring(model.config):
        return model, tokenizer, merge(model)
    try:
        set_stops(model, stop_token_ids(model, tokenizer))
    except Exception:  # noqa: BLE001  (a template is a program: one that refuses this chat names no end)
        set_stops(model, stop_token_ids(model, tokenizer, ()))
    return model, tokenizer, merge(model)
