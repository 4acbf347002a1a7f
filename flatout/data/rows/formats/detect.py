"""Detects the format of a row from its columns."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from flatout.data.conversation import Origin, Sample
from flatout.data.rows.formats.fields import FieldError, Reading, unpacked
from flatout.data.rows.formats.oasst import OASST_COLUMNS, is_tree
from flatout.data.rows.formats.pairs import parse_alpaca, parse_prompt_completion
from flatout.data.rows.formats.plain import MASK_COLUMNS, parse_segments, parse_text, parse_tokens
from flatout.data.rows.formats.turns import CHAT_COLUMNS, chat_column, parse_messages, parse_sharegpt
from flatout.errors import DataError

# names that data sets use for the two columns of alpaca; the user has to choose which is meant
_QUESTIONS = ("instruction", "question", "query", "prompt", "input", "problem", "inputs")
_ANSWERS = ("output", "answer", "response", "completion", "solution", "targets")


@dataclass(frozen=True, slots=True)
class FormatRule:
    """`required`: one column of each group must be present. `optional` ones are read too; all others are ignored."""

    parse: Callable[[Mapping[str, Any], Origin, Reading], Sample]
    required: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...] = ()


# In the order of detection: distinctive columns first, since many chat sets also have a `text` or `prompt` column.
RULES: dict[str, FormatRule] = {
    "tokens": FormatRule(parse_tokens, (("input_ids",),), ("labels", "attention_mask", *MASK_COLUMNS)),
    "oasst": FormatRule(parse_messages, tuple((name,) for name in OASST_COLUMNS), ("rank", "deleted")),
    "oasst_trees": FormatRule(parse_messages, (("prompt",),), ("message_tree_id", "tree_state")),
    "segments": FormatRule(parse_segments, (("segments",),)),
    "messages": FormatRule(parse_messages, (CHAT_COLUMNS,), ("tools", "system", "completion", "role", "content")),
    "sharegpt": FormatRule(
        parse_sharegpt,
        (("conversations", "messages", "conversation"),),
        ("tools", "system", "completion", "from", "value"),
    ),
    "prompt_completion": FormatRule(
        parse_prompt_completion, (("prompt",), ("completion",)), ("tools", "system", "role", "content")
    ),
    "alpaca": FormatRule(parse_alpaca, (("instruction",), ("output",)), ("input", "system", "history")),
    "text": FormatRule(parse_text, (("text",),)),
}


def detect(row: Mapping[str, Any], origin: Origin, reading: Reading | None = None) -> str:
    """Return the row's format name. Raises DataError with the columns found and the nearest known name."""
    reading = reading or Reading()
    if why := preference(row, reading):
        raise DataError(f"{origin}: {why}")
    for name, rule in RULES.items():
        if name == "oasst_trees" and not is_tree(row.get(reading.name("prompt"))):
            continue
        for group in rule.required:
            names = [reading.name(column) for column in group]
            # parent_id is null at a root, so the column's presence is enough
            if not any(row.get(column) is not None or (column in row and "parent_id" in group) for column in names):
                break
        else:
            return "sharegpt" if name == "messages" and _is_sharegpt(row, reading) else name
    raise DataError(f"{origin}: {_unknown(row, reading)}")


def preference(row: Mapping[str, Any], reading: Reading) -> str | None:
    """Return why a row must not be trained on as it is: it ranks answers, or marks this one as bad."""
    if row.get("rejected") is not None and "chosen" not in reading.columns.values():
        return (
            "has a column 'rejected', so it is preference data, which is not trained on yet; to learn the chosen "
            "answers alone, set columns: {completion: chosen}"
        )
    if row.get("label") in (False, "false", "False") and isinstance(row["label"], bool | str):
        return "label is false, so this answer is a bad example; keep the rows whose label is true"
    return None


def missing_columns(row: Mapping[str, Any], rule: FormatRule, reading: Reading) -> list[str]:
    """Return the user's names of required columns that are absent from the row (null counts as present)."""
    groups = [[reading.name(column) for column in group] for group in rule.required]
    return [names[0] for names in groups if not any(name in row for name in names)]


def _is_sharegpt(row: Mapping[str, Any], reading: Reading) -> bool:
    column = chat_column(row, reading)
    turns = row.get(column or "")
    first = None
    with suppress(FieldError):
        turns = unpacked(turns, "")
        first = unpacked(turns[0], "") if isinstance(turns, list) and turns else None
    if not isinstance(first, dict):  # the turns show nothing, so the column's usual name decides
        return column != reading.name("messages")
    return reading.name("from") in first and reading.name("role") not in first


def near_miss(missing: list[str], row: Mapping[str, Any]) -> str | None:
    """Return `no column 'messages'; found 'mesages' (did you mean?)` for the closest pair of names, or None."""
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
    """Return the row's columns for a message; null ones are marked."""
    return "columns found: " + (", ".join(f"{n} (null)" if v is None else n for n, v in row.items()) or "none")


def _unknown(row: Mapping[str, Any], reading: Reading) -> str:
    missing = [name for rule in RULES.values() for name in missing_columns(row, rule, reading)]
    known = "; ".join(f"{name}: {', '.join(group[0] for group in rule.required)}" for name, rule in RULES.items())
    asked = next((name for name in _QUESTIONS if row.get(name) is not None), None)
    answered = next((name for name in _ANSWERS if row.get(name) is not None), None)
    if asked and answered:
        columns = f"{{instruction: {asked}, output: {answered}}}"
        return f"no known format has these columns; set columns: {columns}; {columns_found(row)}"
    hint = near_miss(missing, row) or (
        f"no known format has these columns; name yours, such as columns: {{instruction: question, output: answer}}; "
        f"known are {known}"
    )
    return f"{hint}; {columns_found(row)}"
