"""The parser of one source: chooses the format by the first row, then turns raw rows into samples."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from flatout.config.data import CONVERTERS
from flatout.config.objective import ADVANTAGE, REWARD
from flatout.config.schema import SourceConfig
from flatout.data.conversation import Origin, ParsedRow, PreferenceRow
from flatout.data.rows.formats.advice import (
    Works,
    alpaca_columns,
    columns_found,
    near_miss,
    prompt_column,
    refusal,
    unknown_format,
    unread_meaning,
    unreadable,
)
from flatout.data.rows.formats.answers import CLASSIFY, JUDGED, MARGIN, PREFERENCES, is_choice, is_ranked, other_prompts
from flatout.data.rows.formats.conversations import CHAT_COLUMNS, ROLE_TARGETS, TURN_KEYS, turns_at
from flatout.data.rows.formats.fields import FieldError, Row, SourceOptions, advised, kind, unpacked
from flatout.data.rows.formats.pictures import PICTURED_FORMATS, is_picture_column, pictures_of
from flatout.data.rows.formats.prompts import PROMPTED
from flatout.data.rows.formats.rules import ALL_COLUMNS, RULES
from flatout.data.rows.read import RawRow
from flatout.errors import DataError, Fix

_ONE_SCHEMA = "all rows of a source need one schema: list this file as a separate source, or fix the row"
# columns that some rows of a format have, and how they get them
_WORTH = {MARGIN: "margin and no scores", ADVANTAGE: "advantage", REWARD: "reward"}
# keys of a turn that `columns` renames
_NO_COLUMN = {"role", "content", "from", "value"}


@dataclass(frozen=True, slots=True)
class RowParser:
    """Parses the rows of one source; a plain value, so that it can be sent to other processes."""

    format: str
    """What was chosen, or detected at the row `first`."""
    options: SourceOptions
    first: Origin
    kinds: tuple[tuple[str, str], ...]
    """The columns that every row must have, with the kinds of their values."""
    absent: tuple[str, ...] = ()
    """Those that no row may have, since the first does not."""
    unread: tuple[str, ...] = ()
    """Those of the first row that the format ignores."""
    hint: str = ""
    """How those of them would be read that carry meaning."""
    columns: tuple[str, ...] = ()
    """Columns of the store that its rows fill."""

    @property
    def is_joined(self) -> bool:
        """Whether rows are two texts, which are joined as they stand."""
        return self.format == "prompt_completion" and all(kind == "a string" for _, kind in self.kinds)

    @property
    def summary(self) -> str:
        """One line for the console: the format, its columns and the ignored columns."""
        unread = f"; ignored: {', '.join(self.unread)}{self.hint}" if self.unread else ""
        remark = "" if self.format == "prompt_completion" and not self.is_joined else RULES[self.format].remark
        columns = ", ".join(name for name, _ in self.kinds)
        return f"{self.format} rows ({columns}){unread}{'; ' if remark else ''}{remark}"

    def parse(self, raw: RawRow) -> ParsedRow:
        """Return the common form of one row. Raises DataError with file, row, field, what was found and what to do."""
        row = Row(raw.columns, self.options, raw.origin)
        try:
            self._require_schema(row.columns)
            if why := refusal(row, self.format):
                raise why
            sample = RULES[self.format].parse(row)
            given = sample.columns if isinstance(sample, PreferenceRow) else _WORTH
            for name, said in _WORTH.items():
                if name in self.columns and name not in given:
                    raise FieldError(f"has no {said}, but {self.first} has; {_ONE_SCHEMA}")
            return sample
        except FieldError as bad:
            raise bad.at(raw.origin) from None

    def _require_schema(self, row: Mapping[str, Any]) -> None:
        for name, first_kind in self.kinds:
            if name not in row:
                has = f"no column {name!r}, but {self.first} has it ({self.format} rows)"
                raise FieldError(f"{has}; {columns_found(row)}; {_ONE_SCHEMA}")
            if isinstance(row[name], str | list) and kind(row[name]) != first_kind:
                raise FieldError(f"{name} is {kind(row[name])}, but {first_kind} at {self.first}; {_ONE_SCHEMA}")
        for name in self.absent:
            if row.get(name) is not None:
                raise FieldError(f"has a column {name!r}, but {self.first} has none; {_ONE_SCHEMA}")


def make_parser(source: SourceConfig, first: RawRow) -> RowParser:
    """Make the parser of a source. Raises DataError if its settings do not fit its first row."""

    def works(columns: Mapping[str, str]) -> bool:
        tried = source.model_copy(update={"columns": {**source.columns, **columns}})
        try:
            _parser_of(tried, first, lambda columns: False).parse(first)
        except DataError:
            return False
        return True

    for theirs, ours in source.roles.items():
        if ours not in ROLE_TARGETS:
            possible = ", ".join(ROLE_TARGETS)
            raise DataError(f"{source.path}: roles: {theirs} is mapped to {ours!r}; allowed: {possible}")
    for key in source.keys:
        if key in TURN_KEYS or key in _NO_COLUMN:
            raise DataError(f"{source.path}: keys: {key!r} is a key that flatout reads; remove it")
    if source.converter:
        source = source.model_copy(update={"format": _canonical(first.columns)})
    columns = _of_pictured(first.columns) if source.format == "auto" and not source.columns else {}
    if columns and works(columns):
        source = source.model_copy(update={"columns": columns})
    return _parser_of(source, first, works)


def _parser_of(source: SourceConfig, first: RawRow, works: Works) -> RowParser:
    """Make the parser; `works` says which advice to give where the first row does not fit."""
    _check_renames(source, first)
    options = SourceOptions(source.columns, source.roles, source.system, source.keys, source.pairs, path=source.path)
    row = Row(first.columns, options, first.origin)
    name = _known(row) if source.format == "auto" else source.format
    if why := refusal(row, name if name in (*JUDGED, CLASSIFY, *PICTURED_FORMATS) else None):
        raise why.at(first.origin)
    if name is None:
        raise unknown_format(row, works)
    if file := CONVERTERS.get(name.removesuffix("_trees")):
        said = f"{name} rows need a converter: copy {file.partition(':')[0]} of flatout's repository, and name it"
        end, fixes = advised(options, Fix({"format": file}, "converts these rows"))
        raise DataError(f"{row.origin}: {said}{end}; {columns_found(row.columns)}", fixes)
    if name in PREFERENCES and RULES[name].missing(row):
        name = "ranked" if is_ranked(row) else "choice" if is_choice(row) else name
    rule = RULES[name]
    if missing := rule.missing(row):
        said = f"no column {missing[0]!r}, which format {name} needs"
        asked = prompt_column(row, works) if name == PROMPTED else None
        raise near_miss(row, missing, works) or unreadable(row, said, asked, "asks what it holds")
    if source.system is not None and name in ("text", "tokens"):
        raise DataError(f"{first.origin}: system is set, but {name} rows are not conversations; remove system")
    uses = rule.uses(row)
    used = [*rule.used(row), *uses.needed]
    kinds = tuple((column, kind(row.columns[column])) for column in used)
    parser = RowParser(name, options, first.origin, kinds, uses.absent, columns=uses.fills)
    # to a joined text, nothing else applies
    read = set(used) if parser.is_joined else rule.read(options).union(used)
    read -= set(other_prompts(row)) if name in JUDGED else set()
    read |= set(filter(is_picture_column, row.columns)) if name in PICTURED_FORMATS else set()
    unread = tuple(column for column in row.columns if column not in read and name != PROMPTED)
    return replace(parser, unread=unread, hint=unread_meaning(row, unread) if name == "alpaca" else "")


def _canonical(row: Mapping[str, Any]) -> str:
    """Return the format of a row that a converter made: its label is meant, unlike one that a row may just have."""
    if row.get("label") is None or "input_ids" in row:
        return "auto"
    return "kto" if isinstance(row["label"], bool) else CLASSIFY


def _of_pictured(columns: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns that make a chat of a row with a question, an answer and pictures; empty for another row."""
    with suppress(FieldError):
        row = Row(columns)
        if _known(row) is None and pictures_of(row)[1] and (alpaca := alpaca_columns(columns)):
            return alpaca[0]
    return {}


