"""A micro-batch as one flat stream of tokens: documents, positions and the rows with loss."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

TOKENS_MULTIPLE = 128
BOUNDARIES_MULTIPLE = 64
_TENSORS = ("token_ids", "position_ids", "cu_seqlens", "label_rows", "label_ids", "is_padding")
SMALLEST_MAX_SEQLEN = 128


def padded_num_boundaries(max_documents: int) -> int:
    """Return the number of boundaries of every batch of a run: documents and tail, rounded up to a multiple of 64."""
    return -(-(max_documents + 2) // BOUNDARIES_MULTIPLE) * BOUNDARIES_MULTIPLE


class PackedSize(NamedTuple):
    """What a kernel launch depends on: the tokens of the stream, and an upper bound on document length."""

    num_tokens: int
    max_seqlen: int


def packed_size(lengths: Sequence[int], *, size_buckets: Sequence[int] = ()) -> PackedSize:
    """Return the padded size for documents of these lengths in tokens; padding forms a tail document.

    Tokens are rounded up to a multiple of 128, then to the next of `size_buckets` (ascending), if one is large enough,
    so that a run has few sizes; the length is rounded up to a power of two.
    """
    num_tokens = sum(lengths)
    filled = num_tokens + -num_tokens % TOKENS_MULTIPLE
    if (bucket := bisect_left(size_buckets, filled)) < len(size_buckets):
        filled = size_buckets[bucket]
    longest = max(*lengths, filled - num_tokens, SMALLEST_MAX_SEQLEN)
    return PackedSize(filled, 1 << (longest - 1).bit_length())


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """T tokens of D concatenated documents, L of them predicted, none from another document.

    `token_ids` and `position_ids` int64 (T,), with positions restarting at 0 in each document; `cu_seqlens` int32
    (D+1,) the documents' boundaries; `max_seqlen` an upper bound on document length in tokens; `label_rows` int64 (L,)
    the rows whose next token has loss and `label_ids` int64 (L,) those next tokens;
    `is_padding` bool (T,) tokens that are in no sample.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    label_rows: torch.Tensor
    label_ids: torch.Tensor
    is_padding: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_label_tokens(self) -> int:
        return len(self.label_rows)

    def to(self, device: torch.device) -> PackedBatch:
        """Return the batch on `device`. Copies to a GPU are from pinned memory and non-blocking."""
        pin = device.type == "cuda" and self.token_ids.device.type == "cpu"
        moved: dict[str, Any] = {}
        for name in _TENSORS:
            own = getattr(self, name)
            moved[name] = (own.pin_memory() if pin else own).to(device, non_blocking=True)
        return replace(self, **moved)

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """Keep the allocator from reusing these tensors' memory, once freed, before the work queued on `stream`."""
        for name in _TENSORS:
            getattr(self, name).record_stream(stream)


def flatten_samples(
    samples: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]],
    *,
    num_boundaries: int | None = None,
    size_buckets: Sequence[int] = (),
) -> PackedBatch:
    """Concatenate samples into a batch on the CPU.

    With `num_boundaries` (see `padded_num_boundaries`), the stream is padded to its `packed_size` by an additional
    document without labels, and the last boundary is repeated to that number. Compiled graphs then fit every batch, and
    no kernel leaves rows unwritten. The loss does not change.

    Each sample is (token ids (n,), loss mask (n,)): `loss_mask[i]` says whether token i has loss. A document's first
    token is never predicted, so it never has loss. Raises ValueError for no samples, an empty one, arrays of different
    lengths, or more documents than fit in `num_boundaries`.
    """
    if not samples:
        raise ValueError("a micro-batch needs at least one sample")
    for index, (ids, loss_mask) in enumerate(samples):
        if len(ids) == 0 or len(ids) != len(loss_mask):
            raise ValueError(f"sample {index} has {len(ids)} token ids and a loss mask of {len(loss_mask)}")
    num_real = [len(ids) for ids, _ in samples]
    lengths = [len(ids) for ids, _ in samples]
    max_seqlen = max(lengths)
    if num_boundaries:
        num_tokens, max_seqlen = packed_size(lengths, size_buckets=size_buckets)
        if tail := num_tokens - sum(lengths):
            samples = [*samples, (np.zeros(tail, np.int64), np.zeros(tail, bool))]
            lengths.append(tail)
    boundaries = np.concatenate([[0], np.cumsum(lengths)])
    token_ids = np.concatenate([ids for ids, _ in samples]).astype(np.int64)
    loss_mask = np.concatenate([marks for _, marks in samples]).astype(bool)
    loss_mask[boundaries[:-1]] = False
    label_positions = np.flatnonzero(loss_mask)
    cu_seqlens = boundaries.astype(np.int32)
    if num_boundaries:
        cu_seqlens = np.pad(cu_seqlens, (0, num_boundaries - len(cu_seqlens)), mode="edge")
    num_real += [0] * (len(samples) - len(num_real))
    is_padding = [np.arange(len(ids)) >= real for (ids, _), real in zip(samples, num_real, strict=True)]
    return PackedBatch(
        token_ids=torch.from_numpy(token_ids),
        position_ids=torch.from_numpy(np.arange(len(token_ids)) - np.repeat(boundaries[:-1], lengths)),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        max_seqlen=max_seqlen,
        label_rows=torch.from_numpy(label_positions - 1),
        label_ids=torch.from_numpy(token_ids[label_positions]),
        is_padding=torch.from_numpy(np.concatenate(is_padding)),
    )
