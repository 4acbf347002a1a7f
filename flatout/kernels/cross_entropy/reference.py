"""Cross-entropy of an output head in plain torch: the reference for the tiled form."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def product_loss(
    product: torch.Tensor, targets: torch.Tensor, *, scale: float = 1.0, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed cross-entropy of a head's output, and the number of rows whose argmax is the target.

    Logits are u = scale * product (L, V), or softcap * tanh(u / softcap) with a cap (Gemma 2, arXiv:2408.00118,
    section 2), in fp32, or fp64 for fp64 inputs; targets int64 (L,). Returns the loss sum (0-d, with its graph) and the
    count (0-d int64).
    """
    logits = product.to(torch.promote_types(product.dtype, torch.float32)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, reduction="sum"), (logits.argmax(-1) == targets).sum()


def token_loss(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return `product_loss` of hidden (L, D) @ weight (V, D).T, of the same dtype. Memory is L * V for all logits."""
    return product_loss(F.linear(hidden, weight), targets, scale=scale, softcap=softcap)
