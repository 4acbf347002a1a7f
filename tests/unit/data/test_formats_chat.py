"""Rows with turns: each shape people bring -> the one canonical conversation, written out by hand."""

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest

from flatout.config.schema import SourceConfig
from flatout.data.conversation import Conversation, Message, Origin, PreferenceRow, ToolCall
from flatout.data.rows.formats.conversations import _NAMES
from flatout.data.rows.formats.parser import make_parser
from flatout.data.rows.read import RawRow
from flatout.errors import DataError

ORIGIN = Origin("x.jsonl", 7)
CALL: dict[str, Any] = {"name": "add", "arguments": {"a": 1, "b": [2, "ü"]}}
SCHEMA = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}
WRAPPED = {"type": "function", "function": SCHEMA}
ADD = ToolCall("add", CALL["arguments"])
U, A = Message("user", "q"), Message("assistant", "a")


def parsed(row: dict[str, Any], **settings: Any) -> Conversation:
    raw = RawRow(ORIGIN, row)
    sample = make_parser(SourceConfig(path="x.jsonl", **settings), raw).parse(raw)
    assert isinstance(sample, Conversation)
    assert sample.origin == ORIGIN
    return sample


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


QUESTION, ANSWER = turns(("user", "q"), ("assistant", "a"))


def said(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": role, "value": value} for role, value in pairs]


# what the row holds -> its messages
SHAPES: list[tuple[str, dict[str, Any], tuple[Message, ...]]] = [
    ("messages", {"messages": [QUESTION, ANSWER]}, (U, A)),
    ("messages in a json text", {"messages": json.dumps([QUESTION, ANSWER])}, (U, A)),
    ("messages in json texts", {"messages": [json.dumps(QUESTION), json.dumps(ANSWER)]}, (U, A)),
    ("sharegpt in a json text", {"messages": json.dumps(said(("human", "q"), ("gpt", "a")))}, (U, A)),
    ("messages beside other columns", {"prompt": "q", "text": "x", "messages": [QUESTION, ANSWER]}, (U, A)),
    ("role and content under conversations", {"conversations": [QUESTION, ANSWER]}, (U, A)),
    ("sharegpt", {"conversations": said(("human", "q"), ("gpt", "a"))}, (U, A)),
    ("from and value under messages", {"messages": said(("human", "q"), ("gpt", "a"))}, (U, A)),
    ("singular column", {"conversation": [QUESTION, ANSWER]}, (U, A)),
    (
        "nothing is stripped",
        {"messages": turns(("user", " \n q\u00a0"), ("assistant", ""), ("user", "  "), ("gpt", "\r\n☃"))},
        (
            Message("user", " \n q\u00a0"),
            Message("assistant", "", train=False),
            Message("user", "  "),
            Message("assistant", "\r\n☃"),
        ),
    ),
    ("same role twice", {"messages": [QUESTION, QUESTION, ANSWER, ANSWER]}, (U, U, A, A)),
    (
        "system in the middle is left to the template",
        {"messages": turns(("user", "q"), ("system", "s"), ("assistant", "a"))},
        (U, Message("system", "s"), A),
    ),
    ("system column", {"system": "s", "conversations": said(("human", "q"))}, (Message("system", "s"), U)),
    ("an empty system column is none", {"system": "", "messages": [QUESTION]}, (U,)),
    ("nulls of a parquet schema are absent keys", {"messages": [QUESTION | dict.fromkeys(
        ("name", "tool_calls", "tool_call_id", "train", "weight", "reasoning_content", "function_call"))]}, (U,)),
    ("name", {"messages": [QUESTION | {"name": "Ann"}]}, (Message("user", "q", name="Ann"),)),
    (
        "openai tool calls, arguments as a text",
        {"messages": [
            QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c1", "type": "function", "function": CALL | {"arguments": json.dumps(CALL["arguments"])}},
                {"id": "c2", "type": "function", "function": CALL}]},
            {"role": "tool", "tool_call_id": "c2", "content": "4"},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
            ANSWER]},
        (
            U,
            Message("assistant", "", tool_calls=(replace(ADD, call_id="c1"), replace(ADD, call_id="c2"))),
            Message("tool", "3", tool_call_id="c1"),
            Message("tool", "4", tool_call_id="c2"),
            A,
        ),
    ),
    (
        "content may be absent beside calls, and bare calls need no id",
        {"messages": [QUESTION, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "3"}]},
        (U, Message("assistant", "", tool_calls=(ADD,)), Message("tool", "3")),
    ),
    (
        "openai's old function_call and function role",
        {"messages": [QUESTION, {"role": "assistant", "content": None, "function_call": CALL},
                      {"role": "function", "name": "add", "content": "3"}]},
        (U, Message("assistant", "", tool_calls=(ADD,)), Message("tool", "3", name="add")),
    ),
    (
        "sharegpt function_call and observation",
        {"conversations": said(("human", "q"), ("function_call", json.dumps(CALL)), ("observation", "3"), ("ai", "a"))},
        (U, Message("assistant", "", tool_calls=(ADD,)), Message("tool", "3"), A),
    ),
    (
        "parallel calls in one function_call",
        {"conversations": said(("human", "q"), ("function_call", json.dumps([CALL, CALL])), ("observation", "3"))},
        (U, Message("assistant", "", tool_calls=(ADD,) * 2), Message("tool", "3")),
    ),
    (
        "a call written into the text may be answered",
        {"conversations": said(("human", "q"), ("gpt", "<tool_call>{}</tool_call>"), ("tool", "3"))},
        (U, Message("assistant", "<tool_call>{}</tool_call>"), Message("tool", "3")),
    ),
    (
        "typed parts",
        {"messages": [
            {"role": "user", "loss_weight": 0.0,
             "content": [{"type": "text", "text": "q1 "}, {"type": "text", "value": "q2"}]},
            {"role": "assistant", "loss_weight": 1.0, "content": [
                {"type": "reasoning", "value": "hm"}, {"type": "text", "text": "t", "value": None},
                {"type": "tool_call", "value": json.dumps(CALL)}]}]},
        (
            Message("user", "q1 q2", train=False),
            Message("assistant", "t", reasoning="hm", tool_calls=(ADD,), train=True),
        ),
    ),
    (
        "loss flags under each of their names",
        {"messages": [QUESTION, ANSWER | {"train": False}, QUESTION, ANSWER | {"weight": 1}, QUESTION, ANSWER]},
        (U, Message("assistant", "a", train=False), U, Message("assistant", "a", train=True), U, A),
    ),
    (
        "an empty answer that asks for it",
        {"messages": [QUESTION, {"role": "assistant", "content": "", "train": True}]},
        (U, Message("assistant", "", train=True)),
    ),
    ("a row that is a good example", {"messages": [QUESTION, ANSWER], "label": True}, (U, A)),
    ("alpaca", {"instruction": "q", "output": "a"}, (U, A)),
    ("alpaca with nothing as input", {"instruction": "q", "input": "", "output": "a", "history": []}, (U, A)),
    (
        "alpaca with all columns",
        {"instruction": "q ", "input": " i", "output": "", "system": "s", "history": [["h1", "h2"]]},
        (
            Message("system", "s"),
            Message("user", "h1"),
            Message("assistant", "h2"),
            Message("user", "q \n i"),
            Message("assistant", "", train=False),
        ),
    ),
    (
        "prompt and completion as messages: loss on the completion only",
        {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]},
        (replace(U, train=False), replace(A, train=False), replace(U, train=False), A),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("row", "messages"), [shape[1:] for shape in SHAPES], ids=[shape[0] for shape in SHAPES])
