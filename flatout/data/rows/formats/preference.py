"""Rows of answers that are compared, as for DPO and reward models, or that are judged one by one, as for KTO.

A row's answers begin where its conversations part: the messages that all have in common are the prompt, and only
assistant turns behind it carry loss.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

from flatout.data.columns import PREFIX_TOKENS
from flatout.data.conversation import Conversation, Message, Origin, PreferenceRow, Role, is_empty
from flatout.data.rows.formats.calls import holds_messages, tools_of
from flatout.data.rows.formats.conversations import (
    CHAT_COLUMNS,
    TurnReader,
    add_history,
    finished,
    spoken_turns,
    turns_at,
)
from flatout.data.rows.formats.fields import FieldError, Reading, kind, list_at, only, text_at
from flatout.data.rows.formats.verdict import better_column, better_of, says_good, two_answers

PREFERENCES = ("preference", "reward", "ranked", "choice")
"""Formats whose rows become pairs of answers."""
JUDGED = (*PREFERENCES, "kto")
"""Formats whose rows say which answer is good; these have a chat template, and columns of their own in the store."""
# the answer to avoid beside a chat that ends with the other one, as ms-swift has it: the last turn, or the whole chat
_BESIDE_CHAT = ("rejected_response", "rejected_messages")
CHOSEN = ("chosen", "chosen_response", "chosen_messages", "preferred_output", "accepted")
REJECTED = ("rejected", *_BESIDE_CHAT, "non_preferred_output")
PROMPTS = ("prompt", "question", "instruction", "input", *CHAT_COLUMNS, "context")
"""Columns of the prompt; the first that has something is read."""
ANSWERS = ("answers", "responses", "completions", "candidates")
"""Columns of several answers with scores or ranks, within each answer or beside them."""
COMPLETIONS, LABELS = ("completion", "response", "output", "answer"), ("label", "kto_tag")
SCORES = (
    ("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"), ("chosen_rating", "rejected_rating"),
    ("chosen-rating", "rejected-rating"), ("chosen_avg_rating", "rejected_avg_rating"),
)  # fmt: skip
MARGIN = "margin"
_EACH_SCORE, _EACH_RANK = ("score", "rating", "overall_score", "reward"), ("rank", "ranking")
_ALL_SCORES, _ALL_RANKS = ("scores", "ratings", "rewards"), ("ranks", "rankings")
RANKED_COLUMNS = (*_ALL_SCORES, *_ALL_RANKS)
_TEXTS = ("answer", "response", "content", "text", "completion")
_SPOKEN = "Assistant: "
Given = tuple[str, object]
"""An answer of a row: its place, and its value."""


def parse_preference(row: Mapping[str, Any], origin: Origin, reading: Reading) -> PreferenceRow:
    """Parse a pair: chosen and rejected, each a text, a turn, or turns; with or without their prompt."""
    good, bad = (_named(row, reading, group) for group in (CHOSEN, REJECTED))
    given: list[Given] = [(good, row.get(good)), (bad, row.get(bad))]
    if good not in row and (chat := _first_column(row, reading, CHAT_COLUMNS)) is not None:
        said = turns_at(row[chat], chat)
        whole = bad == reading.name("rejected_messages")
        given[0] = (chat, said) if whole else (f"{chat}[{len(said) - 1}]", said[-1:])
        last = _turns(said[-1:], given[0][0], reading, "assistant").messages[0].role
        if last != "assistant":
            raise FieldError(f"{given[0][0]} is a turn of {last}, so {bad} has no answer beside it; add the chosen one")
        row = row if whole else {**row, chat: said[:-1]}
    answers = _conversations(row, origin, reading, given)
    columns, margin = {}, _margin(row, reading)
    if margin is not None:
        columns[MARGIN] = (margin,)
    return PreferenceRow(answers, ((0, 1),), origin, columns)


def parse_choice(row: Mapping[str, Any], origin: Origin, reading: Reading) -> PreferenceRow:
    """Parse two answers, such as response_a and response_b, and a column that says which of them is better."""
    names, column = two_answers(row), better_column(row, reading)
    if names is None or column is None:
        raise FieldError("has not two answers and a column that says which is better; remove the row")
    good, bad = better_of(row, names, column)
    return PreferenceRow(_conversations(row, origin, reading, [(k, row[k]) for k in (good, bad)]), ((0, 1),), origin)


def parse_ranked(row: Mapping[str, Any], origin: Origin, reading: Reading) -> PreferenceRow:
    """Parse a list of answers with scores or ranks into pairs, as `reading.pairs` says; equal ones make no pair.

    `best_worst` is the first of the best and the first of the worst, `adjacent` neighbours by value, `all` every pair.
    """
    column = _named(row, reading, ANSWERS)
    items = list_at(row.get(column), column)
    values, are_scores = _values(row, reading, items, column)
    order = sorted(range(len(items)), key=lambda place: -values[place])
    ends = [(order[0], min(order, key=lambda place: values[place]))] if order else []
    pairs_of = {"best_worst": ends, "adjacent": list(pairwise(order)), "all": list(combinations(order, 2))}
    pairs = [(one, other) for one, other in pairs_of[reading.pairs] if values[one] != values[other]]
    if not pairs:
        raise FieldError(f"{column} has no two answers of different value, so none is better; remove the row")
    used = [place for place in order if any(place in pair for pair in pairs)]
    answers = _conversations(row, origin, reading, [(f"{column}[{place}]", _text_of(items[place])) for place in used])
    margins = tuple(values[one] - values[other] for one, other in pairs) if are_scores else ()
    units = tuple((used.index(one), used.index(other)) for one, other in pairs)
    return PreferenceRow(answers, units, origin, {MARGIN: margins} if are_scores else {})


def parse_kto(row: Mapping[str, Any], origin: Origin, reading: Reading) -> PreferenceRow:
    """Parse a prompt, one answer and whether it is good; of a chat, the answer is what follows its last question."""
    name = _named(row, reading, LABELS)
    label = _label(row.get(name), name)
    completion, answers = _first_column(row, reading, COMPLETIONS), list[Given]()
    if completion is not None:
        answers = [(completion, row[completion])]
    return PreferenceRow(_conversations(row, origin, reading, answers), ((0,),), origin, {"label": (label,)})


def is_pair(row: Mapping[str, Any], reading: Reading) -> bool:
    """Whether a row names its chosen answer, or has the last answer of its chat for it."""
    given = (row.get(reading.name(name)) for name in (*CHOSEN, *_BESIDE_CHAT))
    return any(value is not None and not isinstance(value, bool) for value in given)


def is_choice(row: Mapping[str, Any], reading: Reading) -> bool:
    """Whether a row has two answers, and says which of them is better."""
    return two_answers(row) is not None and better_column(row, reading) is not None


def is_labelled(row: Mapping[str, Any], reading: Reading) -> bool:
    """Whether a row is certainly one of KTO; elsewhere a label may be a class."""
    if any(reading.name(name) in reading.keys for name in LABELS):
        return False
    pair = (row.get(reading.name(name)) for name in ("prompt", "completion"))
    has_label = isinstance(only(row.get(reading.name("label"))), bool) and all(value is not None for value in pair)
    return has_label or row.get(reading.name("kto_tag")) is not None


def is_ranked(row: Mapping[str, Any], reading: Reading) -> bool:
    """Whether a row lists answers that have scores or ranks."""
    name = _first_column(row, reading, ANSWERS)
    items = row[name] if name is not None and isinstance(row[name], list) else []
    first, each = items[0] if items else None, (*_EACH_SCORE, *_EACH_RANK)
    return bool(items) and (
        (isinstance(first, dict) and any(first.get(key) is not None for key in each))
        or _first_column(row, reading, RANKED_COLUMNS) is not None
    )


def columns_of(format_name: str, row: Mapping[str, Any], reading: Reading) -> tuple[list[str], list[str], list[str]]:
    """Return the columns of the store that rows like this fill, those of the row that all need, and unread prompts."""
    made, needed = ["label" if format_name == "kto" else PREFIX_TOKENS], list[str]()
    if format_name == "choice":
        needed = [*(two_answers(row) or ()), better_column(row, reading) or ""]
    elif format_name != "kto":
        scores = next((pair for pair in SCORES if all(row.get(reading.name(name)) is not None for name in pair)), ())
        if row.get(reading.name(MARGIN)) is not None:
            needed = [reading.name(MARGIN)]
        elif format_name != "ranked":
            needed = [reading.name(name) for name in scores]
        items = row.get(_first_column(row, reading, ANSWERS) or "")
        if needed or (format_name == "ranked" and isinstance(items, list) and _are_scores(row, reading, items)):
            made.append(MARGIN)
    prompts = [name for name in map(reading.name, PROMPTS) if row.get(name) not in (None, "", [])]
    with_input = 2 if prompts[:2] == [reading.name("instruction"), reading.name("input")] else 1
    return made, needed, prompts[with_input:]


def _first_column(row: Mapping[str, Any], reading: Reading, names: Sequence[str]) -> str | None:
    """Return the user's name of the first of these columns that has something."""
    return next((name for name in map(reading.name, names) if row.get(name) not in (None, "", [])), None)


