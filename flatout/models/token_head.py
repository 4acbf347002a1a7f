"""The model's output head: losses of label tokens in tiles, and the logits of any rows."""

from __future__ import annotations

from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from flatout.errors import UsageError
from flatout.kernels.cross_entropy.tiled import token_loss
from flatout.models.arch_quirks import UNSCALED_LOGITS, logits_cap, logits_scale, num_logits
from flatout.models.load.auto_class import is_scoring
from flatout.models.lora.saved import SavedModule, TrainedRows
from flatout.models.slot_cache import autocast_dtype
from flatout.objectives.loss_inputs import LossSums, TokenLosses, target_losses


class TokenHead:
    """A model's output head with its logit scale, soft-cap and number of logits, as an objective calls it.

    `tile_rows` bounds memory.

    Raises UsageError for a model without an output head.
    """

    def __init__(self, model: PreTrainedModel, tile_rows: int) -> None:
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Module):
            scores = is_scoring(model.config)
            does = "scores texts and does not write: it has no logits of tokens" if scores else "has no output head"
            use = "use objective reward or classify" if scores else "flatout trains causal LMs only"
            raise UsageError(f"this model ({type(model).__name__}) {does}; {use}")
        config = model.config.get_text_config()
        self._head, self._tile_rows = head, tile_rows
        self._scale = 1.0 if model.config.model_type in UNSCALED_LOGITS else logits_scale(config)
        self._softcap, self._num_logits = logits_cap(config), num_logits(config)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return logits (L, V) in fp32 (fp64 in fp64) of hidden states `rows` (L, D)."""
        return scaled_logits(self._head(rows)[..., : self._num_logits], self._scale, self._softcap)

    def cross_entropy(self, rows: torch.Tensor, ids: torch.Tensor) -> LossSums:
        """Return the summed cross-entropy of hidden states `rows` (L, D) for the tokens `ids` (L,), in tiles."""
        if (fused := self._fused(rows, ids, by_row=False)) is not None:
            return LossSums(*fused)
        return self.summed(self._module_losses(rows, ids))

    def token_losses(self, rows: torch.Tensor, ids: torch.Tensor) -> TokenLosses:
        """Return the cross-entropy of each row of `rows` (L, D) for the token in `ids` (L,), in tiles.

        With a frozen head, it takes as long as `cross_entropy`.
        """
        if (fused := self._fused(rows, ids, by_row=True)) is not None:
            return TokenLosses(*fused)
        return self._module_losses(rows, ids)

    def summed(self, losses: TokenLosses) -> LossSums:
        """Return the sums of `token_losses`, added tile by tile as `cross_entropy` of a frozen head adds them."""
        loss_sum = losses.losses.new_zeros(())
        for tile in losses.losses.split(self._tile_rows):
            loss_sum = loss_sum + tile.sum()
        return LossSums(loss_sum, losses.is_correct.sum())

    def _fused(
        self, rows: torch.Tensor, ids: torch.Tensor, *, by_row: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return `token_loss` of a head that is a matrix product and nothing else; None for any other."""
        if (product := head_product(self._head)) is None:
            return None
        weight = product[0] if self._num_logits is None else product[0][: self._num_logits]
        with record_function("flatout::head"):
            return token_loss(
                rows, weight, ids, trained_rows=product[1], scale=self._scale, softcap=self._softcap,
                tile_rows=self._tile_rows, compute_dtype=autocast_dtype(rows), by_row=by_row,
            )  # fmt: skip

    def _module_losses(self, rows: torch.Tensor, ids: torch.Tensor) -> TokenLosses:
        """Return `token_losses` of a head that is called as a module (LoRA, a bias, ...).

        Each tile is recomputed in the backward pass, so its logits are not kept.
        """

        def tile_losses(tile: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.logits(tile)
            # logits that were 16-bit have no digits to keep
            is_wide = autocast_dtype(tile).itemsize > 2
            losses = target_losses(logits, ids) if is_wide else F.cross_entropy(logits, ids, reduction="none")
            return losses, logits.argmax(-1) == ids

        tiles = zip(rows.split(self._tile_rows), ids.split(self._tile_rows), strict=True)
        losses, is_correct = zip(
            *(checkpoint(tile_losses, tile, tile_ids, use_reentrant=False) for tile, tile_ids in tiles), strict=True
        )
        return TokenLosses(torch.cat(losses), torch.cat(is_correct))


def scaled_logits(product: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    """Return logits (L, V) of a head's output: u = scale * product, or softcap * tanh(u / softcap) with a cap.

    In fp32, or fp64 for fp64 inputs. The cap is Gemma 2's (arXiv:2408.00118, section 2).
    """
    logits = product.to(torch.promote_types(product.dtype, torch.float32))
    logits = logits if scale == 1 else logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


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
