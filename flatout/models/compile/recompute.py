"""Recompute activations in the backward pass, or offload them to host memory, instead of keeping them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from flatout.config.schema import Recompute
from flatout.kernels.host_rows import gather_rows
from flatout.models.blocks import text_decoder
from flatout.models.compile.activation_offload import ActivationOffload

# share of the activations, beyond each layer's inputs, that `budget` lets the compiler keep
MEMORY_BUDGET = 0.5


def apply_recompute(model: PreTrainedModel, level: Recompute) -> bool:
    """Apply a model's recompute level, once; `selective` and `budget` only act in `compiling_with`.

    Returns whether the embedding was moved to the host.
    """
    if level in ("full", "offload"):
        checkpoint_layers(model)
    if level != "offload":
        return False
    offload_layer_inputs(model)
    return offload_embedding(model)


def compiling_with(level: Recompute) -> AbstractContextManager[object]:
    """Set torch's compiler options for a level while layers are compiled.

    `selective` lets the compiler recompute what only a matrix product reads; `budget` gives it a memory budget, within
    which it chooses what to recompute (as a knapsack problem).
    """
    if level not in ("selective", "budget"):
        return nullcontext()
    from torch._functorch import config

    changes: dict[str, float] = {"ban_recompute_materialized_backward": False}
    if level == "budget":
        changes = {"activation_memory_budget": MEMORY_BUDGET}
    patched: AbstractContextManager[object] = config.patch(changes)
    return patched


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Keep only each decoder layer's input; the rest of the layer is recomputed in the backward pass."""
    # non-reentrant needs no gradient on the inputs; checkpointing preserves the random state for dropout
    arguments = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)


def offload_layer_inputs(model: PreTrainedModel) -> ActivationOffload:
    """Keep the inputs that checkpointed layers save in host memory between forward and backward.

    Exact: the same bytes come back. Works for both eager and compiled layers, since both save their inputs through
    autograd; the hooks are on the decoder, outside of the compiled regions.
    """
    copies = ActivationOffload(width=model.config.get_text_config().hidden_size)

    def enter(decoder: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            copies.open()

    def leave(decoder: nn.Module, args: Any, output: Any) -> None:
        copies.close()

    decoder = text_decoder(model)
    decoder.register_forward_pre_hook(enter, with_kwargs=True)
    # always_call, so that an error in the forward pass (out of memory) also removes the saved-tensor hooks
    decoder.register_forward_hook(leave, always_call=True)
    return copies


class HostEmbedding(nn.Module):
    """A frozen embedding whose table (V, D) stays in host memory; each pass copies its tokens' rows, (..., D)."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        table = embedding.weight.detach()
        host = torch.empty(table.shape, dtype=table.dtype, pin_memory=table.is_cuda)
        # neither parameter nor buffer, so that nothing moves it back to the device
        self._table = host.copy_(table)

    @property
    def weight(self) -> torch.Tensor:
        """The table, on the host."""
        return self._table

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return gather_rows(self._table, token_ids)


def offload_embedding(model: PreTrainedModel) -> bool:
    """Move a frozen, plain, untied input embedding to host memory; return whether it moved.

    Exact: the same rows come back.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    # a subclass may do more than look up rows (Gemma's scales them)
    if type(embedding) is not nn.Embedding or embedding.weight.requires_grad or embedding.max_norm is not None:
        return False
    if head is None or head.weight.data_ptr() == embedding.weight.data_ptr():
        return False
    model.set_input_embeddings(HostEmbedding(embedding))
    return True
