"""Columns in which a row says whether its answer is good, or which of two answers is the better one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from flatout.data.rows.formats.fields import FieldError, Row, kind, only

_GOOD = {
    "true", "1", "yes", "good", "desirable", "positive", "chosen", "accepted", "accept", "approved", "correct",
    "liked", "like", "up", "thumbs_up", "thumbsup", "upvote", "\N{THUMBS UP SIGN}",
}  # fmt: skip
_BAD = {
    "false", "0", "no", "bad", "undesirable", "negative", "rejected", "reject", "disapproved", "incorrect", "wrong",
    "disliked", "dislike", "down", "thumbs_down", "thumbsdown", "downvote", "\N{THUMBS DOWN SIGN}",
}  # fmt: skip
_NUMBERS = {"0", "1", "yes", "no"}
# columns, also with `is_` before them, whose true or 1 means a good answer, and those where it means a bad one
_GOOD_COLUMNS = {
    "accepted", "approved", "liked", "upvoted", "desirable", "chosen", "preferred", "thumbs_up", "thumbsup",
}  # fmt: skip
_BAD_COLUMNS = {"rejected", "disliked", "downvoted", "undesirable", "thumbs_down", "thumbsdown", "bad"}
# those in which a 0 or 1 may count something
_GOOD_WORDS = {
    "good", "correct", "verdict", "judgement", "judgment", "quality", "feedback", "thumbs", "thumb", "vote",
}  # fmt: skip
_BAD_WORDS = {"incorrect", "wrong"}
_ANSWER = re.compile(
    r"(response|answer|completion|output|candidate|reply|generation|human_ref)s?([_-]?)([a-h]|\d)", re.IGNORECASE
)
_BETTER = (
    "overall_preference", "preference", "preferred", "preferred_response", "preferred_answer", "winner", "better",
    "better_response", "better_answer", "better_response_id", "best", "choice", "chosen", "verdict", "label", "labels",
)  # fmt: skip
_ENDS = (("a", "b"), ("1", "2"), ("0", "1"))
_FIRST, _SECOND = ("first", "left"), ("second", "right")


def _normalized(word: object) -> str:
    return re.sub(r"[\s-]+", "_", str(word).strip().lower())


@lru_cache(maxsize=4096)
def _meaning(name: str) -> tuple[bool, bool] | None:
    """Return what a true in a column means, and whether a number says as much as a word; None for other columns."""
    word = _normalized(name)
    if word in ("label", "kto_tag"):
        return True, True
    name = word.removeprefix("is_")
    if name not in _GOOD_COLUMNS | _BAD_COLUMNS | _GOOD_WORDS | _BAD_WORDS:
        return None
    return name in _GOOD_COLUMNS | _GOOD_WORDS, name in _GOOD_COLUMNS | _BAD_COLUMNS or word.startswith("is_")


def says_good(value: object, name: str) -> bool | None:
    """Return whether the value of this column calls an answer good: a true of thumbs_down does not; None if unclear."""
    value, true_is_good = only(value), (_meaning(name) or (True, True))[0]
    if isinstance(value, str | bool):
        word = _normalized(value)
        is_good = True if word in _GOOD else False if word in _BAD else None
        if word not in (*_NUMBERS, "true", "false"):
            return is_good  # a word such as rejected says what it means in any column
    else:
        is_good = bool(value) if isinstance(value, int | float) and value in (0, 1) else None
    return None if is_good is None else is_good is true_is_good


def bad_verdict(row: Row) -> tuple[str, bool] | None:
    """Return the column that calls a row's answer bad, and whether its true means a good one; None without any."""
    for name, value in row.columns.items():
        meaning = _meaning(name)
        if meaning is None or value is None or name in {*row.options.keys, *row.options.columns.values()}:
            continue
        if isinstance(value, str) and name.lower() in ("chosen", "rejected"):
            continue  # an answer of a pair, however it reads
        is_good, takes_numbers = meaning
        value = only(value)
        is_word = isinstance(value, bool) or (isinstance(value, str) and _normalized(value) not in _NUMBERS)
        if (takes_numbers or is_word) and says_good(value, name) is False:
            return name, is_good
    return None


def two_answers(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the two columns of a row's answers, such as response_a and response_b; None unless there are just two."""
    by_stem: dict[str, dict[str, str]] = {}
    for name, value in row.items():
        match = _ANSWER.fullmatch(name)
        if match and isinstance(value, str | list | dict) and value:
            by_stem.setdefault(f"{match[1]}{match[2]}".lower(), {})[match[3].lower()] = name
    for own in by_stem.values():
        for first, second in _ENDS:
            if own.keys() == {first, second}:
                return own[first], own[second]
    return None


def better_column(row: Row) -> str | None:
    """Return the column that says which of two answers is better."""
    given = [name for name, value in row.columns.items() if isinstance(value, str | int | float)]
    names = (name for known in _BETTER for name in given if name.lower() == known and name not in row.options.keys)
    return next(names, None)


def better_of(row: Mapping[str, Any], names: tuple[str, str], column: str) -> tuple[str, str]:
    """Return the columns of the better and of the worse answer. Raises FieldError for a tie, and for an unclear one.

    A preference may be a number that is negative where the first is better, as in HelpSteer3.
    """
    value, ends = row[column], tuple(name[-1].lower() for name in names)
    if column.lower() == "overall_preference" and not isinstance(value, str | bool):
        place = 0 if value < 0 else 1 if value > 0 else None
    else:
        whole = value.is_integer() if isinstance(value, float) else False
        said = str(int(value) if whole else value).strip().lower()
        last = re.split(r"[\W_]+", said)[-1] if not isinstance(value, bool) else ""
        known = [(ends[0], *_FIRST, names[0].lower()), (ends[1], *_SECOND, names[1].lower())]
        place = next((place for place, words in enumerate(known) if said in words or last in words), None)
    if place is None:
        shown = f"{value!r:.40}" if isinstance(value, str) else kind(value)
        raise FieldError(
            f"{column} is {shown}, which names neither {names[0]} nor {names[1]} as the better one; write "
            f"{ends[0]} or {ends[1]}, or remove the row"
        )
    return names[place], names[1 - place]
