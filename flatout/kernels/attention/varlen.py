"""Packed causal attention by torch's varlen FlashAttention-2 kernel (Dao 2023, arXiv:2307.08691). CUDA, 16 bit."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

MAX_HEAD_DIM = 256


def varlen_problem(device: torch.device, dtype: torch.dtype, head_dim: int | None) -> str | None:
    """Return why the varlen kernel does not support this device, dtype and head size (None if it does)."""
    if device.type != "cuda":
        return f"the varlen kernel needs CUDA, not {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the varlen kernel needs bf16 or fp16, not {dtype}"
    if head_dim is not None and (head_dim > MAX_HEAD_DIM or head_dim % 8):
        return f"the varlen kernel needs a head size up to {MAX_HEAD_DIM} in multiples of 8, not {head_dim}"
    return None


def make_varlen_attention() -> Callable[..., Tensor]:
    """Bind torch's varlen kernel, with the signature of the installed torch.

    The returned function takes q (T, H, D), k and v (T, K, D), cu_seqlens int32 (N+1,) and max_seqlen, with
    keywords scale and window, and returns (T, H, D). Its backward is only deterministic under
    torch.use_deterministic_algorithms.
    """
    from torch.nn.attention.varlen import varlen_attn

    # older versions support fewer key than query heads without this argument
    names_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def varlen_attention(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, scale: float, window: int | None = None
    ) -> Tensor:
        extra: dict[str, Any] = {"enable_gqa": True} if names_groups and q.shape[1] != k.shape[1] else {}
        # the kernel's window excludes the row itself, transformers' includes it
        left = -1 if window is None else window - 1
        output = varlen_attn(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
            scale=scale, window_size=(left, 0), **extra,
        )  # fmt: skip
        # a tensor, not a pair, as the log-sum-exp is not requested
        return cast(Tensor, output)

    return varlen_attention
