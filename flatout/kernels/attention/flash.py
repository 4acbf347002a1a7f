"""Packed causal attention by FlashAttention: -2 in torch, and -4 by its package where installed.

FlashAttention-2 (arXiv:2307.08691) and -4 (its CuTe DSL package) are each one custom operator with a backward, so that
compiled layers can contain them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
from torch import Tensor

from flatout.kernels.attention.reference import packed_attention
from flatout.kernels.attention.shared_prefix import SharedPrefixes, add_prefix_gradients, attend_to_prefixes
from flatout.kernels.capability import AMPERE, capability
from flatout.kernels.operators import define_operator

Attention = Callable[..., Tensor]

MAX_HEAD_DIM = 256
_FA4 = "flash_attn.cute.interface"
# Hopper and newer
_FA4_MAJORS = (9, 10, 11, 12)
# FA4 would compile another kernel for documents that fit in one tile; one kernel is enough
_FA4_MIN_SEQLEN = 256
# documents of one token, lengths that do not fill a tile, a tail, and repeated boundaries
_PROOF_LENGTHS = (1, 130, 2, 67, 300, 1, 11, 0, 0)
# the operators' arguments
_INPUTS = "Tensor q, Tensor k, Tensor v"
_REST = "Tensor cu_seqlens, SymInt max_seqlen, float scale, SymInt? left"
_SHARED = "Tensor? prefix_cu_seqlens, Tensor? suffix_cu_seqlens, Tensor? shared_sizes"
# sinks, and the tensors of shared prefixes
_NUM_OPTIONS = 4
_COMPARED = ("values", "query gradients", "key gradients", "value gradients", "sink gradients")


def varlen_problem(device: torch.device, dtype: torch.dtype, head_dim: int | None) -> str | None:
    """Return why the varlen kernel does not support this device, dtype and head size (None if it does)."""
    if device.type != "cuda":
        return f"the varlen kernel needs CUDA, not {device.type}"
    if capability(device) < AMPERE:
        return "the varlen kernel needs an Ampere GPU (compute capability 8.0) or newer"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the varlen kernel needs bf16 or fp16, not {dtype}"
    if head_dim is not None and (head_dim > MAX_HEAD_DIM or head_dim % 8):
        return f"the varlen kernel needs a head size up to {MAX_HEAD_DIM} in multiples of 8, not {head_dim}"
    return None


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    scale: float, left: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output (T, H, D) and its log-sum-exp, fp32 (H, T), of q (T, H, D), k and v (S, K, D) in bf16 or fp16.

    `cu_seqlens_q` and `cu_seqlens_k` int32 (N+1,) are the documents' boundaries in queries and keys, and the next two
    upper bounds on their lengths. The last query of a document attends to all of its keys and each earlier one to one
    key less, of which `left` before the last (None: all).
    """
    documents = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    output, log_sums, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *documents, 0.0, left is None, False, **_settings(scale, left)
    )
    return output, log_sums


