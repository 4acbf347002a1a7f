"""Which format a row has, from its columns."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flatout.data.conversation import Origin, Sample
from flatout.data.formats.fields import Reading
from flatout.data.formats.oasst import OASST_COLUMNS
from flatout.data.formats.pairs import parse_alpaca, parse_prompt_completion
from flatout.data.formats.plain import MASK_COLUMNS, parse_text, parse_tokens
from flatout.data.formats.turns import CHAT_COLUMNS, chat_column, parse_messages, parse_sharegpt
from flatout.errors import DataError


@dataclass(frozen=True, slots=True)
class FormatRule:
    """`required`: one column of each group must be there. `optional` ones are read too; all others are ignored."""

    parse: Callable[[Mapping[str, Any], Origin, Reading], Sample]
    required: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...] = ()


# In the order of detection: the more telling columns first, since many chat sets have a `text` or `prompt` column too.
RULES: dict[str, FormatRule] = {
    "tokens": FormatRule(parse_tokens, (("input_ids",),), ("labels", "attention_mask", *MASK_COLUMNS)),
    "oasst": FormatRule(parse_messages, tuple((name,) for name in OASST_COLUMNS), ("rank", "deleted")),
    "messages": FormatRule(parse_messages, (CHAT_COLUMNS,), ("tools", "system", "chosen", "role", "content")),
    "sharegpt": FormatRule(
        parse_sharegpt, (("conversations", "messages", "conversation"),), ("tools", "system", "chosen", "from", "value")
    ),
    "prompt_completion": FormatRule(
        parse_prompt_completion, (("prompt",), ("completion", "chosen")), ("tools", "system", "role", "content")
    ),
    "alpaca": FormatRule(parse_alpaca, (("instruction",), ("output",)), ("input", "system", "history")),
    "text": FormatRule(parse_text, (("text",),)),
}


def detect(row: Mapping[str, Any], origin: Origin, reading: Reading | None = None) -> str:
    """The row's format name. Raises DataError with the columns found and the nearest known name."""
    reading = reading or Reading()
    for name, rule in RULES.items():
        if all(_has_one(group, row, reading) for group in rule.required):
            return "sharegpt" if name == "messages" and _is_sharegpt(row, reading) else name
    raise DataError(f"{origin}: {_unknown(row, reading)}")


def missing_columns(row: Mapping[str, Any], rule: FormatRule, reading: Reading) -> list[str]:
    """The user's names of required columns that the row does not have, not even as null."""
    groups = [[reading.name(column) for column in group] for group in rule.required]
    return [names[0] for names in groups if not any(name in row for name in names)]


def _has_one(group: tuple[str, ...], row: Mapping[str, Any], reading: Reading) -> bool:
    """Whether a column of the group holds something; of parent_id, which is null at a root, the name is enough."""
    names = [reading.name(column) for column in group]
    return any(row.get(name) is not None or (name in row and "parent_id" in group) for name in names)


def _is_sharegpt(row: Mapping[str, Any], reading: Reading) -> bool:
    column = chat_column(row, reading)
    turns = row.get(column or "")
    first = turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(first, dict):  # nothing to see in the turns: go by the column's usual name
        return column != reading.name("messages")
    return reading.name("from") in first and reading.name("role") not in first


def near_miss(missing: list[str], row: Mapping[str, Any]) -> str | None:
    """`no column 'messages'; found 'mesages' (did you mean?)` for the closest pair of names, None if none is close."""
    known = {
        name for rule in RULES.values() for name in (*rule.optional, *(n for group in rule.required for n in group))
    }
    unknown = [found for found in row if found not in known]
    pairs = [
        (difflib.SequenceMatcher(None, name, found).ratio(), name, found)
        for name in missing
        for found in difflib.get_close_matches(name, unknown, n=1, cutoff=0.75)
    ]
    if not pairs:
        return None
    _, name, found = max(pairs)
    return f"no column {name!r}; found {found!r} (did you mean?); rename it, or set columns: {{{name}: {found}}}"


def columns_found(row: Mapping[str, Any]) -> str:
    """The row's columns for a message; null ones are marked."""
    return "columns found: " + (", ".join(f"{n} (null)" if v is None else n for n, v in row.items()) or "none")


def _unknown(row: Mapping[str, Any], reading: Reading) -> str:
    missing = [name for rule in RULES.values() for name in missing_columns(row, rule, reading)]
    known = "; ".join(f"{name}: {', '.join(group[0] for group in rule.required)}" for name, rule in RULES.items())
    hint = near_miss(missing, row) or (
        f"no known format has these columns; name yours, such as columns: {{instruction: question, output: answer}}; "
        f"known are {known}"
    )
    return f"{hint}; {columns_found(row)}"
