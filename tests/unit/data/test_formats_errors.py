"""Bad rows: each error names the place in the row and what was found, and its fix makes the row readable."""

import re
from typing import Any

import pytest

from flatout.config.schema import SourceConfig
from flatout.data.conversation import Conversation, Origin
from flatout.data.rows.formats.parser import make_parser
from flatout.data.rows.read import RawRow
from flatout.errors import DataError

Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
ASK = [
    Q,
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": {}}}]},
]


def chat(*turns: object) -> dict[str, Any]:
    return {"messages": list(turns)}


def said(*turns: dict[str, Any]) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": "q"}, *turns]}


def parts(*content: object) -> dict[str, Any]:
    return chat(Q, {"role": "assistant", "content": list(content)})


# id of notes/reliability table C, row, how the error begins after `train.jsonl:8: `: the field, and what it holds
ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("C3", chat(), "messages is empty"),
    ("C3", {"conversations": []}, "conversations is empty"),
    ("C3", {"prompt": [Q], "completion": []}, "completion is empty"),
    ("C4", chat(Q, {"content": "a"}), "messages[1].role missing"),
    ("C4", chat(Q, {"role": None, "content": "a"}), "messages[1].role is null"),
    ("C4", chat(Q, {"role": "assistant"}), "messages[1].content missing"),
    ("C4", chat(Q, "a"), "messages[1] is a string"),
    ("C4", said({"value": "a"}), "conversations[1].from missing"),
    ("C4", said({"role": "assistant", "content": "a"}), "conversations[1].from missing"),
    ("C4", said({"from": "function_call"}), "conversations[1].value missing"),
    ("C5", chat(Q, {"role": "Agent", "content": "a"}), "messages[1].role 'Agent' is unknown"),
    ("C5", chat({"role": 3, "content": "a"}), "messages[0].role is a number (3)"),
    ("C6", chat(Q, {"role": "assistant", "content": None}), "messages[1].content is null"),
    ("C6", chat({"role": "user", "content": 5}), "messages[0].content is a number (5)"),
    ("C6", chat({"role": "user", "content": True}), "messages[0].content is true"),
    ("C6", chat({"role": "user", "content": {"a": 1}}), "messages[0].content is an object"),
    ("C6", chat({"role": "user", "content": []}), "messages[0].content is an empty list"),
    ("C6", chat({"role": "user", "content": ["a"]}), "messages[0].content[0] is a string"),
    ("C6", said({"from": "gpt", "value": None}), "conversations[1].value is null"),
    ("C6", {"messages": 5}, "messages is a number (5)"),
    ("C6", {"messages": "[{"}, "messages is not valid JSON: character 3"),
    ("C6", {"instruction": 5, "output": "a"}, "instruction is a number (5)"),
    ("C6", {"instruction": "q", "output": ["a"]}, "output is a list"),
    ("C6", {"instruction": "q", "input": 1, "output": "a"}, "input is a number (1)"),
    ("C6", {"instruction": "q", "output": "a", "history": [["only"]]}, "history[0] is a list of 1"),
    ("C6", {"prompt": "q", "completion": [A]}, "prompt is a string and completion is a list"),
    ("C6", {"text": 5}, "text is a number (5)"),
    ("C12", {"text": "ab\0c"}, "text contains NUL (U+0000) at character 3"),
    ("C12", chat({"role": "user", "content": "ab\U000f5a14c"}, A),
     "messages[0].content contains the private-use character U+F5A14 at character 3"),
    ("C12", chat({"role": "user", "content": "é\ud83d!"}),
     "messages[0].content contains the lone surrogate U+D83D at character 2"),
    ("C12", {"text": ""}, "text is empty"),
    ("C15", chat({"role": "tool", "content": "3"}), "messages[0] is a tool result without a call"),
    ("C15", chat(Q, {"role": "tool", "content": "3"}), "messages[1] is a tool result without a call"),
    ("C15", chat(*ASK, {"role": "tool", "content": "3", "tool_call_id": "c9"}),
     "messages[2].tool_call_id 'c9' matches no call"),
    ("C15", chat(Q, A, {"role": "tool", "content": "3", "tool_call_id": "c1"}),
     "messages[2].tool_call_id 'c1' matches no call"),
    ("C15", chat({"role": "user", "content": "q", "tool_calls": ASK[1]["tool_calls"]}),
     "messages[0].tool_calls is a list in a user turn"),
    ("calls", chat(Q, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}),
     "messages[1].tool_calls[0].arguments missing"),
    ("calls", chat(Q, {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{a}"}]}),
     "messages[1].tool_calls[0].arguments is not valid JSON: character 2"),
    ("calls", chat(Q, {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": [1]}]}),
     "messages[1].tool_calls[0].arguments is a list"),
    ("calls", said({"from": "function_call", "value": "add(1)"}),
     "conversations[1].value is not valid JSON: character 1"),
    ("calls", chat(Q) | {"tools": "[1]"}, "tools[0] is a number (1)"),
    ("calls", chat(Q) | {"tools": [{"description": "x"}]}, "tools[0].name is null"),
    ("parts", parts({"type": "image_url", "image_url": {"url": "x"}}), "messages[1].content[0] is a picture"),
    ("parts", parts({"type": "video", "video": "x"}), "messages[1].content[0] (video) holds videos"),
    ("parts", parts({"type": "code", "text": "x"}), "messages[1].content[0].type 'code'"),
    ("parts", parts({"text": "x"}), "messages[1].content[0].type None"),
    ("parts", parts({"type": "text"}), "messages[1].content[0].text is null"),
    ("parts", parts({"type": "text", "text": "x"}, {"type": "reasoning", "value": "y"}),
     "messages[1].content[1] (reasoning) is out of order"),
    ("parts", chat({"role": "user", "content": [{"type": "reasoning", "value": "y"}]}), "messages[0] has reasoning"),
    ("reasoning", chat(Q, A | {"thinking": "x", "reasoning": "y"}),
     "messages[1] has thinking and reasoning with different values"),
    ("weights", chat(Q, A | {"loss_weight": 0.5}), "messages[1].loss_weight is 0.5"),
    ("C21", chat(Q, A | {"weight": float("nan")}), "messages[1].weight is nan"),
    ("C21", chat(Q, A | {"weight": -1}), "messages[1].weight is -1"),
    ("weights", chat(Q, A | {"train": "yes"}), "messages[1].train is a string"),
    ("weights", chat(Q, A | {"train": True, "weight": 0}), "messages[1] has train and weight with different values"),
    ("system", chat({"role": "system", "content": "s"}, Q) | {"system": "t"}, "system is given"),
    ("C21", {"input_ids": [1, 2], "labels": [1]}, "labels has 1 values"),
    ("C21", {"input_ids": [1, -2]}, "input_ids[1] is -2"),
    ("C21", {"input_ids": [1, float("nan")]}, "input_ids[1] is nan"),
    ("C21", {"input_ids": [1, 2.0]}, "input_ids[1] is a number (2.0)"),
    ("C21", {"input_ids": []}, "input_ids is empty"),
    ("C21", {"input_ids": [1, 2], "labels": [-100, None]}, "labels[1] is null"),
    ("C21", {"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "labels[0] is 2"),
    ("C21", {"input_ids": [1, 2], "loss_mask": [0, 0.5]}, "loss_mask[1] is 0.5"),
    ("C21", {"input_ids": [1, 0], "attention_mask": [1, 0]}, "attention_mask[1] is 0: the row is padded"),
    ("C21", {"input_ids": [1, 2], "loss_mask": [0, 1], "labels": [1, 2]},
     "loss_mask and labels both set which tokens carry loss"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "message"), [case[1:] for case in ROWS], ids=[f"{c[0]}-{n}" for n, c in enumerate(ROWS)]
)
def test_bad_rows(row, message):
    raw = RawRow(Origin("train.jsonl", 8), row)
    parser = make_parser(SourceConfig(path="train.jsonl"), raw)
    with pytest.raises(DataError) as caught:
        parser.parse(raw)
    assert caught.value.text.startswith(f"train.jsonl:8: {message}")


def test_a_role_of_ones_own_is_mapped_by_the_fix():
    raw = RawRow(Origin("train.jsonl", 8), chat(Q, {"role": "Agent", "content": "a"}))
    with pytest.raises(DataError) as caught:
        make_parser(SourceConfig(path="train.jsonl"), raw).parse(raw)
    (source,) = caught.value.fixes[0].settings["data.sources"]
    sample = make_parser(SourceConfig(**source), raw).parse(raw)
    assert isinstance(sample, Conversation)
    assert sample.messages[1].role == "assistant"


CALL = {"name": "f", "arguments": {}}
RESULT = {"role": "tool", "content": "3"}
# what stands beside these refusals, and is right
LIKE_ROWS: list[dict[str, Any]] = [
    {"prompt": [Q], "completion": [A]},
    {"prompt": "q", "completion": "a"},
    {"messages": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'},
    chat(Q, {"role": "Assistant", "content": "a"}),
    chat({"role": "user", "content": [{"type": "text", "text": "q"}]}, A),
    chat({"role": "developer", "content": "s"}, Q, A),
    {"instruction": "q", "input": "", "output": "a"},
    {"instruction": "q", "input": None, "output": "a", "history": [["q", "a"]]},
    {"instruction": "q", "output": "a", "history": []},
    {"text": "a\tb\r\n\x0c\x1b\u2028"},
    {"text": "é\U0001f642 \ufeff\u200d \ue000\U000f5a16"},
    chat(*ASK, RESULT, A),
    chat(*ASK, RESULT | {"tool_call_id": "c1"}, A),
    chat(*ASK, RESULT | {"tool_call_id": None}, A),
    chat(Q, {"role": "assistant", "content": "", "tool_calls": [CALL | {"arguments": ""}]}),
    chat(Q, {"role": "assistant", "content": "", "tool_calls": [CALL | {"arguments": "{}"}]}),
    chat(Q, A | {"tool_calls": []}),
    chat(Q, A | {"tool_calls": None}),
    said({"from": "function_call", "value": '{"name": "f", "arguments": {}}'}),
    chat(Q, A) | {"tools": "[]"},
    chat(Q, A) | {"tools": None},
    chat(Q, A) | {"tools": '[{"name": "f", "parameters": {}}]'},
    parts({"type": "reasoning", "value": "y"}, {"type": "text", "text": "x"}),
    chat(Q, A | {"thinking": "x", "reasoning": "x"}),
    chat(Q, A | {"thinking": "x", "reasoning": None}),
    chat(Q, A | {"loss_weight": 1.0}),
    chat(Q, A, Q, A | {"weight": 0.0}),
    chat(Q, A | {"train": 1}),
    chat(Q, A | {"train": True, "weight": 1}),
    chat(Q, A | {"train": None, "weight": 1}),
    chat(Q, A) | {"system": "t"},
    chat({"role": "system", "content": "s"}, Q, A) | {"system": ""},
    {"input_ids": [1, 2], "labels": [-100, 2]},
    {"input_ids": [0, 2]},
    {"input_ids": [1, 2], "loss_mask": [0, 1]},
    {"input_ids": [1, 2], "loss_mask": [False, True]},
    {"input_ids": [1, 2], "attention_mask": [1, 1]},
    {"input_ids": [1, 2], "attention_mask": None, "labels": [1, 2]},
]  # fmt: skip


@pytest.mark.parametrize("row", LIKE_ROWS, ids=range(len(LIKE_ROWS)))
def test_rows_like_the_bad_ones_are_read(row):
    raw = RawRow(Origin("train.jsonl", 8), row)
    assert make_parser(SourceConfig(path="train.jsonl"), raw).parse(raw)


# first row, settings, what the error names, the columns that its fix sets
FIRST_ROWS: list[tuple[str, dict[str, Any], dict[str, Any], str, dict[str, str]]] = [
    ("C10", {"id": 1, "mesages": [Q, A]}, {}, "no column 'messages'; found 'mesages'", {"messages": "mesages"}),
    ("C10", {"instruction": "q", "outputs": "a"}, {}, "no column 'output'; found 'outputs'", {"output": "outputs"}),
    ("C10", {"id": 1, "mesages": []}, {}, "no column 'messages'; found 'mesages'", {}),
    ("C10", {"id": 1, "mesages": []}, {"format": "messages"}, "no column 'messages'; found 'mesages'", {}),
    ("C10", {"question": "q", "answer": "a"}, {}, "no known format", {"instruction": "question", "output": "answer"}),
    ("C10", {"q": "q", "a": "a"}, {}, "no known format", {"instruction": "q", "output": "a"}),
    ("C10", {"messages": None, "x": 1}, {}, "no known format has these columns, as 'messages' is null", {}),
    ("C10", {"q": 1}, {"format": "text"}, "no column 'text'", {}),
    ("C10", {}, {}, "no known format has these columns", {}),
    ("columns", {"question": "q", "answer": "a"}, {"columns": {"instruction": "qestion", "output": "answer"}},
     "no column 'qestion' (did you mean 'question'?)", {}),
    ("columns", {"question": "q", "answer": "a"}, {"columns": {"instructions": "question"}},
     "'instructions' is not a column of any format; did you mean 'instruction'?", {}),
    ("columns", {"question": "q", "output": "a"}, {"columns": {"question": "instruction"}},
     "'question' is a column of the rows", {"instruction": "question"}),
    ("roles", chat(Q), {"roles": {"Agent": "robot"}}, "roles: Agent is mapped to 'robot'", {}),
    ("system", {"text": "t"}, {"system": "s"}, "system is set, but text rows", {}),
]  # fmt: skip


@pytest.mark.parametrize(("row", "settings", "names", "columns"), [case[1:] for case in FIRST_ROWS])
def test_first_rows_that_fit_no_format(row, settings, names, columns):
    raw = RawRow(Origin("train.jsonl", 1), row)
    with pytest.raises(DataError, match=re.escape(names)) as caught:
        make_parser(SourceConfig(path="train.jsonl", **settings), raw)
    assert caught.value.text.startswith("train.jsonl:")
    if names.startswith("no"):
        assert all(column in caught.value.text for column in row)
    fixed = [source for fix in caught.value.fixes for source in fix.settings["data.sources"]]
    assert [source["columns"] for source in fixed] == [columns] * bool(columns)
    for source in fixed:
        assert make_parser(SourceConfig(**source), raw).parse(raw)


def test_rows_in_memory_are_named_by_their_number_and_renamed():
    raw = RawRow(Origin("/a/data/in_memory/data-0f/rows.jsonl", 3), {"question": "q", "answer": "a"})
    with pytest.raises(DataError, match=r"^row 3 of your data: .*rename the key `question` to `instruction`") as caught:
        make_parser(SourceConfig(path=raw.origin.source), raw)
    assert not caught.value.fixes
    bad = RawRow(raw.origin, {"messages": [Q, A], "label": False})
    with pytest.raises(DataError, match=r"^row 3 of your data: .*remove the key `label`") as caught:
        make_parser(SourceConfig(path=raw.origin.source), bad)
    assert [fix.settings for fix in caught.value.fixes] == [{"objective": "kto"}, {"data.on_bad_row": "skip"}]


MIXED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (chat(Q, A), {"conversations": [Q]},
     "b.jsonl:1: no column 'messages', but a.jsonl:1 has it (messages rows)"),
    ({"instruction": "q", "output": "a"}, {"instruction": "q", "result": "a"},
     "b.jsonl:1: no column 'output', but a.jsonl:1 has it (alpaca rows)"),
    ({"prompt": "q", "completion": "a"}, {"prompt": [Q], "completion": [A]},
     "b.jsonl:1: prompt is a list, but a string at a.jsonl:1"),
    ({"text": "t"}, {"text": ["t"]}, "b.jsonl:1: text is a list, but a string at a.jsonl:1"),
    ({"input_ids": [1], "labels": [1]}, {"input_ids": [1]},
     "b.jsonl:1: no column 'labels', but a.jsonl:1 has it (tokens rows)"),
    ({"input_ids": [1]}, {"input_ids": [1], "loss_mask": [1]},
     "b.jsonl:1: has a column 'loss_mask', but a.jsonl:1 has none"),
]  # fmt: skip


@pytest.mark.parametrize(("first", "other", "message"), MIXED)
def test_mixed_schemas_name_both_places_and_the_field(first, other, message):
    rows = [
        RawRow(Origin("a.jsonl", 1), first),
        RawRow(Origin("b.jsonl", 1), other),
        RawRow(Origin("b.jsonl", 2), first),
    ]
    parser = make_parser(SourceConfig(path="folder"), rows[0])
    kept, bad = [], []
    for row in rows:
        try:
            kept.append(str(parser.parse(row).origin))
        except DataError as error:
            bad.append(error.text)
    assert kept == ["a.jsonl:1", "b.jsonl:2"]
    assert len(bad) == 1
    assert bad[0].startswith(message)
