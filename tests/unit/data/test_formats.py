"""Each shape of rows that people bring becomes the one canonical sample, written by hand in cases/, or is named."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from typing import Any

import pytest
from row_cases import ORIGIN, Row, cases, conversation, messages, parsed

from flatout.config.data import DataConfig
from flatout.config.schema import SourceConfig
from flatout.data.conversation import Message, Origin, PlainText, PreferenceRow, TokenRow
from flatout.data.rows.formats.conversations import ROLE_TARGETS
from flatout.data.rows.formats.parser import make_parser
from flatout.data.rows.read import RawRow
from flatout.data.tokenize import SampleTokenizer, TokenizeOptions
from flatout.errors import DataError

CALL: Row = {"name": "add", "arguments": {"a": 1, "b": [2, "ü"]}}
SCHEMA = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}
WRAPPED = {"type": "function", "function": SCHEMA}
U, A = Message("user", "q"), Message("assistant", "a")
QUESTION, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
HUMAN = {"from": "human", "value": "q"}


def turns(*pairs: tuple[str, str]) -> list[Row]:
    return [{"role": role, "content": content} for role, content in pairs]


@pytest.mark.parametrize("case", cases("read.jsonl"), ids=lambda case: case["is"])
def test_rows_with_turns_are_detected_and_read(case):
    row, before = case["row"], json.dumps(case["row"])
    found = conversation(row)
    assert found.messages == messages(case["messages"])
    assert found.tools == tuple(case.get("tools", ()))
    assert conversation(row, format=case["format"]) == found
    assert json.dumps(row) == before, "parsing leaves the raw row as it is"


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("tokens", {"input_ids": [1], "text": "t"}),
        ("messages", {"messages": [QUESTION], "prompt": "p", "completion": "c"}),
        ("messages", {"conversations": [QUESTION]}),
        ("messages", {"messages": []}),
        ("sharegpt", {"conversations": []}),
        ("sharegpt", {"conversations": [HUMAN]}),
        ("prompt_completion", {"prompt": "p", "completion": "c", "text": "t"}),
        ("alpaca", {"instruction": "i", "input": None, "output": "o", "text": "all of it"}),
        ("alpaca", {"messages": None, "instruction": "i", "output": "o"}),
        ("text", {"text": "t", "role": "x"}),
        *((case["format"], case["row"]) for case in cases("read.jsonl")),
    ],
)
def test_detection(name, row):
    parser = make_parser(SourceConfig(path="x.jsonl"), RawRow(ORIGIN, row))
    assert parser.format == name
    assert parser.summary.startswith(f"{name} rows (")


@pytest.mark.parametrize("case", cases("refused.jsonl"), ids=lambda case: case["says"])
def test_a_bad_row_is_named_with_its_field_and_what_it_holds(case):
    with pytest.raises(DataError) as caught:
        parsed(case["row"])
    assert caught.value.text.startswith(f"train.jsonl:8: {case['says']}")


@pytest.mark.parametrize("row", cases("accepted.jsonl"), ids=str)
def test_rows_like_the_bad_ones_are_read(row):
    assert parsed(row)


@pytest.mark.parametrize("case", cases("first_rows.jsonl"), ids=lambda case: case["says"])
def test_first_rows_that_fit_no_format_name_what_there_is_and_their_fix_works(case):
    raw, says = RawRow(Origin("train.jsonl", 1), case["row"]), case["says"]
    with pytest.raises(DataError, match=re.escape(says)) as caught:
        make_parser(SourceConfig(path="train.jsonl", **case.get("settings", {})), raw)
    assert caught.value.text.startswith("train.jsonl:")
    if says.startswith("no"):
        assert all(column in caught.value.text for column in raw.columns)
    fixed = [source for fix in caught.value.fixes for source in fix.settings["data.sources"]]
    assert [source["columns"] for source in fixed] == ([case["columns"]] if "columns" in case else [])
    for source in fixed:
        assert make_parser(SourceConfig(**source), raw).parse(raw)


@pytest.mark.parametrize("case", cases("mixed.jsonl"), ids=lambda case: case["says"])
def test_mixed_schemas_name_both_places_and_the_field(case):
    rows = [RawRow(Origin("a.jsonl", 1), case["first"]), RawRow(Origin("b.jsonl", 1), case["other"])]
    parser = make_parser(SourceConfig(path="folder"), rows[0])
    with pytest.raises(DataError) as caught:
        parser.parse(rows[1])
    assert caught.value.text.startswith(case["says"])
    for origin in (rows[0].origin, Origin("b.jsonl", 2)):  # and the next row is read
        assert parser.parse(replace(rows[0], origin=origin)).origin == origin


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_under_each_of_its_names(key):
    row = {"messages": [QUESTION, ANSWER | {key: "hm "}]}
    assert conversation(row).messages == (U, Message("assistant", "a", reasoning="hm "))


ROLES = {
    "system": "system developer", "user": "user human prompter",
    "assistant": "assistant gpt chatgpt bing bard claude model bot ai",
    "tool": "tool observation function function_response tool_response tool_result ipython",
    "function_call": "function_call tool_call",
}  # fmt: skip


@pytest.mark.parametrize(("role", "name"), [(role, name) for role, names in ROLES.items() for name in names.split()])
def test_every_role_name_in_any_case_and_shape(role, name):
    assert set(ROLES) == set(ROLE_TARGETS)
    text = json.dumps(CALL) if role == "function_call" else "t"
    wanted = "assistant" if role == "function_call" else role
    start = turns(("assistant", "")) if role == "tool" else []
    for spelled in (name, name.upper()):
        assert conversation({"messages": start + turns((spelled, text))}).messages[-1].role == wanted


def test_a_role_of_ones_own_is_mapped_by_the_fix_or_the_setting_which_goes_first():
    row = {"messages": turns(("Agent", "t"), ("bot", "u"))}
    with pytest.raises(DataError) as caught:
        parsed(row)
    (source,) = caught.value.fixes[0].settings["data.sources"]
    assert [message.role for message in conversation(row, roles=source["roles"]).messages] == ["assistant"] * 2
    found = conversation(row, roles={"Agent": "assistant", "bot": "user"})
    assert found.messages == (Message("assistant", "t"), Message("user", "u"))


@pytest.mark.parametrize(
    "tools", [[SCHEMA], [WRAPPED], json.dumps([SCHEMA]), json.dumps([WRAPPED]), [json.dumps(WRAPPED)]]
)
def test_tools_are_wrapped_once(tools):
    assert conversation({"messages": [QUESTION], "tools": tools}).tools == (WRAPPED,)


@pytest.mark.parametrize("tools", [None, "", [], "[]"])
def test_no_tools(tools):
    assert conversation({"messages": [QUESTION], "tools": tools}).tools == ()


def test_columns_setting_renames_row_columns_and_turn_keys():
    gsm = {"question": "q", "answer": "a", "instruction": "not this"}
    assert conversation(gsm, columns={"instruction": "question", "output": "answer"}).messages == (U, A)
    odd = {"chat": [{"speaker": "user", "words": "q"}, {"speaker": "assistant", "words": "a"}]}
    for name, keys in (("auto", ("role", "content")), ("sharegpt", ("from", "value"))):
        columns = {"messages": "chat", keys[0]: "speaker", keys[1]: "words"}
        assert conversation(odd, format=name, columns=columns).messages == (U, A)


OTHER = turns(("assistant", "b"))
PREFERENCES: list[Row] = [
    {"conversations": [HUMAN], "chosen": {"from": "gpt", "value": "a"}, "rejected": {"from": "gpt", "value": "b"}},
    {"messages": [QUESTION], "chosen": [ANSWER], "rejected": OTHER},
    {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": OTHER},
]


@pytest.mark.parametrize("row", PREFERENCES)
def test_preference_rows_are_pairs_unless_the_chosen_answer_is_named(row):
    assert isinstance(parsed(row), PreferenceRow)
    chat_format = "sharegpt" if "conversations" in row else "messages" if "messages" in row else "prompt_completion"
    with pytest.raises(DataError, match=r"train\.jsonl:8: .*'rejected'") as caught:
        parsed(row, format=chat_format)
    compared, chosen = (fix.settings["data.sources"][0] for fix in caught.value.fixes)
    assert isinstance(parsed(row, **compared), PreferenceRow)
    found = conversation(row, columns=chosen["columns"]).messages
    assert [(message.role, message.content) for message in found] == [("user", "q"), ("assistant", "a")]


def test_the_sources_system_prompt_fills_in_only_where_there_is_none():
    rows: list[Row] = [
        {"messages": [QUESTION]},
        {"messages": turns(("system", "own"), ("user", "q"))},
        {"messages": [QUESTION], "system": "col"},
    ]
    assert [conversation(row, system="src").messages[0].content for row in rows] == ["src", "own", "col"]
    alpaca = conversation({"instruction": "q", "output": "a"}, system="src")
    assert alpaca.messages == (Message("system", "src"), U, A)


def test_a_parser_is_a_value_that_other_processes_can_get():
    raw = RawRow(ORIGIN, {"messages": [QUESTION, ANSWER], "id": 3})
    parser = make_parser(SourceConfig(path="x.jsonl", roles={"Agent": "user"}), raw)
    assert pickle.loads(pickle.dumps(parser)).parse(raw) == parser.parse(raw)
    assert parser.summary == "messages rows (messages); ignored: id"


def test_a_chat_in_one_text_has_its_turns_where_texts_are_joined_too():
    raw = RawRow(ORIGIN, {"conversations": "Human: q\n\nAssistant: a"})
    parser = make_parser(SourceConfig(path="train.jsonl"), raw)
    sample = replace(parser, options=replace(parser.options, joins=True)).parse(raw)
    assert sample == parser.parse(raw)
    assert len(sample.messages) == 2


def test_rows_in_memory_are_named_by_their_number_and_renamed():
    raw = RawRow(Origin("/a/data/in_memory/data-0f/rows.jsonl", 3), {"question": "q", "answer": "a"})
    with pytest.raises(DataError, match=r"^row 3 of your data: .*rename the key `question` to `instruction`") as caught:
        make_parser(SourceConfig(path=raw.origin.source), raw)
    assert not caught.value.fixes
    bad = RawRow(raw.origin, {"messages": [QUESTION, ANSWER], "label": False})
    with pytest.raises(DataError, match=r"^row 3 of your data: .*remove the key `label`") as caught:
        make_parser(SourceConfig(path=raw.origin.source), bad)
    assert [fix.settings for fix in caught.value.fixes] == [{"objective": "kto"}, {"data.on_bad_row": "skip"}]


def test_text_and_prompt_completion_keep_every_character():
    assert parsed({"text": "  a\r\n", "id": 1}) == PlainText("  a\r\n", ORIGIN)
    assert parsed({"prompt": " p ", "completion": " c"}) == PlainText(" c", ORIGIN, prompt=" p ")
    plain = PlainText("c", ORIGIN, prompt="p")
    assert parsed({"prompt": "p", "chosen": "c", "rejected": "r"}, columns={"completion": "chosen"}) == plain
    assert parsed({"q": "p", "a": "c"}, columns={"prompt": "q", "completion": "a"}) == plain
    assert parsed({"messages": [QUESTION], "text": "t"}, format="text") == PlainText("t", ORIGIN)


@pytest.mark.parametrize(
    ("columns", "trained"),
    [
        ({}, (True, True, True)),
        ({"labels": [-100, 8, 9]}, (False, True, True)),
        ({"labels": "[-100, 8, 9]", "attention_mask": [1, 1, 1]}, (False, True, True)),
        ({"trained": [False, True, False]}, (False, True, False)),
        ({"loss_mask": [0, 1, 1]}, (False, True, True)),
        ({"assistant_masks": [0, 0.0, 1.0], "labels": None}, (False, False, True)),
    ],
)
def test_tokenized_rows(columns, trained):
    assert parsed({"input_ids": [7, 8, 9]} | columns) == TokenRow((7, 8, 9), trained, ORIGIN)


def test_segments_say_what_carries_loss(small_tokenizer_dir):
    pieces = [("<|im_start|>q", False), ("yes<|im_end|>", True), ("\nthink", False), ("hello", True)]
    segments: list[Any] = [{"text": text, "label": label} for text, label in pieces]
    tokenizer = SampleTokenizer(TokenizeOptions(str(small_tokenizer_dir), "", None, DataConfig(special_tokens="keep")))
    for rows, learned in ((segments, "yes<|im_end|>hello<|im_end|>"), (segments[:3], "yes<|im_end|>")):
        text = tokenizer(parsed({"segments": rows})).pieces[0]
        assert tokenizer.tokenizer.decode(text.token_ids[text.loss_mask].tolist()) == learned
    with pytest.raises(DataError, match=r"segments\[0\]\.label is null; give true or false"):
        parsed({"segments": [{"text": "a"}]})
