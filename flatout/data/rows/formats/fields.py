"""Checks of single values in a row. Errors name the place in the row; valid values are never changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from flatout.config.data import SourceConfig
from flatout.data.conversation import PICTURE, Origin, is_in_memory
from flatout.errors import DataError, Fix
from flatout.io.json_file import JSONSyntaxError, parse_json

# a PICTURE in a text would become a place for a picture that the row does not have
_REFUSED = {"\0": "NUL (U+0000)", PICTURE: "the private-use character U+F5A14"}


class FieldError(DataError):
    """What is wrong with a row, from the field on (`messages[1].role missing; ...`); the parser adds file and row."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """How to read the rows of a source: its settings, and what is known of all sources."""

    columns: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    system: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    pairs: Literal["best_worst", "adjacent", "all"] = "best_worst"
    classes: tuple[str, ...] = ()
    """The labels of all sources for classification, in their order."""
    path: str = ""
    joins: bool = False
    """Texts are joined as they stand (data.template: plain), so that speakers in them are a part of the text."""

    def name(self, column: str) -> str:
        """Return the user's name of a column; one that was renamed to another column is not read under its own name."""
        return self.columns.get(column, f"{column} (renamed)" if column in self.columns.values() else column)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a source, whose columns are asked for by flatout's names, and have the user's."""

    columns: Mapping[str, Any]
    """What was read, by the user's names."""
    options: SourceOptions = field(default_factory=SourceOptions)
    origin: Origin = field(default=Origin("", 1))

    def name(self, column: str) -> str:
        return self.options.name(column)

    def get(self, column: str) -> Any:
        return self.columns.get(self.options.name(column))

    def text(self, column: str) -> str:
        return text_at(self.get(column), self.name(column))

    def first(self, columns: Iterable[str]) -> str | None:
        """Return the user's name of the first of these columns that has something: not null, "" or []."""
        return next((name for name in map(self.name, columns) if self.columns.get(name) not in (None, "", [])), None)

    def named(self, columns: Sequence[str]) -> str:
        """Return the user's name of the first of these columns that has something, or at least is there."""
        there = (name for name in map(self.name, columns) if name in self.columns)
        return self.first(columns) or next(there, self.name(columns[0]))


@dataclass(frozen=True, slots=True)
class Uses:
    """What the rows of a source need and fill, by its first row, besides the columns of their format."""

    fills: tuple[str, ...] = ()
    """Columns of the store."""
    needed: tuple[str, ...] = ()
    """Columns of the row that all rows must have, by the user's names."""
    absent: tuple[str, ...] = ()
    """Columns that no row may have, since the first does not."""


def kind(value: object) -> str:
    """Return what a value is called in messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int | float):
        return f"a number ({value})"
    names: dict[type, str] = {str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def only(value: object) -> object:
    """Return the item of a list of one, as files write a label where others have several; other values unchanged."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def text_at(value: object, place: str) -> str:
    """Return a text that UTF-8 can encode, unchanged. Raises FieldError for another type, and _REFUSED characters."""
    if not isinstance(value, str):
        raise FieldError(f"{place} is {kind(value)}, not a string")
    if value.isascii() and "\0" not in value:
        return value
    if at := next((at for at in map(value.find, _REFUSED) if at >= 0), -1) + 1:
        raise FieldError(f"{place} contains {_REFUSED[value[at - 1]]} at character {at}; remove it from the data")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        code, at = ord(value[error.start]), error.start + 1
        lost = "half a character was lost when the data was written"
        raise FieldError(f"{place} contains the lone surrogate U+{code:04X} at character {at}; {lost}") from None
    return value


def optional_text(value: object, place: str) -> str | None:
    """Like text_at, but null stays None."""
    return None if value is None else text_at(value, place)


def check_texts(value: object, place: str) -> None:
    """Check every text and key inside a value like text_at does. Raises FieldError."""
    if isinstance(value, str):
        text_at(value, place)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            text_at(key, f"a key of {place}")
            check_texts(item, place)
    elif isinstance(value, list | tuple):
        for item in value:
            check_texts(item, place)


def list_at(value: object, place: str) -> list[Any]:
    """Return a list, also from JSON text (how csv and some parquet files store lists)."""
    value = unpacked(value, place)
    if not isinstance(value, list):
        raise FieldError(f"{place} is {kind(value)}, not a list")
    return value


def object_at(value: object, place: str) -> dict[str, Any]:
    """Return an object, also from JSON text."""
    value = unpacked(value, place)
    if not isinstance(value, dict):
        raise FieldError(f"{place} is {kind(value)}, not an object")
    return value


def unpacked(value: object, place: str) -> object:
    """Return the value of a JSON text; any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except JSONSyntaxError as error:
        raise FieldError(f"{place} is not valid JSON: character {error.column}: {error.what}") from None


def flag_at(value: object, place: str) -> bool:
    """Return a flag given as true, false, 0 or 1. Raises FieldError for every other number, NaN included."""
    if not isinstance(value, int | float):
        raise FieldError(f"{place} is {kind(value)}; give true or false, or 1 or 0")
    if value not in (0, 1):
        raise FieldError(f"{place} is {value}; only 0 (no loss) and 1 (loss) are allowed")
    return bool(value)


def number_at(value: object, place: str) -> float:
    """Return a finite number, also from a text. Raises FieldError."""
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or abs(number) > 1e30:
        raise FieldError(f"{place} is {kind(value)}, not a finite number")
    return number


def advised(options: SourceOptions, *ways: Fix) -> tuple[str, list[Fix]]:
    """Return how to change settings of a source: the end of a sentence for rows in memory, which have none; and fixes.

    `ways` have what to add to these settings, under their own names, and settings of the run.
    """
    said, fixes = dict[str, None](), list[Fix]()
    given = {"columns": options.columns, "keys": options.keys, "roles": options.roles}
    for way in ways:
        own = {name: value for name, value in way.settings.items() if name in SourceConfig.model_fields}
        of_run = {name: value for name, value in way.settings.items() if name not in own}
        steps = [f"rename the key `{theirs}` to `{ours}`" for ours, theirs in own.get("columns", {}).items()]
        steps += [f"remove the key `{name}`" for name in own.get("keys", ())]
        if not is_in_memory(options.path):
            own |= {name: {**given[name], **own[name]} for name in given.keys() & own.keys()}
            fixes.append(Fix({"data.sources": [{"path": options.path, **own}], **of_run}, way.why))
        elif of_run:
            fixes.append(Fix(of_run, "; ".join([way.why, *steps])))
        elif steps:
            said[f"; {' and '.join(steps)}"] = None
    return "".join(said), fixes


def refused(said: str, options: SourceOptions, *ways: Fix) -> FieldError:
    """Return the error on a row that other settings of its source would make readable; `ways` are as in `advised`."""
    end, fixes = advised(options, *ways)
    return FieldError(said + end, fixes)
