"""Rows that are no training examples as they are, and rows that fit no format: why, and settings that were tried."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice
from typing import Any

from flatout.config.data import SourceConfig
from flatout.data.rows.formats.answers import CHOSEN, CLASSIFY, JUDGED, LABELS, parse_kto
from flatout.data.rows.formats.content import TRAIN_KEYS
from flatout.data.rows.formats.conversations import spoken_turns
from flatout.data.rows.formats.fields import FieldError, Row, advised, only, refused
from flatout.data.rows.formats.pictures import (
    PICTURED_FORMATS,
    holds_something,
    is_picture_column,
    media_error,
    media_kind,
)
from flatout.data.rows.formats.prompts import PROMPTED
from flatout.data.rows.formats.rules import ALL_COLUMNS, RULES
from flatout.data.rows.formats.verdict import bad_verdict, two_answers
from flatout.errors import DataError, Fix, as_text

MEDIA_MARKS = re.compile(r"<\|?(?:image|video|audio)(?:_pad|_soft_token|_1)?\|?>")
"""What stands for a picture, a video or a sound in the texts of data sets."""
# column of a row -> values that say that it is not to be learnt (0 == False, 1 == True)
_SILENT: dict[str, tuple[object, ...]] = {
    **dict.fromkeys((*TRAIN_KEYS, "learn"), (False, "false", "False", "0")),
    **dict.fromkeys(("mask", "masked"), (True, "true", "True", "1")),
}
# formats whose rows have no answer: their `label` is a class
_PLAIN = ("text", "segments", "tokens")
# names that data sets use for what alpaca has, in lower case, the likeliest first
_QUESTIONS = (
    "instruction", "question", "query", "prompt", "input", "problem", "inputs", "input_query", "user", "human"
)  # fmt: skip
_ANSWERS = (
    "output", "answer", "response", "completion", "solution", "targets", "expected_answer", "reply", "assistant", "gpt",
    "answers",
)  # fmt: skip
# what data sets call the better and the worse answer
_PAIRS = (("chosen", "rejected"), ("winner", "loser"), ("preferred", "dispreferred"), ("better", "worse"))
_CONTEXTS = ("input", "context", "passage", "document", "article", "background", "knowledge")
_REASONING = (
    "reasoning", "reasoning_content", "thinking", "thought", "thoughts", "think", "rationale", "cot", "complex_cot",
    "chain_of_thought", "explanation",
)  # fmt: skip
_SYSTEM = ("system", "system_prompt")
# names that are as alike as that are one, mistyped
_TYPO = 0.9
# columns that the format reads under their own names
_READ = ("history", "tools", "functions", "chat_template_kwargs")

_UNKNOWN = "no known format has these columns"
# the columns of the formats that most data sets have
_USUAL = "(messages), (instruction, output), (prompt, completion), (text) or (chosen, rejected)"

Works = Callable[[Mapping[str, str]], bool]
"""Whether the row can be read with these columns in addition to those that are set."""


class ColumnsError(DataError):
    """Rows have columns that no format reads; its fix sets those of the source that would make them readable."""


def refusal(row: Row, format_name: str | None = None) -> FieldError | None:
    """Return why a row must not be trained on as it is; `format_name` is None while the format is not known."""
    is_judged = format_name in (*JUDGED, CLASSIFY, PROMPTED)
    if not is_judged and (why := _as_preference(row)):
        return why
    if not is_judged and format_name != "segments" and (verdict := bad_verdict(row)):
        name, means_good = verdict
        # the label of a text may be its class
        is_clear = isinstance(only(row.columns[name]), bool) or only(row.columns[name]) in ("false", "False")
        if name.lower() != "label" or is_clear or format_name not in (None, *_PLAIN):
            return _bad_answer(row, name, means_good)
    return _as_silent(row, format_name) or _as_media(row, format_name)


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
    return refused(said, row.options, compared, chosen)


def _as_silent(row: Row, format_name: str | None) -> FieldError | None:
    settled = {*row.options.keys, *row.options.columns.values()}
    for name, value in row.columns.items() if format_name not in ("tokens", PROMPTED) else ():
        silent = _SILENT.get(name, ())
        if name not in settled and isinstance(value, bool | int | float | str) and value in silent:
            other = "true" if False in silent else "false"
            said = f"{name} is {_shown(value)}, so this row is not to be learnt; keep only rows whose {name} is {other}"
            return _unless_ignored(row, name, said, "trains on such rows too")
    return None


def _as_media(row: Row, format_name: str | None) -> FieldError | None:
    """Return why a row with media beside its texts, or marks of them, cannot be trained on."""
    has_media = False
    for name, value in row.columns.items():
        media, is_picture = media_kind(name), is_picture_column(name) and name not in row.options.keys
        is_read = name in row.options.columns.values() or (is_picture and format_name in (None, *PICTURED_FORMATS))
        if media is None or is_read:
            continue
        has_media = True
        if name in row.options.keys or not holds_something(value):
            continue
        chats = ", ".join(PICTURED_FORMATS)
        said = f"{name!r} holds images, which are read in chats ({chats}) and not in {format_name} rows"
        said = f"{said}; write such rows as messages" if is_picture else media_error(f"{name!r}", media)
        return _unless_ignored(row, name, said, "if the text stands alone")
    marks = filter(None, map(MEDIA_MARKS.search, _texts(row.columns))) if has_media else ()
    if mark := next(iter(marks), None):
        return FieldError(f"the text holds {mark[0]}, which stands for what cannot be trained on yet; remove the row")
    return None


def _unless_ignored(row: Row, name: str, said: str, why: str) -> FieldError:
    return refused(said, row.options, Fix({"keys": {name: "ignored"}}, why))


def _bad_answer(row: Row, name: str, means_good: bool) -> FieldError:
    """Say that a row's answer is called bad, and which settings learn from such rows, leave them out or ignore it."""
    columns, learns = {} if name in LABELS else {"label": name}, list[Fix]()
    with suppress(FieldError):
        parse_kto(replace(row, options=replace(row.options, columns={**row.options.columns, **columns})))
        settings = {"format": "kto", **({"columns": columns} if columns else {}), "objective": "kto"}
        learns = [Fix(settings, "learns from bad answers too")]
    end, fixes = advised(row.options, *learns, Fix({"keys": {name: "ignored"}}, "trains on bad answers, too"))
    skips = Fix({"data.on_bad_row": "skip"}, "leaves bad answers out")
    shown, other = _shown(only(row.columns[name])), "true" if means_good else "false"
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