def varlen_backward(
    output_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sums: Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, scale: float, left: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of q, k and v; the arguments are those of `varlen_forward`, and what it returned."""
    documents = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    # the random state is for dropout, which is off
    random_state, unused = q.new_zeros(2, dtype=torch.uint64), q.new_empty(0)
    return torch.ops.aten._flash_attention_backward(
        output_grad, q, k, v, output, log_sums, *documents, 0.0, left is None, random_state, unused,
        **_settings(scale, left),
    )  # fmt: skip


def _settings(scale: float, left: int | None) -> dict[str, Any]:
    return {"scale": scale, "window_size_left": -1 if left is None else left, "window_size_right": 0}


@cache
def make_varlen_attention() -> Attention:
    """Register the FlashAttention-2 kernels in torch, once per process; returns what `packed_operator` returns."""

    # queries and keys have the same boundaries
    def twice(*arguments: Any) -> tuple[Any, ...]:
        *tensors, cu_seqlens, max_seqlen, scale, left = arguments
        return *tensors, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale, left

    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return varlen_forward(*twice(*arguments))

    def backward(*arguments: Any) -> tuple[Tensor, ...]:
        return varlen_backward(*twice(*arguments))

    return packed_operator("flatout::varlen", forward, backward)


def flash_problem(device: torch.device) -> str | None:
    """Return why FlashAttention-4 cannot be tried on this device (None if it can)."""
    try:
        is_installed = find_spec(_FA4) is not None
    except ModuleNotFoundError:
        # the parent package is missing
        is_installed = False
    if not is_installed:
        return "fa4 is not installed"
    if capability(device)[0] not in _FA4_MAJORS:
        return "fa4 has no kernels for this device"
    return None


@cache
def make_flash_attention() -> Attention:
    """Bind FA4, once per process. Raises ImportError or AttributeError for an unexpected package."""
    module: Any = importlib.import_module(_FA4)
    kernel, kernel_backward = module._flash_attn_fwd, module._flash_attn_bwd

    def settings(cu_seqlens: Tensor, max_seqlen: int, scale: float, left: int | None) -> dict[str, Any]:
        longest = max(max_seqlen, _FA4_MIN_SEQLEN)
        return {
            "cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": longest, "max_seqlen_k": longest,
            "softmax_scale": scale, "window_size_left": left, "window_size_right": 0,
        }  # fmt: skip

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        output, log_sums, *_ = kernel(q, k, v, causal=True, return_lse=True, **settings(*rest))
        return output, log_sums

    def backward(
        output_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sums: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        options = {"deterministic": torch.are_deterministic_algorithms_enabled(), **settings(*rest)}
        return tuple(kernel_backward(q, k, v, output, output_grad, log_sums, causal=True, **options))

    return packed_operator("flatout::fa4", forward, backward)


def packed_operator(
    name: str,
    forward: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., tuple[Tensor, ...]],
    *,
    log_sums_by_token: bool = False,
) -> Attention:
    """Register an attention kernel as an operator with a backward, and return it as a function.

    The function takes q (T, H, D), k and v (T, K, D) in bf16 or fp16, cu_seqlens int32 (N+1,) and max_seqlen, with
    keywords scale, window, sinks (H,) and shared (`SharedPrefixes`), and returns (T, H, D). With shared prefixes no
    window may reach the end of one. The backward is only deterministic under torch.use_deterministic_algorithms.

    `forward` takes (q, k, v, cu_seqlens, max_seqlen, scale, left) and returns the output and its log-sum-exp, fp32
    (H, T), or (T, H) with `log_sums_by_token`; `backward` takes the output's gradient, q, k, v, output, log-sum-exp and
    the arguments from cu_seqlens on, and returns the three gradients. A row attends to `left` tokens before its own;
    None means all. `backward` must take its weights from the log-sum-exp, P = exp(S - lse), and its row sums from the
    output, D = rowsum(dO * O), as FlashAttention does: sinks and shared prefixes come in through these two.
    """

    def by_token(log_sums: Tensor) -> Tensor:
        return log_sums if log_sums_by_token else log_sums.T

    def run(*arguments: Any) -> tuple[Tensor, ...]:
        *given, sinks, prefix_cu_seqlens, suffix_cu_seqlens, sizes = arguments
        output, log_sums = (tensor.contiguous() for tensor in forward(*given))
        if sizes is not None:
            q, k, v, _, _, scale, _ = given
            shared = SharedPrefixes(prefix_cu_seqlens, suffix_cu_seqlens, sizes)
            attend_to_prefixes(q, k, v, output, by_token(log_sums), scale, shared)
        if sinks is not None:
            log_sums = by_token(add_sinks(output, by_token(log_sums), sinks)).contiguous()
        return output, log_sums

    def fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        shape = (q.shape[0], q.shape[1]) if log_sums_by_token else (q.shape[1], q.shape[0])
        return q.new_empty(q.shape), q.new_empty(shape, dtype=torch.promote_types(q.dtype, torch.float32))

    def run_backward(output_grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        *given, prefix_cu_seqlens, suffix_cu_seqlens, sizes = arguments
        output_grad = output_grad.contiguous()
        q_grad, k_grad, v_grad = (tensor.contiguous() for tensor in backward(output_grad, *given))
        gradients = (q_grad, k_grad, v_grad)
        if sizes is not None:
            q, k, v, output, log_sums, _, _, scale, _ = given
            shared = SharedPrefixes(prefix_cu_seqlens, suffix_cu_seqlens, sizes)
            add_prefix_gradients(gradients, output_grad, (q, k, v), output, by_token(log_sums), scale, shared)
        return gradients

    gradients = "(Tensor, Tensor, Tensor)"
    schema = f"(Tensor output_grad, {_INPUTS}, Tensor output, Tensor log_sums, {_REST}, {_SHARED}) -> {gradients}"
    operator_backward = define_operator(f"{name}_backward", schema, run_backward, empty_gradients, _backward_flops)
    schema = f"({_INPUTS}, {_REST}, Tensor? sinks, {_SHARED}) -> (Tensor, Tensor)"
    operator = define_operator(name, schema, run, fake, _forward_flops)
    return _differentiable(operator, operator_backward, by_token)


def empty_gradients(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors for the gradients of q, k and v: the shapes of a backward operator."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _forward_flops(
    q: Any, k: Any, v: Any, cu_seqlens: Any, max_seqlen: int, scale: float, left: int | None, *_: Any, **__: Any
) -> int:
    return attention_flops(q, max_seqlen, max_seqlen, left)


def _backward_flops(output_grad: Any, q: Any, k: Any, v: Any, output: Any, log_sums: Any, *rest: Any, **_: Any) -> int:
    # its five products, with the scores again, where the forward pass has two
    return _forward_flops(q, k, v, *rest) * 5 // 2


def attention_flops(q: Any, max_seqlen_q: int, max_seqlen_k: int, left: int | None) -> int:
    """Return the FLOPs of causal attention by queries of shape q (T, H, D), with documents as long as the longest."""
    num_keys = max_seqlen_k - max_seqlen_q // 2
    if left is not None:
        num_keys = min(num_keys, left + 1)
    return int(4 * q[0] * q[1] * q[2] * num_keys)


def _differentiable(
    operator: Callable[..., Any], operator_backward: Callable[..., Any], by_token: Callable[[Tensor], Tensor]
) -> Attention:
    class PackedAttention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *options: Any) -> Tensor:
            (sinks, *shared), settings = options[:_NUM_OPTIONS], options[_NUM_OPTIONS:]
            output: Tensor
            output, log_sums = operator(q, k, v, cu_seqlens, *settings, sinks, *shared)
            ctx.save_for_backward(q, k, v, output, log_sums, cu_seqlens, sinks, *shared)
            ctx.settings = settings
            return output

        @staticmethod
        def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, ...]:
            # checkpointing lets them be read once
            tensors = ctx.saved_tensors
            saved, (sinks, *shared) = tensors[:-_NUM_OPTIONS], tensors[-_NUM_OPTIONS:]
            gradients = operator_backward(output_grad, *saved, *ctx.settings, *shared)
            *_, output, log_sums, _ = saved
            trained = ctx.needs_input_grad[4]
            sinks_grad = sinks_gradient(output_grad, output, by_token(log_sums), sinks) if trained else None
            return (*gradients, None, sinks_grad, None, None, None, None, None, None)

    def attention(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, scale: float,
        window: int | None = None, sinks: Tensor | None = None, shared: SharedPrefixes | None = None,
    ) -> Tensor:  # fmt: skip
        # the kernels' window excludes the row itself, transformers' includes it
        left = None if window is None else window - 1
        sinks = None if sinks is None else sinks.to(torch.promote_types(q.dtype, torch.float32))
        return PackedAttention.apply(
            q, k, v, cu_seqlens, sinks, *(shared or (None, None, None)), max_seqlen, scale, left
        )

    return attention


def add_sinks(output: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Scale the output (T, H, D) in place for sinks (H,), and return the new log-sum-exp (T, H).

    A sink s is one more score, without a value: lse' = log(exp(lse) + exp(s)), O' = O exp(lse - lse').
    """
    total = torch.logaddexp(log_sums, sinks)
    output.mul_((log_sums - total).exp()[..., None])
    return total


def sinks_gradient(output_grad: Tensor, output: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Return ds = sum over rows of p (0 - D), with the sink's probability p = exp(s - lse')."""
    row_sums = (output_grad.to(sinks.dtype) * output).sum(-1)
    return -((sinks - log_sums).exp() * row_sums).sum(0)


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
    each with and without sinks, forward and backward. The error against fp64 may be at most 2x (values) and 3x
    (gradients) the rival's.
    """
    num_heads, num_key_heads, size = heads
    lengths = torch.tensor(_PROOF_LENGTHS)
    boundaries = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device, torch.int32)
    draw = torch.Generator().manual_seed(0)
    shapes = [(count, int(lengths.sum()), size) for count in (num_heads, num_key_heads, num_key_heads, num_heads)]
    # heads first in memory, as in some models
    drawn = [torch.randn(shape, generator=draw).to(device, dtype).transpose(0, 1) for shape in shapes]
    drawn_sinks = torch.randn(num_heads, generator=draw).to(device, dtype)

    def outcome(
        form: Attention, compute: torch.dtype, width: int | None, has_sinks: bool, *longest: int
    ) -> tuple[Tensor, ...]:
        *leaves, incoming, sinks = (tensor.to(compute) for tensor in (*drawn, drawn_sinks))
        leaves = [leaf.detach().requires_grad_(True) for leaf in (*leaves, *[sinks][: int(has_sinks)])]
        options = {"sinks": leaves[-1]} if has_sinks else {}
        with torch.enable_grad():
            output = form(*leaves[:3], boundaries, *longest, scale=size**-0.5, window=width, **options)
            gradients = torch.autograd.grad(output, leaves, incoming)
        return output.detach(), *gradients

    for width, has_sinks in product({None, window}, (False, True)):
        truth = outcome(packed_attention, torch.float64, width, has_sinks)
        ours, theirs = (outcome(form, dtype, width, has_sinks, 512) for form in (attention, rival))
        for what, times, mine, other, true in zip(_COMPARED, (2, 3, 3, 3, 3), ours, theirs, truth, strict=False):
            error, allowed = ((tensor.double() - true).norm().item() for tensor in (mine, other))
            # `not <=` so that a NaN counts as a disagreement
            if not error <= times * allowed:
                return f"its {what} have {error / allowed:.1f} times the error of torch's kernel"
    return None
