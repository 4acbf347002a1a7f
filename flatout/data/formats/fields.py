"""Checks of single values in a row. A wrong one is told with its place in the row; a right one is never altered."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flatout.data.strict_json import JSONSyntaxError, parse_json


class FieldError(Exception):
    """What is wrong with a row, from the field on (`messages[1].role missing; ...`); the parser adds file and row."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How one source's rows are read: `columns` (ours -> theirs), `roles` (theirs -> ours), the system prompt."""

    columns: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    system: str | None = None

    def name(self, column: str) -> str:
        """The user's name of our column."""
        return self.columns.get(column, column)


def kind(value: object) -> str:
    """How a value is called in messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int | float):
        return f"a number ({value})"
    if isinstance(value, str):
        return "a text"
    if isinstance(value, list):
        return "a list"
    return "an object" if isinstance(value, dict) else type(value).__name__


def text_at(value: object, place: str) -> str:
    """A text that UTF-8 can write, unchanged. Raises FieldError for another type, a NUL or a lone surrogate."""
    if not isinstance(value, str):
        raise FieldError(f"{place} is {kind(value)}, not a text")
    if value.isascii() and "\0" not in value:
        return value
    if (at := value.find("\0")) >= 0:
        raise FieldError(f"{place} holds NUL (U+0000) at character {at + 1}; remove it from the data")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(value[error.start])
        raise FieldError(
            f"{place} holds the lone surrogate U+{code:04X} at character {error.start + 1}; "
            f"half of a character was cut off when the data was written"
        ) from None
    return value


def optional_text(value: object, place: str) -> str | None:
    """As text_at; null stays None."""
    return None if value is None else text_at(value, place)


def list_at(value: object, place: str) -> list[Any]:
    """A list, or JSON text of one (how csv and some parquet files keep lists)."""
    value = unpacked(value, place)
    if not isinstance(value, list):
        raise FieldError(f"{place} is {kind(value)}, not a list")
    return value


def object_at(value: object, place: str) -> dict[str, Any]:
    """An object, or JSON text of one."""
    value = unpacked(value, place)
    if not isinstance(value, dict):
        raise FieldError(f"{place} is {kind(value)}, not an object")
    return value


def unpacked(value: object, place: str) -> object:
    """The value that a JSON text holds; any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except JSONSyntaxError as error:
        raise FieldError(f"{place} is no JSON: character {error.column}: {error.what}") from None


def flag_at(value: object, place: str) -> bool:
    """True or false, as itself or as 0 or 1. Raises FieldError for every other number, NaN among them."""
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    if isinstance(value, int | float):
        raise FieldError(f"{place} is {value}; only 0 (no loss) and 1 (loss) are possible")
    raise FieldError(f"{place} is {kind(value)}; give true or false, or 1 or 0")
