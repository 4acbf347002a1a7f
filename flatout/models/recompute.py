"""Activations that are computed again in the backward pass, or wait in host memory, instead of being kept."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from flatout.config.schema import Recompute
from flatout.models.host_copies import HostCopies

# share of the activations, beyond each layer's inputs, that `partial` lets the compiler keep
PARTIAL_BUDGET = 0.5


def apply_recompute(model: PreTrainedModel, level: Recompute) -> None:
    """Set a model's level, once, before its layers are compiled; lean and partial act in `compiling_with` alone."""
    if level in ("layers", "offload"):
        checkpoint_layers(model)
    if level == "offload":
        offload_layer_inputs(model)


def compiling_with(level: Recompute) -> AbstractContextManager[object]:
    """Around everything that compiles layers. `lean` lets the compiler compute again what only a product reads, and
    `partial` gives it a memory budget, for which it chooses what to compute again (a knapsack; both are torch's)."""
    if level not in ("lean", "partial"):
        return nullcontext()
    from torch._functorch import config

    changes: dict[str, float] = {"ban_recompute_materialized_backward": False}
    if level == "partial":
        changes = {"activation_memory_budget": PARTIAL_BUDGET}
    patched: AbstractContextManager[object] = config.patch(changes)
    return patched


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Keep only each decoder layer's input; the rest of the layer is computed again in the backward pass."""
    # non-reentrant: needs no gradient on the inputs, and keeps the random state for dropout
    arguments = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)


def offload_layer_inputs(model: PreTrainedModel) -> HostCopies:
    """Keep what checkpointed layers keep, their inputs, in host memory between forward and backward.

    Exact: the same bytes come back. Works for eager and compiled layers alike, since both save their inputs through
    autograd; the hooks stand on the decoder, outside of what is compiled.
    """
    copies = HostCopies(width=model.config.get_text_config().hidden_size)

    def enter(decoder: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            copies.open()

    def leave(decoder: nn.Module, args: Any, output: Any) -> None:
        copies.close()

    decoder = model.get_decoder()
    decoder.register_forward_pre_hook(enter, with_kwargs=True)
    # always: an error in the forward pass (out of memory) must not leave the hooks behind
    decoder.register_forward_hook(leave, always_call=True)
    return copies
