"""Cross-entropy of an output head in plain torch: the reference for the tiled form."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def product_loss(
    product: Tensor, targets: Tensor, *, scale: float = 1.0, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of a head's output, and the number of rows whose argmax is the target.

    `product` (L, V), `scale` and `softcap` as in `scaled_logits`; targets int64 (L,). Returns the loss sum (0-d, with
    its graph) and the count (0-d int64).
    """
    logits = scaled_logits(product, scale, softcap)
    return F.cross_entropy(logits, targets, reduction="sum"), (logits.argmax(-1) == targets).sum()


def scaled_logits(product: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return logits (L, V) of a head's output: u = scale * product, or softcap * tanh(u / softcap) with a cap.

    In fp32, or fp64 for fp64 inputs. The cap is Gemma 2's (arXiv:2408.00118, section 2).
    """
    logits = product.to(torch.promote_types(product.dtype, torch.float32))
    logits = logits if scale == 1 else logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
