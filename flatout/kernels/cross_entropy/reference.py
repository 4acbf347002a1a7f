"""Cross-entropy of an output head, written out: the truth of the tiled form."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def head_logits(
    hidden: torch.Tensor, weight: torch.Tensor, *, scale: float = 1.0, softcap: float | None = None
) -> torch.Tensor:
    """Logits of an output head: u = scale * hidden @ weight.T, then softcap * tanh(u / softcap) when there is a cap.

    hidden (L, D) and weight (V, D) of one dtype; returns (L, V) in fp32, or fp64 for fp64 inputs.
    The cap is Gemma 2's (arXiv:2408.00118, section 2).
    """
    product = F.linear(hidden, weight)
    logits = product.to(torch.promote_types(product.dtype, torch.float32)) * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def token_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed cross-entropy and the number of rows whose largest logit is the target.

    hidden (L, D), weight (V, D), targets int64 (L,). Returns the loss sum (0-d, fp32 or fp64, with its graph) and the
    count (0-d int64). All logits exist at once: memory L * V.
    """
    logits = head_logits(hidden, weight, scale=scale, softcap=softcap)
    return F.cross_entropy(logits, targets, reduction="sum"), (logits.argmax(-1) == targets).sum()
