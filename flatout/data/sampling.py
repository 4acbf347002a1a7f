"""How many rows the sources have, which of them are used, and how often: by counts, weights and a seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flatout.config.schema import DataConfig
from flatout.data.rows.formats.parser import RowParser
from flatout.data.rows.sources import RowSource

Readers = Sequence[tuple[RowSource, RowParser]]
"""Each source with the parser that was chosen from its first rows."""


def copies_of_rows(
    num_rows: Sequence[int], weights: Sequence[float], num_samples: int | None, *, shuffle: bool, seed: int
) -> list[NDArray[np.int32]]:
    """Return how often each row is used: one int32 array [num_rows[s]] for each source s.

    Weight w uses every row floor(w) times, and round((w - floor(w)) * n) of the n rows once more, drawn by `seed`.
    `num_samples` then keeps that many of all uses (all, if there are fewer): drawn by `seed`, or the first ones.
    """
    copies = []
    for source, (count, weight) in enumerate(zip(num_rows, weights, strict=True)):
        whole = int(weight)
        uses = np.full(count, whole, dtype=np.int32)
        extra = round((weight - whole) * count)
        uses[np.random.default_rng((seed, 0, source)).permutation(count)[:extra]] += 1
        copies.append(uses)
    total = sum(int(uses.sum()) for uses in copies)
    if num_samples is None or num_samples >= total:
        return copies
    joined = np.concatenate(copies)
    owner = np.repeat(np.arange(len(joined)), joined)
    picked = np.random.default_rng((seed, 1)).permutation(total)[:num_samples] if shuffle else np.arange(num_samples)
    chosen = np.bincount(owner[picked], minlength=len(joined)).astype(np.int32)
    return np.split(chosen, np.cumsum(num_rows)[:-1])


def count_rows(config: DataConfig, readers: Readers) -> tuple[list[NDArray[np.int32]] | None, int | None]:
    """Return how often each row of each source is used (None: once each), and how many are read (None: not known)."""
    weights = [source.weight for source in config.sources]
    if config.num_samples is None and all(weight == 1.0 for weight in weights):
        about = [source.about_rows() for source, _ in readers]
        return None, None if None in about else sum(count or 0 for count in about)
    counts = []
    for source, _ in readers:
        count = source.num_rows
        if count is None:  # bad rows are reported later, when the rows are parsed; their lines count
            count = sum(1 for _ in source.rows(lambda _: None, parse=False))
        counts.append(count)
    copies = copies_of_rows(counts, weights, config.num_samples, shuffle=config.shuffle, seed=config.seed)
    return copies, sum(int((uses > 0).sum()) for uses in copies)


def most_rows(readers: Readers) -> int | None:
    """Return a number that all rows together cannot exceed; None if that is not known before they are parsed."""
    counts = [source.most_rows() for source, _ in readers]
    return None if None in counts else sum(count or 0 for count in counts)
