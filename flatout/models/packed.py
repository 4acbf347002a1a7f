"""A micro-batch as one flat stream of tokens: documents, positions and the rows that carry loss."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

TOKENS_MULTIPLE = 128
BORDERS_MULTIPLE = 64
SMALLEST_MAX_SEQLEN = 128


def kernel_borders(max_documents: int) -> int:
    """How many borders every batch of a run is given: the documents' and the tail's, up to a multiple of 64."""
    return -(-(max_documents + 2) // BORDERS_MULTIPLE) * BORDERS_MULTIPLE


class StreamSize(NamedTuple):
    """What a kernel's launch depends on: tokens of the stream, and the length that no document exceeds."""

    num_tokens: int
    max_seqlen: int


def stream_size(lengths: Sequence[int], *, ladder: Sequence[int] = ()) -> StreamSize:
    """The size that suits kernels for documents of these lengths, in tokens, the tail's document included.

    Tokens go up to a multiple of 128, then to the next of `ladder` (ascending), if one is as large, so that few sizes
    serve a whole run; the length goes up to a power of two.
    """
    num_tokens = sum(lengths)
    filled = num_tokens + -num_tokens % TOKENS_MULTIPLE
    if (rung := bisect_left(ladder, filled)) < len(ladder):
        filled = ladder[rung]
    longest = max(*lengths, filled - num_tokens, SMALLEST_MAX_SEQLEN)
    return StreamSize(filled, 1 << (longest - 1).bit_length())


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """T tokens of D documents laid end to end, L of them predicted.

    `token_ids` and `position_ids` int64 (T,), positions restarting at 0 in each document; `cu_seqlens` int32 (D+1,)
    the documents' borders; `max_seqlen` no document is longer, in tokens; `label_rows` int64 (L,) the rows whose next
    token carries loss and `label_ids` int64 (L,) those next tokens. No row predicts a token of another document.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    label_rows: torch.Tensor
    label_ids: torch.Tensor

    @property
    def size(self) -> StreamSize:
        return StreamSize(self.num_tokens, self.max_seqlen)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_label_tokens(self) -> int:
        return len(self.label_rows)

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch on `device`. Copies to a GPU come from pinned memory and do not wait."""
        moved = {}
        for field in fields(self):
            tensor = getattr(self, field.name)
            if isinstance(tensor, torch.Tensor):
                pin = device.type == "cuda" and tensor.device.type == "cpu"
                moved[field.name] = (tensor.pin_memory() if pin else tensor).to(device, non_blocking=True)
        return replace(self, **moved)  # type: ignore[arg-type]  # every entry is a tensor field of this class

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """Tell the allocator that `stream` reads these tensors, though another one made them.

        Their memory is then not given out again before the work that is in `stream` when they are freed is done.
        """
        for field in fields(self):
            tensor = getattr(self, field.name)
            if isinstance(tensor, torch.Tensor):
                tensor.record_stream(stream)


def pack(
    samples: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]],
    *,
    num_borders: int | None = None,
    ladder: Sequence[int] = (),
) -> PackedBatch:
    """Lay samples end to end, on the CPU.

    `num_borders` (see `kernel_borders`) gives shapes that suit kernels: the stream is filled up to its `stream_size`
    by a document of its own without labels, and the last border is repeated until there are that many. Compiled
    graphs then fit every batch, and no kernel leaves rows unwritten. It changes no loss.

    Each sample is (token ids (n,), trained (n,)): `trained[i]` says whether token i carries loss. A document's first
    token is never predicted, so it never carries loss. Raises ValueError for no samples, an empty one, arrays of
    different lengths, or more documents than `num_borders` has room for.
    """
    if not samples:
        raise ValueError("a micro-batch needs at least one sample")
    for index, (ids, trained) in enumerate(samples):
        if len(ids) == 0 or len(ids) != len(trained):
            raise ValueError(f"sample {index} has {len(ids)} token ids and {len(trained)} trained marks")
    max_seqlen = max(len(ids) for ids, _ in samples)
    if num_borders:
        given = [len(ids) for ids, _ in samples]
        num_tokens, max_seqlen = stream_size(given, ladder=ladder)
        if tail := num_tokens - sum(given):
            samples = [*samples, (np.zeros(tail, np.int64), np.zeros(tail, bool))]
    lengths = np.array([len(ids) for ids, _ in samples], dtype=np.int64)
    borders = np.concatenate([[0], np.cumsum(lengths)])
    token_ids = np.concatenate([ids for ids, _ in samples]).astype(np.int64)
    trained = np.concatenate([marks for _, marks in samples]).astype(bool)
    trained[borders[:-1]] = False
    label_positions = np.flatnonzero(trained)
    cu_seqlens = borders.astype(np.int32)
    if num_borders:
        cu_seqlens = np.pad(cu_seqlens, (0, num_borders - len(cu_seqlens)), mode="edge")
    return PackedBatch(
        token_ids=torch.from_numpy(token_ids),
        position_ids=torch.from_numpy(np.arange(len(token_ids)) - np.repeat(borders[:-1], lengths)),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        max_seqlen=max_seqlen,
        label_rows=torch.from_numpy(label_positions - 1),
        label_ids=torch.from_numpy(token_ids[label_positions]),
    )
