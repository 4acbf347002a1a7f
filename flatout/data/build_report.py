"""What happened to each row of a build: counts and lists for report.json, and when to stop the build."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatout.config.schema import DataConfig
from flatout.data.tokenize import LOSING
from flatout.data.workers import Chunk, TokenizedChunk
from flatout.errors import DataError

MAX_PROBLEMS = 5
_PATIENCE_ROWS = 5000  # how many rows the build still reads after a bad one, to report more of them at once
_LISTED = ("truncated", "split", "too_long", "no_labels", "lost_labels", "typed_control")
_COUNTED = (
    *_LISTED, "rows", "bad", "kept", "samples", "conversations", "duplicates", "windows_without_labels",
    "typed_control_tokens", "reasoning_dropped", "reasoning_masked", "empty_answers",
    "split_by_question", "questions", "documents", "typed_documents",
    "tokens", "label_tokens", *(f"{fate}_{kind}" for fate in LOSING for kind in ("tokens", "labels")),
)  # fmt: skip
# shares of rows that may be lost before a build with on_bad_row: error stops
_MAX_NO_LABELS, _MAX_LOST_LABELS = 0.001, 0.01
_MAX_TYPED = 0.1  # share of plain texts that may contain special tokens before the build stops


class BuildReport:
    """Collects counts over a build; every dropped, truncated or skipped row is counted and listed."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self.counts: Counter[str] = Counter(dict.fromkeys(_COUNTED, 0))
        self.problems: list[str] = []
        # row numbers by what happened, then by file
        self._listed: dict[str, dict[str, array[int]]] = {name: defaultdict(lambda: array("q")) for name in _LISTED}
        self._lengths = array("q")
        self._percentiles: dict[str, int] = {}
        self._hashes = array("Q")
        self._read_since_problem = 0

    def bad_row(self, problem: DataError | str) -> None:
        """Count a row that cannot be read, parsed or tokenized. Raises DataError once enough are known to stop."""
        self.counts["rows"] += 1
        self.counts["bad"] += 1
        self.problems.append(str(problem))
        if self._config.on_bad_row == "error" and len(self.problems) >= MAX_PROBLEMS:
            self._stop()

    def add(self, chunk: Chunk, done: TokenizedChunk, hashes: NDArray[np.uint64]) -> None:
        """Count one chunk; `hashes` are of its stored pieces. Raises DataError when bad rows stop the build."""
        self.counts["rows"] += len(chunk.rows) - len(done.problems)
        self.counts["typed_control"] += len(done.typed_rows)
        self.counts.update(done.counts)
        self.counts.update(fate for fate in done.fates if fate != "bad")
        self._lengths.extend(n for n, fate in zip(done.num_tokens, done.fates, strict=True) if fate != "bad")
        self._hashes.frombytes(hashes.tobytes())
        listed = [(fate, index) for index, fate in enumerate(done.fates) if fate in _LISTED]
        for name, index in listed + [("typed_control", index) for index in done.typed_rows]:
            origin = chunk.rows[index].origin
            self._listed[name][origin.source].append(origin.row_number)
        for problem in done.problems:
            self.bad_row(problem)
        if self.counts["documents"] >= _PATIENCE_ROWS:
            self._check_special_tokens()
        if self.problems and self._config.on_bad_row == "error":
            self._read_since_problem += len(chunk.rows)
            if self._read_since_problem > _PATIENCE_ROWS:
                self._stop()

    def close(self, num_samples: int) -> None:
        """Finish the counts after the last row. Raises DataError if too many rows were lost, or nothing is left."""
        counts, config, rows = self.counts, self._config, self.counts["rows"]
        if self._lengths:
            # of the lengths before the length policy, in tokens
            lengths, shares = np.frombuffer(self._lengths, dtype=np.int64), (50, 90, 95, 99, 100)
            values = np.percentile(lengths, shares, method="higher").tolist()
            self._percentiles = {f"p{share}": value for share, value in zip(shares, values, strict=True)}
        counts["duplicates"] = len(self._hashes) - len(np.unique(np.frombuffer(self._hashes, dtype=np.uint64)))
        counts["samples"] = num_samples
        self._check_special_tokens()
        strict = config.on_bad_row == "error"
        if self.problems and strict:
            self._stop()
        if strict or not num_samples:
            found = self._percentiles
            spread = f"95th percentile {found.get('p95')}, longest {found.get('p100')} tokens"
            if config.too_long == "error" and counts["too_long"]:
                raise DataError(
                    f"{counts['too_long']} of {rows} rows are over max_tokens={config.max_tokens} ({spread}): "
                    f"{self._some('too_long')}; raise data.max_tokens, or set data.too_long to drop, truncate or split"
                )
            if counts["no_labels"] > _MAX_NO_LABELS * rows:
                raise DataError(
                    f"{counts['no_labels']} of {rows} rows have no label tokens (no answer, an empty one, or "
                    f"train: false): {self._some('no_labels')}; remove them, or set data.on_bad_row: skip"
                )
            if counts["lost_labels"] > _MAX_LOST_LABELS * rows:
                raise DataError(
                    f"{counts['lost_labels']} of {rows} rows lose all labels at max_tokens={config.max_tokens} "
                    f"({spread}): {self._some('lost_labels')}; raise data.max_tokens, set data.too_long: drop, "
                    "or data.on_bad_row: skip"
                )
        if not num_samples:
            raise DataError(
                f"data set {config.name!r} is empty: of {rows} rows {counts['bad']} were bad, "
                f"{counts['no_labels']} had no labels, {counts['too_long']} were too long, "
                f"{counts['lost_labels']} lost all labels when truncated"
                + (f"; the first: {self.problems[0]}" if self.problems else "")
                + f"; read from {', '.join(source.path for source in config.sources)}"
            )

    def notes(self) -> list[str]:
        """Return what a user should know about the rows, one sentence each."""
        counts = self.counts
        told = {
            "bad": "bad rows were skipped",
            "too_long": "rows were dropped: too long",
            "no_labels": "rows were dropped: no label tokens",
            "lost_labels": "rows were dropped: truncation left no label",
            "truncated": f"rows were truncated to {self._config.max_tokens} tokens",
            "split": f"rows were split into windows of {self._config.max_tokens} tokens",
            "typed_control": "rows contain control tokens as text; they were encoded as text",
            "split_by_question": f"conversations became {counts['questions']} samples, one for each question: the chat "
            "template drops the reasoning of earlier answers (data.lost_reasoning: split)",
            "reasoning_masked": "answers carry no loss: the chat template drops their reasoning",
            "reasoning_dropped": "turns lost their reasoning: the chat template drops it",
            "empty_answers": "answers are empty; they do not contribute to the loss",
            "duplicates": "samples are duplicates; they are kept",
        }
        notes = []
        for name, what in told.items():
            note = f"{counts[name]} {what}"
            if name in LOSING:
                tokens, labels = counts[f"{name}_tokens"], counts[f"{name}_labels"]
                note += (
                    f"; lost: {tokens:,} tokens ({tokens / max(counts['tokens'], 1):.1%} of all) "
                    f"and {labels:,} label tokens ({labels / max(counts['label_tokens'], 1):.1%} of all)"
                )
            if counts[name]:
                notes.append(note)
        return notes

    def report(self, notes: list[str]) -> dict[str, Any]:
        """Return the content of report.json."""
        return {
            "counts": dict(sorted(self.counts.items())),
            "length_percentiles": self._percentiles,
            "notes": notes,
            "bad_rows": self.problems,
            "rows": {name: {file: list(rows) for file, rows in files.items()} for name, files in self._listed.items()},
        }

    def _check_special_tokens(self) -> None:
        counts = self.counts
        if self._config.special_tokens is None and counts["typed_documents"] > _MAX_TYPED * counts["documents"]:
            raise DataError(
                f"{counts['typed_documents']} of {counts['documents']} texts contain special tokens of the tokenizer "
                f"({self._some('typed_control')}): they look already formatted with a chat template; set "
                "data.special_tokens: keep to read them as tokens, or text to encode them as text"
            )

    def _some(self, name: str) -> str:
        """Name the first rows of a list."""
        origins = (f"{file}:{row}" for file, rows in self._listed[name].items() for row in rows)
        return ", ".join(islice(origins, MAX_PROBLEMS)) + (", ..." if self.counts[name] > MAX_PROBLEMS else "")

    def _stop(self) -> None:
        lines = "".join(f"\n  - {problem}" for problem in self.problems[:MAX_PROBLEMS])
        raise DataError(
            f"data set {self._config.name!r}: bad rows, so nothing was built (set data.on_bad_row: skip to drop them)"
            f"{lines}"
        )
