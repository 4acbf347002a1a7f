"""Rows without turns: plain text and tokenized rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from flatout.data.conversation import PlainText, TokenRow
from flatout.data.rows.formats.content import turn_flags
from flatout.data.rows.formats.fields import FieldError, Row, flag_at, kind, list_at, object_at, text_at

T = TypeVar("T")
_IGNORED_LABEL = -100
MASK_COLUMNS = ("trained", "loss_mask", "assistant_masks", "completion_mask")
TOKEN_COLUMNS = ("labels", "attention_mask", *MASK_COLUMNS)
_TRL_MASKS = {"assistant_masks", "completion_mask"}  # a token carries loss if both masks allow it
# lines of a chat that was written down as text
_ASKED = re.compile(r"^[#*\[ ]{0,5}(user|human|question|q)[*\] ]{0,4}:", re.IGNORECASE | re.MULTILINE)
_ANSWERED = re.compile(r"^[#*\[ ]{0,5}(assistant|ai|bot|answer|a)[*\] ]{0,4}:", re.IGNORECASE | re.MULTILINE)


def parse_text(row: Row) -> PlainText:
    """Parse `text`: one document, trained on as a whole."""
    text = row.text("text")
    if not text:
        raise FieldError(f"{row.name('text')} is empty; there is nothing to learn")
    remarks = list[str]()
    if row.origin.source.endswith(".txt"):
        remarks += ["tabbed_text"] * ("\t" in text and all("\t" in line for line in text.split("\n") if line))
        remarks += ["spoken_text"] * (_ASKED.search(text) is not None and _ANSWERED.search(text) is not None)
    return PlainText(text, row.origin, remarks=tuple(remarks))


def parse_segments(row: Row) -> PlainText:
    """Parse `segments`: pieces of one text, each {"text", "label"}; those with a true label carry loss. No template."""
    column = row.name("segments")
    text, silent, remarks = "", [], dict[str, None]()
    for index, value in enumerate(list_at(row.get("segments"), column)):
        segment, place = object_at(value, f"{column}[{index}]"), f"{column}[{index}]"
        start = len(text)
        text += text_at(segment.get("text"), f"{place}.text")
        trained = flag_at(segment.get("label"), f"{place}.label")
        other, ranges = turn_flags(segment, place, row.options, ("text", "label"), remarks)
        if ranges is not None or other not in (None, trained):
            raise FieldError(f"{place} says what carries loss in its label and elsewhere, differently; keep the label")
        if not trained:
            silent.append((start, len(text)))
    return PlainText(text, row.origin, silent=tuple(silent), remarks=tuple(remarks))


def parse_tokens(row: Row) -> TokenRow:
    """Parse input_ids, with labels (-100: no loss) or a mask column of 0 and 1; otherwise every token carries loss.

    Labels are not shifted: labels[i] is input_ids[i] or -100. Raises FieldError for columns of unequal length, NaN,
    negative or fractional values, and for padding (a 0 in attention_mask).
    """
    column = row.name("input_ids")
    values = list_at(row.get("input_ids"), column)
    token_ids = tuple(check_token_id(value, f"{column}[{index}]") for index, value in enumerate(values))
    if not token_ids:
        raise FieldError(f"{column} is empty; there is nothing to learn")

    def beside(name: str, check: Callable[[object, str], T]) -> list[T]:
        """Return the values of a column, one for each token."""
        values = list_at(row.columns[name], name)
        if len(values) != len(token_ids):
            lengths = f"{name} has {len(values)} values, but {column} has {len(token_ids)}"
            raise FieldError(f"{lengths}; the lengths must match")
        return [check(value, f"{name}[{index}]") for index, value in enumerate(values)]

    attention, labels = row.name("attention_mask"), row.name("labels")
    if row.get("attention_mask") is not None and not all(seen := beside(attention, flag_at)):
        raise FieldError(f"{attention}[{seen.index(False)}] is 0: the row is padded; remove the padding")
    masks = [row.name(name) for name in (*MASK_COLUMNS, "labels") if row.get(name) is not None]
    if len(masks) > 1 and set(masks) != set(map(row.name, _TRL_MASKS)):
        raise FieldError(f"{' and '.join(masks)} both set which tokens carry loss; keep one")
    if masks == [labels]:
        flags = [list[bool]()]
        ids = beside(labels, lambda value, at: value if value == _IGNORED_LABEL else check_token_id(value, at))
        for index, (label, token_id) in enumerate(zip(ids, token_ids, strict=True)):
            if label not in (_IGNORED_LABEL, token_id):
                said = f"{labels}[{index}] is {label}, but {column}[{index}] is {token_id}"
                raise FieldError(f"{said}; a label is -100 or the token at the same index (not shifted)")
            flags[0].append(label != _IGNORED_LABEL)
    else:
        flags = [beside(mask, flag_at) for mask in masks] or [[True] * len(token_ids)]
    return TokenRow(token_ids, tuple(map(all, zip(*flags, strict=True))), row.origin)


def check_token_id(value: object, place: str) -> int:
    """Return a token id. Raises FieldError unless it is an integer >= 0 (the vocabulary is checked later)."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise FieldError(f"{place} is {kind(value)}, not an integer")
    if value < 0:
        raise FieldError(f"{place} is {value}; token ids start at 0")
    return value
