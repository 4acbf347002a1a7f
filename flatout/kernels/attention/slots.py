"""Attention of one new token of each slot to the keys that the slot keeps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def slot_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    starts: Tensor,
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
    K divides H. `starts` int32 (N + 1,) are the slots' first rows, `longest` an upper bound on the lengths. With a
    window, a token attends to that many last ones; `softcap` and `sinks` (H,) are as in `masked_attention`. Places
    that are not filled must be finite. `use_kernel` is for what torch's FlashAttention computes: bf16 or fp16 on CUDA.
    """
    if use_kernel and softcap is None and sinks is None:
        return _flash(query, key, value, lengths, starts, scale, window)
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


def _flash(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, starts: Tensor, scale: float, window: int | None
) -> Tensor:
    """Compute it by FlashAttention-2, which reads no key beyond `lengths`."""
    num_slots = len(query)
    # without bounds on the right, heads that share keys are computed together
    left, right = (-1, -1) if window is None else (window - 1, 0)
    boundaries = torch.arange(num_slots + 1, dtype=torch.int32, device=query.device)
    outputs: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(
        query, key, value, boundaries, starts, 1, len(key) // num_slots, 0.0, False, False,
        scale=scale, window_size_left=left, window_size_right=right, seqused_k=lengths,
    )  # fmt: skip
    return outputs[0]
