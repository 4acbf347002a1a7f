"""Activations that are computed again in the backward pass, or wait in host memory, instead of being kept."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from flatout.config.schema import Recompute
from flatout.kernels.host_rows import gather_rows
from flatout.models.host_copies import HostCopies

# share of the activations, beyond each layer's inputs, that `partial` lets the compiler keep
PARTIAL_BUDGET = 0.5


def apply_recompute(model: PreTrainedModel, level: Recompute) -> None:
    """Set a model's level, once, before its layers are compiled; lean and partial act in `compiling_with` alone."""
    if level in ("layers", "offload"):
        checkpoint_layers(model)
    if level == "offload":
        offload_layer_inputs(model)
        offload_embedding(model)


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


class HostEmbedding(nn.Module):
    """A frozen embedding whose table (V, D) stays in host memory; each pass brings the rows of its tokens, (..., D)."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        table = embedding.weight.detach()
        host = torch.empty(table.shape, dtype=table.dtype, pin_memory=table.is_cuda)
        # no parameter and no buffer: nothing may move it to the device again
        self._table = host.copy_(table)

    @property
    def weight(self) -> torch.Tensor:
        """The table, on the host."""
        return self._table

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return gather_rows(self._table, token_ids)


def offload_embedding(model: PreTrainedModel) -> bool:
    """Keep the input embedding in host memory, where it is frozen, plain and not the head's weight too; whether it is.

    Exact: the same rows come back.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    # a subclass may do more than look up (Gemma scales)
    if type(embedding) is not nn.Embedding or embedding.weight.requires_grad or embedding.max_norm is not None:
        return False
    if head is None or head.weight.data_ptr() == embedding.weight.data_ptr():
        return False
    model.set_input_embeddings(HostEmbedding(embedding))
    return True