def _named(row: Mapping[str, Any], reading: Reading, names: Sequence[str]) -> str:
    """Return the user's name of the first of these columns that has something, or at least is there."""
    there = (name for name in map(reading.name, names) if name in row)
    return _first_column(row, reading, names) or next(there, reading.name(names[0]))


def _conversations(
    row: Mapping[str, Any], origin: Origin, reading: Reading, given: Sequence[Given]
) -> tuple[Conversation, ...]:
    """Return a conversation for each answer of a row; a row without any has its answer at the end of its prompt.

    Raises FieldError for answers that are empty, equal, to different prompts, or none.
    """
    asked = prompt_of(row, reading)
    if asked is not None and asked.is_spoken:
        given = [(place, _spoken(said) if isinstance(said, str) else said) for place, said in given]
    read = [_turns(value, place, reading, "assistant") for place, value in given]
    are_whole = [bool(turns.messages) and turns.messages[0].role != "assistant" for turns in read]
    if 0 < sum(are_whole) < len(read):
        raise FieldError(f"{given[0][0]} and {given[1][0]} differ in form: only one begins with the prompt")
    if not given:
        if asked is None:
            raise FieldError("has no answer; name its column `completion`")
        read = [asked]
    elif all(are_whole):
        _check_prompt(asked, read, given[0][0])
    elif asked is None:
        raise FieldError(f"{given[0][0]} begins with an answer, and there is no prompt; name its column `prompt`")
    else:
        _check_question(asked)
        read = [_joined(asked, turns) for turns in read]
    if len(read) == 1:
        num_common = len(asked.messages) if given and asked and not any(are_whole) else _after_question(read[0])
    else:
        num_common = _num_common(read, [place for place, _ in given])
    for turns in read:
        _check_answer(turns, num_common)
        turns.messages[:num_common] = [replace(message, train=False) for message in turns.messages[:num_common]]
    tools = tools_of(row, reading)
    return tuple(finished(turns, row, origin, tools) for turns in read)


