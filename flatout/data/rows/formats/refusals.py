"""Rows that must not be trained on as they are: they rank answers, mark one as bad, or hold more than text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

from flatout.data.conversation import Origin
from flatout.data.rows.formats.advice import source_step, written
from flatout.data.rows.formats.classify import CLASSIFY
from flatout.data.rows.formats.fields import FieldError, Reading, only
from flatout.data.rows.formats.keys import TRAIN_KEYS, holds_something, media_error, media_kind
from flatout.data.rows.formats.pictures import PICTURED_FORMATS, is_picture_column
from flatout.data.rows.formats.preference import CHOSEN, JUDGED, LABELS, parse_kto
from flatout.data.rows.formats.verdict import bad_verdict
from flatout.errors import next_steps

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
    is_judged, rejected = format_name in (*JUDGED, CLASSIFY), row.get("rejected")
    is_pair = rejected is not None and not isinstance(rejected, bool)
    good = next((name for name in CHOSEN if row.get(name) is not None), "")
    if not is_judged and is_pair and (not good or good not in reading.columns.values()):
        alone = f", or, to train on the chosen answers only, columns: {{completion: {good}}} or {{messages: {good}}}"
        lacks = "; it has no column of the chosen answer: name it chosen"
        return f"has a column 'rejected', so it is preference data: set format: preference{alone if good else lacks}"
    if not is_judged and format_name != "segments" and (verdict := bad_verdict(row, reading)):
        name, means_good = verdict
        # the label of a text may be its class
        is_clear = isinstance(only(row[name]), bool) or only(row[name]) in ("false", "False")
        if name.lower() != "label" or is_clear or format_name not in (None, *_PLAIN):
            return _bad_answer(row, reading, name, means_good)
    is_media = False
    for name, value in row.items():
        media, bad, meaning = _kind_of_mark(name)
        if _is_in(value, bad) and format_name != "tokens" and not {name} & {*reading.keys, *reading.columns.values()}:
            return _bad_example(name, value, meaning)
        is_picture = is_picture_column(name) and name not in reading.keys
        is_read = is_picture and format_name in (None, *PICTURED_FORMATS)
        if media is not None and not is_read and name not in reading.columns.values():
            is_media = True
            if is_picture and holds_something(value):
                return (
                    f"{name!r} holds images, which are read in chats ({', '.join(PICTURED_FORMATS)}) and not in "
                    f"{format_name} rows; write such rows as messages, or set keys: {{{name}: ignored}} if the text "
                    "stands alone"
                )
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


def _bad_answer(row: Mapping[str, Any], reading: Reading, name: str, means_good: bool) -> str:
    """Say that a row's answer is called bad, and which settings learn from such rows, leave them out or ignore it."""
    value, steps, how = only(row[name]), list[tuple[str, str]](), ""
    shown, other = str(value).lower() if isinstance(value, bool | str) else value, "true" if means_good else "false"
    columns = {} if name in LABELS else {"label": name}
    tried = replace(reading, columns={**reading.columns, **columns})
    with suppress(FieldError):
        parse_kto(row, Origin("", 1), tried)
        mapped = f" and columns: {written(columns)}" if columns else ""
        how = f"set format: kto{mapped} to learn from bad ones too, "
        asked = {"format": "kto", **({"columns": dict(tried.columns)} if columns else {})}
        steps.append((source_step(reading.path, asked), "learns from bad answers too"))
    steps.append(("data.on_bad_row=skip", "leaves bad answers out"))
    steps.append((source_step(reading.path, {"keys": {**reading.keys, name: "ignored"}}), "trains on bad answers, too"))
    return (
        f"{name} is {shown}, so this answer is a bad example; {how}keep only rows whose {name} is {other}, or set "
        f"keys: {{{name}: ignored}}{next_steps(*steps)}"
    )


def _bad_example(name: str, value: object, meaning: str) -> str:
    shown = str(value).lower() if isinstance(value, bool | str) else value
    advice = f"or set keys: {{{name}: ignored}}"
    other = "true" if meaning == "false" else "false"
    return f"{name} is {shown}, so this row is not to be learnt; keep only rows whose {name} is {other}, {advice}"


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)
