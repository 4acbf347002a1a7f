"""Cut a micro-batch into shards of equal length and attention, one for each rank of a group."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from flatout.models.packed import (
    TOKENS_MULTIPLE,
    KeyPieces,
    PackedBatch,
    padded_boundaries,
    padded_num_boundaries,
    rounded_max_seqlen,
)

# a document is cut by itself if each of its chunks fills a tile of the attention kernel
MIN_CHUNK_TOKENS = 128

Integers = NDArray[np.int64]
"""Row indices or lengths, int64."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A micro-batch's documents, and padding, in the order in which they are cut.

    `lengths` (D,) of the documents with their padding, long ones first, then the rest with a tail of padding as the
    last; `order` (D,) which document of the batch each is, -1 for the tail; `num_long` of them are long.
    """

    lengths: Integers
    order: Integers
    num_long: int

    @property
    def starts(self) -> Integers:
        """The documents' first rows, and the number of tokens (D+1,)."""
        return np.concatenate([[0], np.cumsum(self.lengths)])


@dataclass(frozen=True, slots=True)
class ContextShard:
    """The shard of one of N ranks: every micro-batch is cut into `num_shards`, and this rank takes that at `rank`.

    Each long document, and all the rest as one, is cut into 2 N chunks of equal length. A rank takes the one at `rank`
    and its mirror image, 2 N - 1 - `rank`: causal attention grows linearly along a document, so all ranks have the same
    of it. Documents up to 256 N tokens would not fill the kernel's tiles in 2 N pieces, and their attention is small
    beside their products, so they are dealt to the rest's chunks by length, nearly all of them whole.

    Ranks have the same number of tokens: long documents are padded to a multiple of 2 N, and the rest to that or, for a
    GPU, all to a multiple of 128 N. Padding has no labels.
    """

    num_shards: int
    rank: int

    def num_boundaries(self, max_documents: int) -> int:
        """Return the number of boundaries of every shard of a run, see `padded_num_boundaries`."""
        # two pieces of every document, and one more where the rest's second chunk starts
        return padded_num_boundaries(2 * max_documents + 2)

    def of(self, batch: PackedBatch, num_boundaries: int | None = None) -> PackedBatch:
        """Return this rank's shard of a packed batch on the CPU, which `flatten_samples` made without padding.

        Its documents are pieces of documents, whose keys `PackedBatch.keys` lists. With `num_boundaries` (for a GPU),
        the last boundaries are repeated to that number. Padding is in no sample, see `sample_counts`.
        """
        boundaries = batch.cu_seqlens.numpy().astype(np.int64)
        stream = self.stream(np.diff(boundaries), TOKENS_MULTIPLE if num_boundaries else 1)
        begins, ends, documents = self.pieces(stream)
        rows = [_ranges(*self.pieces(stream, rank)[:2]) for rank in range(self.num_shards)]
        shard_rows, gathered_row = rows[self.rank], np.empty(stream.starts[-1], np.int64)
        gathered_row[np.concatenate(rows)] = np.arange(stream.starts[-1])
        key_begins = stream.starts[documents]
        # the row in the stream of each of the batch's tokens
        first_rows = np.empty(len(boundaries) - 1, np.int64)
        is_real = stream.order >= 0
        first_rows[stream.order[is_real]] = stream.starts[:-1][is_real]
        moved = _ranges(first_rows, first_rows + np.diff(boundaries))

        def spread(values: torch.Tensor) -> torch.Tensor:
            stream_values = np.zeros(stream.starts[-1], values.numpy().dtype)
            stream_values[moved] = values.numpy()
            return torch.from_numpy(stream_values[shard_rows])

        label_rows = gathered_row[moved[batch.label_rows.numpy()]] - self.rank * len(shard_rows)
        is_own = torch.from_numpy((label_rows >= 0) & (label_rows < len(shard_rows)))
        if (columns := batch.loss_columns) is not None:
            per_label = {name: values[is_own] for name, values in columns.per_label.items()}
            columns = replace(columns, label_samples=columns.label_samples[is_own], per_label=per_label)
        return replace(
            batch,
            token_ids=spread(batch.token_ids),
            position_ids=spread(batch.position_ids),
            sample_counts=spread(batch.sample_counts),
            label_rows=torch.from_numpy(label_rows)[is_own],
            label_ids=batch.label_ids[is_own],
            label_places=is_own.nonzero()[:, 0],
            loss_columns=columns,
            cu_seqlens=torch.from_numpy(padded_boundaries(ends - begins, num_boundaries)),
            max_seqlen=_max_seqlen(ends - begins, num_boundaries),
            keys=KeyPieces(
                torch.from_numpy(gathered_row[_ranges(key_begins, ends)]),
                torch.from_numpy(padded_boundaries(ends - key_begins, num_boundaries)),
                _max_seqlen(ends - key_begins, num_boundaries),
            ),
        )

    def stream(self, lengths: Integers, multiple: int = 1) -> Stream:
        """Return the order and padding of documents of these lengths; a shard has a multiple of `multiple` tokens."""
        num_chunks = 2 * self.num_shards
        is_long = lengths >= num_chunks * MIN_CHUNK_TOKENS
        rest = np.flatnonzero(~is_long)
        rest = rest[np.argsort(-lengths[rest], kind="stable")]
        # every chunk gets documents of all lengths
        rest = rest[np.argsort(np.arange(len(rest)) % num_chunks, kind="stable")]
        order = np.concatenate([np.flatnonzero(is_long), rest])
        padded = np.where(is_long, lengths + -lengths % num_chunks, lengths)[order]
        tail = -int(padded.sum()) % max(num_chunks, multiple * self.num_shards)
        if tail:
            padded, order = np.append(padded, tail), np.append(order, -1)
        return Stream(padded, order, int(is_long.sum()))

    def pieces(self, stream: Stream, rank: int | None = None) -> tuple[Integers, Integers, Integers]:
        """Return first rows, end rows and documents of a shard's pieces in the stream, by default of this rank's."""
        rank, num_chunks = self.rank if rank is None else rank, 2 * self.num_shards
        starts = stream.starts
        cuts = np.append(starts[: stream.num_long + 1], starts[-1])
        sizes = np.diff(cuts) // num_chunks
        begins = np.stack([cuts[:-1] + rank * sizes, cuts[:-1] + (num_chunks - 1 - rank) * sizes], 1).flatten()
        ends = begins + np.repeat(sizes, 2)
        # in the rest, a piece ends where a document does
        inner = starts[stream.num_long + 1 : -1]
        rest = zip(begins[-2:], ends[-2:], strict=True)
        inside = [inner[(inner > begin) & (inner < end)] for begin, end in rest]
        begins, ends = (np.concatenate([bounds, *inside]) for bounds in (begins, ends))
        begins, ends = np.sort(begins), np.sort(ends)
        begins, ends = begins[ends > begins], ends[ends > begins]
        return begins, ends, np.searchsorted(starts, begins, side="right") - 1


def _ranges(begins: Integers, ends: Integers) -> Integers:
    """Return all integers from each of `begins` to the one before its end, range after range."""
    lengths = ends - begins
    return np.arange(lengths.sum()) + np.repeat(begins - (np.cumsum(lengths) - lengths), lengths)


def _max_seqlen(lengths: Integers, number: int | None) -> int:
    return rounded_max_seqlen(int(lengths.max())) if number else int(lengths.max())
