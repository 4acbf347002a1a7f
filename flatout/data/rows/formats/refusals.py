"""Rows that must not be trained on as they are: they rank answers, mark one as bad, or hold more than text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from flatout.data.rows.formats.advice import advised
from flatout.data.rows.formats.answers import CHOSEN, CLASSIFY, JUDGED, LABELS, parse_kto
from flatout.data.rows.formats.conversations import spoken_turns
from flatout.data.rows.formats.fields import FieldError, Row, SourceOptions, only
from flatout.data.rows.formats.pictures import PICTURED_FORMATS, is_picture_column
from flatout.data.rows.formats.turn_flags import TRAIN_KEYS, holds_something, media_error, media_kind
from flatout.data.rows.formats.verdict import bad_verdict
from flatout.errors import Fix

MEDIA_MARKS = re.compile(r"<\|?(?:image|video|audio)(?:_pad|_soft_token|_1)?\|?>")
"""What stands for a picture, a video or a sound in the texts of data sets."""
# column of a row -> values that say that it is not to be learnt (0 == False, 1 == True), and what these mean
_MARKS: dict[str, tuple[tuple[object, ...], str]] = {
    **dict.fromkeys((*TRAIN_KEYS, "learn"), ((False, "false", "False", "0"), "false")),
    **dict.fromkeys(("mask", "masked"), ((True, "true", "True", "1"), "true")),
}
# formats whose rows have no answer: their `label` is a class
_PLAIN = ("text", "segments", "tokens")


def refusal(row: Row, format_name: str | None = None) -> FieldError | None:
    """Return why a row must not be trained on as it is; `format_name` is None while the format is not known."""
    is_judged = format_name in (*JUDGED, CLASSIFY)
    if not is_judged and (why := _as_preference(row)):
        return why
    if not is_judged and format_name != "segments" and (verdict := bad_verdict(row)):
        name, means_good = verdict
        # the label of a text may be its class
        is_clear = isinstance(only(row.columns[name]), bool) or only(row.columns[name]) in ("false", "False")
        if name.lower() != "label" or is_clear or format_name not in (None, *_PLAIN):
            return _bad_answer(row, name, means_good)
    is_media, options = False, row.options
    for name, value in row.columns.items():
        media, (bad, meaning) = media_kind(name), _MARKS.get(name, ((), ""))
        if _is_in(value, bad) and format_name != "tokens" and not {name} & {*options.keys, *options.columns.values()}:
            shown, other = _shown(value), "true" if meaning == "false" else "false"
            said = f"{name} is {shown}, so this row is not to be learnt; keep only rows whose {name} is {other}"
            return _ignored(said, options, name, "trains on such rows too")
        is_picture = is_picture_column(name) and name not in options.keys
        is_read = is_picture and format_name in (None, *PICTURED_FORMATS)
        if media is not None and not is_read and name not in options.columns.values():
            is_media = True
            if is_picture and holds_something(value):
                chats = ", ".join(PICTURED_FORMATS)
                said = f"{name!r} holds images, which are read in chats ({chats}) and not in {format_name} rows"
                return _ignored(f"{said}; write such rows as messages", options, name, "if the text stands alone")
            if name not in options.keys and holds_something(value):
                return _ignored(media_error(f"{name!r}", media), options, name, "if the text stands alone")
    marks = filter(None, map(MEDIA_MARKS.search, _texts(row.columns))) if is_media else ()
    if mark := next(iter(marks), None):
        return FieldError(f"the text holds {mark[0]}, which stands for what cannot be trained on yet; remove the row")
    return None


def _as_preference(row: Row) -> FieldError | None:
    """Return why a row with a rejected answer, and no column that was named for its chosen one, is no plain row."""
    columns = row.columns
    rejected, good = columns.get("rejected"), next((name for name in CHOSEN if columns.get(name) is not None), "")
    if rejected is None or isinstance(rejected, bool) or good in row.options.columns.values():
        return None
    said = "has a column 'rejected', so it is preference data"
    if not good:
        return FieldError(f"{said}, but it has no column of the chosen answer: name it chosen")
    value = columns[good]
    is_whole = spoken_turns(value) if isinstance(value, str) else isinstance(value, list) and len(value) > 1
    compared = Fix({"format": "preference", "objective": "dpo"}, "learns which answer is better")
    chosen = Fix({"columns": {"messages" if is_whole else "completion": good}}, "trains on the chosen answers")
    end, fixes = advised(row.options, compared, chosen)
    return FieldError(said + end, fixes)


def _is_in(value: object, values: tuple[object, ...]) -> bool:
    return bool(values) and isinstance(value, bool | int | float | str) and value in values


def _ignored(said: str, options: SourceOptions, name: str, why: str) -> FieldError:
    """Return the refusal of a row for a key or column, which the person may also want not to be read."""
    end, fixes = advised(options, Fix({"keys": {name: "ignored"}}, why))
    return FieldError(said + end, fixes)


def _bad_answer(row: Row, name: str, means_good: bool) -> FieldError:
    """Say that a row's answer is called bad, and which settings learn from such rows, leave them out or ignore it."""
    columns, other, learns = {} if name in LABELS else {"label": name}, "true" if means_good else "false", list[Fix]()
    with suppress(FieldError):
        parse_kto(replace(row, options=replace(row.options, columns={**row.options.columns, **columns})))
        settings = {"format": "kto", **({"columns": columns} if columns else {}), "objective": "kto"}
        learns = [Fix(settings, "learns from bad answers too")]
    ignores = Fix({"keys": {name: "ignored"}}, "trains on bad answers, too")
    end, fixes = advised(row.options, *learns, ignores)
    skips = Fix({"data.on_bad_row": "skip"}, "leaves bad answers out")
    shown = _shown(only(row.columns[name]))
    said = f"{name} is {shown}, so this answer is a bad example; keep only rows whose {name} is {other}"
    return FieldError(said + end, [*fixes[: len(learns)], skips, *fixes[len(learns) :]])


def _shown(value: object) -> object:
    return str(value).lower() if isinstance(value, bool | str) else value


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)
