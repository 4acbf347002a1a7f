"""Recompute activations in the backward pass, or offload them to host memory, instead of keeping them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from transformers import PreTrainedModel

from flatout.config.schema import Recompute
from flatout.kernels.host_rows import gather_rows
from flatout.models.compile.activation_offload import ActivationOffload

# share of the activations, beyond each layer's inputs, that `budget` lets the compiler keep
MEMORY_BUDGET = 0.5


def apply_recompute(model: PreTrainedModel, level: Recompute) -> bool:
    """Apply a model's recompute level, once; `selective` and `budget` only act in `compiling_with`.

    `full` keeps only each decoder layer's input; `offload` moves those inputs and the embedding to the host.
    Returns whether the embedding was moved.
    """
    if level not in ("full", "offload"):
        return False
    # non-reentrant needs no gradient on the inputs; checkpointing preserves the random state for dropout
    arguments = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    if level == "full":
        return False
    ActivationOffload(model)
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


class HostEmbedding(nn.Module):
    """A frozen embedding whose table (V, D) stays in host memory; each pass copies its tokens' rows, (..., D)."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        table = embedding.weight.detach()
        host = torch.empty(table.shape, dtype=table.dtype, pin_memory=table.is_cuda)
        # neither parameter nor buffer, so that nothing moves it back to the device
        self.weight = host.copy_(table)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return gather_rows(self.weight, token_ids)


def offload_embedding(model: PreTrainedModel) -> bool:
    """Move a frozen, plain, untied input embedding to host memory, exactly; return whether it moved."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    # a subclass may do more than look up rows (Gemma's scales them)
    if type(embedding) is not nn.Embedding or embedding.weight.requires_grad or embedding.max_norm is not None:
        return False
    if head is None or head.weight.data_ptr() == embedding.weight.data_ptr():
        return False
    model.set_input_embeddings(HostEmbedding(embedding))
    return True
