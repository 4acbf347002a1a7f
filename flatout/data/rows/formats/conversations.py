"""Rows that hold a conversation: lists of turns (OpenAI messages, ShareGPT), alpaca, and prompt/completion."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from flatout.data.conversation import ROLES, Conversation, Message, PlainText, Role, ToolCall, is_empty
from flatout.data.rows.formats.content import (
    Content,
    call_of,
    calls_of,
    check_answers,
    holds_messages,
    in_call_order,
    read_parts,
    silent_spans,
    tools_of,
    turn_flags,
)
from flatout.data.rows.formats.fields import (
    FieldError,
    Row,
    SourceOptions,
    advised,
    check_texts,
    kind,
    list_at,
    object_at,
    optional_text,
    refused,
    text_at,
    unpacked,
)
from flatout.data.rows.formats.pictures import PICTURE_COLUMNS, pictures_of, with_pictures
from flatout.errors import Fix

# not a separate role: an assistant turn whose text is a function call in JSON
_CALL = "function_call"
# role -> the names that data sets give it
_NAMES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "claude", "model", "bot", "ai"),
    "tool": ("tool", "observation", "function", "function_response", "tool_response", "tool_result", "ipython"),
    _CALL: ("function_call", "tool_call"),
}
_KNOWN = {name: role for role, names in _NAMES.items() for name in names}
ROLE_TARGETS = (*ROLES, _CALL)
# fields of a turn that have several names in data sets
_REASONING = ("reasoning_content", "thinking", "reasoning")
_CALL_ID = ("tool_call_id", "call_id")
# what data sets call the role and the text of a turn
_ROLE_KEYS, _TEXT_KEYS = ("role", "from", "speaker", "author", "sender", "user"), ("text", "value", "message", "body")
TURN_KEYS = {"name", "tool_calls", "function_call", *_CALL_ID, *_REASONING}
"""Keys of a turn that are read, besides those of its role, its text and its loss."""
CHAT_COLUMNS = ("messages", "conversations", "conversation", "dialog", "dialogue")
CHAT_OPTIONAL = ("tools", "functions", "system", "chat_template_kwargs", *PICTURE_COLUMNS)
"""Columns that every format of turns reads, if they are there."""


def turns_at(value: object, place: str) -> list[Any]:
    """Return a list of turns, also from JSON text, or from an object of equally long lists (`datasets` has these)."""
    value = unpacked(value, place)
    if holds_messages(value):
        value = value["messages"]  # type: ignore[index]  # it is an object
    if not (isinstance(value, dict) and value and all(isinstance(items, list) for items in value.values())):
        return list_at(value, place)
    lengths = {key: len(items) for key, items in value.items()}
    if len(set(lengths.values())) > 1:
        lengths_text = ", ".join(f"{key} {length}" for key, length in lengths.items())
        raise FieldError(f"{place} is an object of lists of different lengths ({lengths_text}); give each turn one")
    places = range(next(iter(lengths.values())))
    return [{key: items[place] for key, items in value.items() if items[place] is not None} for place in places]


_SPEAKERS = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):[ \t]*")
SPOKEN = "Assistant:"
"""What an answer follows in such a text."""


def spoken_turns(text: str, role: str = "user") -> list[Message]:
    """Return the turns of a text as hh-rlhf writes a conversation, or an answer (`role`); empty for another text.

    An empty `Assistant:` at its end is where the answer follows, and no turn.
    """
    _, *spoken = _SPEAKERS.split(text)
    begins = {"user": "Human", "assistant": "Assistant"}.get(role)
    if not spoken or text[: text.find(spoken[0])].strip() or not (spoken[0] == "Human" or spoken[0] == begins):
        return []
    if spoken[-2:] == ["Assistant", ""] and spoken[2:]:
        spoken = spoken[:-2]
    pairs = zip(spoken[::2], spoken[1::2], strict=True)
    return [Message("user" if speaker == "Human" else "assistant", said) for speaker, said in pairs]


def parse_chat(row: Row, *, role: str, content: str) -> Conversation:
    """Parse a list of turns, whose keys are `role` and `content`; optional columns are CHAT_OPTIONAL.

    OpenAI and Anthropic messages have the keys role and content (and tool_calls, ...), ShareGPT has from and value.
    """
    turns = TurnReader(row.options, (row.name(role), row.name(content)))
    column = row.named(CHAT_COLUMNS)
    turns.read(row.columns.get(column), column)
    # a column with the last answer is only used if the user named it
    answer = row.get("completion") if "completion" in row.options.columns else None
    if answer not in (None, []) and turns.messages[-1].role != "assistant":
        turns.read(answer if isinstance(answer, list) else [answer], row.name("completion"))
    return finished(turns, row)


def parse_alpaca(row: Row) -> Conversation:
    """Parse instruction and output; optional input, system, and history (a list of [question, answer] pairs).

    A column of reasoning is only read if the user named it.
    """
    turns = TurnReader(row.options)
    turns.add(Message("user", add_history(turns, row)))
    answer, output = row.get("output"), row.name("output")
    if output == "answers" and isinstance(answer, list) and answer and all(isinstance(one, str) for one in answer):
        if len(set(answer)) > 1:
            turns.remarks["several_answers"] = None
        answer = max(answer, key=answer.count)  # of equal numbers, the first
    thoughts = row.get("reasoning") if "reasoning" in row.options.columns else None
    reasoning = optional_text(thoughts, row.name("reasoning")) or None
    turns.add(Message("assistant", text_at(answer, output), reasoning))
    return finished(turns, row)


def add_history(turns: TurnReader, row: Row) -> str:
    """Append the turns of an alpaca row's `history`, and return its question: instruction and input."""
    question, history, pairs = row.text("instruction"), row.name("history"), row.get("history")
    if extra := optional_text(row.get("input"), row.name("input")):
        question = f"{question}\n{extra}"
    for index, pair in enumerate([] if pairs in (None, "") else list_at(pairs, history)):
        if not isinstance(pair, list) or len(pair) != 2:
            got = f"a list of {len(pair)}" if isinstance(pair, list) else kind(pair)
            raise FieldError(f"{history}[{index}] is {got}, not a [question, answer] pair")
        for place, role in enumerate(("user", "assistant")):
            turns.add(Message(cast(Role, role), text_at(pair[place], f"{history}[{index}][{place}]")))
    return question


