"""Attention of one new token of each slot to the keys that the slot keeps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.kernels.capability import has_triton


def slot_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    longest: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    use_kernel: bool = False,
) -> Tensor:
    """Return the output (N, H, E) of query (N, H, D), the newest token of each of N slots.

    key (N * S, K, D) and value (N * S, K, E) have S places a slot, of which the first `lengths` int32 (N,) are filled;
    K divides H. `longest` is an upper bound on the lengths. With a window, a token attends to that many last ones;
    `softcap` and `sinks` (H,) are as in `masked_attention`. Places that are not filled must be finite. With
    `use_kernel`, Triton computes it for 16-bit tensors on CUDA.
    """
    if use_kernel and has_triton(query.device) and query.dtype.itemsize == 2:
        from flatout.kernels.attention import slots_triton

        return slots_triton.attend(query, key, value, lengths, scale, window, softcap, sinks)
    num_slots, groups = len(query), query.shape[1] // key.shape[1]
    # (N, K, longest, size)
    key, value = (slots.unflatten(0, (num_slots, -1))[:, :longest].transpose(1, 2) for slots in (key, value))
    places = torch.arange(key.shape[2], device=key.device)
    mask = places < lengths[:, None]
    if window is not None:
        mask &= places >= lengths[:, None] - window
    # heads that share keys are rows of one product
    grouped = query.unflatten(1, (-1, groups))
    if softcap is None and sinks is None:
        output: Tensor = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask[:, None, None], scale=scale)
        return output.flatten(1, 2)
    scores = grouped @ key.transpose(-1, -2) * scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, groups, 1).expand(num_slots, -1, -1, -1)
        scores = torch.cat([scores, column], dim=-1)
    weights: Tensor = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    return (weights @ value).flatten(1, 2)
