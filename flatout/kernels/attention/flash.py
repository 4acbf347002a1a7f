"""Packed causal attention by FlashAttention: -2 in torch, -3 and -4 by their packages where installed.

FlashAttention-2 (arXiv:2307.08691) is torch's varlen kernel, -3 (arXiv:2407.08608) and -4 (its CuTe DSL package) are
each one custom operator with a backward, so that compiled layers can contain them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor

from flatout.kernels.attention.reference import packed_attention

Attention = Callable[..., Tensor]

MAX_HEAD_DIM = 256
_MODULES = {"fa4": "flash_attn.cute.interface", "fa3": "flash_attn_interface"}
# FA3 supports only Hopper, FA4 Hopper and newer
_MAJORS = {"fa4": (9, 10, 11, 12), "fa3": (9,)}
# FA4 would compile another kernel for documents that fit in one tile; one kernel is enough
_FA4_MIN_SEQLEN = 256
# documents of one token, lengths that do not fill a tile, a tail, and repeated boundaries
_PROOF_LENGTHS = (1, 130, 2, 67, 300, 1, 11, 0, 0)
_COMPARED = ("values", "query gradients", "key gradients", "value gradients")


def varlen_problem(device: torch.device, dtype: torch.dtype, head_dim: int | None) -> str | None:
    """Return why the varlen kernel does not support this device, dtype and head size (None if it does)."""
    if device.type != "cuda":
        return f"the varlen kernel needs CUDA, not {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the varlen kernel needs bf16 or fp16, not {dtype}"
    if head_dim is not None and (head_dim > MAX_HEAD_DIM or head_dim % 8):
        return f"the varlen kernel needs a head size up to {MAX_HEAD_DIM} in multiples of 8, not {head_dim}"
    return None


def make_varlen_attention() -> Attention:
    """Bind torch's varlen kernel, with the signature of the installed torch; returns what `packed_operator` returns."""
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


def flash_problem(name: str, device: torch.device) -> str | None:
    """Return why FlashAttention-3 or -4 cannot be tried on this device (None if it can)."""
    try:
        is_installed = find_spec(_MODULES[name]) is not None
    except ModuleNotFoundError:
        # the parent package is missing
        is_installed = False
    if not is_installed:
        return f"{name} is not installed"
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in _MAJORS[name]:
        return f"{name} has no kernels for this device"
    return None