def _check_renames(source: SourceConfig, first: RawRow) -> None:
    is_auto = source.format == "auto"
    known, form = (ALL_COLUMNS, "any format") if is_auto else (RULES[source.format].columns, f"format {source.format}")
    for ours, theirs in source.columns.items():
        lacks = theirs not in first.columns and ours not in _NO_COLUMN
        if theirs in known and ours in first.columns and (lacks or ours not in known):
            columns = {**{name: own for name, own in source.columns.items() if name != ours}, theirs: ours}
            fix = Fix({"data.sources": [{"path": source.path, "columns": columns}]}, "flatout's name comes first")
            said = f"columns: {ours!r} is a column of the rows and {theirs!r} one of flatout's"
            raise DataError(f"{source.path}: {said}", [fix])
        if ours not in known:
            near = difflib.get_close_matches(ours, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            raise DataError(f"{source.path}: columns: {ours!r} is not a column of {form}; {hint}")
        if lacks:
            near = difflib.get_close_matches(theirs, list(first.columns), n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            said = f"no column {theirs!r}{hint}, set by columns={{{ours}: {theirs}}}"
            raise DataError(f"{first.origin}: {said}; {columns_found(first.columns)}")


def _known(row: Row) -> str | None:
    """Return the name of the format that a row is of, None if its columns are of none."""
    for name, rule in RULES.items():
        is_whole = all(any(row.get(column) is not None for column in group) for group in rule.required)
        if is_whole and rule.looks(row):
            return "sharegpt" if name == "messages" and _is_sharegpt(row) else name
    return None


def _is_sharegpt(row: Row) -> bool:
    column = row.named(CHAT_COLUMNS)
    first = None
    with suppress(FieldError):
        turns = turns_at(row.columns.get(column), "")
        first = unpacked(turns[0], "") if turns else None
    if not isinstance(first, dict):  # the turns show nothing, so the column's usual name decides
        return column != row.name("messages")
    return row.name("from") in first and row.name("role") not in first
