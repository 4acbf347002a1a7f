"""Which rows of each source are used, and how often: a pure function of counts, weights and a seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


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