def test_shapes(row, messages):
    before = json.dumps(row)
    assert parsed(row).messages == messages
    assert json.dumps(row) == before, "parsing leaves the raw row as it is"


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_under_each_of_its_names(key):
    row = {"messages": [QUESTION, ANSWER | {key: "hm "}]}
    assert parsed(row).messages == (U, Message("assistant", "a", reasoning="hm "))


@pytest.mark.parametrize(("role", "name"), [(role, name) for role, names in _NAMES.items() for name in names])
def test_every_role_name_in_any_case_and_shape(role, name):
    text = json.dumps(CALL) if role == "function_call" else "t"
    wanted = "assistant" if role == "function_call" else role
    start = turns(("assistant", "")) if role == "tool" else []
    for spelled in (name, name.upper()):
        assert parsed({"messages": start + turns((spelled, text))}).messages[-1].role == wanted


def test_roles_setting_adds_names_and_goes_first():
    row = {"messages": turns(("Agent", "t"), ("bot", "u"))}
    conversation = parsed(row, roles={"Agent": "assistant", "bot": "user"})
    assert conversation.messages == (Message("assistant", "t"), Message("user", "u"))


@pytest.mark.parametrize(
    "tools", [[SCHEMA], [WRAPPED], json.dumps([SCHEMA]), json.dumps([WRAPPED]), [json.dumps(WRAPPED)]]
)
def test_tools_are_wrapped_once(tools):
    assert parsed({"messages": [QUESTION], "tools": tools}).tools == (WRAPPED,)


