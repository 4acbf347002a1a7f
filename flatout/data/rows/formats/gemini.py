"""Gemini's rows: `contents` of roles and parts, as its API and its tuning files have them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flatout.data.conversation import Conversation, Message, Origin, ToolCall
from flatout.data.rows.formats.calls import wrapped
from flatout.data.rows.formats.conversations import TurnReader, finished, role_of
from flatout.data.rows.formats.fields import FieldError, Reading, flag_at, list_at, object_at, optional_text, text_at
from flatout.data.rows.formats.keys import media_error, turn_flags

_READ = {"role", "parts"}
# what a part may be, by each of its spellings
_PARTS = {
    "text": "text", "functionCall": "call", "function_call": "call", "functionResponse": "result",
    "function_response": "result",
}  # fmt: skip
_MEDIA = ("inlineData", "inline_data", "fileData", "file_data")
# what stands beside the text and carries no meaning for training
_BESIDE = {"thought", "thoughtSignature", "thought_signature", "videoMetadata", "video_metadata"}


def looks_like_gemini(row: Mapping[str, Any], reading: Reading) -> bool:
    """Return whether the row's `contents` hold parts."""
    contents = row.get(reading.name("contents"))
    if isinstance(contents, str):
        return contents.lstrip().startswith("[") and '"parts"' in contents
    return isinstance(contents, list) and bool(contents) and isinstance(contents[0], dict) and "parts" in contents[0]


def parse_gemini(row: Mapping[str, Any], origin: Origin, reading: Reading) -> Conversation:
    """Parse contents; optional systemInstruction and tools. Thoughts are reasoning; schemas get JSON's types."""
    column, turns = reading.name("contents"), TurnReader(reading)
    contents = list_at(row.get(column), column)
    if not contents:
        raise FieldError(f"{column} is empty; a conversation needs at least one turn")
    for index, value in enumerate(contents):
        _read_turn(object_at(value, f"{column}[{index}]"), f"{column}[{index}]", turns)
    names = [name for name in map(reading.name, ("systemInstruction", "system_instruction")) if row.get(name)]
    system = _system(row[names[0]], names[0]) if names else None
    tools, place, functions = reading.name("tools"), reading.name("tools"), list[object]()
    for index, item in enumerate([] if row.get(tools) in (None, "") else list_at(row[tools], tools)):
        tool = object_at(item, f"{place}[{index}]")
        listed = next((tool[key] for key in ("functionDeclarations", "function_declarations") if key in tool), [tool])
        functions += list_at(listed, f"{place}[{index}]")
    declared = wrapped([_lower_types(function) for function in functions], place)
    return finished(turns, row, origin, declared, system)


def _read_turn(turn: Mapping[str, Any], place: str, turns: TurnReader) -> None:
    role = role_of(turn.get("role", "user"), f"{place}.role", turns.reading.roles)
    train, ranges = turn_flags(turn, place, turns.reading, _READ, turns.remarks)
    if ranges is not None:
        raise FieldError(f"{place} has ranges with loss, but its parts are not one text; remove them")
    texts, thoughts, calls, num_results = list[str](), list[str](), list[ToolCall](), 0
    parts = list_at(turn.get("parts"), f"{place}.parts")
    if not parts:
        raise FieldError(f"{place}.parts is empty; a turn needs at least one part")
    for index, value in enumerate(parts):
        here = f"{place}.parts[{index}]"
        part = object_at(value, here)
        name, what = _name_of(part, here)
        if ((texts or thoughts) and what == "result") or (calls and what == "text"):
            raise FieldError(f"{here} ({name}) is out of order; parts must be results, thoughts, text, then calls")
        if what == "text":
            is_thought = part.get("thought") is not None and flag_at(part["thought"], f"{here}.thought")
            if is_thought and (texts or role != "assistant"):
                raise FieldError(
                    f"{here} is a thought after a text, or not the model's; only its turns begin with them"
                )
            (thoughts if is_thought else texts).append(text_at(part[name], f"{here}.{name}"))
            continue
        function = object_at(part[name], f"{here}.{name}")
        called = text_at(function.get("name"), f"{here}.{name}.name")
        call_id = optional_text(function.get("id"), f"{here}.{name}.id")
        if what == "call":
            args = object_at({} if function.get("args") is None else function["args"], f"{here}.{name}.args")
            calls.append(ToolCall(called, args, call_id))
            continue
        response, num_results = function.get("response"), num_results + 1
        text = response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)
        turns.add(Message("tool", text_at(text, f"{here}.{name}.response"), None, (), called, call_id, train), here)
    if calls and role != "assistant":
        raise FieldError(f"{place} has a functionCall in a {role} turn; only the model calls functions")
    if texts or thoughts or calls or not num_results:
        reasoning = "".join(thoughts) if thoughts else None
        said: Any = role
        turns.add(Message(said, "".join(texts), reasoning, tuple(calls), train=train), place)


def _name_of(part: Mapping[str, Any], place: str) -> tuple[str, str]:
    """Return the key of a part that holds its content, and what that is."""
    if name := next((key for key in _MEDIA if part.get(key) is not None), None):
        mime = part[name].get("mimeType", part[name].get("mime_type")) if isinstance(part[name], Mapping) else None
        media = str(mime).partition("/")[0]
        raise FieldError(media_error(f"{place} ({name})", media if media in ("image", "video", "audio") else "file"))
    names = [key for key in _PARTS if part.get(key) is not None]
    others = [key for key, value in part.items() if value is not None and key not in _PARTS and key not in _BESIDE]
    if len(names) != 1 or others:
        keys = ", ".join(part) or "none"
        raise FieldError(
            f"{place} cannot be trained on; a part is a text, a functionCall or a functionResponse; keys: {keys}"
        )
    return names[0], _PARTS[names[0]]


def _system(value: object, place: str) -> str:
    if isinstance(value, str):
        return text_at(value, place)
    parts = list_at(object_at(value, place).get("parts"), f"{place}.parts")
    texts = [object_at(part, f"{place}.parts[{index}]").get("text") for index, part in enumerate(parts)]
    return "".join(text_at(text, f"{place}.parts[{index}].text") for index, text in enumerate(texts))


def _lower_types(value: Any) -> Any:
    """Return a schema whose types are JSON's ("string"), not Gemini's ("STRING")."""
    if isinstance(value, list):
        return [_lower_types(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: item.lower() if key == "type" and isinstance(item, str) and item.isupper() else _lower_types(item)
        for key, item in value.items()
    }
