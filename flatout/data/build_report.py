"""What happened to each row of a build: counts and lists for report.json, and when to stop the build."""

from __future__ import annotations

import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from itertools import chain, islice
from typing import Any, NoReturn

import numpy as np

from flatout.config.schema import DataConfig
from flatout.data.conversation import Origin
from flatout.data.counts import ALWAYS_COUNTED, COUNTS, LISTED, LOSING, UNITS
from flatout.data.markup import markup_notes
from flatout.data.pictures.files import Files, files_of
from flatout.data.preference_columns import unit_notes
from flatout.data.workers import Chunk, Problem, TokenizedChunk
from flatout.errors import DataError, Fix

MAX_PROBLEMS = 5
_CUT = {"truncated": "truncated", "split": "split", "lost_labels": "without a label left", "too_long": "too long"}
_PATIENCE_ROWS = 5000  # how many rows the build still reads after a bad one, to report more of them at once
# shares of rows that may be lost before a build with on_bad_row: error stops
_MAX_SHARES = {"no_labels": 0.001, "lost_labels": 0.01}
# so many rows of each kind, and so many errors, are listed; all are counted
MAX_LISTED, MAX_LISTED_PROBLEMS = 200_000, 10_000
_MAX_LOST_TOKENS = 0.2  # share of label tokens that a length policy may lose which nobody asked for
_MAX_TYPED = 0.1  # share of plain texts that may contain special tokens before the build stops
_SKIP = Fix({"data.on_bad_row": "skip"}, "leaves such rows out")

TOLD_EVERY_S = 30.0
"""How often a long build reports its progress."""


def _record(chunk: Chunk, done: TokenizedChunk) -> dict[str, Any]:
    """Return what is remembered of a chunk, as JSON: an interrupted build takes the records of its shards once more."""
    problems, tally = [*chunk.problems, *done.problems], done.tally
    counts = Counter(rows=len(chunk.rows) + len(chunk.problems), bad=len(problems))
    counts.update(deduped_tokens=done.repeated.tokens, deduped_labels=done.repeated.labels)
    counts.update(tally.counts)
    origins = [(name, chunk.rows[place].origin) for name, place in tally.listed]
    return {
        "counts": dict(counts),
        "num_units": len(done.unit_sizes),
        "problems": [(text, [asdict(fix) for fix in fixes]) for text, fixes in problems],
        # what happened to a row that the report names, its file and its number
        "listed": [(name, origin.source, origin.row_number) for name, origin in origins],
        "lengths": [*tally.lengths.items()],
        "keys": [key for key in done.keys if key],
        "files": [*dict.fromkeys(chunk.rows[row].origin.source for row in done.sample_row.tolist())],
        "picture_files": files_of(chain.from_iterable(done.pictures)),
    }


