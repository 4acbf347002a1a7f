"""Cross-entropy of an output head in plain torch: the reference for the tiled form."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def product_loss(
    product: Tensor, targets: Tensor, *, scale: float = 1.0, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of a head's output, and the number of rows whose argmax is the target.

    Logits are u = scale * product (L, V), or softcap * tanh(u / softcap) with a cap (Gemma 2, arXiv:2408.00118,
    section 2), in fp32, or fp64 for fp64 inputs; targets int64 (L,). Returns the loss sum (0-d, with its graph) and the
    count (0-d int64).
    """
    logits = product.to(torch.promote_types(product.dtype, torch.float32)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, reduction="sum"), (logits.argmax(-1) == targets).sum()
