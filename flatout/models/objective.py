"""The training loss as a plug: what it needs of a micro-batch, and what a step's sum is divided by."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from flatout.errors import UsageError
from flatout.kernels.cross_entropy.reference import product_loss, scaled_logits
from flatout.kernels.cross_entropy.tiled import token_loss
from flatout.models.arch_quirks import UNSCALED_LOGITS, logits_cap, logits_scale, num_logits
from flatout.models.lora.saved import SavedModule, TrainedRows
from flatout.models.packed import PackedBatch


class LossSums(NamedTuple):
    """Sums, not means, over one micro-batch's rows: the caller divides once, by the step's global divisor.

    `loss_sum` 0-d fp32 (fp64 in fp64) with its graph; `num_correct` 0-d int64, tokens whose argmax is right.
    """

    loss_sum: torch.Tensor
    num_correct: torch.Tensor


class TokenLosses(NamedTuple):
    """Cross-entropy (L,) fp32 (fp64 in fp64) of each row, with its graph, and whether its argmax is right (L,)."""

    losses: torch.Tensor
    is_correct: torch.Tensor


class TokenHead:
    """A model's output head with its logit scale, soft-cap and number of logits, as an objective calls it.

    `tile_rows` bounds memory.

    Raises UsageError for a model without an output head.
    """

    def __init__(self, model: PreTrainedModel, tile_rows: int) -> None:
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Module):
            raise UsageError(f"model type {model.config.model_type} has no output head; flatout trains causal LMs only")
        config = model.config.get_text_config()
        self._head, self._tile_rows = head, tile_rows
        self._scale = 1.0 if model.config.model_type in UNSCALED_LOGITS else logits_scale(config)
        self._softcap, self._num_logits = logits_cap(config), num_logits(config)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return logits (L, V) in fp32 (fp64 in fp64) of hidden states `rows` (L, D)."""
        return scaled_logits(self._head(rows)[..., : self._num_logits], self._scale, self._softcap)

    def cross_entropy(self, rows: torch.Tensor, ids: torch.Tensor) -> LossSums:
        """Return the summed cross-entropy of hidden states `rows` (L, D) for the tokens `ids` (L,), in tiles."""
        if (product := head_product(self._head)) is not None:
            weight = product[0] if self._num_logits is None else product[0][: self._num_logits]
            with record_function("flatout::head"):
                return LossSums(
                    *token_loss(
                        rows, weight, ids, trained_rows=product[1], scale=self._scale, softcap=self._softcap,
                        tile_rows=self._tile_rows, compute_dtype=compute_dtype(rows),
                    )
                )  # fmt: skip

        # any other head (with LoRA, a bias, ...) is called as a module
        def tile_loss(tile: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            product = self._head(tile)[..., : self._num_logits]
            return product_loss(product, ids, scale=self._scale, softcap=self._softcap)

        tiles = self._in_tiles(tile_loss, rows, ids)
        return LossSums(
            torch.stack([loss for loss, _ in tiles]).sum(), torch.stack([right for _, right in tiles]).sum()
        )

    def token_losses(self, rows: torch.Tensor, ids: torch.Tensor) -> TokenLosses:
        """Return the cross-entropy of each row of `rows` (L, D) for the token in `ids` (L,), in tiles."""

        def tile_losses(tile: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.logits(tile)
            return F.cross_entropy(logits, ids, reduction="none"), logits.argmax(-1) == ids

        tiles = self._in_tiles(tile_losses, rows, ids)
        return TokenLosses(torch.cat([losses for losses, _ in tiles]), torch.cat([right for _, right in tiles]))

    def _in_tiles(self, tile_loss: Any, rows: torch.Tensor, ids: torch.Tensor) -> list[Any]:
        """Call `tile_loss` on each tile, which is recomputed in the backward pass: its logits are not kept."""
        tiles = zip(rows.split(self._tile_rows), ids.split(self._tile_rows), strict=True)
        return [checkpoint(tile_loss, tile, tile_ids, use_reentrant=False) for tile, tile_ids in tiles]


class Objective(Protocol):
    """A training loss that is a sum over rows of hidden states, divided once by a number known before step 0.

    The gradient of a step is that of sum(loss_sums) / sum(sample_divisor), over all micro-batches and ranks, and over
    the same samples: it does not depend on how a step is split. Every rank makes an equal objective.
    """

    @property
    def name(self) -> str:
        """Identifies the loss with its settings: a run does not resume with an objective of another name."""

    def sample_divisor(self, token_ids: NDArray[Any], loss_mask: NDArray[Any]) -> float:
        """Return what one sample adds to the divisor; called once per sample before step 0, at least 0.

        `token_ids` int32 (n,), `loss_mask` bool (n,); the first token is never predicted, whatever its mask says.
        """

    def rows(self, batch: PackedBatch) -> torch.Tensor:
        """Return the rows (R,) int64 of the stream whose hidden states `loss_sums` needs."""

    def loss_sums(self, rows: torch.Tensor, batch: PackedBatch, head: TokenHead) -> LossSums:
        """Return the sums over a micro-batch; `rows` (R, D) are the hidden states of the rows asked for."""


class CausalCrossEntropy:
    """Cross-entropy of the next token, divided by the number of label tokens; the loss of every run by default."""

    name = "cross_entropy"

    def sample_divisor(self, token_ids: NDArray[Any], loss_mask: NDArray[Any]) -> float:
        """Return the number of label tokens."""
        return float(loss_mask[1:].sum())

    def rows(self, batch: PackedBatch) -> torch.Tensor:
        """Return the rows whose next token has loss."""
        return batch.label_rows

    def loss_sums(self, rows: torch.Tensor, batch: PackedBatch, head: TokenHead) -> LossSums:
        """Return the summed cross-entropy; 0, still attached to the graph, for a batch without labels."""
        return head.cross_entropy(rows, batch.label_ids)


CROSS_ENTROPY = CausalCrossEntropy()


def checked_sums(objective: Objective, found: Any) -> LossSums:
    """Return what an objective returned as LossSums. Raises UsageError for anything else."""
    if isinstance(found, LossSums) and all(isinstance(one, torch.Tensor) and one.dim() == 0 for one in found):
        return found
    kind = f"a {type(found).__name__}"
    if isinstance(found, LossSums):
        kind = "LossSums of " + " and ".join(
            f"shape {tuple(one.shape)}" if isinstance(one, torch.Tensor) else type(one).__name__ for one in found
        )
    raise UsageError(
        f"objective {objective.name}: loss_sums returned {kind}; expected LossSums(loss_sum, num_correct), two tensors "
        "without dimensions"
    )


def head_product(head: nn.Module) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None] | None:
    """Return the weight of a head that a fused kernel can compute, and the ids and values of rows trained apart.

    None for a head that is more than a matrix product.
    """
    plain = head.trained if isinstance(head, SavedModule) else head.base if isinstance(head, TrainedRows) else head
    if not is_unhooked_linear(plain) or head._forward_hooks or head._forward_pre_hooks:
        return None
    return plain.weight, (head.token_ids, head.rows) if isinstance(head, TrainedRows) else None


def is_unhooked_linear(head: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a head is a matrix product and nothing else, so that a fused kernel can compute it."""
    # the exact type, as a subclass or a hook may compute something else
    return type(head) is nn.Linear and head.bias is None and not head._forward_hooks and not head._forward_pre_hooks


def compute_dtype(rows: torch.Tensor) -> torch.dtype:
    """Return the dtype in which autocast computes products of `rows`."""
    device_type = rows.device.type
    lower = torch.is_autocast_enabled(device_type) and rows.dtype != torch.float64
    return torch.get_autocast_dtype(device_type) if lower else rows.dtype
