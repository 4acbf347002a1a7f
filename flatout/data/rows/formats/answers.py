"""Rows that say which answer is better, as for DPO, or whether one is good, as for KTO; and texts with a label.

A row's answers begin where its conversations part: the messages that all have in common are the prompt, and only
assistant turns behind it carry loss.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, combinations, pairwise

from flatout.data.columns import PREFIX_TOKENS
from flatout.data.conversation import Conversation, Message, PlainText, PreferenceRow, is_empty
from flatout.data.rows.formats.conversations import (
    CHAT_COLUMNS,
    SPOKEN,
    TurnReader,
    add_history,
    finished,
    spoken_turns,
    turns_at,
)
from flatout.data.rows.formats.fields import FieldError, Row, Uses, kind, list_at, number_at, only
from flatout.data.rows.formats.plain import parse_text
from flatout.data.rows.formats.verdict import better_column, better_of, says_good, two_answers
from flatout.errors import Fix

PREFERENCES = ("preference", "reward", "ranked", "choice")
"""Formats whose rows become pairs of answers."""
JUDGED = (*PREFERENCES, "kto", "rollouts")
"""Formats whose rows say which answer is good; these stay whole, and have columns of their own in the store."""
CLASSIFY, CLASS = "classify", "class"
"""The format of labelled texts, and the column of the store that it fills."""
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
Given = tuple[str, object]
"""An answer of a row: its place, and its value."""


def parse_preference(row: Row) -> PreferenceRow:
    """Parse a pair: chosen and rejected, each a text, a turn, or turns; with or without their prompt."""
    good, bad = row.named(CHOSEN), row.named(REJECTED)
    given: list[Given] = [(good, row.columns.get(good)), (bad, row.columns.get(bad))]
    if good not in row.columns and (chat := row.first(CHAT_COLUMNS)) is not None:
        said = turns_at(row.columns[chat], chat)
        whole = bad == row.name("rejected_messages")
        given[0] = (chat, said) if whole else (f"{chat}[{len(said) - 1}]", said[-1:])
        turns = TurnReader(row.options)
        turns.read(said[-1:], given[0][0])
        if (last := turns.messages[0].role) != "assistant":
            raise FieldError(f"{given[0][0]} is a turn of {last}, so {bad} has no answer beside it; add the chosen one")
        row = row if whole else replace(row, columns={**row.columns, chat: said[:-1]})
    return PreferenceRow(_conversations(row, given), ((0, 1),), row.origin, _margin(row))


def parse_choice(row: Row) -> PreferenceRow:
    """Parse two answers, such as response_a and response_b, and a column that says which of them is better."""
    names, column = two_answers(row.columns), better_column(row)
    if names is None or column is None:
        raise FieldError("has not two answers and a column that says which is better; remove the row")
    given = [(name, row.columns[name]) for name in better_of(row.columns, names, column)]
    return PreferenceRow(_conversations(row, given), ((0, 1),), row.origin)


def parse_ranked(row: Row) -> PreferenceRow:
    """Parse a list of answers with scores or ranks into pairs, as `data.sources.pairs` says; equal ones make no pair.

    `best_worst` is the first of the best and the first of the worst, `adjacent` neighbours by value, `all` every pair.
    """
    column = row.named(ANSWERS)
    items = list_at(row.columns.get(column), column)
    values, are_scores = _values(row, items, column)
    order = sorted(range(len(items)), key=lambda place: -values[place])
    ends = [(order[0], min(order, key=lambda place: values[place]))] if order else []
    pairs_of = {"best_worst": ends, "adjacent": list(pairwise(order)), "all": list(combinations(order, 2))}
    pairs = [(one, other) for one, other in pairs_of[row.options.pairs] if values[one] != values[other]]
    if not pairs:
        raise FieldError(f"{column} has no two answers of different value, so none is better; remove the row")
    used = [place for place in order if any(place in pair for pair in pairs)]
    answers = _conversations(row, [(f"{column}[{place}]", _text_of(items[place])) for place in used])
    margins = {MARGIN: tuple(values[one] - values[other] for one, other in pairs)} if are_scores else {}
    units = tuple((used.index(one), used.index(other)) for one, other in pairs)
    return PreferenceRow(answers, units, row.origin, margins)


def parse_kto(row: Row) -> PreferenceRow:
    """Parse a prompt, one answer and whether it is good; of a chat, the answer is what follows its last question."""
    name = row.named(LABELS)
    is_good = says_good(value := row.columns.get(name), name)
    if is_good is None:
        shown = f"{value!r:.40}" if isinstance(value, str) else kind(value)
        raise FieldError(f"{name} is {shown}; the label of an answer is true or false, 1 or 0, good or bad")
    completion = row.first(COMPLETIONS)
    given = [] if completion is None else [(completion, row.columns[completion])]
    return PreferenceRow(_conversations(row, given), ((0,),), row.origin, {"label": (int(is_good),)})


def parse_classified(row: Row) -> PreferenceRow:
    """Parse `text`, as it is, or a prompt or chat, which gets the chat template; and `label`."""
    label = label_of(row)
    sample: Conversation | PlainText
    if row.get("text") is not None:
        sample = parse_text(row)
    elif (asked := prompt_of(row)) is not None:
        sample = finished(asked, row)
    else:
        raise FieldError("has neither text nor messages; name the column of the text `text`")
    classes = row.options.classes
    return PreferenceRow((sample,), ((0,),), row.origin, {CLASS: (classes.index(label),)} if classes else {})


def label_of(row: Row) -> str:
    """Return the label of a text. Raises FieldError for a value that is no label."""
    name, value = row.name("label"), only(row.get("label"))
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        value = int(value)  # tables have integers with gaps as floats
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, int | str) or not str(value).strip():
        got = "empty" if value == "" else f"a list of {len(value)}" if isinstance(value, list) else kind(value)
        how = "keep one of them for each text" if isinstance(value, list) and value else "label the text"
        # the labels are known once all rows were read: some then have one
        is_known = bool(row.options.classes)
        skip = [Fix({"data.on_bad_row": "skip"}, "leaves out rows without one label")] if is_known else []
        raise FieldError(f"{name} is {got}; a label is a text or an integer (no number to predict): {how}", skip)
    return str(value).strip()


def is_pair(row: Row) -> bool:
    """Whether a row names its chosen answer, or has the last answer of its chat for it."""
    given = map(row.get, (*CHOSEN, *_BESIDE_CHAT))
    return any(value is not None and not isinstance(value, bool) for value in given)


def is_choice(row: Row) -> bool:
    """Whether a row has two answers, and says which of them is better."""
    return two_answers(row.columns) is not None and better_column(row) is not None


def is_labelled(row: Row) -> bool:
    """Whether a row is certainly one of KTO; elsewhere a label may be a class."""
    if any(row.name(name) in row.options.keys for name in LABELS):
        return False
    is_answered = row.get("prompt") is not None and row.get("completion") is not None
    return (is_answered and isinstance(only(row.get("label")), bool)) or row.get("kto_tag") is not None


def is_ranked(row: Row) -> bool:
    """Whether a row lists answers that have scores or ranks."""
    name = row.first(ANSWERS)
    items = row.columns[name] if name is not None and isinstance(row.columns[name], list) else []
    first, each = items[0] if items else None, (*_EACH_SCORE, *_EACH_RANK)
    return bool(items) and (
        (isinstance(first, dict) and any(first.get(key) is not None for key in each))
        or row.first(RANKED_COLUMNS) is not None
    )


def uses_of_choice(row: Row) -> Uses:
    """Return what rows of a choice need, and fill."""
    return Uses((PREFIX_TOKENS,), (*(two_answers(row.columns) or ()), better_column(row) or ""))


def uses_of_pair(row: Row) -> Uses:
    """Return what pairs need, and fill: all have a margin or scores, or none has."""
    if needed := _margin_columns(row):
        return Uses((PREFIX_TOKENS, MARGIN), needed)
    return Uses((PREFIX_TOKENS,), absent=(MARGIN, *chain(*SCORES)))


def uses_of_ranked(row: Row) -> Uses:
    """Return what lists of answers fill: margins, if they have scores."""
    items = row.columns.get(row.first(ANSWERS) or "")
    has_margin = isinstance(items, list) and _are_scores(row, items)
    return Uses((PREFIX_TOKENS, *[MARGIN] * has_margin))


def other_prompts(row: Row) -> tuple[str, ...]:
    """Return the columns that could be a prompt, behind the one that is."""
    prompts = [name for name in map(row.name, PROMPTS) if row.columns.get(name) not in (None, "", [])]
    with_input = 2 if prompts[:2] == [row.name("instruction"), row.name("input")] else 1
    return tuple(prompts[with_input:])


def _conversations(row: Row, given: Sequence[Given]) -> tuple[Conversation, ...]:
    """Return a conversation for each answer of a row; a row without any has its answer at the end of its prompt.

    Raises FieldError for answers that are empty, equal, to different prompts, or none.
    """
    asked, num_asked = prompt_of(row), 0
    read = [_answer(row, *one, follows=asked is not None and asked.is_spoken) for one in given]
    are_whole = [turns.messages[0].role != "assistant" for turns in read]
    if 0 < sum(are_whole) < len(read):
        raise FieldError(f"{given[0][0]} and {given[1][0]} differ in form: only one begins with the prompt")
    if not given:
        if asked is None:
            raise FieldError("has no answer; name its column `completion`")
        read = [asked]
    elif all(are_whole):
        _check_prompt(asked, read[0], given[0][0])
    elif asked is None:
        raise FieldError(f"{given[0][0]} begins with an answer, and there is no prompt; name its column `prompt`")
    elif asked.messages[-1].role == "assistant":
        raise FieldError(f"{asked.places[-1]} is an assistant turn, but the answers follow it; end the prompt before")
    else:
        read, num_asked = [_joined(asked, turns) for turns in read], len(asked.messages)
    if len(read) > 1:
        num_common = _num_common(read, [place for place, _ in given])
    else:
        asking = (place for place, message in enumerate(read[0].messages, start=1) if message.role == "user")
        num_common = num_asked or max(asking, default=0)
    for turns in read:
        _check_answer(turns, num_common)
        turns.messages[:num_common] = [replace(message, train=False) for message in turns.messages[:num_common]]
    return tuple(finished(turns, row) for turns in read)


def _answer(row: Row, place: str, said: object, *, follows: bool) -> TurnReader:
    """Read an answer; `follows`: its prompt ends with `Assistant:`."""
    turns = TurnReader(row.options)
    if follows and isinstance(said, str) and not spoken_turns(said, "assistant"):
        said = f"{SPOKEN} {said.lstrip()}"
    turns.read(said, place, "assistant")
    return turns


def prompt_of(row: Row, columns: Sequence[str] = PROMPTS) -> TurnReader | None:
    """Read the prompt of a row, the first of these columns, None if it has none."""
    name = row.first(columns)
    if name is None:
        return None
    turns = TurnReader(row.options)
    if name == row.name("instruction"):
        turns.add(Message("user", add_history(turns, row)), name)
    else:
        turns.read(row.columns[name], name, None if name in map(row.name, CHAT_COLUMNS) else "user")
    return turns


def _joined(asked: TurnReader, answer: TurnReader) -> TurnReader:
    turns = TurnReader(answer.options)
    turns.messages, turns.places = [*asked.messages, *answer.messages], [*asked.places, *answer.places]
    turns.remarks = asked.remarks | answer.remarks
    return turns


def _check_prompt(asked: TurnReader | None, whole: TurnReader, place: str) -> None:
    said = {message.content.strip() for message in whole.messages}
    for message, name in zip(asked.messages, asked.places, strict=True) if asked else ():
        if message.content.strip() not in said:
            raise FieldError(f"{name} is not among the messages of {place}, which begins with a prompt of its own")


def _num_common(read: Sequence[TurnReader], places: Sequence[str]) -> int:
    """Return how many messages all begin with. Raises FieldError if two answers are equal."""
    for (one, first), (other, second) in combinations(zip(places, read, strict=True), 2):
        if first.messages == second.messages:
            raise FieldError(f"{one} and {other} are equal, so neither is better; remove the row")
    beside = list(zip(*(turns.messages for turns in read), strict=False))
    return next((place for place, (one, *others) in enumerate(beside) if others != [one] * len(others)), len(beside))


def _check_answer(turns: TurnReader, num_common: int) -> None:
    """Raise FieldError unless an answer with something in it follows the messages that all answers have in common."""
    place, answer = turns.places[min(num_common, len(turns.places) - 1)], turns.messages[num_common:]
    prompted = next((name for name, m in zip(turns.places, turns.messages[:num_common], strict=False) if m.train), None)
    if prompted is not None:
        raise FieldError(f"{prompted} asks for loss in the prompt, but only answers carry loss; remove that key")
    if not num_common:
        raise FieldError(f"{place}: the answers have no first message in common, so they have no prompt")
    if not answer:
        raise FieldError(f"{place} is the last turn, so there is no answer after the prompt")
    if answer[0].role != "assistant":
        raise FieldError(f"{place} ({answer[0].role}) is where the answers part, so they follow different prompts")
    if all(is_empty(message) for message in answer if message.role == "assistant"):
        raise FieldError(f"{place} is empty; every answer needs its text")


def _margin_columns(row: Row) -> tuple[str, ...]:
    """Return the user's names of the columns that say by how much the chosen answer is better: `margin`, or scores."""
    known = (names for names in ((MARGIN,), *SCORES) if all(row.get(name) is not None for name in names))
    return tuple(map(row.name, next(known, ())))


