"""The parser of one source: chooses the format by the first row, then turns raw rows into samples."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NoReturn

from flatout.config.data import CONVERTERS
from flatout.config.schema import SourceConfig
from flatout.data.columns import PREFIX_TOKENS
from flatout.data.conversation import Origin, ParsedRow, PreferenceRow
from flatout.data.rows.formats.advice import (
    Advice,
    Works,
    advised,
    alpaca_columns,
    near_miss,
    proposed,
    unread_meaning,
)
from flatout.data.rows.formats.classify import CLASS, CLASSIFY, parse_classified
from flatout.data.rows.formats.conversations import (
    CHAT_COLUMNS,
    CHAT_OPTIONAL,
    ROLE_TARGETS,
    TURN_KEYS,
    chat_column,
    parse_alpaca,
    parse_chat,
    parse_prompt_completion,
    turns_at,
)
from flatout.data.rows.formats.fields import FieldError, Reading, kind, unpacked
from flatout.data.rows.formats.pictures import PICTURED_FORMATS, is_picture_column, pictures_of
from flatout.data.rows.formats.plain import MASK_COLUMNS, parse_segments, parse_text, parse_tokens
from flatout.data.rows.formats.preference import (
    ANSWERS,
    CHOSEN,
    COMPLETIONS,
    JUDGED,
    LABELS,
    MARGIN,
    PREFERENCES,
    PROMPTS,
    RANKED_COLUMNS,
    REJECTED,
    SCORES,
    columns_of,
    is_choice,
    is_labelled,
    is_pair,
    is_ranked,
    parse_choice,
    parse_kto,
    parse_preference,
    parse_ranked,
)
from flatout.data.rows.formats.refusals import refusal
from flatout.data.rows.read import RawRow
from flatout.errors import DataError, Fix

# what the console says about a format, besides its columns
_REMARKS = {
    "prompt_completion": (
        "prompt and completion are concatenated, without a chat template or separator (format=alpaca with "
        "columns={instruction: prompt, output: completion} applies the chat template)"
    ),
    "preference": "both answers get the chat template; only what follows the messages they share carries loss",
    "ranked": "pairs of answers get the chat template; only what follows the messages they share carries loss",
    "choice": "the better answer is chosen row by row; both get the chat template, and only answers carry loss",
    "classify": "the last token is scored; a chat gets the chat template",
    "kto": "only the answer carries loss, and its label is kept",
}
_ONE_SCHEMA = "all rows of a source need one schema: list this file as a separate source, or fix the row"


@dataclass(frozen=True, slots=True)
class FormatRule:
    """`required`: one column of each group must be present. `optional` ones are read too; all others are ignored.

    `named` are keys of turns, and columns that are only read if the user named them. `looks` says whether a row whose
    columns fit is of this format.
    """

    parse: Callable[[Mapping[str, Any], Origin, Reading], ParsedRow]
    required: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    looks: Callable[[Mapping[str, Any], Reading], bool] = lambda row, reading: True

    @property
    def columns(self) -> set[str]:
        return {*self.optional, *self.named, *chain(*self.required)}

    def read(self, reading: Reading) -> set[str]:
        """Return the user's names of the columns that are read with these settings."""
        named = {reading.columns[name] for name in self.named if name in reading.columns}
        return named | {reading.name(name) for name in (*self.optional, *chain(*self.required))}


_TURNS = ("role", "content", "from", "value")
_ASKED = (*PROMPTS, "history", *CHAT_OPTIONAL)
_pairs = FormatRule(
    parse_preference, ((*CHOSEN, *CHAT_COLUMNS), REJECTED), (*_ASKED, MARGIN, *chain(*SCORES)), _TURNS, is_pair
)
_parse_messages = partial(parse_chat, role="role", content="content")


def _converted(*required: str, looks: Callable[[Mapping[str, Any], Reading], bool] = lambda row, _: True) -> FormatRule:
    """Return the rule of rows that a converter makes canonical: they are refused, and their fix names it."""
    return FormatRule(_parse_messages, tuple((name,) for name in required), looks=looks)


def _looks_like_gemini(row: Mapping[str, Any], reading: Reading) -> bool:
    contents = row[reading.name("contents")]
    if isinstance(contents, str):
        return contents.lstrip().startswith("[") and '"parts"' in contents
    return isinstance(contents, list) and bool(contents) and isinstance(contents[0], dict) and "parts" in contents[0]


def _looks_like_glaive(row: Mapping[str, Any], reading: Reading) -> bool:
    chat = row[reading.name("chat")]
    return isinstance(chat, str) and all(f"{name}:" in chat for name in ("USER", "ASSISTANT"))


