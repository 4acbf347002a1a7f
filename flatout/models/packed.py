"""A micro-batch as one flat stream of tokens: documents, packed or padded to rows, positions and rows with loss."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from flatout.errors import UsageError
from flatout.kernels.attention.shared_prefix import SharedPrefixes

TOKENS_MULTIPLE = 128
BOUNDARIES_MULTIPLE = 64
SMALLEST_MAX_SEQLEN = 128

Samples = Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]]
"""Token ids (n,) and loss mask (n,) of each sample."""


def rounded_max_seqlen(longest: int) -> int:
    """Return an upper bound on the length of documents, a power of two, so that a run has few."""
    return 1 << (max(longest, SMALLEST_MAX_SEQLEN) - 1).bit_length()


def padded_num_boundaries(max_documents: int) -> int:
    """Return the number of boundaries of every batch of a run: documents and tail, rounded up to a multiple of 64."""
    return -(-(max_documents + 2) // BOUNDARIES_MULTIPLE) * BOUNDARIES_MULTIPLE


def padded_boundaries(lengths: Iterable[int], num_boundaries: int | None) -> npt.NDArray[np.int32]:
    """Return the boundaries of documents of these lengths, with the last one repeated to `num_boundaries`."""
    boundaries = np.cumsum([0, *lengths]).astype(np.int32)
    return np.pad(boundaries, (0, num_boundaries - len(boundaries) if num_boundaries else 0), mode="edge")


class PackedSize(NamedTuple):
    """What a kernel launch depends on: the tokens of the stream, and an upper bound on document length."""

    num_tokens: int
    max_seqlen: int


def packed_size(
    lengths: Sequence[int],
    *,
    size_buckets: Sequence[int] = (),
    row_length: int | None = None,
    fill_tokens: int = 0,
) -> PackedSize:
    """Return the padded size for documents of these lengths in tokens; padding forms a tail document.

    Tokens are rounded up to a multiple of 128, then to the next of `size_buckets` (ascending), if one is large enough,
    so that a run has few sizes; the length is rounded up to a power of two. Rows are padded to `row_length` already,
    and other streams at least to `fill_tokens`.
    """
    if row_length is not None:
        return PackedSize(len(lengths) * row_length, rounded_max_seqlen(row_length))
    num_tokens = sum(lengths)
    filled = max(num_tokens, fill_tokens)
    filled += -filled % TOKENS_MULTIPLE
    if (bucket := bisect_left(size_buckets, filled)) < len(size_buckets):
        filled = size_buckets[bucket]
    return PackedSize(filled, rounded_max_seqlen(max(*lengths, filled - num_tokens)))


class KeyPieces(NamedTuple):
    """Which keys the pieces of a shard attend to, see `flatout.models.context.shard`.

    `rows` int64 (S,) are the keys' rows in the gathered shares of all ranks, piece by piece; `cu_seqlens` int32 (D+1,)
    their boundaries, as many as of the batch; `max_seqlen` an upper bound on the keys of a piece.
    """

    rows: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int


@dataclass(frozen=True, slots=True)
class BatchColumns:
    """What an objective reads of a micro-batch with S samples in U units; a filler has none of them, and no label.

    `label_samples` int64 (L,) is the sample of each label token, `sample_units` int64 (S,) the unit of each sample,
    `last_rows` int64 (S,) the row of the token at which each is scored, empty where nobody scores. Columns by name:
    `per_label` (L,) has the values per token at the label tokens, `per_sample` (S,), `per_unit` (U,).
    """

    label_samples: torch.Tensor
    sample_units: torch.Tensor
    num_units: int
    last_rows: torch.Tensor
    per_label: Mapping[str, torch.Tensor] = field(default_factory=dict)
    per_sample: Mapping[str, torch.Tensor] = field(default_factory=dict)
    per_unit: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """T tokens of D concatenated documents, L of them predicted, none from another document."""

    token_ids: torch.Tensor
    """int64 (T,)."""
    position_ids: torch.Tensor
    """int64 (T,), from 0 in each document."""
    cu_seqlens: torch.Tensor
    """The documents' boundaries, int32 (D+1,)."""
    max_seqlen: int
    """An upper bound on the tokens of a document."""
    label_rows: torch.Tensor
    """The rows whose next token has loss, int64 (L,)."""
    label_ids: torch.Tensor
    """Those next tokens, int64 (L,)."""
    sample_counts: torch.Tensor
    """How many samples a token belongs to, int64 (T,); 0 for padding."""
    row_length: int | None = None
    """The tokens to which each document is padded on the right, at position 0; its boundaries are its row's."""
    cu_seqlens_cpu: torch.Tensor | None = None
    """`cu_seqlens` on the CPU, for a batch that was copied to a GPU."""
    shared: SharedPrefixes | None = None
    """Prefixes of several samples, documents at the start of the stream; positions of the rest go on after them."""
    keys: KeyPieces | None = None
    """The keys of a rank's shard of the tokens, of which D counts pieces of documents."""
    label_places: torch.Tensor | None = None
    """Which of the micro-batch's label tokens a rank's shard has, int64 (L,); None: all."""
    loss_columns: BatchColumns | None = None
    """What the objective reads besides; its names are properties of the batch."""
    cache: Any = None
    """A cache of transformers', after whose tokens documents go on."""
    pictures: Mapping[str, torch.Tensor] | None = None
    """What the tower reads of all pictures, by argument of `get_image_features`; None in a run whose data has none."""
    axes: torch.Tensor | None = None
    """Positions in time, height and width, int64 (3, T), for models that count these."""

    @property
    def label_samples(self) -> torch.Tensor:
        """The sample of each label token, int64 (L,). Raises UsageError without `loss_columns`."""
        return self._columns.label_samples

    @property
    def sample_units(self) -> torch.Tensor:
        """The unit of each sample, int64 (S,)."""
        return self._columns.sample_units

    @property
    def last_rows(self) -> torch.Tensor:
        """The row of the token at which each sample is scored, int64 (S,)."""
        return self._columns.last_rows

    @property
    def num_samples(self) -> int:
        return len(self._columns.sample_units)

    @property
    def num_units(self) -> int:
        return self._columns.num_units

    @property
    def columns(self) -> Mapping[str, torch.Tensor]:
        """The columns by name: at label tokens (L,), per sample (S,) or per unit (U,)."""
        return {**self._columns.per_label, **self._columns.per_sample, **self._columns.per_unit}

    @property
    def _columns(self) -> BatchColumns:
        if self.loss_columns is None:
            raise UsageError(
                "the objective reads samples or columns, but declares neither: set scope = 'sample' or `columns`"
            )
        return self.loss_columns

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (B, S) that a model gets: one row of packed documents, or a row for each."""
        return (1, self.num_tokens) if self.row_length is None else (-1, self.row_length)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_label_tokens(self) -> int:
        return len(self.label_rows)

    def to(self, device: torch.device) -> PackedBatch:
        """Return the batch on `device`. Copies to a GPU are from pinned memory and non-blocking, others complete."""
        pin = device.type == "cuda" and self.token_ids.device.type == "cpu"

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            return (tensor.pin_memory() if pin else tensor).to(device, non_blocking=device.type != "cpu")

        moved: PackedBatch = _mapped(self, copy)
        return replace(moved, cu_seqlens_cpu=self.cu_seqlens) if pin else moved

    @property
    def document_numbers(self) -> torch.Tensor:
        """Return the number of each token's document, int64 (T,), on the device."""
        tokens = torch.arange(self.num_tokens, dtype=self.cu_seqlens.dtype, device=self.cu_seqlens.device)
        return torch.searchsorted(self.cu_seqlens[1:], tokens, right=True)

    def spread(self, gap: int) -> tuple[PackedBatch, torch.Tensor]:
        """Return the batch with `gap` more tokens, at position 0, after each document, and its rows in it, int64 (T,).

        Nothing waits for the device. A last document fills the stream to a multiple of 128. No sample has the added
        tokens; labels are not moved.
        """
        num_documents = len(self.cu_seqlens) - 1
        filled = self.num_tokens + gap * num_documents
        filled += -filled % TOKENS_MULTIPLE
        rows = torch.arange(self.num_tokens, device=self.token_ids.device) + gap * self.document_numbers

        def boundaries(cu_seqlens: torch.Tensor) -> torch.Tensor:
            numbers = torch.arange(num_documents + 1, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
            return F.pad(cu_seqlens + gap * numbers, (0, 1), value=filled)

        blank = self.token_ids.new_zeros(filled)
        spread = replace(
            self,
            token_ids=blank.index_copy(0, rows, self.token_ids),
            position_ids=blank.index_copy(0, rows, self.position_ids),
            sample_counts=blank.index_copy(0, rows, self.sample_counts),
            axes=None if self.axes is None else blank.repeat(3, 1).index_copy(1, rows, self.axes),
            cu_seqlens=boundaries(self.cu_seqlens),
            cu_seqlens_cpu=None if self.cu_seqlens_cpu is None else boundaries(self.cu_seqlens_cpu),
            max_seqlen=max(self.max_seqlen + gap, TOKENS_MULTIPLE),
        )
        return spread, rows

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """Keep the allocator from reusing these tensors' memory, once freed, before the work queued on `stream`."""

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(stream)
            return tensor

        _mapped(self, keep)


def _mapped(part: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a batch, or a part of one, with each tensor changed; those that are always on the CPU and a cache stay."""
    if isinstance(part, torch.Tensor):
        return change(part)
    if isinstance(part, Mapping):
        return {name: _mapped(value, change) for name, value in part.items()}
    if isinstance(part, SharedPrefixes | KeyPieces):
        make: Any = type(part)
        return make(*map(change, part[:2]), part[2])
    if isinstance(part, PackedBatch | BatchColumns):
        names = [item.name for item in fields(part) if item.name not in ("cu_seqlens_cpu", "cache")]
        return replace(part, **{name: _mapped(getattr(part, name), change) for name in names})
    return part


def segment_lengths(lengths: Sequence[int], shared: Sequence[tuple[int, int]]) -> list[int]:
    """Return the tokens of each document of a stream of samples of these lengths: prefixes, then what is left of each.

    `shared` is as in `flatten_samples`.
    """
    cut = [num_tokens for num_tokens, count in shared for _ in range(count)]
    rest = [length - num_tokens for length, num_tokens in zip(lengths, cut, strict=False)]
    return [*(num_tokens for num_tokens, _ in shared), *rest, *lengths[len(cut) :]]


def rows_of_positions(
    batch: PackedBatch, positions: Sequence[int], shared: Sequence[tuple[int, int]]
) -> npt.NDArray[np.int64]:
    """Return the row in a stream of each sample's token at these positions; `shared` is as in `flatten_samples`."""
    starts = batch.cu_seqlens.numpy().astype(np.int64)
    cut = [(start, size) for start, (size, count) in zip(starts, shared, strict=False) for _ in range(count)]
    rows = []
    for sample, position in enumerate(positions):
        prefix, size = cut[sample] if sample < len(cut) else (0, 0)
        rows.append(prefix + position if position < size else starts[len(shared) + sample] + position - size)
    return np.array(rows, np.int64)


def flatten_samples(
    samples: Samples,
    *,
    num_boundaries: int | None = None,
    size_buckets: Sequence[int] = (),
    row_length: int | None = None,
    fill_tokens: int = 0,
    shared: Sequence[tuple[int, int]] = (),
    num_shared_boundaries: int | None = None,
) -> PackedBatch:
    """Concatenate samples (ids (n,), loss mask (n,)) into a batch on the CPU, of at least `fill_tokens` tokens.

    A document's first token is never predicted, so it never has loss. Much padding is at position 0. With
    `num_boundaries` (see `padded_num_boundaries`), a document without labels pads the stream to its `packed_size`, and
    the last boundary is repeated to that number: compiled graphs fit every batch, and no kernel leaves rows unwritten.
    With `row_length`, each sample is padded to a row of that length. `shared` are prefixes (tokens, samples) of the
    first samples in their order, which are stored once, with as many boundaries as `num_shared_boundaries` says.
    Raises ValueError for no samples, an empty one, one longer than a row, arrays of different lengths, more
    documents than fit in `num_boundaries`, or a prefix that samples do not share or that predicts a label.
    """
    samples, starts, counts = _cut_prefixes(samples, shared)
    lengths = [len(ids) for ids, _ in samples]
    max_seqlen, real = max(lengths), np.array(lengths)
    if row_length is not None:
        samples = [(_padded(ids, row_length), _padded(mask, row_length)) for ids, mask in samples]
        lengths, max_seqlen = [row_length] * len(samples), row_length
    if num_boundaries:
        size = packed_size(lengths, size_buckets=size_buckets, row_length=row_length, fill_tokens=fill_tokens)
        fill_tokens, max_seqlen = size
    if (tail := fill_tokens - sum(lengths)) > 0:
        samples = [*samples, (np.zeros(tail, np.int64), np.zeros(tail, bool))]
        lengths.append(tail)
        max_seqlen = max(max_seqlen, tail)
    cu_seqlens = padded_boundaries(lengths, num_boundaries)
    first = cu_seqlens[: len(lengths)]
    token_ids = np.concatenate([ids for ids, _ in samples]).astype(np.int64)
    loss_mask = np.concatenate([marks for _, marks in samples]).astype(bool)
    loss_mask[first] = False
    label_positions = np.flatnonzero(loss_mask)
    document = np.repeat(np.arange(len(lengths)), lengths)
    real, starts, counts = (np.pad(values, (0, len(lengths) - len(values))) for values in (real, starts, counts))
    position_ids = np.arange(len(token_ids)) - first[document]
    is_padding = position_ids >= real[document]
    position_ids += starts[document]
    if row_length is not None or tail > TOKENS_MULTIPLE:
        position_ids[is_padding] = 0
    return PackedBatch(
        token_ids=torch.from_numpy(token_ids),
        position_ids=torch.from_numpy(position_ids),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        max_seqlen=max_seqlen,
        label_rows=torch.from_numpy(label_positions - 1),
        label_ids=torch.from_numpy(token_ids[label_positions]),
        sample_counts=torch.from_numpy(np.where(is_padding, 0, counts[document])),
        row_length=row_length,
        shared=_shared_prefixes(shared, lengths, num_shared_boundaries),
    )


def _padded(values: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    return np.pad(values, (0, length - len(values)))


def _cut_prefixes(
    samples: Samples, shared: Sequence[tuple[int, int]]
) -> tuple[Samples, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the documents of a stream, and of each the position of its first token and how many samples have it."""
    if not samples:
        raise ValueError("a micro-batch needs at least one sample")
    for index, (ids, loss_mask) in enumerate(samples):
        if len(ids) == 0 or len(ids) != len(loss_mask):
            raise ValueError(f"sample {index} has {len(ids)} token ids and a loss mask of {len(loss_mask)}")
    prefixes, rest, starts, first = [], [], [], 0
    for num_tokens, count in shared:
        members = samples[first : first + count]
        ids, loss_mask = members[0][0][:num_tokens], members[0][1][:num_tokens]
        for own_ids, own_mask in members:
            if len(own_ids) <= num_tokens or not np.array_equal(own_ids[:num_tokens], ids):
                raise ValueError(f"samples {first} to {first + count - 1} do not share {num_tokens} tokens")
            if own_mask[1 : num_tokens + 1].any():
                raise ValueError(f"samples {first} to {first + count - 1} have labels in {num_tokens} shared tokens")
            rest.append((own_ids[num_tokens:], own_mask[num_tokens:]))
        prefixes.append((ids, loss_mask))
        starts += [num_tokens] * count
        first += count
    counts = [count for _, count in shared] + [1] * len(samples)
    offsets = [0] * len(shared) + starts + [0] * (len(samples) - first)
    return [*prefixes, *rest, *samples[first:]], np.array(offsets), np.array(counts)


def _shared_prefixes(
    shared: Sequence[tuple[int, int]], lengths: Sequence[int], num_boundaries: int | None
) -> SharedPrefixes | None:
    if not shared and num_boundaries is None:
        return None
    ends = len(shared) + np.cumsum([0, *(count for _, count in shared)])
    sizes = [num_tokens for num_tokens, _ in shared]
    suffixes = [sum(lengths[start:end]) for start, end in pairwise(ends)]
    facts = [len(shared), sum(sizes), sum(suffixes), max(suffixes, default=0), max(sizes, default=0)]
    bounds = (torch.from_numpy(padded_boundaries(token_counts, num_boundaries)) for token_counts in (sizes, suffixes))
    return SharedPrefixes(next(bounds), next(bounds), torch.tensor(facts))
