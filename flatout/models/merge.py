"""Merge a trained adapter into its base model, from folder to folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from flatout.errors import ResourceError, UsageError, reason_of
from flatout.io.durable_io import DurableIO
from flatout.models.export import merge, publish_model
from flatout.models.load.auto_class import is_scoring
from flatout.models.load.inference import ModelPaths, load_trained, resolve_model_paths
from flatout.models.stops import set_stops, stop_token_ids


def merge_adapter(target: str, out: Path, *, base: str | None = None, device: str = "cpu") -> str:
    """Merge the adapter of a run or adapter folder, and write a plain Hugging Face folder to `out`; say what was done.

    Raises UsageError if there is no adapter, and ResourceError if `out` is not empty or cannot be written.
    """
    require_empty(out)
    # fail before the model is loaded if the folder cannot be created
    DurableIO().make_dir(out)
    trained = resolve_model_paths(target, base=base)
    if trained.adapter is None:
        raise UsageError(f"{target} has no adapter to merge: it is already a plain model; copy it instead")
    model, tokenizer, num_layers = load_merged(trained, device=device)
    publish_model(model, tokenizer, out)
    dtype = str(model.dtype).removeprefix("torch.")
    return f"merged {num_layers} layers of {trained.adapter} into {trained.base}: {out} ({dtype})"


def require_empty(out: Path) -> None:
    """Raise ResourceError for an output folder that has content, UsageError for a path that cannot be read."""
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ResourceError(f"--out: {out} already exists and is not empty; choose a different folder")
    except OSError as error:
        raise UsageError(f"--out: {out}: {reason_of(error)}; choose a different folder") from error


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
