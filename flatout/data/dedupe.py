"""Leaves out rows that repeat an earlier one (`data.dedupe`), by the keys that came with their tokens."""

from __future__ import annotations

import base64
from collections import Counter
from dataclasses import replace

import numpy as np

from flatout.data.row_keys import KEY_BYTES
from flatout.data.workers import TokenizedChunk


class SeenRows:
    """The keys of the rows that a build has kept so far; each takes about 100 bytes."""

    def __init__(self) -> None:
        """Begin before the first row."""
        self._keys, self._new = set[bytes](), list[bytes]()

    def without_repeated(self, done: TokenizedChunk) -> TokenizedChunk:
        """Return a chunk without the pieces of rows that repeat an earlier one; their fates and counts say so."""
        repeated = {row for row, key in enumerate(done.keys) if key and not self._add(key)}
        if not repeated:
            return done
        goes = np.isin(np.arange(len(done.fates)), list(repeated))
        left, gone = done.of_rows(~goes), done.of_rows(goes)
        counts = done.counts - sum((Counter(done.row_counts[row]) for row in repeated), Counter[str]())
        counts.update(deduped_tokens=len(gone.token_ids), deduped_labels=int(np.count_nonzero(gone.loss_mask)))
        return replace(
            left,
            fates=["equal_rows" if row in repeated else fate for row, fate in enumerate(done.fates)],
            typed_rows=[row for row in done.typed_rows if row not in repeated],
            counts=counts,
        )

    def _add(self, key: bytes) -> bool:
        """Return whether a key is new, and remember it."""
        if key in self._keys:
            return False
        self._keys.add(key)
        self._new.append(key)
        return True

    def state(self) -> str:
        """Return the keys that are new since the last call, for `restore`."""
        new, self._new = self._new, []
        return base64.b64encode(b"".join(new)).decode()

    def restore(self, state: str) -> None:
        """Take over what an earlier build saw; call it for each of its states, in order."""
        keys = base64.b64decode(state)
        self._keys.update(keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES))
