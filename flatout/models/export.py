"""Merge adapters into their base, and write plain Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from flatout.errors import ResourceError, UsageError
from flatout.io.durable_io import DurableIO
from flatout.io.hub import hub_file
from flatout.models.lora.layer import adapted_modules, remove_adapter
from flatout.models.lora.saved import untie

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
        own = model.state_dict(keep_vars=True)
        # a tied tensor is cast once, so that its entries still share one
        cast = {old: old.detach().to(dtype if old.is_floating_point() else old.dtype) for old in set(own.values())}
        state = {name: cast[old] for name, old in own.items()}
    # a copy, as transformers removes what it has written
    model.save_pretrained(folder, state_dict=None if state is None else {**state, **keep})
    if state is not None:
        config_file = folder / "config.json"
        content = json.loads(config_file.read_text(encoding="utf-8"))
        content["dtype"] = str(dtype).removeprefix("torch.")
        config_file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def copy_processor(name: str, folder: Path) -> None:
    """Copy the files of a hub id's or folder's image processor, if it has one, beside a model or adapter."""
    for file in PROCESSOR_FILES:
        if (path := hub_file(name, file, None)) is not None:
            (folder / file).write_bytes(path.read_bytes())


def publish_model(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Call `save_model` for a folder that is empty or missing, durably and atomically.

    It is first written next to the folder; leftovers of a killed call are removed. Raises ResourceError.
    """
    durable_io, empty = DurableIO(), folder.with_name(f".{folder.name}.old")
    with durable_io.replace_dir(folder, aside=empty) as new:
        tensors = {tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}
        durable_io.require_free(folder.parent, sum(tensors.values()))
        with durable_io.resource_errors("write", folder):
            try:
                save_model(model, tokenizer, new)
            except SafetensorError as error:
                remedy = "free some space or choose a different folder"
                raise ResourceError(f"cannot write {folder}: {error}; {remedy}") from error
        durable_io.sync_tree(new)
        durable_io.remove_tree(empty)
    durable_io.remove_tree(empty)