@cache
def make_flash_attention(name: str) -> Attention:
    """Bind FA3 or FA4, once per process. Raises ImportError or AttributeError for an unexpected package."""
    module, is_fa4 = importlib.import_module(_MODULES[name]), name == "fa4"
    names = ("_flash_attn_fwd", "_flash_attn_bwd") if is_fa4 else ("_flash_attn_forward", "_flash_attn_backward")
    kernel, kernel_backward = (getattr(module, each) for each in names)

    def settings(cu_seqlens: Tensor, max_seqlen: int, scale: float, left: int | None) -> dict[str, Any]:
        longest = max(max_seqlen, _FA4_MIN_SEQLEN) if is_fa4 else max_seqlen
        return {
            "cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": longest, "max_seqlen_k": longest,
            "softmax_scale": scale, "window_size_left": -1 if left is None and not is_fa4 else left,
            "window_size_right": 0,
        }  # fmt: skip

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        wanted = {"return_lse": True} if is_fa4 else {}
        output, log_sums, *_ = kernel(q, k, v, causal=True, **wanted, **settings(*rest))
        return output, log_sums

    def backward(
        output_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sums: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        options = {"deterministic": torch.are_deterministic_algorithms_enabled(), **settings(*rest)}
        if is_fa4:
            return tuple(kernel_backward(q, k, v, output, output_grad, log_sums, causal=True, **options))
        q_grad, k_grad, v_grad = (tensor.new_empty(tensor.shape) for tensor in (q, k, v))
        grads = {"dq": q_grad, "dk": k_grad, "dv": v_grad}
        kernel_backward(output_grad, q, k, v, output, log_sums, is_causal=True, **grads, **options)
        return q_grad, k_grad, v_grad

    return packed_operator(f"flatout::{name}", forward, backward)


def packed_operator(
    name: str,
    forward: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., tuple[Tensor, ...]],
    *,
    log_sums_by_token: bool = False,
) -> Attention:
    """Register an attention kernel as an operator with a backward, and return it as a function.

    The function takes q (T, H, D), k and v (T, K, D) in bf16 or fp16, cu_seqlens int32 (N+1,) and max_seqlen, with
    keywords scale and window, and returns (T, H, D). Its backward is only deterministic under
    torch.use_deterministic_algorithms.

    `forward` takes (q, k, v, cu_seqlens, max_seqlen, scale, left) and returns the output and its log-sum-exp, fp32
    (H, T), or (T, H) with `log_sums_by_token`; `backward` takes the output's gradient, q, k, v, output, log-sum-exp and
    the arguments from cu_seqlens on, and returns the three gradients. A row attends to `left` tokens before its own;
    None means all.
    """
    inputs = "Tensor q, Tensor k, Tensor v"
    rest = "Tensor cu_seqlens, SymInt max_seqlen, float scale, SymInt? left"

    def run(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(tensor.contiguous() for tensor in forward(*arguments))

    def run_backward(output_grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(tensor.contiguous() for tensor in backward(output_grad.contiguous(), *arguments))

    schema = f"({inputs}, {rest}) -> (Tensor, Tensor)"
    operator = torch.library.custom_op(name, run, mutates_args=(), schema=schema)
    schema = f"(Tensor output_grad, {inputs}, Tensor output, Tensor log_sums, {rest}) -> (Tensor, Tensor, Tensor)"
    operator_backward = torch.library.custom_op(f"{name}_backward", run_backward, mutates_args=(), schema=schema)

    @operator.register_fake
    def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        shape = (q.shape[0], q.shape[1]) if log_sums_by_token else (q.shape[1], q.shape[0])
        return q.new_empty(q.shape), q.new_empty(shape, dtype=torch.float32)

    @operator_backward.register_fake
    def _(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, Tensor, Tensor]:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, cu_seqlens, *ctx.settings = inputs
        ctx.save_for_backward(q, k, v, *output, cu_seqlens)

    def differentiate(ctx: Any, output_grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = operator_backward(output_grad, *ctx.saved_tensors, *ctx.settings)
        return (*gradients, None, None, None, None)

    operator.register_autograd(differentiate, setup_context=keep)

    def attention(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, scale: float, window: int | None = None
    ) -> Tensor:
        # the kernels' window excludes the row itself, transformers' includes it
        left = None if window is None else window - 1
        output: Tensor = operator(q, k, v, cu_seqlens, max_seqlen, scale, left)[0]
        return output

    return attention


def flash_disagreement(
    attention: Attention,
    rival: Attention,
    *,
    heads: tuple[int, int, int],
    window: int | None,
    device: torch.device,
    dtype: torch.dtype,
) -> str | None:
    """Compare `attention` with `rival` on a small packed batch; return why it is less exact (None if it is not).

    `heads` are the model's query heads, key heads and head size. With a `window`, both with and without it are checked,
    forward and backward. The error against fp64 may be at most 2x (values) and 3x (gradients) the rival's.
    """
    num_heads, num_key_heads, size = heads
    lengths = torch.tensor(_PROOF_LENGTHS)
    boundaries = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device, torch.int32)
    draw = torch.Generator().manual_seed(0)
    shapes = [(count, int(lengths.sum()), size) for count in (num_heads, num_key_heads, num_key_heads, num_heads)]
    # heads first in memory, as in some models
    drawn = [torch.randn(shape, generator=draw).to(device, dtype).transpose(0, 1) for shape in shapes]

    def outcome(form: Attention, compute: torch.dtype, width: int | None, *longest: int) -> tuple[Tensor, ...]:
        *leaves, incoming = (tensor.to(compute) for tensor in drawn)
        leaves = [leaf.detach().requires_grad_(True) for leaf in leaves]
        with torch.enable_grad():
            output = form(*leaves, boundaries, *longest, scale=size**-0.5, window=width)
            gradients = torch.autograd.grad(output, leaves, incoming)
        return output.detach(), *gradients

    for width in {None, window}:
        truth = outcome(packed_attention, torch.float64, width)
        ours, theirs = (outcome(form, dtype, width, 512) for form in (attention, rival))
        for what, times, mine, other, true in zip(_COMPARED, (2, 3, 3, 3), ours, theirs, truth, strict=True):
            error, allowed = ((tensor.double() - true).norm().item() for tensor in (mine, other))
            # `not <=` so that a NaN counts as a disagreement
            if not error <= times * allowed:
                return f"its {what} have {error / allowed:.1f} times the error of torch's kernel"
    return None