def _holds_replies(row: Mapping[str, Any], reading: Reading) -> bool:
    prompt = row[reading.name("prompt")]
    return isinstance(prompt, dict) and "replies" in prompt


# In the order of detection: distinctive columns first, since many chat sets also have a `text` or `prompt` column.
RULES: dict[str, FormatRule] = {
    "tokens": FormatRule(parse_tokens, (("input_ids",),), ("labels", "attention_mask", *MASK_COLUMNS)),
    "oasst": _converted("message_id", "text", "role", looks=lambda row, _: "parent_id" in row),
    "oasst_trees": _converted("prompt", looks=_holds_replies),
    "segments": FormatRule(parse_segments, (("segments",),)),
    "preference": _pairs,
    "reward": _pairs,
    "choice": FormatRule(parse_choice, (), _ASKED, _TURNS, is_choice),
    "ranked": FormatRule(parse_ranked, (ANSWERS,), (*_ASKED, *RANKED_COLUMNS), _TURNS, looks=is_ranked),
    # never detected: a label may also be that of an answer, or mean nothing
    "classify": FormatRule(
        parse_classified, (("text", *PROMPTS), ("label",)), ("history", *CHAT_OPTIONAL), _TURNS, lambda *_: False
    ),
    "kto": FormatRule(parse_kto, (LABELS,), (*_ASKED, *COMPLETIONS), _TURNS, looks=is_labelled),
    "messages": FormatRule(_parse_messages, (CHAT_COLUMNS,), CHAT_OPTIONAL, ("completion", "role", "content")),
    "sharegpt": FormatRule(
        partial(parse_chat, role="from", content="value"),
        (("conversations", *(name for name in CHAT_COLUMNS if name != "conversations")),),
        CHAT_OPTIONAL,
        ("completion", "from", "value"),
    ),
    "gemini": _converted("contents", looks=_looks_like_gemini),
    "glaive": _converted("chat", looks=_looks_like_glaive),
    "xlam": _converted("query", "tools", "answers"),
    "prompt_completion": FormatRule(
        parse_prompt_completion, (("prompt",), ("completion",)), CHAT_OPTIONAL, ("role", "content")
    ),
    "alpaca": FormatRule(
        parse_alpaca, (("instruction",), ("output",)), ("input", "history", *CHAT_OPTIONAL), ("reasoning",)
    ),
    "text": FormatRule(parse_text, (("text",),)),
}
_NO_COLUMN = {"role", "content", "from", "value"}
"""Keys of a turn that `columns` renames."""


@dataclass(frozen=True, slots=True)
class RowParser:
    """Parses the rows of one source; a plain value, so that it can be sent to other processes.

    `format` is what was chosen, or detected at the row `first`. `kinds` are the columns that every row must have, with
    the kinds of their values; `absent` those that no row may have, since the first does not; `unread` those of the
    first row that the format ignores, and `hint` says how those of them would be read that carry meaning. `columns`
    are those of the store that its rows fill.
    """

    format: str
    reading: Reading
    first: Origin
    kinds: tuple[tuple[str, str], ...]
    absent: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    hint: str = ""
    columns: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """One line for the console: the format, its columns and the ignored columns."""
        unread = f"; ignored: {', '.join(self.unread)}{self.hint}" if self.unread else ""
        remark = "" if self.format == "prompt_completion" and not self._is_joined else _REMARKS.get(self.format, "")
        columns = ", ".join(name for name, _ in self.kinds)
        return f"{self.format} rows ({columns}){unread}{'; ' if remark else ''}{remark}"

    @property
    def _is_joined(self) -> bool:
        return all(kind == "a string" for _, kind in self.kinds)

    def parse(self, raw: RawRow) -> ParsedRow:
        """Return the common form of one row. Raises DataError with file, row, field, what was found and what to do."""
        row = raw.columns
        try:
            for name, first_kind in self.kinds:
                if name not in row:
                    has = f"no column {name!r}, but {self.first} has it ({self.format} rows)"
                    raise FieldError(f"{has}; {_columns_found(row)}; {_ONE_SCHEMA}")
                if isinstance(row[name], str | list) and kind(row[name]) != first_kind:
                    raise FieldError(f"{name} is {kind(row[name])}, but {first_kind} at {self.first}; {_ONE_SCHEMA}")
            for name in self.absent:
                if row.get(name) is not None:
                    raise FieldError(f"has a column {name!r}, but {self.first} has none; {_ONE_SCHEMA}")
            if why := refusal(row, self.reading, self.format):
                raise why
            sample = RULES[self.format].parse(row, raw.origin, self.reading)
            if isinstance(sample, PreferenceRow) and MARGIN in self.columns and MARGIN not in sample.columns:
                raise FieldError(f"has no margin and no scores, but {self.first} has; {_ONE_SCHEMA}")
            return sample
        except FieldError as bad:
            raise bad.at(raw.origin) from None