def _spoken(answer: str) -> str:
    """Return an answer to a prompt that ends with `Assistant:`, with that before it."""
    return answer if spoken_turns(answer, "assistant") else _SPOKEN + answer.lstrip()


def _turns(value: object, place: str, reading: Reading, role: Role) -> TurnReader:
    """Read a text, which is a turn of `role`, one turn, or a list of turns. Raises FieldError."""
    if value in (None, "", []):
        raise FieldError(f"{place} is {'missing' if value is None else 'empty'}; every answer needs its text")
    if isinstance(value, str):
        turns, spoken = TurnReader(reading), spoken_turns(text_at(value, place), role)
        if reading.joins and spoken:
            cut = value.rfind(_SPOKEN[:-1]) + len(_SPOKEN[:-1]) if role == "assistant" and spoken[1:] else 0
            spoken = [Message("user", value[:cut]), Message(role, value[cut:])][not cut :]
        turns.is_spoken = bool(spoken) and not reading.joins and value.rstrip().endswith(_SPOKEN[:-1])
        for message in spoken or [Message(role, value)]:
            turns.add(message, place)
        return turns
    if not isinstance(value, list | dict):
        raise FieldError(f"{place} is {kind(value)}; expected a text, a turn, or a list of turns")
    is_turn = isinstance(value, dict) and not all(isinstance(item, list) for item in value.values())
    given = [value] if is_turn else turns_at(value, place)
    first = given[0] if given and isinstance(given[0], dict) else {}
    is_from = reading.name("from") in first and reading.name("role") not in first
    turns = TurnReader(reading, *map(reading.name, ("from", "value") if is_from else ("role", "content")))
    turns.read(given, place)
    if not turns.messages:
        raise FieldError(f"{place} is empty; every answer needs its text")
    return turns