def alpaca_columns(row: Mapping[str, Any]) -> tuple[dict[str, str], str] | None:
    """Return columns that make an alpaca row of this one, and a remark; None without a question and an answer.

    Two answers of which one holds the other are one, and otherwise the worked one is the reasoning of the other.
    """
    texts = {
        name: value[0] if isinstance(value, list) else value for name, value in row.items()
        if (isinstance(value, str) and value.strip())
        or (name == "answers" and isinstance(value, list) and {*map(type, value)} == {str})
    }  # fmt: skip
    used = list[str]()

    def take(names: Iterable[str]) -> str | None:
        present = (own for name in names for own in texts if own.lower() == name and own not in used)
        used.extend(taken := [*islice(present, 1)])
        return taken[0] if taken else None

    question, answer = take(_QUESTIONS), take(_ANSWERS)
    if question is None or answer is None:
        return None
    other, remark = take(_ANSWERS), ""
    reasoning = take(_REASONING)
    if other is not None and reasoning is not None:
        used.remove(other)
    elif other is not None and texts[answer].strip() in texts[other]:
        answer, remark = other, f"{answer} stands in {other}"
    elif other is not None:
        reasoning = other
    ours = {"input": take(_CONTEXTS), "system": take(_SYSTEM), "reasoning": reasoning}
    columns = {"instruction": question, "output": answer}
    columns |= {name: own for name, own in ours.items() if own is not None and (own != name or name == "reasoning")}
    left = [name for name, value in row.items() if value not in (None, "", []) and name not in (*used, *_READ)]
    return columns, "; ".join(filter(None, [remark, f"not read then: {', '.join(left)}" if left else ""]))


def unreadable(
    row: Row, said: str, columns: Mapping[str, str] | None = None, why: str = "", *, is_sure: bool = True
) -> DataError:
    """Return the error on columns that no format reads, with the setting `columns` that makes the row readable.

    `why` is what these do; `is_sure` whether the names say so, and they are no example with the row's own.
    """
    end, fixes = advised(row.options, Fix({"columns": columns}, why)) if columns else ("", [])
    kind_of = ColumnsError if fixes and is_sure else DataError
    return kind_of(f"{row.origin}: {said}{end}; {columns_found(row.columns)}", fixes)


def columns_found(row: Mapping[str, Any]) -> str:
    """Return the row's columns for a message; null ones are marked."""
    return "columns found: " + (", ".join(f"{n} (null)" if v is None else n for n, v in row.items()) or "none")


def unknown_format(row: Row, works: Works) -> DataError:
    """Return the error on a row that no format reads, with the columns to set if the names or the row's texts say so.

    `works` tries columns in addition to those that are set.
    """
    return (
        _as_other_pair(row, works)
        or _as_alpaca(row, works)
        or _as_null(row)
        or near_miss(row, [name for rule in RULES.values() for name in rule.missing(row)], works)
        or _as_example(row, works)
    )


