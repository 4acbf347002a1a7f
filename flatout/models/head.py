"""Compute a packed batch's summed loss: only label rows reach the head, and logits are computed in tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeGuard

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from flatout.errors import UsageError
from flatout.kernels.cross_entropy.reference import product_loss, scaled_logits
from flatout.kernels.cross_entropy.tiled import DEFAULT_TILE_ROWS, ROWS_MULTIPLE, is_fused, token_loss
from flatout.models.arch_quirks import logits_scale
from flatout.models.blocks import hidden_states
from flatout.models.compile.cuda_graphs import GraphedDecoder
from flatout.models.packed import PackedBatch, flatten_samples


class LossSums(NamedTuple):
    """Sums, not means, over one micro-batch's label tokens: the caller divides once, by the step's global count.

    `loss_sum` 0-d fp32 (fp64 in fp64) with its graph; `num_correct` 0-d int64, tokens whose argmax is right.
    """

    loss_sum: torch.Tensor
    num_correct: torch.Tensor


def packed_loss(
    model: PreTrainedModel,
    batch: PackedBatch,
    *,
    decoder: Callable[[PackedBatch], torch.Tensor] | None = None,
    tile_rows: int = DEFAULT_TILE_ROWS,
) -> LossSums:
    """Compute the summed cross-entropy of a packed batch's label tokens, and how many of them are predicted right.

    `decoder` computes the last hidden states instead of `hidden_states`. A batch without labels gives 0, still attached
    to the graph. Applies the config's logit scale and soft-cap. Does not add the balancing loss of a
    mixture-of-experts router. Raises UsageError for a model without an output head.
    """
    states = hidden_states(model, batch) if decoder is None else decoder(batch)
    rows = states.index_select(0, batch.label_rows)
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise UsageError(f"model type {model.config.model_type} has no output head; flatout trains causal LMs only")
    config = model.config.get_text_config()
    scale, softcap = logits_scale(config), getattr(config, "final_logit_softcapping", None)
    if _is_unhooked_linear(head):
        with record_function("flatout::head"):
            return LossSums(
                *token_loss(
                    rows, head.weight, batch.label_ids, scale=scale, softcap=softcap, tile_rows=tile_rows,
                    compute_dtype=_compute_dtype(rows),
                )
            )  # fmt: skip

    def tile_loss(tile: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return product_loss(head(tile), ids, scale=scale, softcap=softcap)

    # any other head (with LoRA, a bias, ...) is called as a module, and recomputes its tiles in the backward pass
    tiles = [
        checkpoint(tile_loss, tile, ids, use_reentrant=False)
        for tile, ids in zip(rows.split(tile_rows), batch.label_ids.split(tile_rows), strict=True)
    ]
    loss_sum = torch.stack([loss for loss, _ in tiles]).sum()
    return LossSums(loss_sum, torch.stack([correct for _, correct in tiles]).sum())


class PackedLoss(nn.Module):
    """`packed_loss` of one model as a module, for strategies to shard: the model's forward does not use its head."""

    def __init__(self, model: PreTrainedModel, *, tile_rows: int = DEFAULT_TILE_ROWS) -> None:
        super().__init__()
        self.model = model
        self.tile_rows = tile_rows
        # computes hidden states by recorded graphs; None: the model's own forward pass
        self.decoder: GraphedDecoder | None = None

    def forward(self, batch: PackedBatch, predict: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `LossSums` as a plain tuple, in which every strategy can find the tensors.

        With `predict`, return `next_logits` instead; strategies gather sharded weights only around this method.
        """
        if predict:
            return next_logits(self.model, batch)
        loss_sum, num_correct = packed_loss(self.model, batch, decoder=self.decoder, tile_rows=self.tile_rows)
        return loss_sum, num_correct


def next_logits(model: PreTrainedModel, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits after each of a batch's label rows, (L, V) fp32 (fp64 in fp64), and the likeliest ids (L,)."""
    rows = hidden_states(model, batch).index_select(0, batch.label_rows)
    config = model.config.get_text_config()
    product = model.get_output_embeddings()(rows)
    logits = scaled_logits(product, logits_scale(config), getattr(config, "final_logit_softcapping", None))
    return logits, logits.argmax(-1)


def prepare_head(model: PreTrainedModel, tile_rows: int) -> None:
    """Run the loss once for every tile size, under training's autocast, so that no step waits while kernels load.

    It leaves no gradient, and does nothing for a head that is not fused, is sharded, or is not a plain linear layer.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module) or not _is_unhooked_linear(head) or isinstance(head.weight, DTensor):
        return
    if not is_fused(model.device, _compute_dtype(head.weight)):
        return
    for num_rows in range(ROWS_MULTIPLE, tile_rows + 1, ROWS_MULTIPLE):
        # a document's first token is never predicted
        document = (np.zeros(num_rows + 1, np.int64), np.ones(num_rows + 1, bool))
        states = head.weight.new_zeros(num_rows + 1, head.weight.shape[1]).requires_grad_()
        batch = flatten_samples([document]).to(model.device)
        packed_loss(model, batch, decoder=lambda _, states=states: states, tile_rows=tile_rows)  # type: ignore[misc]


def _is_unhooked_linear(head: nn.Module) -> TypeGuard[nn.Linear]:
    # the exact type, as a subclass or a hook may compute something else
    return type(head) is nn.Linear and head.bias is None and not head._forward_hooks and not head._forward_pre_hooks


def _compute_dtype(rows: torch.Tensor) -> torch.dtype:
    device_type = rows.device.type
    lower = torch.is_autocast_enabled(device_type) and rows.dtype != torch.float64
    return torch.get_autocast_dtype(device_type) if lower else rows.dtype
