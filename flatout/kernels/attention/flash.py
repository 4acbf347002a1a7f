"""Packed causal attention by FlashAttention-3 (arXiv:2407.08608) and -4 (its CuTe DSL package), where installed.

Each is one custom operator with a backward, so that a compiled layer can hold it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from flatout.kernels.attention.reference import packed_attention

FlashName = Literal["fa4", "fa3"]
Attention = Callable[..., Tensor]
Forward = Callable[..., tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]

_MODULES = {"fa4": "flash_attn.cute.interface", "fa3": "flash_attn_interface"}
# FA3 is written for Hopper alone, FA4 for Hopper and what came after
_MAJORS = {"fa4": (9, 10, 11, 12), "fa3": (9,)}
# FA4 compiles another kernel for documents that fit one of its tiles; one kernel is enough
_FA4_MIN_SEQLEN = 256
# documents of one token, lengths that fill no tile, a tail, and borders that repeat
_PROOF_LENGTHS = (1, 130, 2, 67, 300, 1, 11, 0, 0)


def flash_problem(name: FlashName, device: torch.device) -> str | None:
    """Why FlashAttention-3 or -4 cannot be tried on this device (None when it can)."""
    if not _is_installed(_MODULES[name]):
        return f"{name} is not installed"
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in _MAJORS[name]:
        return f"{name} has no kernels for this device"
    return None


@cache
def make_flash_attention(name: FlashName) -> Attention:
    """Bind one of them, once a process. Raises ImportError or AttributeError when the package is not the one known.

    The function returned takes query (T, H, D), key and value (T, K, D) in bf16 or fp16, cu_seqlens int32 (N+1,) and
    max_seqlen, with keywords scale and window, and returns (T, H, D). Its backward is deterministic only under
    torch.use_deterministic_algorithms.
    """
    module = importlib.import_module(_MODULES[name])
    forward, backward = _fa4(module) if name == "fa4" else _fa3(module)
    return form_of(packed_operator(f"flatout::{name}", forward, backward))


def form_of(operator: Callable[..., tuple[Tensor, Tensor]]) -> Attention:
    """What `make_flash_attention` returns, from an operator made by `packed_operator`."""

    def flash_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        *,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        # the kernels count tokens to the left of the row, transformers counts the row itself too
        left = None if window is None else window - 1
        output: Tensor = operator(query, key, value, cu_seqlens, max_seqlen, scale, left)[0]
        return output

    return flash_attention


def packed_operator(
    name: str, forward: Forward, backward: Backward, *, log_sums_by_token: bool = False
) -> Callable[..., tuple[Tensor, Tensor]]:
    """A torch operator (query, key, value, cu_seqlens, max_seqlen, scale, left) -> (output, log-sum-exp fp32 (H, T)).

    `log_sums_by_token` says that the kernels keep the second as (T, H).

    `forward` takes the operator's arguments; `backward` takes the output's gradient, query, key, value, output,
    log-sum-exp and the arguments from cu_seqlens on, and returns the three gradients. A row sees `left` tokens before
    its own, or all with None.
    """

    def run(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, left: int | None
    ) -> tuple[Tensor, Tensor]:
        output, log_sums = forward(q, k, v, cu_seqlens, max_seqlen, scale, left)
        return output.contiguous(), log_sums.contiguous()

    def run_backward(
        output_grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        output: Tensor,
        log_sums: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        scale: float,
        left: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_grad, k_grad, v_grad = backward(
            output_grad.contiguous(), q, k, v, output, log_sums, cu_seqlens, max_seqlen, scale, left
        )
        return q_grad.contiguous(), k_grad.contiguous(), v_grad.contiguous()

    operator = torch.library.custom_op(name, run, mutates_args=())
    operator_backward = torch.library.custom_op(f"{name}_backward", run_backward, mutates_args=())

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
    return operator


def flash_disagreement(
    attention: Attention,
    rival: Attention,
    *,
    heads: tuple[int, int, int],
    window: int | None,
    device: torch.device,
    dtype: torch.dtype,
) -> str | None:
    """Why `attention` is less exact than `rival`, forward and backward on one small packed batch (None: it is not).

    `heads` are the model's query heads, key heads and head size; with a `window` both with and without it. The error
    against fp64 may be at most 2x (values) and 3x (gradients) the rival's.
    """
    batch = _proof_batch(heads, device, dtype)
    for size in {None, window}:
        truth, ours, theirs = (
            _outcome(form, batch, size, compute)
            for form, compute in ((_truth, torch.float64), (attention, dtype), (rival, dtype))
        )
        for what, times, mine, other, true in zip(_COMPARED, (2, 3, 3, 3), ours, theirs, truth, strict=True):
            error, allowed = ((tensor.double() - true).norm().item() for tensor in (mine, other))
            # written so that a NaN is a disagreement
            if not error <= times * allowed:
                return f"its {what} err {error / allowed:.1f} times as much as torch's kernel"
    return None


_COMPARED = ("values", "query gradients", "key gradients", "value gradients")


def _truth(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, _: int, **settings: Any) -> Tensor:
    return packed_attention(q, k, v, cu_seqlens, **settings)


def _proof_batch(heads: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Borders, query, key, value and the gradient that comes in."""
    num_heads, num_key_heads, size = heads
    lengths = torch.tensor(_PROOF_LENGTHS)
    borders = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device, torch.int32)
    draw = torch.Generator().manual_seed(0)
    shapes = [(int(lengths.sum()), count, size) for count in (num_heads, num_key_heads, num_key_heads, num_heads)]
    return [borders, *(torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes)]


