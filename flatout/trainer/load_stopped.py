"""The model of a run that stopped before its end, from its newest checkpoint, to talk to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from flatout.checkpoint.write import Checkpoints
from flatout.config.folders import how_to_finish
from flatout.config.read import load_config
from flatout.data import registry
from flatout.data.token_store import TokenStore
from flatout.data.tokenizer import tokenizer_of
from flatout.errors import CheckpointError, UsageError
from flatout.models.load.inference import NOT_WRITING, load_for_inference
from flatout.models.lora.layer import add_lora
from flatout.models.scoring import SCORE
from flatout.models.stops import give_template, set_stops, stop_token_ids


def load_stopped(folder: Path, device: torch.device) -> tuple[PreTrainedModel, Any, int]:
    """Return the model as `load_trained` does, its tokenizer, and the step of the checkpoint.

    Raises UsageError for a run whose weights cannot be told without its end: one without a checkpoint, from random
    weights or with new tokens, or that scores texts; CheckpointError for a damaged one.
    """
    config = load_config(folder / "config.yaml")
    resume = how_to_finish(folder)
    saved = Checkpoints(folder, keep=1, on_event=lambda kind, facts: None).newest()
    if saved is None:
        raise UsageError(f"{folder} has no final/ and no checkpoint yet; {resume}")
    if config.model.init != "pretrained" or config.data.added_tokens:
        what = "new tokens" if config.data.added_tokens else "random weights"
        raise UsageError(f"{folder} is not finished, and a run with {what} answers only once it is; {resume}")
    weights = saved.tensors["model"]
    if any(SCORE in name.split(".") for name in weights):
        raise UsageError(NOT_WRITING.format(folder))
    model = load_for_inference(config.model.name, revision=config.model.revision, device=device)
    if config.method == "lora":
        # the checkpoint has the values, so code that only starts them is not run
        lora = config.lora.model_copy(update={"init_path": None})
        add_lora(model, lora, seed=config.seed, parts=config.model.trained_parts)
    tensors = dict(model.state_dict(keep_vars=True))
    if odd := next(
        (name for name in weights if name not in tensors or tensors[name].shape != weights.shapes[name]), None
    ):
        raise CheckpointError(f"{saved.path} trains {odd}, which {config.model.name} does not have; {resume}")
    for name in weights:
        weights.copy_into(name, tensors[name])
    tokenizer = tokenizer_of(config.data, config.model.name)
    root = config.data.root
    meta = TokenStore.open(registry.entry_dir(root, registry.find(root, config.data.name)), verify=False).meta
    if meta.template_text:
        give_template(tokenizer, meta.template_text, meta.stop_tokens)
    set_stops(model, stop_token_ids(model, tokenizer, meta.stop_tokens))
    return model.requires_grad_(False).eval(), tokenizer, saved.step