@pytest.mark.parametrize("tools", [None, "", [], "[]"])
def test_no_tools(tools):
    assert parsed({"messages": [QUESTION], "tools": tools}).tools == ()


def test_columns_setting_renames_row_columns_and_turn_keys():
    gsm = {"question": "q", "answer": "a", "instruction": "not this"}
    assert parsed(gsm, columns={"instruction": "question", "output": "answer"}).messages == (U, A)
    odd = {"chat": [{"speaker": "user", "words": "q"}, {"speaker": "assistant", "words": "a"}]}
    renamed = {"messages": "chat", "role": "speaker", "content": "words"}
    assert parsed(odd, columns=renamed).messages == (U, A)
    assert parsed(
        odd, format="sharegpt", columns={"messages": "chat", "from": "speaker", "value": "words"}
    ).messages == (U, A)


OTHER = turns(("assistant", "b"))
PREFERENCES: list[dict[str, Any]] = [
    {"conversations": said(("human", "q")), "chosen": said(("gpt", "a"))[0], "rejected": said(("gpt", "b"))[0]},
    {"messages": [QUESTION], "chosen": [ANSWER], "rejected": OTHER},
    {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": OTHER},
]


@pytest.mark.parametrize("row", PREFERENCES)
def test_preference_rows_are_pairs_unless_the_chosen_answer_is_named(row):
    raw = RawRow(ORIGIN, row)
    assert isinstance(make_parser(SourceConfig(path="x.jsonl"), raw).parse(raw), PreferenceRow)
    chat_format = "sharegpt" if "conversations" in row else "messages" if "messages" in row else "prompt_completion"
    with pytest.raises(DataError, match=r"x\.jsonl:7: .*'rejected'") as caught:
        parsed(row, format=chat_format)
    compared, chosen = (SourceConfig(**fix.settings["data.sources"][0]) for fix in caught.value.fixes)
    assert isinstance(make_parser(compared, raw).parse(raw), PreferenceRow)
    found = parsed(row, columns=chosen.columns).messages
    assert [(message.role, message.content) for message in found] == [("user", "q"), ("assistant", "a")]


@pytest.mark.parametrize("label", [False, "false"])
def test_a_bad_example_is_refused_unless_its_label_is_said_to_mean_nothing(label):
    row = {"messages": [QUESTION, ANSWER], "label": label}
    with pytest.raises(DataError, match=r"x\.jsonl:7: label is false") as caught:
        parsed(row)
    learns, skips, ignores = (fix.settings for fix in caught.value.fixes)
    assert (learns["objective"], skips) == ("kto", {"data.on_bad_row": "skip"})
    judged = SourceConfig(**learns["data.sources"][0])
    assert isinstance(make_parser(judged, RawRow(ORIGIN, row)).parse(RawRow(ORIGIN, row)), PreferenceRow)
    plain = parsed({"messages": [QUESTION, ANSWER]}).messages
    assert parsed(row, keys=ignores["data.sources"][0]["keys"]).messages == plain


def test_the_sources_system_prompt_fills_in_only_where_there_is_none():
    rows = [
        {"messages": [QUESTION]},
        {"messages": turns(("system", "own"), ("user", "q"))},
        {"messages": [QUESTION], "system": "col"},
    ]
    assert [parsed(row, system="src").messages[0].content for row in rows] == ["src", "own", "col"]
    alpaca = parsed({"instruction": "q", "output": "a"}, system="src")
    assert alpaca.messages == (Message("system", "src"), U, A)


def test_a_parser_is_a_value_that_other_processes_can_get():
    raw = RawRow(ORIGIN, {"messages": [QUESTION, ANSWER], "id": 3})
    parser = make_parser(SourceConfig(path="x.jsonl", roles={"Agent": "user"}), raw)
    assert pickle.loads(pickle.dumps(parser)).parse(raw) == parser.parse(raw)
    assert parser.summary == "messages rows (messages); ignored: id"


def test_a_chat_in_one_text_has_its_turns_where_texts_are_joined_too():
    raw = RawRow(Origin("train.jsonl", 1), {"conversations": "Human: q\n\nAssistant: a"})
    parser = make_parser(SourceConfig(path="train.jsonl"), raw)
    sample = replace(parser, options=replace(parser.options, joins=True)).parse(raw)
    assert sample == parser.parse(raw)
    assert len(sample.messages) == 2