class BuildReport:
    """Collects counts over a build; every dropped, truncated or skipped row is counted, and the first ones are listed.

    `most_rows` returns a number that all rows together cannot exceed (None if not known); it may read the sources, and
    is only asked once a limit seems to be exceeded.
    """

    limit = "data.max_tokens"
    """The setting that gives the most tokens of a row; empty for the model's positions."""
    noun = "rows"

    def __init__(self, config: DataConfig, most_rows: Callable[[], int | None] = lambda: None) -> None:
        self._config, self._most_rows = config, cache(most_rows)
        self.counts: Counter[str] = Counter(dict.fromkeys(ALWAYS_COUNTED, 0))
        self.problems: list[Problem] = []
        self.num_chunks = 0
        self.seen = set[int]()
        """Keys of the rows that are in the store, for `data.dedupe`."""
        self.files: dict[str, int] = {}
        """The number of each file in the store."""
        self.picture_files: Files = {}
        # row numbers by what happened, then by file
        self._listed: dict[str, dict[str, array[int]]] = {name: defaultdict(lambda: array("q")) for name in LISTED}
        self._num_listed: Counter[str] = Counter()
        self._lengths: Counter[int] = Counter()  # rows of each length, before the length policy
        self._percentiles: dict[str, int] = {}
        self._num_units = self._read_since_loss = 0
        self._new: list[dict[str, Any]] = []

    def add(self, chunk: Chunk, done: TokenizedChunk) -> None:
        """Count one chunk. Raises DataError as soon as it is certain that the set will be refused."""
        record = _record(chunk, done)
        self.restore([record])
        self._new.append(record)
        self._check(len(chunk.rows) + len(record["problems"]))

    def check_unread(self, problems: list[Problem]) -> None:
        """Raise DataError if so many rows could not even be read, of which no chunk is counted yet."""
        if self._config.on_bad_row == "error" and len(problems) >= MAX_PROBLEMS:
            self.problems += problems
            self._stop()

    def new_records(self) -> list[dict[str, Any]]:
        """Return the records of the chunks since the last call as JSON, for `restore`."""
        new, self._new = self._new, []
        return new

    def restore(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Take over what an earlier build counted; call it for each of its lists of records, in order."""
        self.num_chunks += len(records)
        for record in records:
            self.counts.update(record["counts"])
            self._num_units += record["num_units"]
            new = record["problems"][: max(0, MAX_LISTED_PROBLEMS - len(self.problems))]
            self.problems += [(text, tuple(Fix(**fix) for fix in fixes)) for text, fixes in new]
            self._lengths.update(dict(record["lengths"]))
            self.seen.update(record["keys"])
            self.picture_files |= record["picture_files"]
            for name in record["files"]:
                self.files.setdefault(name, len(self.files))
            for name, source, row in record["listed"]:
                if self._num_listed[name] < MAX_LISTED:
                    self._num_listed[name] += 1
                    self._listed[name][source].append(row)

    def _check(self, num_read: int) -> None:
        """Raise DataError if the set is certain to be refused, and enough rows are read to say why."""
        counts, config = self.counts, self._config
        if counts["documents"] + counts["conversations"] >= _PATIENCE_ROWS:
            self._check_special_tokens()
        if config.on_bad_row != "error":
            return
        if self.problems or (config.too_long == "error" and counts["too_long"]):
            self._read_since_loss += num_read
            if counts["bad"] >= MAX_PROBLEMS or self._read_since_loss > _PATIENCE_ROWS:
                self._refuse(counts["rows"])
        over = [name for name, share in _MAX_SHARES.items() if counts[name] > share * counts["rows"]]
        if any(counts[name] >= MAX_PROBLEMS for name in over) and (most := self._most_rows()) is not None:
            self._refuse(max(most, counts["rows"]))

    def _refuse(self, most_rows: int) -> None:
        """Raise DataError if so many rows are lost that a set of at most `most_rows` must not be built."""
        counts, config = self.counts, self._config
        if self.problems and config.on_bad_row == "error":
            self._stop()
        length_spread, read = self._spread(), counts["rows"]
        spread = f"95th percentile {length_spread.get('p95')}, longest {length_spread.get('p100')} tokens"
        of = f"of {read}" if most_rows == read else f"of the first {read} of at most {most_rows}"
        if config.too_long == "error" and counts["too_long"]:
            raise DataError(
                f"{counts['too_long']} {of} rows are over max_tokens={config.max_tokens} ({spread}): "
                f"{self._some('too_long')}",
                [self._longer("p100"), Fix({"data.too_long": "drop"}, "leaves them out")],
            )
        if counts["no_labels"] > _MAX_SHARES["no_labels"] * most_rows:
            is_all = counts["no_labels"] == counts["rows"]
            advice = "add one to each, such as an assistant's message" if is_all else "add one to each, or remove them"
            raise DataError(
                f"{counts['no_labels']} {of} rows have no answer to learn from (none, an empty one, or train: false): "
                f"{self._some('no_labels')}; {advice}",
                [_SKIP] * (not is_all),
            )
        if counts["lost_labels"] > _MAX_SHARES["lost_labels"] * most_rows:
            drop = [Fix({"data.too_long": "drop"}, "leaves out all longer rows")]
            fixes = [self._longer("p99"), *drop * (min(self._lengths) <= (config.max_tokens or 0))]
            raise DataError(
                f"{counts['lost_labels']} {of} rows lose all labels at max_tokens={config.max_tokens} "
                f"({spread}): {self._some('lost_labels')}",
                [*fixes, *[_SKIP] * (counts["lost_labels"] < read)],
            )

    def close(self, num_samples: int, num_distinct: int) -> None:
        """Finish the counts after the last row. Raises DataError if too many rows were lost, or nothing is left."""
        counts, config, rows = self.counts, self._config, self.counts["rows"]
        self._percentiles = self._spread()
        # copies that the weights ask for are no duplicates
        counts["duplicates"] = self._num_units - num_distinct
        counts["samples"] = num_samples
        self._check_special_tokens()
        if config.on_bad_row == "error" or not num_samples:
            self._refuse(rows)
        self._check_lost_tokens()
        if not num_samples:
            lost = {"bad": "were bad", "no_labels": "had no labels", "lost_labels": "lost all labels when truncated"}
            lost["too_long"] = f"were longer than {self.limit or 'the model'} allows"
            fates = ", ".join(f"{counts[fate]} {what}" for fate, what in lost.items() if counts[fate])
            raise DataError(
                f"no {self.noun} are left of {rows}: {fates or 'the sources have none'}"
                + (f"; the first: {self.problems[0][0]}" if self.problems else "")
                + f"; read from {', '.join(source.path for source in config.sources)}",
                self.problems[0][1] if self.problems else self.longer,
            )

    def _check_lost_tokens(self) -> None:
        """Raise DataError if max_tokens loses so many label tokens that somebody must have asked for it."""
        counts, config = self.counts, self._config
        lost = sum(counts[f"{fate}_labels"] for fate in LOSING)
        if config.too_long == "auto" and lost > _MAX_LOST_TOKENS * counts["label_tokens"]:
            # auto drops pairs and labelled answers only, which cannot be cut
            accepts = Fix({"data.too_long": "drop" if counts["too_long"] else "truncate"}, "accepts the loss")
            fates = ", ".join(f"{counts[fate]:,} rows {what}" for fate, what in _CUT.items() if counts[fate])
            lengths = ", ".join(f"{percentile} {tokens:,}" for percentile, tokens in self._percentiles.items())
            raise DataError(
                f"{lost:,} of {counts['label_tokens']:,} label tokens ({lost / counts['label_tokens']:.1%}) are lost "
                f"at max_tokens={config.max_tokens}: {fates}; lengths of rows in tokens: {lengths}",
                [self._longer("p99"), accepts],
            )

    @property
    def longer(self) -> list[Fix]:
        """What keeps all rows that were too long, if any."""
        return [self._longer("p100")] if self.counts["too_long"] else []

    def _longer(self, percentile: str) -> Fix:
        if not self.limit:
            return Fix({}, "shorter prompts, or a model with more positions")
        rows = {"p99": "99 of 100 rows", "p100": "all rows"}[percentile]
        return Fix({self.limit: self._spread()[percentile]}, f"keeps {rows} whole")

    def _spread(self) -> dict[str, int]:
        """Return percentiles of the rows' lengths in tokens, before the length policy."""
        if not self._lengths:
            return {}
        lengths = np.array(sorted(self._lengths), np.int64)
        ends = np.cumsum([self._lengths[length] for length in lengths.tolist()])
        # as np.percentile does with method="higher", whose arithmetic this is
        places = {percent: int(np.ceil((ends[-1] - 1) * (percent / 100))) for percent in (50, 90, 95, 99, 100)}
        return {f"p{percent}": int(lengths[np.searchsorted(ends, place, "right")]) for percent, place in places.items()}

    def notes(self) -> list[str]:
        """Return what a user should know about the rows, one sentence each."""
        counts, notes = self.counts, list(unit_notes(self.counts))
        are_units = any(counts[name] for name in UNITS)
        ends = {}
        if counts["learnt_control"]:
            rows = self._some("typed_control")
            ends["typed_control"] = f", and in answers of {counts['learnt_control']} rows they carry loss ({rows})"
        if self._config.dedupe == "off":
            ends["duplicates"] = "; data.dedupe=exact leaves out rows that repeat an earlier one"
        for fate in LOSING:
            tokens, labels = counts[f"{fate}_tokens"], counts[f"{fate}_labels"]
            ends[fate] = f"; lost: {tokens:,} tokens ({tokens / max(counts['tokens'], 1):.1%} of all)"
            if counts["label_tokens"]:  # prompts have none
                ends[fate] += f" and {labels:,} label tokens ({labels / counts['label_tokens']:.1%} of all)"
            else:
                ends[fate] += "".join(f"; try {fix}" for fix in self.longer)
        few_repeat = counts["repeated_prompt"] <= _MAX_TYPED * (counts["documents"] + counts["conversations"])
        for name, how in COUNTS.items():
            note = (are_units and how.note_of_units) or how.note
            if note and counts[name] and not (name == "repeated_prompt" and few_repeat):
                note = note.format(max_tokens=self._config.max_tokens, questions=counts["questions"])
                notes.append(f"{counts[name]} {note}{ends.get(name, '')}")
        if tokens := counts["deduped_tokens"]:
            notes.append(f"dropped copies of rows held {tokens:,} tokens, {counts['deduped_labels']:,} of them labels")
        return [*notes, *markup_notes(counts)]

    def report(self, notes: list[str]) -> dict[str, Any]:
        """Return the content of report.json."""
        return {
            "counts": dict(sorted(self.counts.items())),
            "length_percentiles": self._percentiles,
            "notes": notes,
            "bad_rows": [text for text, _ in self.problems],
            "rows": {name: {file: list(rows) for file, rows in files.items()} for name, files in self._listed.items()},
        }

    def _check_special_tokens(self) -> None:
        counts, config = self.counts, self._config
        num_texts = counts["documents"] + counts["conversations"]
        most, as_text = _MAX_TYPED * num_texts, Fix({"data.special_tokens": "text"}, "encodes them as text")
        if config.special_tokens != "text" and counts["typed_control"] > most:
            plain = {"data.template": "plain"} if counts["conversations"] else {}
            raise DataError(
                f"{counts['typed_control']} of {num_texts} texts contain special tokens of the tokenizer "
                f"({self._some('typed_control')}): they look already formatted with a chat template",
                [Fix({"data.special_tokens": "keep", **plain}, "reads them as tokens"), as_text],
            )
        if config.special_tokens is None and counts["template_marks"] > most:
            marks = [name.removeprefix("markup:") for name in counts if name.startswith(("markup:<", "markup:["))]
            raise DataError(
                f"{counts['template_marks']} of {num_texts} texts contain {', '.join(sorted(marks))}: they look "
                "already formatted with a chat template, whose markers are no tokens here; use its model's tokenizer, "
                "or remove the markers",
                [as_text],
            )

    def _some(self, name: str) -> str:
        origins = (f"{Origin(file, row)}" for file, rows in self._listed[name].items() for row in rows)
        return ", ".join(islice(origins, MAX_PROBLEMS)) + (", ..." if self.counts[name] > MAX_PROBLEMS else "")

    def _stop(self) -> NoReturn:
        problems = self.problems[:MAX_PROBLEMS]
        lines = "".join(f"\n  - {text}" for text, _ in problems)
        are_all = 0 < self.counts["rows"] == self.counts["bad"]
        # rows of one kind have the same fixes
        fixes = {str(fix): fix for _, of_row in problems for fix in (*of_row, *[_SKIP] * (not are_all))}
        said = f"data set {self._config.name!r}: bad rows, so nothing was built"
        raise DataError(said + lines, [*fixes.values()])


def timed(
    progress: Callable[[int, int | None], None], log: Callable[[str], None], num_before: int, total: int | None
) -> Callable[[int], None]:
    """Return what to call with the rows done: it tells `progress`, and `log` every TOLD_EVERY_S."""
    start_s = reported_s = time.monotonic()
    progress(num_before, total)

    def tell(num_rows: int) -> None:
        nonlocal reported_s
        progress(num_rows, total)
        now_s = time.monotonic()
        if now_s - reported_s >= TOLD_EVERY_S:
            reported_s, per_s = now_s, (num_rows - num_before) / (now_s - start_s)
            left = f" of about {total:,}, {max(total - num_rows, 0) / per_s:,.0f} s left" if total else ""
            log(f"tokenized {num_rows:,} rows{left}, {per_s:,.0f} rows/s")

    return tell
