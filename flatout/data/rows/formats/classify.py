"""Rows of a text or a chat with the label that a model is to give it; read only where the format is named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flatout.data.conversation import Conversation, Origin, PlainText, PreferenceRow
from flatout.data.rows.formats.calls import tools_of
from flatout.data.rows.formats.conversations import finished
from flatout.data.rows.formats.fields import FieldError, Reading, kind, only
from flatout.data.rows.formats.plain import parse_text
from flatout.data.rows.formats.preference import prompt_of
from flatout.errors import Fix

CLASSIFY, CLASS = "classify", "class"
"""The format, and the column of the store that it fills."""


def parse_classified(row: Mapping[str, Any], origin: Origin, reading: Reading) -> PreferenceRow:
    """Parse `text`, as it is, or a prompt or chat, which gets the chat template; and `label`."""
    label = label_of(row, reading)
    sample: Conversation | PlainText
    if row.get(reading.name("text")) is not None:
        sample = parse_text(row, origin, reading)
    elif (asked := prompt_of(row, reading)) is not None:
        sample = finished(asked, row, origin, tools_of(row, reading))
    else:
        raise FieldError("has neither text nor messages; name the column of the text `text`")
    return PreferenceRow(
        (sample,), ((0,),), origin, {CLASS: (reading.classes.index(label),)} if reading.classes else {}
    )


def label_of(row: Mapping[str, Any], reading: Reading) -> str:
    """Return a row's label as text. Raises FieldError for a value that is no label."""
    name = reading.name("label")
    value = only(row.get(name))
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        value = int(value)  # tables have integers with gaps as floats
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, int | str) or not str(value).strip():
        got = "empty" if value == "" else f"a list of {len(value)}" if isinstance(value, list) else kind(value)
        how = "keep one of them for each text" if isinstance(value, list) and value else "label the text"
        # the labels are known once all rows were read: some then have one
        skip = [Fix({"data.on_bad_row": "skip"}, "leaves out rows without one label")] if reading.classes else []
        raise FieldError(f"{name} is {got}; a label is a text or an integer (no number to predict): {how}", skip)
    return str(value).strip()
