"""Rows that must not be trained on as they are: they rank answers, mark one as bad, or hold more than text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from flatout.data.rows.formats.classify import CLASSIFY
from flatout.data.rows.formats.fields import Reading
from flatout.data.rows.formats.keys import TRAIN_KEYS, holds_something, media_error, media_kind
from flatout.data.rows.formats.pictures import PICTURE_COLUMNS, PICTURED_FORMATS
from flatout.data.rows.formats.preference import JUDGED

MEDIA_MARKS = re.compile(r"<\|?(?:image|video|audio)(?:_pad|_soft_token|_1)?\|?>")
"""What stands for a picture, a video or a sound in the texts of data sets."""
# of a row: true means that it is to be learnt, or that it is not
_LEARNT, _NOT_LEARNT = {*TRAIN_KEYS, "learn"}, {"mask", "masked"}
_FALSE: tuple[object, ...]
_TRUE: tuple[object, ...]
_FALSE, _TRUE = (False, "false", "False", "0"), (True, "true", "True", "1")  # 0 == False, 1 == True
# formats whose rows have no answer: their `label` is a class
_PLAIN = ("text", "segments", "tokens")


def refusal(row: Mapping[str, Any], reading: Reading, format_name: str | None = None) -> str | None:
    """Return why a row must not be trained on as it is; `format_name` is None while the format is not known."""
    is_judged = format_name in (*JUDGED, CLASSIFY)
    if not is_judged and row.get("rejected") is not None and "chosen" not in reading.columns.values():
        return (
            "has a column 'rejected', so it is preference data: set format: preference, or, to train on the chosen "
            "answers only, columns: {completion: chosen} or {messages: chosen}"
        )
    label = row.get("label")
    has_judgement = isinstance(label, bool) or label in ("false", "False") or format_name not in (None, *_PLAIN)
    if not is_judged and has_judgement and _is_in(label, _FALSE) and "label" not in reading.keys:
        return _bad_example("label", label, "false")
    is_media = False
    for name, value in row.items():
        media, bad, meaning = _kind_of_mark(name)
        if _is_in(value, bad) and format_name != "tokens" and not {name} & {*reading.keys, *reading.columns.values()}:
            return _bad_example(name, value, meaning)
        is_read = name in PICTURE_COLUMNS and format_name in PICTURED_FORMATS and name not in reading.keys
        if media is not None and not is_read and name not in reading.columns.values():
            is_media = True
            if name not in reading.keys and holds_something(value):
                return f"{media_error(f'{name!r}', media)}, or set keys: {{{name}: ignored}} if its text stands alone"
    if is_media and (mark := next((match for text in _texts(row) if (match := MEDIA_MARKS.search(text))), None)):
        return f"the text holds {mark[0]}, which stands for what cannot be trained on yet; remove the row"
    return None


@lru_cache(maxsize=4096)
def _kind_of_mark(name: str) -> tuple[str | None, tuple[object, ...], str]:
    """Return the media that a column of this name holds, the values that refuse its row, and what those mean."""
    bad = {**dict.fromkeys(_LEARNT, (_FALSE, "false")), **dict.fromkeys(_NOT_LEARNT, (_TRUE, "true"))}
    return media_kind(name), *bad.get(name, ((), ""))


def _is_in(value: object, values: tuple[object, ...]) -> bool:
    return bool(values) and isinstance(value, bool | int | float | str) and value in values


def _bad_example(name: str, value: object, meaning: str) -> str:
    shown = str(value).lower() if isinstance(value, bool | str) else value
    advice = f"or set keys: {{{name}: ignored}}"
    if name == "label":
        return (
            f"label is {shown}, so this answer is a bad example; set format: kto to learn from bad ones too, keep only "
            f"rows whose label is true, {advice}"
        )
    other = "true" if meaning == "false" else "false"
    return f"{name} is {shown}, so this row is not to be learnt; keep only rows whose {name} is {other}, {advice}"


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)
