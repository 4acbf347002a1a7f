"""What became of every row of a build: counts, lists for report.json, and when it is too much to go on."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatout.config.schema import DataConfig
from flatout.data.conversation import Origin
from flatout.data.workers import Chunk, TokenizedChunk
from flatout.errors import DataError

MAX_PROBLEMS = 5
_PATIENCE_ROWS = 5000  # how far the build reads on after a bad row, to name more of them at once
_LISTED = ("truncated", "split", "too_long", "no_labels", "lost_labels", "typed_control")
_COUNTED = (
    *_LISTED, "rows", "bad", "kept", "samples", "conversations", "duplicates", "windows_without_labels",
    "typed_control_tokens", "reasoning_dropped",
)  # fmt: skip
# Shares of rows that may be lost before a build with on_bad_row: error stops.
_MAX_NO_LABELS, _MAX_LOST_LABELS = 0.001, 0.01


class Ledger:
    """Collects over a build; every dropped, cut or skipped row is counted and listed."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self.counts: Counter[str] = Counter(dict.fromkeys(_COUNTED, 0))
        self.problems: list[str] = []
        self._listed: dict[str, dict[str, array[int]]] = {name: defaultdict(lambda: array("q")) for name in _LISTED}
        self._first: dict[str, list[Origin]] = defaultdict(list)
        self._lengths = array("q")
        self._hashes = array("Q")
        self._read_since_problem = 0

    def bad_row(self, error: DataError) -> None:
        """A row that cannot be read or parsed. Raises DataError when enough are known to stop."""
        self.counts["rows"] += 1
        self._bad(str(error))

    def add(self, chunk: Chunk, done: TokenizedChunk) -> None:
        """Count one chunk. Raises DataError when bad rows stop the build."""
        self.counts["rows"] += len(chunk.rows)
        self.counts.update(done.counts)
        self._lengths.extend(int(n) for n, fate in zip(done.num_tokens, done.fates, strict=True) if fate != "bad")
        for index, fate in enumerate(done.fates):
            self.counts[fate] += fate != "bad"
            if fate in self._listed:
                self._list(fate, chunk.rows[index].origin)
        for index in done.typed_rows:
            self.counts["typed_control"] += 1
            self._list("typed_control", chunk.rows[index].origin)
        for problem in done.problems:
            self._bad(problem)
        if self.problems and self._config.on_bad_row == "error":
            self._read_since_problem += len(chunk.rows)
            if self._read_since_problem > _PATIENCE_ROWS:
                self._stop()

    def add_hashes(self, hashes: NDArray[np.uint64]) -> None:
        """Content hashes of what was stored, first copies only: for counting duplicates."""
        self._hashes.frombytes(hashes.tobytes())

    def close(self, num_samples: int) -> None:
        """The end of the rows. Raises DataError when too many were lost, or nothing is left."""
        hashes = np.frombuffer(self._hashes, dtype=np.uint64)
        self.counts["duplicates"] = len(hashes) - len(np.unique(hashes))
        self.counts["samples"] = num_samples
        strict = self._config.on_bad_row == "error"
        if self.problems and strict:
            self._stop()
        if strict or not num_samples:
            self._check_lengths()
            self._check_labels()
        if not num_samples:
            raise DataError(
                f"data set {self._config.name!r} is empty: of {self.counts['rows']} rows {self.counts['bad']} were "
                f"bad, {self._lost()}" + (f"; the first: {self.problems[0]}" if self.problems else "")
            )

    def notes(self) -> list[str]:
        """What a user should know about the rows, a sentence each."""
        counts = self.counts
        told = {
            "bad": "bad rows were skipped",
            "too_long": "rows were dropped: too long",
            "no_labels": "rows were dropped: nothing to learn in them",
            "lost_labels": "rows were dropped: cutting left no label",
            "truncated": f"rows were cut at {self._config.max_tokens} tokens",
            "split": f"rows were split into windows of {self._config.max_tokens} tokens",
            "typed_control": "rows hold control tokens as text; they were encoded as text",
            "reasoning_dropped": "turns lost their reasoning: the chat template leaves it out",
            "duplicates": "samples are duplicates; they are kept",
        }
        return [f"{counts[name]} {what}" for name, what in told.items() if counts[name]]

    def report(self, notes: list[str]) -> dict[str, Any]:
        """The content of report.json."""
        lists = {name: {file: list(rows) for file, rows in files.items()} for name, files in self._listed.items()}
        return {
            "counts": dict(sorted(self.counts.items())),
            "length_percentiles": self.percentiles(),
            "notes": notes,
            "bad_rows": self.problems,
            "rows": lists,
        }

    def percentiles(self) -> dict[str, int]:
        """Lengths before the length policy, in tokens."""
        if not self._lengths:
            return {}
        lengths = np.frombuffer(self._lengths, dtype=np.int64)
        return {f"p{q}": int(np.percentile(lengths, q, method="higher")) for q in (50, 90, 95, 99, 100)}

    def _lost(self) -> str:
        counts = self.counts
        return (
            f"{counts['no_labels']} had no labels, {counts['too_long']} were too long, "
            f"{counts['lost_labels']} lost all labels when cut"
        )

    def _check_lengths(self) -> None:
        if self._config.too_long == "error" and self.counts["too_long"]:
            raise DataError(
                f"{self._share('too_long')} are over max_tokens={self._config.max_tokens} ({self._spread()}): "
                f"{self._some('too_long')}; raise data.max_tokens, or set data.too_long to drop, truncate or split"
            )

    def _check_labels(self) -> None:
        rows = self.counts["rows"]
        if self.counts["no_labels"] > _MAX_NO_LABELS * rows:
            raise DataError(
                f"{self._share('no_labels')} have nothing to learn (no assistant turn, or train: false): "
                f"{self._some('no_labels')}; remove them, or set data.on_bad_row: skip"
            )
        if self.counts["lost_labels"] > _MAX_LOST_LABELS * rows:
            raise DataError(
                f"{self._share('lost_labels')} lose every label at max_tokens={self._config.max_tokens} "
                f"({self._spread()}): {self._some('lost_labels')}; raise data.max_tokens, set data.too_long: drop, "
                "or data.on_bad_row: skip"
            )

    def _share(self, name: str) -> str:
        return f"{self.counts[name]} of {self.counts['rows']} rows"

    def _spread(self) -> str:
        found = self.percentiles()
        return f"95th percentile {found['p95']}, longest {found['p100']} tokens"

    def _some(self, name: str) -> str:
        first = ", ".join(str(origin) for origin in self._first[name])
        return first + (", ..." if self.counts[name] > MAX_PROBLEMS else "")

    def _list(self, name: str, origin: Origin) -> None:
        self._listed[name][origin.source].append(origin.row)
        if len(self._first[name]) < MAX_PROBLEMS:
            self._first[name].append(origin)

    def _bad(self, problem: str) -> None:
        self.counts["bad"] += 1
        self.problems.append(problem)
        if self._config.on_bad_row == "error" and len(self.problems) >= MAX_PROBLEMS:
            self._stop()

    def _stop(self) -> None:
        lines = "".join(f"\n  - {problem}" for problem in self.problems[:MAX_PROBLEMS])
        raise DataError(
            f"data set {self._config.name!r}: bad rows, so nothing was built (data.on_bad_row: skip leaves them out)"
            f"{lines}"
        )
