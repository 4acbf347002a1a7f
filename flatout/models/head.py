"""From a packed batch to its summed loss: hidden states of the label rows only, logits by tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from flatout.errors import UsageError
from flatout.kernels.cross_entropy import DEFAULT_TILE_ROWS, ROWS_MULTIPLE, is_fused, token_loss
from flatout.models.families import logits_scale
from flatout.models.packed import PackedBatch, pack

if TYPE_CHECKING:
    from flatout.models.graphs import GraphedDecoder


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over the label tokens of one micro-batch, never means: the caller divides once, by the step's global count.

    `loss_sum` 0-d fp32 (fp64 in fp64) with its graph; `num_correct` 0-d int64, tokens whose largest logit is right.
    """

    loss_sum: torch.Tensor
    num_correct: torch.Tensor


def hidden_states(model: PreTrainedModel, batch: PackedBatch) -> torch.Tensor:
    """Last hidden states (T, D) of a packed batch; documents see only themselves. `model` comes from load_model."""
    token_ids = batch.token_ids[None]
    output = model.get_decoder()(
        input_ids=token_ids,
        # all tokens are real: without this, transformers looks for documents in the positions, and waits for the GPU
        attention_mask=torch.ones_like(token_ids, dtype=torch.bool),
        position_ids=batch.position_ids[None],
        use_cache=False,
        **document_arguments(batch),
    )
    states: torch.Tensor = output.last_hidden_state[0]
    return states


def document_arguments(batch: PackedBatch) -> dict[str, Any]:
    """The documents' borders under the names by which transformers hands them to every attention layer."""
    return {"cu_seq_lens_q": batch.cu_seqlens, "max_length_q": batch.max_seqlen}


def packed_loss(
    model: PreTrainedModel,
    batch: PackedBatch,
    *,
    decoder: Callable[[PackedBatch], torch.Tensor] | None = None,
    tile_rows: int = DEFAULT_TILE_ROWS,
) -> LossSums:
    """Summed cross-entropy of a packed batch's label tokens, and how many of them the model gets right.

    `decoder` gives the last hidden states in place of `hidden_states`. A batch without labels gives 0 with a live
    graph. Logit scale and soft-cap of the model's config are honoured. A mixture-of-experts router's balancing loss is
    not added. Raises UsageError for a model without an output head.
    """
    states = hidden_states(model, batch) if decoder is None else decoder(batch)
    rows = states.index_select(0, batch.label_rows)
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise UsageError(f"model type {model.config.model_type} has no output head; flatout trains causal LMs only")
    config = model.config.get_text_config()
    scale, softcap = logits_scale(config), getattr(config, "final_logit_softcapping", None)
    if _is_plain_linear(head):
        with record_function("flatout::head"):
            loss_sum, num_correct = token_loss(
                rows, head.weight, batch.label_ids, scale=scale, softcap=softcap, tile_rows=tile_rows,
                compute_dtype=_compute_dtype(rows),
            )  # fmt: skip
        return LossSums(loss_sum, num_correct)
    return _module_loss(head, rows, batch.label_ids, scale=scale, softcap=softcap, tile_rows=tile_rows)


class PackedLoss(nn.Module):
    """`packed_loss` of one model as a module: the root that a run calls and a strategy may shard.

    The head's weight is read outside the model's own forward, so sharding must begin around both.
    """

    def __init__(self, model: PreTrainedModel, *, tile_rows: int = DEFAULT_TILE_ROWS) -> None:
        super().__init__()
        self.model = model
        self.tile_rows = tile_rows
        # gives hidden states by recorded graphs; None: as the model runs by itself
        self.decoder: GraphedDecoder | None = None

    def forward(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss_sum, num_correct) of `LossSums`, as a tuple, in which sharding finds the tensors."""
        sums = packed_loss(self.model, batch, decoder=self.decoder, tile_rows=self.tile_rows)
        return sums.loss_sum, sums.num_correct


def prepare_head(model: PreTrainedModel, tile_rows: int) -> None:
    """Run the loss once for every size of a tile, so that no step is the first of one and waits while kernels load.

    Under the autocast of its steps; leaves no gradient. A head whose tiles are not filled up, that is cut over ranks,
    or that is no plain linear layer, is left alone.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module) or not _is_plain_linear(head) or hasattr(head.weight, "to_local"):
        return
    if not is_fused(model.device, _compute_dtype(head.weight)):
        return
    for num_rows in range(ROWS_MULTIPLE, tile_rows + 1, ROWS_MULTIPLE):
        # a document's first token is never predicted
        document = (np.zeros(num_rows + 1, np.int64), np.ones(num_rows + 1, bool))
        states = head.weight.new_zeros(num_rows + 1, head.weight.shape[1]).requires_grad_()
        batch = pack([document]).to(model.device)
        packed_loss(model, batch, decoder=partial(_first, states), tile_rows=tile_rows)


def _first(states: torch.Tensor, _: PackedBatch) -> torch.Tensor:
    return states


def _module_loss(
    head: nn.Module, rows: torch.Tensor, targets: torch.Tensor, *, scale: float, softcap: float | None, tile_rows: int
) -> LossSums:
    """Any head (LoRA on it, a bias, something unusual): the module itself, each tile recomputed in the backward."""

    def tile_loss(tile: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = head(tile)
        logits = product.to(torch.promote_types(product.dtype, torch.float32)) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return F.cross_entropy(logits, ids, reduction="sum"), (logits.argmax(-1) == ids).sum()

    tiles = [
        checkpoint(tile_loss, tile, ids, use_reentrant=False)
        for tile, ids in zip(rows.split(tile_rows), targets.split(tile_rows), strict=True)
    ]
    loss_sum = torch.stack([loss for loss, _ in tiles]).sum()
    return LossSums(loss_sum, torch.stack([correct for _, correct in tiles]).sum())


def _is_plain_linear(head: nn.Module) -> TypeGuard[nn.Linear]:
    # an exact type: a subclass or a hook may compute something else
    return type(head) is nn.Linear and head.bias is None and not head._forward_hooks and not head._forward_pre_hooks


def _compute_dtype(rows: torch.Tensor) -> torch.dtype:
    device_type = rows.device.type
    lower = torch.is_autocast_enabled(device_type) and rows.dtype != torch.float64
    return torch.get_autocast_dtype(device_type) if lower else rows.dtype
