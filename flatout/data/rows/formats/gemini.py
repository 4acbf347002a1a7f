"""Gemini's rows: `contents` of roles and parts, as its API and its tuning files have them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flatout.data.conversation import Conversation, Origin
from flatout.data.rows.formats.calls import wrapped
from flatout.data.rows.formats.conversations import TurnReader, finished
from flatout.data.rows.formats.fields import FieldError, Reading, flag_at, list_at, object_at, text_at
from flatout.data.rows.formats.keys import media_error
from flatout.data.rows.formats.parts import read_parts

# what a part may be, by each of its spellings, and the typed part that it becomes
_PARTS = {
    "text": "text", "functionCall": "tool_use", "function_call": "tool_use", "functionResponse": "tool_result",
    "function_response": "tool_result",
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
    column, turns = reading.name("contents"), TurnReader(reading, "role", "parts")
    contents = [object_at(turn, f"{column}[{index}]") for index, turn in enumerate(list_at(row.get(column), column))]
    if not contents:
        raise FieldError(f"{column} is empty; a conversation needs at least one turn")
    parts = [_typed(turn.get("parts"), f"{column}[{index}].parts") for index, turn in enumerate(contents)]
    turns.read([{"role": "user", **turn, "parts": own} for turn, own in zip(contents, parts, strict=True)], column)
    names = [name for name in map(reading.name, ("systemInstruction", "system_instruction")) if row.get(name)]
    system = _system(row[names[0]], names[0]) if names else None
    tools, functions = reading.name("tools"), list[object]()
    for index, item in enumerate([] if row.get(tools) in (None, "") else list_at(row[tools], tools)):
        tool = object_at(item, f"{tools}[{index}]")
        listed = next((tool[key] for key in ("functionDeclarations", "function_declarations") if key in tool), [tool])
        functions += list_at(listed, f"{tools}[{index}]")
    declared = wrapped([_lower_types(function) for function in functions], tools)
    return finished(turns, row, origin, declared, system)


def _typed(value: object, place: str) -> list[dict[str, Any]]:
    """Return Gemini's parts as the typed parts that other formats have."""
    parts = enumerate(list_at(value, place))
    return [_part(object_at(part, f"{place}[{index}]"), f"{place}[{index}]") for index, part in parts]


def _part(part: Mapping[str, Any], place: str) -> dict[str, Any]:
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
    value = part[names[0]]
    if names[0] == "text":
        is_thought = part.get("thought") is not None and flag_at(part["thought"], f"{place}.thought")
        return {"type": "reasoning" if is_thought else "text", "text": value}
    function = object_at(value, f"{place}.{names[0]}")
    called = {"type": _PARTS[names[0]], "name": text_at(function.get("name"), f"{place}.{names[0]}.name")}
    if called["type"] == "tool_use":
        return called | {"input": {} if function.get("args") is None else function["args"], "id": function.get("id")}
    response = function.get("response")
    text = response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)
    return called | {"content": text, "tool_use_id": function.get("id")}


def _system(value: object, place: str) -> str:
    if isinstance(value, str):
        return text_at(value, place)
    parts = _typed(object_at(value, place).get("parts"), f"{place}.parts")
    content = read_parts(parts, f"{place}.parts", "system", Reading(), {})
    if content.calls or content.reasoning:
        raise FieldError(f"{place}.parts has a call or a thought; a system instruction is text")
    return content.text


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
