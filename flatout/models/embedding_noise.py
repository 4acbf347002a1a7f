"""Uniform noise on the input embeddings of training passes (NEFTune, Jain et al. 2023, arXiv:2310.05914)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from flatout.errors import Fix, UsageError
from flatout.kernels.rounding import LOW_32, hash_32
from flatout.models.blocks import computed_batch
from flatout.models.packed import PackedBatch

# random bits take eight bytes an element
_CHUNK_ELEMENTS = 1 << 22


@contextmanager
def noisy_embeddings(
    model: PreTrainedModel, batch: PackedBatch, sample_ids: Sequence[int], *, alpha: float, seed: Sequence[int]
) -> Iterator[None]:
    """Add noise to a batch's input embeddings in the model's next pass: uniform(-1, 1) * alpha / sqrt(L * D).

    L is the length of a token's own sample and D the width of an embedding. The noise depends only on `seed`, the
    token's sample and its position there, so it is the same in any micro-batch and on any rank. `sample_ids` are those
    of the batch's documents, in order. Padding gets none. Raises UsageError for a model that embeds a batch's tokens
    more than once.
    """
    if not alpha:
        yield
        return
    batch, num_calls = computed_batch(model, batch), 0

    def add(module: Any, args: Any, embedded: Tensor) -> Tensor:
        nonlocal num_calls
        # a model may look up single tokens too, such as the one that stands for pictures
        if embedded.shape[:-1].numel() != batch.num_tokens:
            return embedded
        num_calls += 1
        return embedded + _noise(batch, sample_ids, embedded, alpha, seed).view_as(embedded)

    with model.get_input_embeddings().register_forward_hook(add):
        yield
    if num_calls != 1:
        raise UsageError(
            f"model.neftune_alpha: model type {model.config.model_type} embeds its tokens {num_calls} times in a pass",
            [Fix({"model.neftune_alpha": 0})],
        )


@torch.no_grad()
def _noise(
    batch: PackedBatch, sample_ids: Sequence[int], embedded: Tensor, alpha: float, seed: Sequence[int]
) -> Tensor:
    """Return the noise (T, D) of a batch's tokens in the dtype of `embedded` (..., D)."""
    width, is_real, documents = embedded.shape[-1], batch.sample_counts > 0, batch.document_numbers
    num_documents = len(batch.cu_seqlens) - 1
    lengths = documents.new_zeros(num_documents).index_add(0, documents, is_real.long())[documents]
    wide = torch.promote_types(embedded.dtype, torch.float32)
    scales = torch.where(is_real, alpha / (lengths * width).to(wide).sqrt(), 0.0)
    ids = torch.tensor([*sample_ids, *[0] * (num_documents - len(sample_ids))])
    ids = ids.to(documents.device, non_blocking=True) + int(np.random.SeedSequence(seed).generate_state(1)[0])
    keys = hash_32((hash_32(ids & LOW_32)[documents] + hash_32(batch.position_ids)) & LOW_32)
    columns = hash_32(torch.arange(1, width + 1, device=keys.device))
    num_rows, parts = max(1, _CHUNK_ELEMENTS // width), []
    for rows, factors in zip(keys.split(num_rows), scales.split(num_rows), strict=True):
        # the midpoints of 2^23 equal parts of (-1, 1), all of which fp32 has
        bits = hash_32((rows[:, None] + columns) & LOW_32) >> 9
        parts.append((((bits.to(wide) + 0.5) / (1 << 22) - 1) * factors[:, None]).to(embedded.dtype))
    return torch.cat(parts)
