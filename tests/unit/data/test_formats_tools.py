"""Formats of function calling and of other systems' logs: each row -> the one canonical conversation, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flatout.config.schema import SourceConfig
from flatout.data.conversation import Conversation, Message, Origin, ToolCall
from flatout.data.rows.formats.parser import make_parser
from flatout.data.rows.read import RawRow
from flatout.errors import DataError

U, A = Message("user", "Weather?"), Message("assistant", "Sunny.")
GET = ToolCall("get", {"city": "Rome"})
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get", "description": "asks", "parameters": SCHEMA}}
NAMED = TOOL["function"]


def parsed(row: dict[str, Any], **settings: Any) -> Conversation:
    raw = RawRow(Origin("x.jsonl", 7), row)
    sample = make_parser(SourceConfig(path="x.jsonl", **settings), raw).parse(raw)
    assert isinstance(sample, Conversation)
    return sample


def turn(role: str, *parts: dict[str, Any] | str) -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


# name, row, its format, its messages, its tools
ROWS: list[tuple[str, dict[str, Any], str, tuple[Message, ...], tuple[Any, ...]]] = [
    ("anthropic", {
        "system": [{"type": "text", "text": "You help."}],
        "messages": [
            {"role": "user", "content": "Weather?"},
            turn("assistant", {"type": "thinking", "thinking": "I ask.", "signature": "s"},
                 {"type": "text", "text": "One moment."},
                 {"type": "tool_use", "id": "c1", "name": "get", "input": {"city": "Rome"}}),
            turn("user", {"type": "tool_result", "tool_use_id": "c1", "is_error": False,
                          "content": [{"type": "text", "text": "bl"}, {"type": "text", "text": "ue"}]},
                 {"type": "text", "text": "Well?"}),
            turn("assistant", {"type": "text", "text": "Sunny."})],
        "tools": [{"name": "get", "description": "asks", "input_schema": SCHEMA}]}, "messages",
     (Message("system", "You help."), U,
      Message("assistant", "One moment.", "I ask.", (replace(GET, call_id="c1"),)),
      Message("tool", "blue", tool_call_id="c1"), Message("user", "Well?"), A), (TOOL,)),
    ("two results in one turn, out of order", {"messages": [
        turn("assistant", *({"type": "tool_use", "id": i, "name": "get", "input": {}} for i in "ab")),
        turn("user", *({"type": "tool_result", "tool_use_id": i, "content": i} for i in "ba"))]}, "messages",
     (Message("assistant", "", tool_calls=(ToolCall("get", {}, "a"), ToolCall("get", {}, "b"))),
      Message("tool", "a", tool_call_id="a"), Message("tool", "b", tool_call_id="b")), ()),
    ("llama stack", {"dialog": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "stop_reason": "end_of_turn",
         "tool_calls": [{"call_id": "c1", "tool_name": "get", "arguments": {"city": "Rome"}}]},
        {"role": "tool", "call_id": "c1", "content": "blue"}, {"role": "assistant", "content": "Sunny."}]}, "messages",
     (U, Message("assistant", "", tool_calls=(replace(GET, call_id="c1"),)),
      Message("tool", "blue", tool_call_id="c1"), A),
     ()),
    ("a thinking part", {"messages": [{"role": "user", "content": "Weather?"}, turn(
        "assistant", {"type": "thinking", "thinking": "It is blue."}, {"type": "text", "text": "Sunny."})]}, "messages",
     (U, replace(A, reasoning="It is blue.")), ()),
    ("a struct of lists", {"conversations": {"from": ["human", "gpt"], "value": ["Weather?", "Sunny."]}}, "sharegpt",
     (U, A), ()),
    ("openai's functions", {"messages": [{"role": "user", "content": "Weather?"}], "functions": [NAMED]}, "messages",
     (U,), (TOOL,)),
]  # fmt: skip


@pytest.mark.parametrize(("row", "name", "messages", "tools"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_rows_are_detected_and_read(row, name, messages, tools):
    raw = RawRow(Origin("x.jsonl", 7), row)
    parser = make_parser(SourceConfig(path="x.jsonl"), raw)
    assert parser.summary.startswith(f"{name} rows (")
    found = parsed(row)
    assert found.messages == messages
    assert found.tools == tools
    assert parsed(row, format=name) == found


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [turn("user", {"type": "text", "text": "a"}, {"type": "tool_result", "content": "b"})]},
     "messages[0].content[1] (tool_result) is out of order; parts must be tool results, then text"),
    ({"messages": [turn("assistant", {"type": "tool_result", "content": "b"})]},
     "messages[0].content has tool results; they belong in a user or tool turn, not in role assistant"),
    ({"messages": [turn("assistant", {"type": "redacted_thinking", "data": "x"})]},
     "messages[0].content[0].type 'redacted_thinking' cannot be trained on"),
    ({"messages": [turn("user", {"type": "tool_use", "name": "g", "input": {}})]},
     "only an assistant turn has tool calls"),
    ({"messages": [turn("assistant", {"type": "tool_use", "name": "g"})]}, "messages[0].content[0].input missing"),
    ({"messages": [turn("assistant", {"type": "text", "text": "a"})], "tools": [NAMED], "functions": [NAMED]},
     "tools and functions both list tools; keep one"),
]  # fmt: skip


WORDS, TOOL_USE = {"type": "text", "text": "a"}, {"type": "tool_use", "id": "c", "name": "g", "input": {}}
LIKE_REFUSED: list[dict[str, Any]] = [
    {"messages": [turn("user", WORDS), turn("assistant", WORDS, TOOL_USE),
                  turn("user", {"type": "tool_result", "tool_use_id": "c", "content": "b"}, WORDS),
                  turn("assistant", WORDS)]},
    {"messages": [turn("assistant", WORDS)], "tools": [NAMED], "functions": None},
    {"messages": [turn("assistant", WORDS)], "functions": [NAMED]},
]  # fmt: skip


@pytest.mark.parametrize("row", LIKE_REFUSED)
def test_what_is_like_it_is_read(row):
    assert parsed(row).messages


@pytest.mark.parametrize(("row", "message"), REFUSED)
def test_what_these_formats_cannot_mean_is_named(row, message):
    with pytest.raises(DataError) as caught:
        parsed(row)
    assert str(caught.value).startswith("x.jsonl:7: ")
    assert message in str(caught.value)
