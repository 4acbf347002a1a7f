"""The parser of one source: checks its settings against the first row, then turns raw rows into samples."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from flatout.config.schema import SourceConfig
from flatout.data.conversation import Origin, Sample
from flatout.data.formats.detect import RULES, FormatRule, columns_found, detect, missing_columns, near_miss
from flatout.data.formats.fields import FieldError, Reading, kind
from flatout.data.formats.oasst import thread
from flatout.data.formats.roles import TARGETS
from flatout.data.rows import BadRow, RawRow, raise_error
from flatout.data.sources import RowSource
from flatout.errors import DataError

_ONE_SCHEMA = "one source holds one schema: list this file as a source of its own, or fix the row"


def _ignore(note: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class RowParser:
    """Parses the rows of one source; a plain value, so that other processes can get it.

    `format` is what was chosen or detected at the row `first`. `kinds` are the columns that every row must have and
    what they hold there; `absent` those that no row may have, since the first has not; `unread` those of the first
    row that the format does not look at.
    """

    format: str
    reading: Reading
    first: Origin
    kinds: tuple[tuple[str, str], ...]
    absent: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """One line for the console: the format, its columns and the columns left unread."""
        unread = f"; not read: {', '.join(self.unread)}" if self.unread else ""
        return f"{self.format} rows ({', '.join(name for name, _ in self.kinds)}){unread}"

    def gather(
        self, rows: Iterable[RawRow], bad_row: BadRow = raise_error, note: Callable[[str], None] = _ignore
    ) -> Iterator[RawRow]:
        """The rows to parse: the source's own, except that OASST rows are threaded into conversations first.

        Call it once over the whole source, before rows are sampled or spread over processes. `note` gets one
        sentence on what threading made and left out.
        """
        return thread(rows, self.reading, bad_row, note) if self.format == "oasst" else iter(rows)

    def parse(self, raw: RawRow) -> Sample:
        """The canonical form of one row. Raises DataError with file, row, field, what was found and what to do."""
        try:
            if self.format == "oasst":  # threaded rows have the messages shape, whatever columns the source has
                return RULES["messages"].parse(raw.row, raw.origin, Reading(system=self.reading.system))
            self._check_columns(raw)
            return RULES[self.format].parse(raw.row, raw.origin, self.reading)
        except FieldError as bad:
            raise DataError(f"{raw.origin}: {bad}") from None

    def _check_columns(self, raw: RawRow) -> None:
        row = raw.row
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
    """The parser of a source, from its settings and its first row.

    Raises DataError when `format`, `columns`, `roles` or `system` do not fit the row.
    """
    _check_roles(source)
    _check_renames(source, first)
    reading = Reading(source.columns, source.roles, source.system)
    name = detect(first.row, first.origin, reading) if source.format == "auto" else source.format
    rule = RULES[name]
    if missing := missing_columns(first.row, rule, reading):
        hint = near_miss(missing, first.row) or f"no column {missing[0]!r}, which format {name} needs"
        raise DataError(f"{first.origin}: {hint}; {columns_found(first.row)}")
    if source.system is not None and name in ("text", "tokens"):
        raise DataError(f"{first.origin}: system is set, but {name} rows hold no conversation; remove system")
    used = _used_columns(first, rule, reading)
    absent: list[str] = []
    if name == "tokens":  # a mask that only some rows have would make the others train on everything
        optional = [reading.name(column) for column in rule.optional]
        used += [column for column in optional if first.row.get(column) is not None]
        absent = [column for column in optional if first.row.get(column) is None]
    read = {reading.name(column) for column in chain(rule.optional, *rule.required)}
    unread = tuple(column for column in first.row if column not in read)
    kinds = tuple((column, kind(first.row[column])) for column in used)
    return RowParser(name, reading, first.origin, kinds, tuple(absent), unread)


def read_samples(source: SourceConfig, rows: RowSource, bad_row: BadRow = raise_error) -> Iterator[Sample]:
    """Every sample of an opened source, in order, in this process; bad rows go to `bad_row`."""
    stream = rows.rows(bad_row)
    for first in stream:  # once: what follows reads the rest of the stream
        parser = make_parser(source, first)
        for raw in parser.gather(chain([first], stream), bad_row):
            try:
                sample = parser.parse(raw)
            except DataError as error:
                bad_row(error)
            else:
                yield sample


def _used_columns(first: RawRow, rule: FormatRule, reading: Reading) -> list[str]:
    """The required columns that the first row has: of each group the first that is not null, else not absent."""
    used = []
    for group in rule.required:
        names = [name for name in (reading.name(column) for column in group) if name in first.row]
        used.append(next((name for name in names if first.row[name] is not None), names[0]))
    return used


def _check_roles(source: SourceConfig) -> None:
    for theirs, ours in source.roles.items():
        if ours not in TARGETS:
            raise DataError(f"{source.path}: roles: {theirs} is mapped to {ours!r}; possible: {', '.join(TARGETS)}")


def _check_renames(source: SourceConfig, first: RawRow) -> None:
    rules = RULES.values() if source.format == "auto" else [RULES[source.format]]
    known = {name for rule in rules for name in chain(rule.optional, *rule.required)}
    in_turns = {"role", "content", "from", "value"}  # keys of a turn; `role` is a column of the row for OASST only
    for ours, theirs in source.columns.items():
        if ours not in known:
            near = difflib.get_close_matches(ours, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            raise DataError(f"{source.path}: columns: {ours!r} is no column of ours (format {source.format}); {hint}")
        if theirs not in first.row and ours not in in_turns:
            near = difflib.get_close_matches(theirs, list(first.row), n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise DataError(
                f"{first.origin}: no column {theirs!r}{hint}, which columns: {{{ours}: {theirs}}} names; "
                f"{columns_found(first.row)}"
            )