def make_parser(source: SourceConfig, first: RawRow) -> RowParser:
    """Make the parser of a source. Raises DataError if its settings do not fit its first row."""

    def works(columns: Mapping[str, str]) -> bool:
        tried = source.model_copy(update={"columns": {**source.columns, **columns}})
        try:
            _parser_of(tried, first, lambda columns: False).parse(first)
        except DataError:
            return False
        return True

    for theirs, ours in source.roles.items():
        if ours not in ROLE_TARGETS:
            possible = ", ".join(ROLE_TARGETS)
            raise DataError(f"{source.path}: roles: {theirs} is mapped to {ours!r}; allowed: {possible}")
    for key in source.keys:
        if key in TURN_KEYS or key in _NO_COLUMN:
            raise DataError(f"{source.path}: keys: {key!r} is a key that flatout reads; remove it")
    if source.converter:
        source = source.model_copy(update={"format": _canonical(first.columns)})
    columns = _of_pictured(first.columns) if source.format == "auto" and not source.columns else {}
    if columns and works(columns):
        source = source.model_copy(update={"columns": columns})
    return _parser_of(source, first, works)


def _parser_of(source: SourceConfig, first: RawRow, works: Works) -> RowParser:
    """Make the parser; `works` says which advice to give where the first row does not fit."""
    row = first.columns
    _check_renames(source, first)
    reading = Reading(source.columns, source.roles, source.system, source.keys, source.pairs, path=source.path)
    known = _known(row, reading) if source.format == "auto" else source.format
    if why := refusal(row, reading, known if known in (*JUDGED, CLASSIFY, *PICTURED_FORMATS) else None):
        raise why.at(first.origin)
    name = known or _unknown(first, reading, works)
    if file := CONVERTERS.get(name.removesuffix("_trees")):
        said = f"{name} rows need a converter: copy {file.partition(':')[0]} of flatout's repository, and name it"
        end, fixes = advised(reading, Fix({"format": file}, "converts these rows"))
        raise DataError(f"{first.origin}: {said}{end}; {_columns_found(row)}", fixes)
    if name in PREFERENCES and _missing_columns(row, RULES[name], reading):
        name = "ranked" if is_ranked(row, reading) else "choice" if is_choice(row, reading) else name
    rule = RULES[name]
    if missing := _missing_columns(row, rule, reading):
        advice = near_miss(missing, _all_columns(), row, works)
        advice = advice or Advice(f"no column {missing[0]!r}, which format {name} needs")
        raise _refusal(reading, first, advice)
    if source.system is not None and name in ("text", "tokens"):
        raise DataError(f"{first.origin}: system is set, but {name} rows are not conversations; remove system")
    used = []
    for group in rule.required:  # one column per group, preferably one that is not null
        names = [column for column in map(reading.name, group) if column in row]
        used.append(next((column for column in names if row[column] is not None), names[0]))
    absent: list[str] = []
    if name == "tokens":  # if only some rows had a mask, the others would train on everything
        optional = [reading.name(column) for column in rule.optional]
        used += [column for column in optional if row.get(column) is not None]
        absent = [column for column in optional if row.get(column) is None]
    columns, unasked = [CLASS] if name == CLASSIFY else [], set[str]()
    if name in JUDGED:
        columns, needed, asked_again = columns_of(name, row, reading)
        used, unasked = [*used, *needed], set(asked_again)
        if PREFIX_TOKENS in columns and MARGIN not in columns:
            absent = [column for column in rule.columns if column == MARGIN or column in chain(*SCORES)]
    kinds = tuple((column, kind(row[column])) for column in used)
    is_joined = name == "prompt_completion" and all(kind == "a string" for _, kind in kinds)
    read = set(used) if is_joined else rule.read(reading).union(used) - unasked  # to a text, nothing else applies
    shows = is_picture_column if name in PICTURED_FORMATS else lambda column: False
    unread = tuple(column for column in row if column not in read and not shows(column))
    hint = unread_meaning(row, unread, reading) if name == "alpaca" else ""
    return RowParser(name, reading, first.origin, kinds, tuple(absent), unread, hint, tuple(columns))


def _canonical(row: Mapping[str, Any]) -> str:
    """Return the format of a row that a converter made: its label is meant, unlike one that a row may just have."""
    if row.get("label") is None or "input_ids" in row:
        return "auto"
    return "kto" if isinstance(row["label"], bool) else CLASSIFY


