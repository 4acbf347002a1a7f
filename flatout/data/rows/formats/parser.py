"""The parser of one source: checks its settings against the first row, then turns raw rows into samples."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from flatout.config.schema import SourceConfig
from flatout.data.conversation import Origin, Sample
from flatout.data.rows.formats.detect import (
    RULES,
    FormatRule,
    columns_found,
    detect,
    missing_columns,
    near_miss,
    preference,
)
from flatout.data.rows.formats.fields import FieldError, Reading, kind
from flatout.data.rows.formats.oasst import Note, is_tree, thread
from flatout.data.rows.formats.roles import TARGETS
from flatout.data.rows.read import BadRow, RawRow, raise_error
from flatout.errors import DataError

_JOINED = (
    "; both texts are joined as they are, without a chat template or a separator (format: alpaca with columns: "
    "{instruction: prompt, output: completion} puts the chat template around them)"
)
_ONE_SCHEMA = "one source holds one schema: list this file as a source of its own, or fix the row"


@dataclass(frozen=True, slots=True)
class RowParser:
    """Parses the rows of one source; a plain value, so that it can be sent to other processes.

    `format` is what was chosen, or detected at the row `first`. `kinds` are the columns that every row must have, with
    the kinds of their values; `absent` those that no row may have, since the first does not; `unread` those of the
    first row that the format ignores.
    """

    format: str
    reading: Reading
    first: Origin
    kinds: tuple[tuple[str, str], ...]
    absent: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def threads(self) -> bool:
        """Whether rows are messages or trees of them, which `gather` threads into conversations."""
        return self.format.startswith("oasst")

    @property
    def summary(self) -> str:
        """One line for the console: the format, its columns and the ignored columns."""
        unread = f"; not read: {', '.join(self.unread)}" if self.unread else ""
        joined = self.format == "prompt_completion" and all(kind == "a text" for _, kind in self.kinds)
        return f"{self.format} rows ({', '.join(name for name, _ in self.kinds)}){unread}{_JOINED if joined else ''}"

    def gather(
        self, rows: Iterable[RawRow], bad_row: BadRow = raise_error, note: Note = lambda _: None
    ) -> Iterator[RawRow]:
        """Yield the rows to parse: the source's own, except that OASST rows are first threaded into conversations.

        Call it once over the whole source, before rows are sampled or spread over processes. `note` gets one sentence
        on what threading made and left out.
        """
        return thread(rows, self.reading, bad_row, note) if self.threads else iter(rows)

    def parse(self, raw: RawRow) -> Sample:
        """Return the common form of one row. Raises DataError with file, row, field, what was found and what to do."""
        try:
            if self.threads:  # threaded rows have the form of `messages`, whatever the source's columns are
                return RULES["messages"].parse(raw.columns, raw.origin, Reading(system=self.reading.system))
            self._check_columns(raw)
            if why := preference(raw.columns, self.reading):
                raise FieldError(why)
            return RULES[self.format].parse(raw.columns, raw.origin, self.reading)
        except FieldError as bad:
            raise DataError(f"{raw.origin}: {bad}") from None

    def _check_columns(self, raw: RawRow) -> None:
        row = raw.columns
        for name, first_kind in self.kinds:
            if name not in row:
                raise FieldError(
                    f"no column {name!r}, but {self.first} has it ({self.format} rows); {columns_found(row)}; "
                    f"{_ONE_SCHEMA}"
                )
            if isinstance(row[name], str | list) and kind(row[name]) != first_kind:
                raise FieldError(f"{name} is {kind(row[name])}, but {first_kind} at {self.first}; {_ONE_SCHEMA}")
        for name in self.absent:
            if row.get(name) is not None:
                raise FieldError(f"has a column {name!r}, but {self.first} has none; {_ONE_SCHEMA}")


def make_parser(source: SourceConfig, first: RawRow) -> RowParser:
    """Make the parser of a source from its settings and its first row.

    Raises DataError if `format`, `columns`, `roles` or `system` do not fit the row.
    """
    for theirs, ours in source.roles.items():
        if ours not in TARGETS:
            raise DataError(f"{source.path}: roles: {theirs} is mapped to {ours!r}; possible: {', '.join(TARGETS)}")
    _check_renames(source, first)
    reading = Reading(source.columns, source.roles, source.system)
    name = detect(first.columns, first.origin, reading) if source.format == "auto" else source.format
    if name == "oasst" and is_tree(first.columns.get(reading.name("prompt"))):
        name = "oasst_trees"
    rule = RULES[name]
    if missing := missing_columns(first.columns, rule, reading):
        hint = near_miss(missing, first.columns) or f"no column {missing[0]!r}, which format {name} needs"
        raise DataError(f"{first.origin}: {hint}; {columns_found(first.columns)}")
    if source.system is not None and name in ("text", "tokens"):
        raise DataError(f"{first.origin}: system is set, but {name} rows hold no conversation; remove system")
    used = _used_columns(first, rule, reading)
    absent: list[str] = []
    if name == "tokens":  # if only some rows had a mask, the others would train on everything
        optional = [reading.name(column) for column in rule.optional]
        used += [column for column in optional if first.columns.get(column) is not None]
        absent = [column for column in optional if first.columns.get(column) is None]
    read = {reading.name(column) for column in chain(rule.optional, *rule.required)}
    unread = tuple(column for column in first.columns if column not in read)
    kinds = tuple((column, kind(first.columns[column])) for column in used)
    return RowParser(name, reading, first.origin, kinds, tuple(absent), unread)


def _used_columns(first: RawRow, rule: FormatRule, reading: Reading) -> list[str]:
    """Return the required columns that the first row has: one per group, preferably one that is not null."""
    used = []
    for group in rule.required:
        names = [name for name in (reading.name(column) for column in group) if name in first.columns]
        used.append(next((name for name in names if first.columns[name] is not None), names[0]))
    return used


def _check_renames(source: SourceConfig, first: RawRow) -> None:
    rules = RULES.values() if source.format == "auto" else [RULES[source.format]]
    known = {name for rule in rules for name in chain(rule.optional, *rule.required)}
    in_turns = {"role", "content", "from", "value"}  # keys of a turn; `role` is a column of the row for OASST only
    for ours, theirs in source.columns.items():
        if ours not in known:
            near = difflib.get_close_matches(ours, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            raise DataError(f"{source.path}: columns: {ours!r} is no column of ours (format {source.format}); {hint}")
        if theirs not in first.columns and ours not in in_turns:
            near = difflib.get_close_matches(theirs, list(first.columns), n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise DataError(
                f"{first.origin}: no column {theirs!r}{hint}, which columns: {{{ours}: {theirs}}} names; "
                f"{columns_found(first.columns)}"
            )
