"""Attention of documents that share a prefix: their queries also attend to its keys, merged by log-sum-exp.

A prefix and each suffix are documents of one stream (arXiv:2410.20305). Causal attention within every document and
attention of the suffixes to the prefixes have a softmax each; with their log-sum-exps l1 and l2,

    l = log(exp(l1) + exp(l2)),   O = exp(l1 - l) O1 + exp(l2 - l) O2

is the softmax over both. With O and l, the backward pass of each part returns its own part of the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flatout.kernels.capability import has_triton


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


def attend_to_prefixes(
    q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sums: Tensor, scale: float, shared: SharedPrefixes
) -> None:
    """Merge attention to the prefixes into `output` (T, H, D) and `log_sums` (T, H) of the suffixes' rows, in place.

    By Triton for 16-bit CUDA tensors; else by the formulas above, with all scores of a prefix in memory.
    """
    if (spans := shared.spans) is None:
        return
    rows, keys = spans
    if _has_kernel(q):
        from flatout.kernels.attention import prefix_triton

        prefix_triton.attend(q[rows], k[keys], v[keys], output[rows], log_sums[rows], shared.documents, scale)
        return
    for queries, own in _pairs(shared, rows.start):
        scores, _, values = _scores(q[queries], k[own], v[own], scale)
        own_sums, other_sums = log_sums[queries], scores.logsumexp(-1).T
        other = torch.einsum("hts,shd->thd", scores.softmax(-1), values)
        output[queries] += (other_sums - own_sums).sigmoid()[..., None] * (other - output[queries])
        log_sums[queries] = torch.logaddexp(own_sums, other_sums)


def add_prefix_gradients(
    gradients: tuple[Tensor, Tensor, Tensor],
    output_grad: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    output: Tensor,
    log_sums: Tensor,
    scale: float,
    shared: SharedPrefixes,
) -> None:
    """Add the part of attention to the prefixes to the gradients of q, k and v, in place.

    `output` (T, H, D) and `log_sums` (T, H) are the merged ones. See `attend_to_prefixes`.
    """
    if (spans := shared.spans) is None:
        return
    (rows, keys), (q, k, v), (q_grad, k_grad, v_grad) = spans, qkv, gradients
    if _has_kernel(q):
        from flatout.kernels.attention import prefix_triton

        prefix_triton.add_gradients(
            (q_grad[rows], k_grad[keys], v_grad[keys]), output_grad[rows], (q[rows], k[keys], v[keys]), output[rows],
            log_sums[rows], shared.documents, scale,
            num_processors=torch.cuda.get_device_properties(q.device).multi_processor_count,
        )  # fmt: skip
        return
    q, output_grad, output = (tensor.to(log_sums.dtype) for tensor in (q, output_grad, output))
    for queries, own in _pairs(shared, rows.start):
        scores, wide_keys, wide_values = _scores(q[queries], k[own], v[own], scale)
        weights = (scores - log_sums[queries].T[..., None]).exp()
        row_sums = (output_grad[queries] * output[queries]).sum(-1).T[..., None]
        weight_grad = torch.einsum("thd,shd->hts", output_grad[queries], wide_values)
        score_grad = weights * (weight_grad - row_sums) * scale
        q_grad[queries] += torch.einsum("hts,shd->thd", score_grad, wide_keys)
        for gradient, a, b in ((k_grad, score_grad, q), (v_grad, weights, output_grad)):
            by_head = torch.einsum("hts,thd->shd", a, b[queries])
            gradient[own] += by_head.unflatten(1, (k.shape[1], -1)).sum(2)


def _has_kernel(q: Tensor) -> bool:
    return has_triton(q.device) and q.dtype.itemsize == 2


def _pairs(shared: SharedPrefixes, offset: int) -> Iterator[tuple[slice, slice]]:
    """The rows of each prefix's suffixes, and those of the prefix; the suffixes start at `offset`."""
    suffixes, prefixes, *_ = shared.documents
    spans = ([slice(*pair) for pair in pairwise(bounds.tolist())] for bounds in (suffixes + offset, prefixes))
    return zip(*spans, strict=True)


def _scores(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores (H, T, S), and keys and values (S, H, D) by query head, in at least fp32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (tensor.to(wide).repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    return torch.einsum("thd,shd->hts", q.to(wide), k) * scale, k, v