def _of_pictured(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns that make a chat of a row with a question, an answer and pictures; empty for another row."""
    with suppress(FieldError):
        if _known(row, Reading()) is None and pictures_of(row, Reading())[1] and (columns := alpaca_columns(row)):
            return columns[0]
    return {}


def _check_renames(source: SourceConfig, first: RawRow) -> None:
    rules = RULES.values() if source.format == "auto" else [RULES[source.format]]
    known = set().union(*(rule.columns for rule in rules))
    form = "any format" if source.format == "auto" else f"format {source.format}"
    for ours, theirs in source.columns.items():
        lacks = theirs not in first.columns and ours not in _NO_COLUMN
        if theirs in known and ours in first.columns and (lacks or ours not in known):
            columns = {**{name: own for name, own in source.columns.items() if name != ours}, theirs: ours}
            fix = Fix({"data.sources": [{"path": source.path, "columns": columns}]}, "flatout's name comes first")
            said = f"columns: {ours!r} is a column of the rows and {theirs!r} one of flatout's"
            raise DataError(f"{source.path}: {said}", [fix])
        if ours not in known:
            near = difflib.get_close_matches(ours, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            raise DataError(f"{source.path}: columns: {ours!r} is not a column of {form}; {hint}")
        if lacks:
            near = difflib.get_close_matches(theirs, list(first.columns), n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            said = f"no column {theirs!r}{hint}, set by columns={{{ours}: {theirs}}}"
            raise DataError(f"{first.origin}: {said}; {_columns_found(first.columns)}")


def _known(row: Mapping[str, Any], reading: Reading) -> str | None:
    """Return the name of the format that a row is of, None if its columns are of none."""
    for name, rule in RULES.items():
        for group in rule.required:
            names = map(reading.name, group)
            if not any(row.get(column) is not None for column in names):
                break
        else:
            if rule.looks(row, reading):
                return "sharegpt" if name == "messages" and _is_sharegpt(row, reading) else name
    return None


def _unknown(first: RawRow, reading: Reading, works: Works) -> NoReturn:
    """Raise DataError with the columns found and what to set."""
    row = first.columns
    advice = proposed(row, works)
    empty = [name for name, value in row.items() if value is None and name in _all_columns()]
    if advice is None and empty:
        advice = Advice(
            f"no known format has these columns, as {empty[0]!r} is null: give it a value or remove the row"
        )
    if advice is None:
        missing = [name for rule in RULES.values() for name in _missing_columns(row, rule, reading)]
        texts = [name for name, value in row.items() if isinstance(value, str)]
        example = dict(zip(("instruction", "output"), texts, strict=False)) if texts[1:] else {}
        example = example if works(example) else {}
        parts = " and ".join(map("{} holds the {}".format, example.values(), ("question", "answer")))
        said = f"no known format has these columns; rename them to {_USUAL}"
        near = near_miss(missing, _all_columns(), row, works)
        advice = near or Advice(said, example, f"if {parts}", is_sure=False)
    raise _refusal(reading, first, advice)


# the columns of the formats that most data sets have
_USUAL = "(messages), (instruction, output), (prompt, completion), (text) or (chosen, rejected)"


class ColumnsError(DataError):
    """Rows have columns that no format reads; its fix sets those of the source that would make them readable."""


def _refusal(reading: Reading, first: RawRow, advice: Advice) -> DataError:
    end, fixes = advised(reading, Fix({"columns": advice.columns}, advice.why)) if advice.columns else ("", [])
    kind_of = ColumnsError if fixes and advice.is_sure else DataError
    return kind_of(f"{first.origin}: {advice.text}{end}; {_columns_found(first.columns)}", fixes)


def _is_sharegpt(row: Mapping[str, Any], reading: Reading) -> bool:
    column = chat_column(row, reading)
    first = None
    with suppress(FieldError):
        turns = turns_at(row.get(column or ""), "")
        first = unpacked(turns[0], "") if turns else None
    if not isinstance(first, dict):  # the turns show nothing, so the column's usual name decides
        return column != reading.name("messages")
    return reading.name("from") in first and reading.name("role") not in first


def _missing_columns(row: Mapping[str, Any], rule: FormatRule, reading: Reading) -> list[str]:
    """Return the user's names of required columns that are absent from the row (null counts as present)."""
    groups = [[reading.name(column) for column in group] for group in rule.required]
    return [names[0] for names in groups if not any(name in row for name in names)]


def _all_columns() -> set[str]:
    return set().union(*(rule.columns for rule in RULES.values()))


def _columns_found(row: Mapping[str, Any]) -> str:
    """Return the row's columns for a message; null ones are marked."""
    return "columns found: " + (", ".join(f"{n} (null)" if v is None else n for n, v in row.items()) or "none")
