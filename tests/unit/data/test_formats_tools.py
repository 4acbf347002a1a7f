"""Formats of function calling and of other systems' logs: each row -> the one canonical conversation, by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatout.cli.main import main
from flatout.config.schema import SourceConfig
from flatout.data.conversation import Conversation, Message, Origin, ToolCall
from flatout.data.rows.formats.parser import make_parser
from flatout.data.rows.read import RawRow
from flatout.errors import DataError

U, A = Message("user", "Weather?"), Message("assistant", "Sunny.")
GET = ToolCall("get", {"city": "Rome"})
CALL = Message("assistant", "", tool_calls=(GET,))
RESULT = Message("tool", '{"sky": "blue"}')
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


def said(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "parts": list(parts)}


GLAIVE = (
    'USER: Weather?\n\n\nASSISTANT: <functioncall> {"name": "get", "arguments": \'{"city": "Rome"}\'} '
    '<|endoftext|>\n\n\nFUNCTION RESPONSE: {"sky": "blue"}\n\n\nASSISTANT: Sunny. <|endoftext|>\n\n\n'
)
XLAM = {"query": "Weather?", "answers": [{"name": "get", "arguments": {"city": "Rome"}}]}
FLAT = {"name": "get", "description": "asks", "parameters": {"city": {"type": "str"}}}

# name, row, its format, its messages, its tools
ROWS: list[tuple[str, dict[str, Any], str, tuple[Message, ...], tuple[Any, ...]]] = [
    ("xlam", XLAM | {"tools": [FLAT]}, "xlam", (U, CALL), (TOOL,)),
    ("xlam as texts", {k: json.dumps(v) if k != "query" else v for k, v in (XLAM | {"tools": [FLAT]}).items()}, "xlam",
     (U, CALL), (TOOL,)),
    ("glaive", {"system": f"SYSTEM: You help, with access to the following functions. Use them if required -\n"
                          f"{json.dumps(NAMED, indent=1)}\n", "chat": GLAIVE}, "glaive",
     (Message("system", "You help."), U, CALL, RESULT, A), (TOOL,)),
    ("glaive without tools", {"system": "SYSTEM: You help, with no access to external functions.\n\n",
                              "chat": "USER: Weather?\n\n\nASSISTANT: Sunny. <|endoftext|>"}, "glaive",
     (Message("system", "You help, with no access to external functions."), U, A), ()),
    ("gemini", {
        "systemInstruction": {"role": "system", "parts": [{"text": "You help."}]},
        "contents": [said("user", {"text": "Weather?"}),
                     said("model", {"functionCall": {"name": "get", "args": {"city": "Rome"}}}),
                     said("user", {"functionResponse": {"name": "get", "response": {"sky": "blue"}}}),
                     said("model", {"text": "It is blue.", "thought": True}, {"text": "Sunny."})],
        "tools": [{"functionDeclarations": [{"name": "get", "description": "asks", "parameters": {
            "type": "OBJECT", "properties": {"city": {"type": "STRING"}}, "required": ["city"]}}]}]}, "gemini",
     (Message("system", "You help."), U, CALL, replace(RESULT, name="get"), replace(A, reasoning="It is blue.")),
     (TOOL,)),
    ("gemini in snake case", {"contents": json.dumps([
        said("user", {"text": "Wea"}, {"text": "ther?"}),
        said("model", {"function_call": {"name": "get", "args": {"city": "Rome"}}}),
        said("function", {"function_response": {"name": "get", "response": "blue"}}),
        said("model", {"text": "Sunny."})]),
        "tools": [{"function_declarations": [NAMED]}]}, "gemini",
     (U, CALL, Message("tool", "blue", name="get"), A), (TOOL,)),
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
def test_rows_are_detected_and_read(row: dict[str, Any], name: str, messages: Any, tools: Any) -> None:
    raw = RawRow(Origin("x.jsonl", 7), row)
    parser = make_parser(SourceConfig(path="x.jsonl"), raw)
    assert parser.summary.startswith(f"{name} rows (")
    found = parsed(row)
    assert found.messages == messages
    assert found.tools == tools
    assert parsed(row, format=name) == found


@pytest.mark.parametrize(
    ("written", "wanted", "is_required"),
    [
        ("str", {"type": "string"}, True),
        ("int, optional", {"type": "integer"}, False),
        ("Optional[float]", {"type": "number"}, False),
        ("bool", {"type": "boolean"}, True),
        ("List[int]", {"type": "array", "items": {"type": "integer"}}, True),
        ("List[List[int]]", {"type": "array"}, True),
        ("Dict[str, int]", {"type": "object"}, True),
        ("Union[int, str]", {"description": "(type: Union[int, str])"}, True),
    ],
)
def test_types_of_xlam_become_those_of_json(written: str, wanted: dict[str, Any], is_required: bool) -> None:
    tool = {"name": "get", "parameters": {"x": {"type": written}}}
    schema = parsed(XLAM | {"tools": [tool]}).tools[0]["function"]["parameters"]
    assert schema == {"type": "object", "properties": {"x": wanted}, "required": ["x"] * is_required}
    assert tool == {"name": "get", "parameters": {"x": {"type": written}}}


def test_a_schema_of_json_stays_as_it_is() -> None:
    assert parsed(XLAM | {"tools": [TOOL]}).tools == (TOOL,)


HI, CALLED = {"text": "Weather?"}, {"functionCall": {"name": "get", "args": {}}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (XLAM | {"tools": [FLAT], "answers": "[]"}, "answers is empty; there is nothing to learn"),
    (XLAM | {"tools": "get(city)"}, "tools is not valid JSON"),
    ({"chat": "USER: a\nASSISTANT: <functioncall> get(Rome) <|endoftext|>"}, "chat, turn 2 is not valid JSON"),
    ({"chat": "USER: a\nASSISTANT: b <|endoftext|> c <|endoftext|>"}, "chat, turn 2 goes on after <|endoftext|>"),
    ({"chat": "USER: a\nFUNCTION RESPONSE: b\nASSISTANT: c"}, "chat, turn 2 is a tool result without a call"),
    ({"contents": [said("user", {"inlineData": {"mimeType": "image/png", "data": "x"}})]},
     "contents[0].parts[0] (inlineData) holds images, which cannot be trained on yet"),
    ({"contents": [said("user", {"executableCode": {}})]}, "contents[0].parts[0] cannot be trained on"),
    ({"contents": [said("user", HI, {"functionResponse": {"name": "g", "response": {}}})]}, "is out of order"),
    ({"contents": [said("user", CALLED)]}, "contents[0].parts is a list in a user turn; only an assistant turn has"),
    ({"contents": [said("model", CALLED, HI)]}, "contents[0].parts[1] (text) is out of order"),
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
    *(({"systemInstruction": {"parts": parts}, "contents": [said("user", HI), said("model", HI)]},
       "systemInstruction.parts has a call or a thought; a system instruction is text")
      for parts in ([HI, CALLED], [{"text": "It asks.", "thought": True}, HI])),
]  # fmt: skip


WORDS, TOOL_USE = {"type": "text", "text": "a"}, {"type": "tool_use", "id": "c", "name": "g", "input": {}}
ANSWERED = {"functionResponse": {"name": "get", "response": {}}}
LIKE_REFUSED: list[dict[str, Any]] = [
    {"chat": "USER: a\nASSISTANT: b <|endoftext|>\nUSER: c\nASSISTANT: d <|endoftext|>"},
    {"systemInstruction": {"parts": [{"text": "Help."}, HI]}, "contents": [said("user", HI), said("model", HI)]},
    {"contents": [said("user", HI, HI), said("model", HI, CALLED), said("user", ANSWERED), said("model", HI)]},
    {"messages": [turn("user", WORDS), turn("assistant", WORDS, TOOL_USE),
                  turn("user", {"type": "tool_result", "tool_use_id": "c", "content": "b"}, WORDS),
                  turn("assistant", WORDS)]},
    {"messages": [turn("assistant", WORDS)], "tools": [NAMED], "functions": None},
    {"messages": [turn("assistant", WORDS)], "functions": [NAMED]},
]  # fmt: skip


@pytest.mark.parametrize("row", LIKE_REFUSED)
def test_what_is_like_it_is_read(row: dict[str, Any]) -> None:
    assert parsed(row).messages


@pytest.mark.parametrize(("row", "message"), REFUSED)
def test_what_these_formats_cannot_mean_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        parsed(row)
    assert str(caught.value).startswith("x.jsonl:7: ")
    assert message in str(caught.value)


def test_the_command_builds_each_of_them(
    tmp_path: Path, small_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["data", "build", *(f"{n}.jsonl" for n in range(len(ROWS))), "--tokenizer", str(small_tokenizer_dir)]
    for number, (_, row, *_) in enumerate(ROWS):
        answered = dict(row)
        if len(row.get("messages", "12")) == 1:
            answered["messages"] = [*row["messages"], {"role": "assistant", "content": "Sunny."}]
        Path(f"{number}.jsonl").write_text(json.dumps(answered) + "\n")
    assert main([*command, "--template", "qwen3", "--name", "x", "--num-procs", "1"]) == 0
    printed = " ".join("".join(capsys.readouterr()).split())
    assert "xlam rows (query, tools, answers); answers become tool calls" in printed
    assert "glaive rows (chat); USER, ASSISTANT and FUNCTION RESPONSE become turns" in printed
    assert "gemini rows (contents); contents become turns" in printed
