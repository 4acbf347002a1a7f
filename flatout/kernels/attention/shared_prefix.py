"""Attention of documents that share a prefix: their queries also attend to its keys, merged by log-sum-exp.

A prefix and each suffix are documents of one stream (arXiv:2410.20305). Causal attention within every document and
attention of the suffixes to the prefixes have a softmax each; with their log-sum-exps l1 and l2,

    l = log(exp(l1) + exp(l2)),   O = exp(l1 - l) O1 + exp(l2 - l) O2

is the softmax over both. With O and l, the backward pass of each part returns its own part of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flatout.kernels.attention.varlen import varlen_backward, varlen_forward

# forward: (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale) -> output, log-sum-exp (H, T);
# backward: (output_grad, q, k, v, output, log-sum-exp, the same from cu_seqlens_q on) -> three gradients
Passes = tuple[Callable[..., tuple[Tensor, ...]], Callable[..., tuple[Tensor, ...]]]


class SharedPrefixes(NamedTuple):
    """Where a stream has its G shared prefixes, which are its first documents, and their suffixes, which are the next.

    `prefix_cu_seqlens` int32 (N+1,), N >= G, are the prefixes' boundaries, the last repeated; `suffix_cu_seqlens` those
    of all suffixes of each prefix together, from the first suffix on. `sizes` int64 (5,), always on the CPU, so that a
    compiled layer has one graph for all batches: G, the tokens of all prefixes, the tokens of all suffixes, the most
    suffix tokens of one prefix, and the longest prefix.
    """

    prefix_cu_seqlens: Tensor
    suffix_cu_seqlens: Tensor
    sizes: Tensor

    @property
    def spans(self) -> tuple[slice, slice] | None:
        """The rows of the suffixes, which are queries, and of the prefixes, which are keys; None without any."""
        num_prefixes, num_keys, num_queries, *_ = self.sizes.tolist()
        return (slice(num_keys, num_keys + num_queries), slice(num_keys)) if num_prefixes else None

    @property
    def documents(self) -> tuple[Tensor, Tensor, int, int]:
        """Boundaries of queries and keys, int32 (G+1,), and the longest of each."""
        num_prefixes, _, _, max_queries, max_keys = self.sizes.tolist()
        bounds = [self.suffix_cu_seqlens[: num_prefixes + 1], self.prefix_cu_seqlens[: num_prefixes + 1]]
        return bounds[0], bounds[1], max_queries, max_keys


def varlen_prefix_passes() -> Passes:
    """Return torch's FlashAttention-2 without a mask."""
    return partial(varlen_forward, causal=False), partial(varlen_backward, causal=False)


def attend_to_prefixes(
    q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sums: Tensor, scale: float, shared: SharedPrefixes, by: Passes
) -> None:
    """Merge attention to the prefixes into `output` (T, H, D) and `log_sums` (T, H) of the suffixes' rows, in place."""
    if (spans := shared.spans) is None:
        return
    rows, keys = spans
    other, other_sums = by[0](q[rows], k[keys], v[keys], *shared.documents, scale)
    own_sums, other_sums = log_sums[rows], other_sums.T
    share = (other_sums - own_sums).sigmoid()[..., None]
    output[rows].mul_(1 - share).add_(other.mul_(share))
    log_sums[rows] = torch.logaddexp(own_sums, other_sums)


def add_prefix_gradients(
    gradients: tuple[Tensor, ...],
    output_grad: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    output: Tensor,
    log_sums: Tensor,
    scale: float,
    shared: SharedPrefixes,
    by: Passes,
) -> None:
    """Add the part of attention to the prefixes to the gradients of q, k and v, in place.

    `output` (T, H, D) and `log_sums` (T, H) are the merged ones.
    """
    if (spans := shared.spans) is None:
        return
    (rows, keys), (q, k, v) = spans, qkv
    given = (output_grad[rows], q[rows], k[keys], v[keys], output[rows], log_sums[rows].T.contiguous())
    parts = by[1](*given, *shared.documents, scale)
    for gradient, span, part in zip(gradients, (rows, keys, keys), parts, strict=True):
        gradient[span] += part