def _as_other_pair(row: Row, works: Works) -> DataError | None:
    for names in _PAIRS:
        has = [name for name in names if row.columns.get(name) not in (None, "")]
        if len(has) == 1 and "chosen" in names:
            other = names[has[0] == "chosen"]
            said = f"a pair has two answers, but {has[0]!r} stands alone: also write {other!r} in each row"
            return unreadable(row, said)
        asked = [name for name in ("prompt", *_QUESTIONS) if name in row.columns]
        pair = dict(zip(("prompt", "chosen", "rejected"), [*asked[:1], *names], strict=False))
        if len(has) == 2 and "chosen" not in names and works(pair):
            return unreadable(row, _UNKNOWN, pair)
    if two := two_answers(row.columns):
        said = f"{two[0]} and {two[1]} are two answers, and no column says which is better: write the better one into "
        return unreadable(row, f"{said}chosen and the other into rejected")
    return None


def _as_alpaca(row: Row, works: Works) -> DataError | None:
    alpaca = alpaca_columns(row.columns)
    return unreadable(row, _UNKNOWN, *alpaca) if alpaca and works(alpaca[0]) else None


def _as_null(row: Row) -> DataError | None:
    empty = [name for name, value in row.columns.items() if value is None and name in ALL_COLUMNS]
    said = f"{_UNKNOWN}, as {empty[0]!r} is null: give it a value or remove the row" if empty else ""
    return unreadable(row, said) if said else None


def near_miss(row: Row, missing: Iterable[str], works: Works) -> DataError | None:
    """Return `no column 'messages'; found 'mesages' (did you mean?)` for the closest pair of names, or None.

    `missing` are columns that formats need.
    """
    unknown = [key for key in row.columns if key not in ALL_COLUMNS]
    pairs = [
        (difflib.SequenceMatcher(None, name, key).ratio(), name, key)
        for name in missing
        for key in difflib.get_close_matches(name, unknown, n=1, cutoff=0.75)
    ]
    if not pairs:
        return None
    ratio, name, key = max(pairs)
    every = {name: key for key, name in {key: name for _, name, key in sorted(pairs)}.items()}
    if len(every) > 1 and works(every):
        missed = " and ".join(f"{theirs!r} for {ours}" for ours, theirs in every.items())
        return unreadable(row, f"{_UNKNOWN}; found {missed}", every)
    columns = {name: key} if works({name: key}) else {}
    said = f"no column {name!r}; found {key!r} (did you mean?); rename it"
    # a typo, though the row has other faults
    return unreadable(row, said, columns) if columns or ratio >= _TYPO else None


def _as_example(row: Row, works: Works) -> DataError:
    texts = [name for name, value in row.columns.items() if isinstance(value, str)]
    example = dict(zip(("instruction", "output"), texts, strict=False)) if texts[1:] else {}
    example = example if works(example) else {}
    why = "if " + " and ".join(map("{} holds the {}".format, example.values(), ("question", "answer")))
    return unreadable(row, f"{_UNKNOWN}; rename them to {_USUAL}", example, why, is_sure=False)


def prompt_column(row: Row, works: Works) -> dict[str, str]:
    """Return the columns that make a prompt of the only text of a row that can be a question; empty for several."""
    texts = [name for name, value in row.columns.items() if isinstance(value, str) and " " in value.strip()]
    texts = [name for name in texts if name.lower() not in (*_ANSWERS, *_REASONING, *_SYSTEM)]
    asked = [name for name in texts if name.lower() in _QUESTIONS] or texts
    columns = {"prompt": asked[0]} if len(asked) == 1 else {}
    return columns if works(columns) else {}


def unread_meaning(row: Row, unread: Iterable[str]) -> str:
    """Return how an alpaca row's unread column of context or reasoning would be read, empty if it has none."""
    columns = {}
    for ours, names in (("input", _CONTEXTS), ("reasoning", _REASONING)):
        taken = ours in row.options.columns or (ours == "input" and row.columns.get("input"))
        theirs = next((name for name in unread if name.lower() in names and isinstance(row.columns[name], str)), None)
        if theirs is not None and not taken:
            columns[ours] = theirs
    return f" (columns={as_text(columns)} reads {', '.join(columns.values())} too)" if columns else ""


@contextmanager
def with_sources(sources: Iterable[SourceConfig]) -> Iterator[None]:
    """Raise errors of the body with all sources of a data set in fixes that set one: they are one setting."""
    try:
        yield
    except DataError as error:
        given = [one.model_dump(mode="json", exclude_defaults=True) for one in sources]
        fixes = list[Fix]()
        for fix in error.fixes:
            changed = {one["path"]: one for one in fix.settings.get("data.sources", ())}
            every = [{**one, **changed.get(one["path"], {})} for one in given]
            fixes.append(Fix({**fix.settings, "data.sources": every}, fix.why) if changed else fix)
        error.fixes = tuple(fixes)
        raise