def prompt_of(row: Mapping[str, Any], reading: Reading) -> TurnReader | None:
    """Read the prompt of a row, None if it has none."""
    name = _first_column(row, reading, PROMPTS)
    if name is None:
        return None
    if name == reading.name("instruction"):
        turns = TurnReader(reading)
        turns.add(Message("user", add_history(turns, row)), name)
        return turns
    is_chat = name in map(reading.name, CHAT_COLUMNS) or holds_messages(row[name])
    return _turns(turns_at(row[name], name) if is_chat else row[name], name, reading, "user")


def _joined(asked: TurnReader, answer: TurnReader) -> TurnReader:
    turns = TurnReader(answer.reading)
    turns.messages, turns.places = [*asked.messages, *answer.messages], [*asked.places, *answer.places]
    turns.remarks = asked.remarks | answer.remarks
    return turns


def _check_prompt(asked: TurnReader | None, read: Sequence[TurnReader], place: str) -> None:
    """Raise FieldError for a prompt that whole conversations do not hold."""
    said = {message.content.strip() for turns in read[:1] for message in turns.messages}
    for message, name in zip(asked.messages, asked.places, strict=True) if asked else ():
        if message.content.strip() not in said:
            raise FieldError(
                f"{name} is not among the messages of {place}, which begins with a prompt of its own; remove one"
            )


def _check_question(asked: TurnReader) -> None:
    if asked.messages[-1].role == "assistant":
        raise FieldError(f"{asked.places[-1]} is an assistant turn, but the answers follow it; end the prompt before")


def _after_question(turns: TurnReader) -> int:
    """Return where the turns behind the last question begin; 0 without one."""
    return max((place + 1 for place, message in enumerate(turns.messages) if message.role == "user"), default=0)


def _num_common(read: Sequence[TurnReader], places: Sequence[str]) -> int:
    """Return how many messages all begin with. Raises FieldError if two answers are equal."""
    for (one, first), (other, second) in combinations(zip(places, read, strict=True), 2):
        if first.messages == second.messages:
            raise FieldError(f"{one} and {other} are equal, so neither is better; remove the row")
    shortest = min(len(turns.messages) for turns in read)
    for place in range(shortest):
        if any(turns.messages[place] != read[0].messages[place] for turns in read):
            return place
    return shortest