def parse_prompt_completion(row: Row) -> Conversation | PlainText:
    """Parse prompt and completion: two texts (no template is applied), or two lists of messages.

    Only the completion carries loss: no turn of a prompt does, unless it has `train: true`.
    """
    prompt, completion = row.name("prompt"), row.name("completion")
    asked, answered = row.get("prompt"), row.get("completion")
    if isinstance(asked, str) and isinstance(answered, str):
        if row.options.system is not None:
            raise FieldError(f"{prompt} is a string, not messages, so the source's system cannot apply; remove system")
        if pictures_of(row)[1]:
            raise FieldError(f"has pictures, but {prompt} is a text without turns to show them; give lists of messages")
        return PlainText(text_at(answered, completion), row.origin, prompt=text_at(asked, prompt))
    if not isinstance(asked, list | dict) or not isinstance(answered, list | dict):
        forms = f"{prompt} is {kind(asked)} and {completion} is {kind(answered)}"
        raise FieldError(f"{forms}; give two strings or two lists of messages")
    turns = TurnReader(row.options, (row.name("role"), row.name("content")))
    if asked != []:
        turns.read(asked, prompt)
    turns.messages = [replace(turn, train=False) if turn.train is None else turn for turn in turns.messages]
    turns.read(answered, completion)
    return finished(turns, row)


def finished(turns: TurnReader, row: Row) -> Conversation:
    """Return the conversation of a row's turns, with its system prompt, its tools and its variables for the template.

    The system prompt is that of the row's column, else the source's if the chat has no system turn. A null or empty
    column means none. An answer without content, which would only teach its end of turn, gets no loss unless it has
    `train: true`. Raises FieldError if column and chat both have a system prompt, or for results without a call.
    """
    tools, messages, remarks = tools_of(row), turns.messages, turns.remarks
    check_answers(messages, turns.places)
    check_texts(tools, "tools")
    for message, place in zip(messages, turns.places, strict=True):
        for call in message.tool_calls:
            check_texts(call.arguments, f"{place}: arguments of {call.name}")
    if (ordered := in_call_order(messages)) is not messages:
        remarks["sorted_results"] = None
    placed = with_pictures(ordered, row)
    has_system = any(message.role == "system" for message in messages)
    prompt, column = row.get("system"), row.name("system")
    if isinstance(prompt, list) and prompt:  # Anthropic's parts
        prompt = read_parts(prompt, column, "system", SourceOptions(), {}).text
    prompt = optional_text(None if prompt in ("", []) else prompt, column)
    if prompt is not None and has_system:
        raise FieldError(f"{column} is given, but the conversation also has a system turn; keep one")
    if prompt is None and not has_system:
        prompt = row.options.system
    completed = [] if prompt is None else [Message("system", prompt)]
    for message in placed:
        teaches_nothing = message.role == "assistant" and message.train is None and is_empty(message)
        completed.append(replace(message, train=False) if teaches_nothing else message)
    return Conversation(tuple(completed), row.origin, tools, _template_args(row), tuple(remarks))


