"""Leaves out rows that repeat an earlier one (`data.dedupe`), by the keys that came with their tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flatout.data.counts import Outcome, Size, Tally
from flatout.data.workers import TokenizedChunk


def without_repeated(done: TokenizedChunk, seen: set[int]) -> TokenizedChunk:
    """Return a chunk without the samples of rows that repeat one of those `seen`; adds the keys of the others to it.

    A key takes about 100 bytes.
    """
    is_repeated = np.zeros(len(done.keys), np.bool_)
    for row, key in enumerate(done.keys):
        is_repeated[row] = key in seen
        seen.update([key] * bool(key))
    if not is_repeated.any():
        return done
    gone, rows = done.of_rows(is_repeated), zip(done.outcomes, is_repeated, strict=True)
    return replace(
        done.of_rows(~is_repeated),
        tally=Tally.of(Outcome("equal_rows") if is_gone else outcome for outcome, is_gone in rows),
        keys=np.where(is_repeated, 0, np.array(done.keys, object)).tolist(),
        repeated=Size(len(gone.token_ids), int(np.count_nonzero(gone.loss_mask))),
    )