def _check_answer(turns: TurnReader, num_common: int) -> None:
    """Raise FieldError unless an answer with something in it follows the messages that all answers have in common."""
    place, answer = turns.places[min(num_common, len(turns.places) - 1)], turns.messages[num_common:]
    prompted = next((name for name, m in zip(turns.places, turns.messages[:num_common], strict=False) if m.train), None)
    if prompted is not None:
        raise FieldError(
            f"{prompted} asks for loss in the prompt, but only answers carry loss; remove that key, or set keys"
        )
    if not num_common:
        raise FieldError(f"{place}: the answers have no first message in common, so they have no prompt")
    if not answer:
        raise FieldError(f"{place} is the last turn, so there is no answer after the prompt")
    if answer[0].role != "assistant":
        raise FieldError(
            f"{place} ({answer[0].role}) is where the answers part, so they follow different prompts; an answer begins "
            "with an assistant turn"
        )
    if all(is_empty(message) for message in answer if message.role == "assistant"):
        raise FieldError(f"{place} is empty; every answer needs its text")


def _margin(row: Mapping[str, Any], reading: Reading) -> float | None:
    """Return by how much the chosen answer is better, None if the row does not say."""
    name = reading.name(MARGIN)
    if row.get(name) is not None:
        margin, text = _number(row[name], name), f"{name} is {row[name]}"
    else:
        scores = next((pair for pair in SCORES if all(row.get(reading.name(one)) is not None for one in pair)), None)
        if scores is None:
            return None
        good, bad = (_number(row[reading.name(one)], reading.name(one)) for one in scores)
        margin, text = good - bad, f"{reading.name(scores[0])} is {good:g} and {reading.name(scores[1])} {bad:g}"
    if margin < 0:
        raise FieldError(f"{text}, so the rejected answer is the better one; exchange the two, or remove the row")
    return margin


def _values(row: Mapping[str, Any], reading: Reading, items: Sequence[object], column: str) -> tuple[list[float], bool]:
    """Return what each answer is worth, more for better, and whether these are scores. Raises FieldError."""
    beside = _first_column(row, reading, RANKED_COLUMNS)
    if beside is not None:
        given = list_at(row[beside], beside)
        if len(given) != len(items):
            raise FieldError(f"{beside} has {len(given)} values, but {column} has {len(items)}; give one for each")
        numbers = [_number(value, f"{beside}[{place}]") for place, value in enumerate(given)]
    else:
        numbers = list(_own_values(items, column))
    are_scores = _are_scores(row, reading, items)
    return [value if are_scores else -value for value in numbers], are_scores


def _own_values(items: Sequence[object], column: str) -> Iterator[float]:
    key = _own_key(items)
    for place, item in enumerate(items):
        if key is None or not isinstance(item, dict) or item.get(key) is None:
            raise FieldError(f"{column}[{place}] has no {key or 'score and no rank'}; each answer needs one")
        yield _number(item[key], f"{column}[{place}].{key}")


def _own_key(items: Sequence[object]) -> str | None:
    """Return the key that most answers have, as values of two keys do not compare."""
    keys = (*_EACH_SCORE, *_EACH_RANK)
    given = Counter(key for item in items if isinstance(item, dict) for key in keys if item.get(key) is not None)
    return max(keys, key=lambda key: given[key]) if given else None


def _are_scores(row: Mapping[str, Any], reading: Reading, items: Sequence[object]) -> bool:
    beside = _first_column(row, reading, RANKED_COLUMNS)
    if beside is not None:
        return beside in map(reading.name, _ALL_SCORES)
    return _own_key(items) in _EACH_SCORE


def _text_of(item: object) -> object:
    """Return what an answer of a list says: a text, a turn, or turns."""
    if isinstance(item, dict) and not {"role", "from"} & item.keys():
        return next((item[key] for key in _TEXTS if item.get(key) is not None), None)
    return item


def _number(value: object, place: str) -> float:
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or abs(number) > 1e30:
        raise FieldError(f"{place} is {kind(value)}, not a finite number")
    return number


def _label(value: object, place: str) -> int:
    """Return 1 for an answer to be learnt, 0 for one to avoid."""
    if (is_good := says_good(value, place)) is not None:
        return int(is_good)
    shown = f"{value!r:.40}" if isinstance(value, str) else kind(value)
    raise FieldError(f"{place} is {shown}; the label of an answer is true or false, 1 or 0, good or bad")