def _template_args(row: Row) -> dict[str, Any]:
    variables, args = row.name("chat_template_kwargs"), row.get("chat_template_kwargs")
    if args in (None, "") or variables in row.options.keys:
        return {}
    given = {name: value for name, value in object_at(args, variables).items() if value is not None}
    check_texts(given, variables)
    return given


class TurnReader:
    """Reads the turns of one row, whose role and content have these `keys`, or those of the first turn."""

    def __init__(self, options: SourceOptions, keys: tuple[str, str] | None = None) -> None:
        self.options, self._keys = options, keys
        self._role, self._content = keys or ("role", "content")
        self._read: set[str] = set()
        self.messages: list[Message] = []
        self.places: list[str] = []
        """Where each message stands in the row."""
        self.remarks: dict[str, None] = {}
        """What the build report counts (see Conversation)."""
        self.is_spoken = False
        """Whether they were read from a text that ends where its answer begins."""

    def add(self, message: Message, place: str = "") -> None:
        self.messages.append(message)
        self.places.append(place)

    def read(self, value: object, place: str, role: Role | None = None) -> None:
        """Append the messages of a list of turns; with a role, also of one turn, or of a text, which has that role.

        Raises FieldError with the turn's index, counted from 0 as in JSON.
        """
        if isinstance(value, str) and value and (role or spoken_turns(value)):
            self._read_text(text_at(value, place), place, role)
            return
        if role and value is not None and not isinstance(value, list | dict | str):
            raise FieldError(f"{place} is {kind(value)}; expected a text, a turn, or a list of turns")
        is_turn = role and isinstance(value, dict) and not all(isinstance(item, list) for item in value.values())
        turns: list[Any] = [value] if is_turn and not holds_messages(value) else []
        if not turns and value not in ("", [], None if role else ""):
            turns = turns_at(value, place)
        if not turns:
            needs = "every answer needs its text" if role else "a conversation needs at least one turn"
            raise FieldError(f"{place} is {'missing' if value is None else 'empty'}; {needs}")
        if self._keys is None and isinstance(turns[0], dict):
            name = self.options.name
            is_from = name("from") in turns[0] and name("role") not in turns[0]
            self._role, self._content = map(name, ("from", "value") if is_from else ("role", "content"))
        self._read = {self._role, self._content, *TURN_KEYS}
        for index, turn in enumerate(turns):
            self._turn(turn, f"{place}[{index}]")

    def _read_text(self, text: str, place: str, role: Role | None) -> None:
        spoken = spoken_turns(text, role or "user")
        if self.options.joins and spoken and role:
            cut = text.rfind(SPOKEN) + len(SPOKEN) if role == "assistant" and spoken[1:] else 0
            spoken = [Message("user", text[:cut]), Message(role, text[cut:])][not cut :]
        self.is_spoken = bool(spoken) and not self.options.joins and text.rstrip().endswith(SPOKEN)
        for message in spoken or [Message(role or "user", text)]:
            self.add(message, place)

    def _turn(self, turn: object, place: str) -> None:
        if isinstance(turn, str) and turn.lstrip().startswith("{"):
            turn = unpacked(turn, place)
        if not isinstance(turn, dict):
            raise FieldError(f"{place} is {kind(turn)}, not an object with {self._role} and {self._content}")
        if self._role not in turn:
            raise self._missing(turn, f"{place}.{self._role}")
        role = role_of(turn[self._role], f"{place}.{self._role}", self.options)
        said, here = turn.get(self._content), f"{place}.{self._content}"
        if len(turn) == 2 and isinstance(said, str) and role != _CALL:  # most turns
            self.add(Message(cast(Role, role), text_at(said, here)), place)
            return
        if role == _CALL:
            if self._content not in turn:
                raise self._missing(turn, here)
            self._add(turn, place, "assistant", Content(calls=calls_of(said, here)))
            return
        content = self._read_content(turn, place, role)
        own = _same_in_all(turn, _REASONING, place)
        if content.reasoning is not None and own is not None:
            raise FieldError(f"{place} has reasoning both in its parts and next to them; keep one")
        content.reasoning = own if content.reasoning is None else content.reasoning
        if content.reasoning and role != "assistant":
            raise FieldError(f"{place} has reasoning, but is a {role} turn; only an assistant turn may have reasoning")
        self._add(turn, place, cast(Role, role), content)

    def _missing(self, turn: Mapping[str, Any], place: str) -> FieldError:
        """Return the refusal of a turn without its role or text, which may stand under another usual name."""
        ours = ("from", "value") if self._role == self.options.name("from") else ("role", "content")
        columns = {}
        for own, key, names in zip(ours, (self._role, self._content), (_ROLE_KEYS, _TEXT_KEYS), strict=True):
            if key not in turn:
                columns[own] = next((name for name in names if isinstance(turn.get(name), str)), "")
        ways = [Fix({"columns": columns})] if all(columns.values()) else []
        return refused(f"{place} missing; keys: {', '.join(turn)}", self.options, *ways)

    def _add(self, turn: Mapping[str, Any], place: str, role: Role, content: Content) -> None:
        """Append the results of a turn's parts, then what it says itself, if that is more than results."""
        train, ranges, name, call_id = None, None, None, None
        if len(turn) > 2 or content.silent:
            name = optional_text(turn.get("name"), f"{place}.name")
            call_id = _same_in_all(turn, _CALL_ID, place)
            train, ranges = turn_flags(turn, place, self.options, self._read, self.remarks)
        if ranges is not None:
            if content.silent or not isinstance(turn.get(self._content), str):
                raise FieldError(f"{place} has ranges with loss, but its {self._content} is no text; keep one form")
            if ranges and train is not False:
                train = any(trained for _, trained in ranges)
                content.silent = silent_spans(ranges, content.text, place) if train else ()
            train = bool(ranges) if train is None else train
        elif train is None and content.is_trained and role != "assistant":
            train = True
        for result_id, result_name, text in content.results:
            self.add(Message("tool", text, name=result_name, tool_call_id=result_id, train=train), place)
        if content.results and not content.text:
            return
        silent = () if train is False else content.silent
        said = (content.text, content.reasoning, content.calls, name, call_id, train, silent, content.pictures)
        self.add(Message(role, *said), place)

    def _read_content(self, turn: Mapping[str, Any], place: str, role: str) -> Content:
        """Read text, reasoning and calls of a turn, from its content and `tool_calls` (or OpenAI's function_call)."""
        value, here, calls_place = turn.get(self._content), f"{place}.{self._content}", f"{place}.tool_calls"
        calls: tuple[ToolCall, ...] = ()
        if turn.get("tool_calls") is not None:
            calls = calls_of(list_at(turn["tool_calls"], calls_place), calls_place)
        if turn.get("function_call") is not None:
            calls += (call_of(turn["function_call"], f"{place}.function_call"),)
        if isinstance(value, list):
            content = read_parts(value, here, role, self.options, self.remarks)
            calls_place = here if content.calls else calls_place
            content.calls += calls
        elif isinstance(value, str) or (value is None and calls):
            content = Content(text_at(value or "", here), calls=calls)
        elif self._content not in turn:
            raise self._missing(turn, here)
        else:
            hint = "; only an assistant turn with tool_calls may have none" if value is None else ""
            raise FieldError(f"{here} is {kind(value)}, not a string{hint}")
        if content.calls and role != "assistant":
            raise FieldError(f"{calls_place} is a list in a {role} turn; only an assistant turn has tool calls")
        if content.results and role not in ("user", "tool"):
            raise FieldError(f"{here} has tool results; they belong in a user or tool turn, not in role {role}")
        return content


def _same_in_all(turn: Mapping[str, Any], keys: Sequence[str], place: str) -> str | None:
    """Return the text that a turn has under any of several names, which must agree; None if it has none."""
    given = {key: text_at(turn[key], f"{place}.{key}") for key in keys if turn.get(key) is not None}
    if len(set(given.values())) > 1:
        raise FieldError(f"{place} has {' and '.join(given)} with different values; keep one")
    return next(iter(given.values()), None)


def role_of(value: object, place: str, options: SourceOptions) -> str:
    """Return one of ROLE_TARGETS; the source's own names come first, built-in ones match in any case."""
    if not isinstance(value, str):
        raise FieldError(f"{place} is {kind(value)}, not a string")
    role = options.roles.get(value) or _KNOWN.get(value) or _KNOWN.get(value.lower())
    if role is None:
        fixes = advised(options, Fix({"roles": {value: "assistant"}}, "for example"))[1]
        raise FieldError(f"{place} {value!r:.200} is unknown; allowed: {', '.join(_KNOWN)}", fixes)
    return role
