"""Leaves out rows that repeat an earlier one (`data.dedupe`), by the keys that came with their tokens."""

from __future__ import annotations

import base64
from collections import Counter
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flatout.config.data import Dedupe
from flatout.data.row_keys import EXACT_WORDS, INDEXED_WORDS, KEY_WORDS, are_near, mixed
from flatout.data.workers import TokenizedChunk
from flatout.errors import DataError, Fix

# an index is 54 to 70 % full
_MAX_LOAD, _GROWTH, _MIN_SLOTS = 0.7, 1.3, 1 << 12
_AT_ONCE = 1 << 16
MOST_NUMBERS = 2**32 - 1
"""Places of rows that an index can name in 32 bits; 0 is a free slot."""
_HALF = np.uint64(32)


class Index:
    """Finds the first row that has given words at one of some places of its key; by double hashing, many at once.

    A place of a row takes 5.7 to 7.4 bytes, 13 while the index grows.
    """

    def __init__(self, first_word: int, num_places: int, width: int) -> None:
        """Index the words of keys from `first_word` on: `num_places` places, one after the other, of `width` words."""
        self._first, self._num_places, self._width = first_word, num_places, width
        self._slots = np.zeros(_MIN_SLOTS, np.uint32)  # 1 + row * num_places + place

    def find(
        self, keys: NDArray[np.uint64], wanted: NDArray[np.uint64], numbers: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Return the first row of `keys` that is like a row of `wanted` at a place, int64 [n], -1 for none.

        `keys` are those that were added. `numbers` [n] are row * num_places + place in `wanted`; None: all, in order.
        """
        numbers = np.arange(len(wanted) * self._num_places) if numbers is None else numbers
        words, places, at, steps = self._probes(wanted, numbers)
        numbers_found, left = np.full(len(words), -1, np.int64), np.arange(len(words))
        while len(left):
            slots = self._slots[((at >> _HALF) * np.uint64(len(self._slots))) >> _HALF].astype(np.int64) - 1
            rows, own_places = np.divmod(slots, self._num_places)
            equal = (slots >= 0) & (own_places == places[left])
            for word in range(self._width):
                equal &= keys[rows, self._first + own_places * self._width + word] == words[left, word]
            numbers_found[left[equal]] = rows[equal]
            goes_on = (slots >= 0) & ~equal
            left, at = left[goes_on], at[goes_on] + steps[left[goes_on]]
        return numbers_found

    def add(self, keys: NDArray[np.uint64], num_before: int) -> None:
        """Add the rows from `num_before` on at those places where no row before is like them.

        Raises DataError for more rows than its slots can name.
        """
        most = len(keys) * self._num_places
        if most > MOST_NUMBERS:
            raise DataError(
                f"data.dedupe: {len(keys):,} different rows exceed the {MOST_NUMBERS // self._num_places:,} that it "
                "can tell apart; build from fewer sources",
                [Fix({"data.dedupe": "off"}, "keeps all rows")],
            )
        if most > _MAX_LOAD * len(self._slots):
            slots = self._slots
            self._slots = np.zeros(max(int(most / _MAX_LOAD) + 1, int(len(slots) * _GROWTH)), np.uint32)
            for start in range(0, len(slots), _AT_ONCE):
                part = slots[start : start + _AT_ONCE]
                self._put(keys, part[part != 0].astype(np.int64) - 1)
        numbers = np.arange(num_before * self._num_places, most)
        first = numbers[np.unique(self._probes(keys, numbers)[2], return_index=True)[1]]
        self._put(keys, first[self.find(keys, keys, first) < 0])

    def _put(self, keys: NDArray[np.uint64], numbers: NDArray[np.int64]) -> None:
        _, _, at, steps = self._probes(keys, numbers)
        while len(numbers):
            slots = ((at >> _HALF) * np.uint64(len(self._slots))) >> _HALF
            free = np.flatnonzero(self._slots[slots] == 0)
            # of those for one slot, the first takes it
            placed = free[np.unique(slots[free], return_index=True)[1]]
            self._slots[slots[placed]] = (numbers[placed] + 1).astype(np.uint32)
            is_left = np.ones(len(numbers), np.bool_)
            is_left[placed] = False
            numbers, at, steps = numbers[is_left], (at + steps)[is_left], steps[is_left]

    def _probes(
        self, keys: NDArray[np.uint64], numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the words of rows at places, the places, where they are looked for first, and how far apart then.

        A point stands for the slot that lies at this share of 2^64. Steps are odd, and at least 2^61.
        """
        rows, places = np.divmod(numbers, self._num_places)
        words = keys[rows[:, None], self._first + (places * self._width)[:, None] + np.arange(self._width)]
        start = mixed(places.astype(np.uint64) + np.uint64(1))
        for word in words.T:
            start = mixed(start ^ word)
        return words, places, start, (mixed(start) >> np.uint64(2)) | np.uint64((1 << 61) | 1)


class SeenRows:
    """The rows of a build so far. A row is compared with those that were kept, so what stays depends on nothing else.

    A kept row takes 22 to 25 bytes with `exact` and 196 to 220 with `near`, and while its index grows, 30 and 266.
    """

    def __init__(self, policy: Dedupe) -> None:
        """Begin before the first row."""
        self._num_words, self._num_rows, self._num_reported = KEY_WORDS[policy], 0, 0
        self._keys = np.zeros((_AT_ONCE, self._num_words), np.uint64)
        self._exact = Index(0, 1, EXACT_WORDS)
        self._near = Index(EXACT_WORDS, INDEXED_WORDS, 1) if policy == "near" else None

    def without_repeated(self, done: TokenizedChunk) -> TokenizedChunk:
        """Return a chunk without the pieces of rows that repeat an earlier one; their fates and counts say so."""
        if not self._num_words:
            return done
        rows = np.unique(done.piece_row)  # rows without pieces are left out already
        verdicts = dict(zip(rows.tolist(), self._judged(done.keys[rows]), strict=True))
        repeated = {row: verdict for row, verdict in verdicts.items() if verdict}
        if not repeated:
            return done
        goes = np.isin(np.arange(len(done.fates)), list(repeated))
        left, gone = done.of_rows(~goes), done.of_rows(goes)
        counts = done.counts - sum((Counter(done.row_counts[row]) for row in repeated), Counter[str]())
        counts.update(deduped_tokens=len(gone.token_ids), deduped_labels=int(np.count_nonzero(gone.loss_mask)))
        return replace(
            left,
            fates=[repeated.get(row, fate) for row, fate in enumerate(done.fates)],
            typed_rows=[row for row in done.typed_rows if row not in repeated],
            counts=counts,
        )

    def _judged(self, keys: NDArray[np.uint64]) -> list[str]:
        """Return the fate of each row by its key, "" for one that is kept; kept rows are seen from now on."""
        equal = self._exact.find(self._keys, keys) >= 0
        matches = np.zeros(0, np.int64) if self._near is None else self._near.find(self._keys, keys)
        holders = matches.reshape(len(keys), INDEXED_WORDS if self._near else 0)
        near = np.any(are_near(self._keys[holders], keys[:, None]) & (holders >= 0), axis=1)
        seen, firsts = set[tuple[int, ...]](), dict[tuple[int, int], int]()
        fates = []
        for row, words in enumerate(keys.tolist()):
            content = tuple(words[:EXACT_WORDS])
            # what `Index.add` will find, of the rows before
            places = [(k, words[EXACT_WORDS + k]) for k, holder in enumerate(holders[row].tolist()) if holder < 0]
            others = sorted({firsts[place] for place in places if place in firsts})
            if equal[row] or content in seen:
                fates.append("equal_rows")
            elif near[row] or (others and are_near(keys[others], keys[row]).any()):
                fates.append("near_rows")
            else:
                fates.append("")
                seen.add(content)
                for place in places:
                    firsts.setdefault(place, row)
        self._add(keys[np.array([not fate for fate in fates], np.bool_)])
        return fates

    def _add(self, keys: NDArray[np.uint64]) -> None:
        before, self._num_rows = self._num_rows, self._num_rows + len(keys)
        if self._num_rows > len(self._keys):
            # in place, so that there is no second copy of all keys; no other object refers to them
            self._keys.resize((self._num_rows * 17 // 16, self._num_words), refcheck=False)
        self._keys[before : self._num_rows] = keys
        for index in (self._exact, *([self._near] if self._near else [])):
            index.add(self._keys[: self._num_rows], before)

    def state(self) -> str:
        """Return the keys that are new since the last call, for `restore`."""
        before, self._num_reported = self._num_reported, self._num_rows
        return base64.b64encode(self._keys[before : self._num_rows].tobytes()).decode()

    def restore(self, state: str) -> None:
        """Take over what an earlier build saw; call it for each of its states, in order."""
        if self._num_words:
            self._add(np.frombuffer(base64.b64decode(state), np.uint64).reshape(-1, self._num_words))
        self._num_reported = self._num_rows
