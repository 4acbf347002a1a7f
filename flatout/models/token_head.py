"""The model's output head: losses of label tokens in tiles, and the logits of any rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from flatout.errors import UsageError
from flatout.kernels.cross_entropy.tiled import row_entropies, token_loss
from flatout.models.arch_quirks import UNSCALED_LOGITS, logits_cap, logits_scale, num_logits
from flatout.models.load.auto_class import is_scoring
from flatout.models.lora.saved import SavedModule, TrainedRows
from flatout.models.slot_cache import autocast_dtype
from flatout.objectives.loss_inputs import LossSums, RegularizedSums, TokenLosses, target_losses

# the part of a tile's rows whose logits fit in its place several times, in fp32
_ENTROPY_TILES = 8
# the same with the gradients of label smoothing and z-loss
_REGULARIZED_TILES = 16


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

    def logits(self, rows: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """Return logits / temperature (L, V) in fp32 (fp64 in fp64) of hidden states `rows` (L, D)."""
        return scaled_logits(self._head(rows)[..., : self._num_logits], *self._shape(temperature))

    def _shape(self, temperature: float) -> tuple[float, float | None]:
        """Return the scale and soft-cap of logits / T: (c / T) tanh((u / T) / (c / T)) is c tanh(u / c) / T."""
        return self._scale / temperature, None if self._softcap is None else self._softcap / temperature

    def cross_entropy(self, rows: torch.Tensor, ids: torch.Tensor) -> LossSums:
        """Return the summed cross-entropy of hidden states `rows` (L, D) for the tokens `ids` (L,), in tiles."""
        if (fused := self._fused(rows, ids, by_row=False)) is not None:
            return LossSums(*fused[:2])
        return self.summed(self._module_losses(rows, ids))

    def token_losses(
        self, rows: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0, *, with_entropy: bool = False
    ) -> TokenLosses:
        """Return the cross-entropy of each row of `rows` (L, D) for the token in `ids` (L,), in tiles.

        It is that of softmax(logits / temperature). With a frozen head, it takes as long as `cross_entropy`.
        """
        if (fused := self._fused(rows, ids, temperature, by_row=True, with_entropy=with_entropy)) is not None:
            return TokenLosses(*fused)
        return self._module_losses(rows, ids, temperature, with_entropy)

    def entropy(self, rows: torch.Tensor, temperature: float) -> torch.Tensor:
        """Return the entropy (L,) in nats of softmax(logits / temperature) of `rows` (L, D), with its graph.

        Each tile is computed again in the backward pass. It has fewer rows than other tiles, as it holds its logits
        several times in fp32.
        """
        tiles = rows.split(max(1, self._tile_rows // _ENTROPY_TILES))
        return torch.cat([
            checkpoint(lambda tile: row_entropies(self.logits(tile, temperature)), tile, use_reentrant=False)
            for tile in tiles
        ])  # fmt: skip

    def regularized_cross_entropy(
        self, rows: torch.Tensor, ids: torch.Tensor, label_smoothing: float, z_loss: float
    ) -> RegularizedSums:
        """Return the summed cross-entropy with label smoothing and z-loss, computed by tiles in plain torch.

        Each tile is computed again in the backward pass, also with a frozen head. As those of `entropy`, tiles have
        fewer rows than others.
        """

        def tile_sums(tile: torch.Tensor, tile_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits = self.logits(tile)
            plain, total = target_losses(logits, tile_ids), logits.logsumexp(-1)
            losses = plain.lerp(total - logits.mean(-1), label_smoothing) if label_smoothing else plain
            losses = losses + z_loss * total.square()
            return losses.sum(), plain.detach().sum(), (logits.argmax(-1) == tile_ids).sum()

        num_rows = max(1, self._tile_rows // _REGULARIZED_TILES)
        tiles = zip(rows.split(num_rows), ids.split(num_rows), strict=True)
        sums = [checkpoint(tile_sums, tile, tile_ids, use_reentrant=False) for tile, tile_ids in tiles]
        return RegularizedSums(*(torch.stack(parts).sum() for parts in zip(*sums, strict=True)))

    def summed(self, losses: TokenLosses) -> LossSums:
        """Return the sums of `token_losses`, added tile by tile as `cross_entropy` of a frozen head adds them."""
        loss_sum = losses.losses.new_zeros(())
        for tile in losses.losses.split(self._tile_rows):
            loss_sum = loss_sum + tile.sum()
        return LossSums(loss_sum, losses.is_correct.sum())

    def _fused(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        temperature: float = 1.0,
        *,
        by_row: bool,
        with_entropy: bool = False,
    ) -> tuple[torch.Tensor, ...] | None:
        """Return `token_loss` of a head that is a matrix product and nothing else; None for any other."""
        if (product := head_product(self._head)) is None:
            return None
        weight = product[0] if self._num_logits is None else product[0][: self._num_logits]
        scale, softcap = self._shape(temperature)
        with record_function("flatout::head"):
            return token_loss(
                rows, weight, ids, trained_rows=product[1], scale=scale, softcap=softcap, tile_rows=self._tile_rows,
                compute_dtype=autocast_dtype(rows), by_row=by_row, with_entropy=with_entropy,
            )  # fmt: skip

    def _module_losses(
        self, rows: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0, with_entropy: bool = False
    ) -> TokenLosses:
        """Return `token_losses` of a head that is called as a module (LoRA, a bias, ...).

        Each tile is recomputed in the backward pass, so its logits are not kept.
        """

        def tile_losses(tile: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits = self.logits(tile, temperature)
            # logits that were 16-bit have no digits to keep
            is_wide = autocast_dtype(tile).itemsize > 2
            losses = target_losses(logits, ids) if is_wide else F.cross_entropy(logits, ids, reduction="none")
            with torch.no_grad():
                entropies = row_entropies(logits) if with_entropy else losses[:0].detach()
            return losses, logits.argmax(-1) == ids, entropies

        tiles = zip(rows.split(self._tile_rows), ids.split(self._tile_rows), strict=True)
        terms = [checkpoint(tile_losses, tile, tile_ids, use_reentrant=False) for tile, tile_ids in tiles]
        return TokenLosses(*map(torch.cat, zip(*terms, strict=True)))


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
    hooks = [hooked for each in (head, plain) for hooked in (each._forward_hooks, each._forward_pre_hooks)]
    # the exact type, as a subclass or a hook may compute something else
    if type(plain) is not nn.Linear or plain.bias is not None or any(hooks):
        return None
    return plain.weight, (head.token_ids, head.rows) if isinstance(head, TrainedRows) else None