def _outcome(form: Attention, batch: list[Tensor], window: int | None, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Values and the three gradients."""
    borders, *tensors = batch
    *leaves, incoming = (tensor.to(dtype) for tensor in tensors)
    leaves = [leaf.detach().requires_grad_(True) for leaf in leaves]
    with torch.enable_grad():
        output = form(*leaves, borders, 512, scale=leaves[0].shape[-1] ** -0.5, window=window)
        gradients = torch.autograd.grad(output, leaves, incoming)
    return output.detach(), *gradients


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        # the package around it is missing
        return False


def _fa4(module: Any) -> tuple[Forward, Backward]:
    kernel, kernel_backward = module._flash_attn_fwd, module._flash_attn_bwd

    def settings(cu_seqlens: Tensor, max_seqlen: int, scale: float, left: int | None) -> dict[str, Any]:
        longest = max(max_seqlen, _FA4_MIN_SEQLEN)
        return {
            "cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": longest, "max_seqlen_k": longest,
            "softmax_scale": scale, "causal": True, "window_size_left": left, "window_size_right": 0,
        }  # fmt: skip

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        output, log_sums, *_ = kernel(q, k, v, return_lse=True, **settings(*rest))
        return output, log_sums

    def backward(
        output_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sums: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        deterministic = torch.are_deterministic_algorithms_enabled()
        q_grad, k_grad, v_grad = kernel_backward(
            q, k, v, output, output_grad, log_sums, deterministic=deterministic, **settings(*rest)
        )
        return q_grad, k_grad, v_grad

    return forward, backward


def _fa3(module: Any) -> tuple[Forward, Backward]:
    kernel, kernel_backward = module._flash_attn_forward, module._flash_attn_backward

    def settings(cu_seqlens: Tensor, max_seqlen: int, scale: float, left: int | None) -> dict[str, Any]:
        return {
            "cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": max_seqlen,
            "max_seqlen_k": max_seqlen, "softmax_scale": scale, "window_size_left": -1 if left is None else left,
            "window_size_right": 0,
        }  # fmt: skip

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        output, log_sums, *_ = kernel(q, k, v, causal=True, **settings(*rest))
        return output, log_sums

    def backward(
        output_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sums: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_grad, k_grad, v_grad = (tensor.new_empty(tensor.shape) for tensor in (q, k, v))
        deterministic = torch.are_deterministic_algorithms_enabled()
        kernel_backward(
            output_grad, q, k, v, output, log_sums, dq=q_grad, dk=k_grad, dv=v_grad, is_causal=True,
            deterministic=deterministic, **settings(*rest),
        )  # fmt: skip
        return q_grad, k_grad, v_grad

    return forward, backward