def _margin(row: Row) -> dict[str, tuple[float]]:
    names = _margin_columns(row)
    numbers = [number_at(row.columns[name], name) for name in names]
    if not numbers:
        return {}
    margin = numbers[0] - sum(numbers[1:])
    if margin < 0:
        said = " and ".join(f"{name} {number:g}" for name, number in zip(["is", *names[1:]], numbers, strict=True))
        raise FieldError(f"{names[0]} {said}, so the rejected answer is the better one; exchange the two")
    return {MARGIN: (margin,)}


def _values(row: Row, items: Sequence[object], column: str) -> tuple[list[float], bool]:
    """Return what each answer is worth, more for better, and whether these are scores. Raises FieldError."""
    are_scores, key = _are_scores(row, items), _own_key(items)
    if (beside := row.first(RANKED_COLUMNS)) is not None:
        given = list_at(row.columns[beside], beside)
        if len(given) != len(items):
            raise FieldError(f"{beside} has {len(given)} values, but {column} has {len(items)}; give one for each")
        places = [f"{beside}[{place}]" for place in range(len(items))]
    else:
        given = [item.get(key) if isinstance(item, dict) else None for item in items]
        if None in given:
            raise FieldError(
                f"{column}[{given.index(None)}] has no {key or 'score and no rank'}; each answer needs one"
            )
        places = [f"{column}[{place}].{key}" for place in range(len(items))]
    numbers = map(number_at, given, places)
    return [number if are_scores else -number for number in numbers], are_scores


def _own_key(items: Sequence[object]) -> str | None:
    """Return the key that most answers have, as values of two keys do not compare."""
    keys = (*_EACH_SCORE, *_EACH_RANK)
    given = Counter(key for item in items if isinstance(item, dict) for key in keys if item.get(key) is not None)
    return max(keys, key=lambda key: given[key]) if given else None


def _are_scores(row: Row, items: Sequence[object]) -> bool:
    if (beside := row.first(RANKED_COLUMNS)) is not None:
        return beside in map(row.name, _ALL_SCORES)
    return _own_key(items) in _EACH_SCORE


def _text_of(item: object) -> object:
    """Return what an answer of a list says: a text, a turn, or turns."""
    if isinstance(item, dict) and not {"role", "from"} & item.keys():
        return next((item[key] for key in _TEXTS if item.get(key) is not None), None)
    return item
