"""Glaive's function-calling rows: one text with speakers in capitals, and tools in the system text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from flatout.data.conversation import Conversation, Message, Origin, ToolCall
from flatout.data.rows.formats.calls import arguments_at, call_of, wrapped
from flatout.data.rows.formats.conversations import TurnReader, finished
from flatout.data.rows.formats.fields import FieldError, Reading, object_at, text_at, unpacked

_SPEAKER = re.compile(r"(?:\A|\n)[ \t]*(USER|ASSISTANT|FUNCTION RESPONSE):")
_END = "<|endoftext|>"
_CALL = "<functioncall>"
# arguments are JSON in single quotes, so the call is not JSON as a whole
_QUOTED = re.compile(r"""\{\s*"name":\s*"(?P<name>[^"]+)",\s*"arguments":\s*'(?P<arguments>.*)'\s*\}""", re.DOTALL)
_OFFER = re.compile(r",? with access to the following functions\. Use them if required\s*-?\s*\Z")
_JSON = json.JSONDecoder()


def looks_like_glaive(row: Mapping[str, Any], reading: Reading) -> bool:
    """Return whether the row's `chat` is a text with Glaive's speakers."""
    chat = row.get(reading.name("chat"))
    return isinstance(chat, str) and {"USER", "ASSISTANT"} <= set(_SPEAKER.findall(chat))


def parse_glaive(row: Mapping[str, Any], origin: Origin, reading: Reading) -> Conversation:
    """Parse `chat`, and `system` with tools in it, which become tools; the words that announce them are left out."""
    chat, system = reading.name("chat"), reading.name("system")
    text, turns = text_at(row.get(chat), chat), TurnReader(reading)
    pieces = _SPEAKER.split(text)
    if len(pieces) == 1 or pieces[0].strip():
        raise FieldError(f"{chat} does not begin with USER:, ASSISTANT: or FUNCTION RESPONSE:")
    for index, (speaker, said) in enumerate(zip(pieces[1::2], pieces[2::2], strict=True)):
        place, said = f"{chat}, turn {index + 1}", said.strip()
        if speaker != "ASSISTANT":
            turns.add(Message("user" if speaker == "USER" else "tool", said), place)
            continue
        said = said.removesuffix(_END).rstrip()
        if _END in said:
            raise FieldError(f"{place} goes on after {_END}; a turn of another speaker must follow it")
        before, is_call, call = said.partition(_CALL)
        calls = (_call(call.strip(), place),) if is_call else ()
        turns.add(Message("assistant", before.strip(), tool_calls=calls), place)
    prompt, tools = _system(row.get(system), system)
    return finished(turns, row, origin, tools, prompt)


def _call(text: str, place: str) -> ToolCall:
    if match := _QUOTED.fullmatch(text):
        return ToolCall(match["name"], arguments_at(match["arguments"].replace("\\'", "'"), f"{place}.arguments"))
    call = object_at(text, place)
    return call_of({"arguments": {}, **call}, place)


def _system(value: object, place: str) -> tuple[str, tuple[Mapping[str, Any], ...]]:
    """Return the prompt and the tools of a system text: JSON objects at its end, one after the other."""
    if value is None:
        return "", ()
    prompt = text_at(value, place).strip().removeprefix("SYSTEM:").strip()
    first = prompt.find("{")
    functions, at = list[object](), first
    while 0 <= at < len(prompt):
        try:
            end = _JSON.raw_decode(prompt, at)[1]
        except ValueError:
            return prompt, ()  # braces in words
        functions.append(unpacked(prompt[at:end], place))
        at = end + len(prompt[end:]) - len(prompt[end:].lstrip())
    if not functions:
        return prompt, ()
    before = prompt[:first].strip()
    offered = _OFFER.sub("", before)
    return (f"{offered}." if offered and offered != before else offered), wrapped(functions, place)
