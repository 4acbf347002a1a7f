"""Bad rows: what stands in the row -> the whole message, which names place, what was found and what to do."""

from typing import Any

import pytest

from flatout.config.schema import SourceConfig
from flatout.data.conversation import Origin
from flatout.data.rows.formats.parser import make_parser
from flatout.data.rows.read import RawRow
from flatout.errors import DataError

Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
ASK = [
    Q,
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": {}}}]},
]
ALLOWED = (
    "allowed: system, developer, user, human, prompter, assistant, gpt, chatgpt, bing, bard, claude, model, bot, ai, "
    "tool, observation, function, function_response, tool_response, tool_result, ipython, function_call, tool_call"
)


def chat(*turns: object) -> dict[str, Any]:
    return {"messages": list(turns)}


def said(*turns: dict[str, Any]) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": "q"}, *turns]}


def parts(*content: object) -> dict[str, Any]:
    return chat(Q, {"role": "assistant", "content": list(content)})


# id of notes/reliability table C, row, message after `train.jsonl:8: `
ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("C3", chat(), "messages is empty; a conversation needs at least one turn"),
    ("C3", {"conversations": []}, "conversations is empty; a conversation needs at least one turn"),
    ("C3", {"prompt": [Q], "completion": []}, "completion is empty; there is nothing to learn"),
    ("C4", chat(Q, {"content": "a"}), "messages[1].role missing; keys: content"),
    ("C4", chat(Q, {"role": None, "content": "a"}), "messages[1].role is null, not a string"),
    ("C4", chat(Q, {"role": "assistant"}), "messages[1].content missing; keys: role"),
    ("C4", chat(Q, "a"), "messages[1] is a string, not an object with role and content"),
    ("C4", said({"value": "a"}), "conversations[1].from missing; keys: value"),
    ("C4", said({"role": "assistant", "content": "a"}), "conversations[1].from missing; keys: role, content"),
    ("C4", said({"from": "function_call"}), "conversations[1].value missing; keys: from"),
    ("C5", chat(Q, {"role": "Agent", "content": "a"}),
     f"messages[1].role 'Agent' is unknown; {ALLOWED}; map others with roles, such as roles: {{Agent: assistant}}"),
    ("C5", chat({"role": 3, "content": "a"}), "messages[0].role is a number (3), not a string"),
    ("C6", chat(Q, {"role": "assistant", "content": None}),
     "messages[1].content is null, not a string; only an assistant turn with tool_calls may have none"),
    ("C6", chat({"role": "user", "content": 5}), "messages[0].content is a number (5), not a string"),
    ("C6", chat({"role": "user", "content": True}), "messages[0].content is true, not a string"),
    ("C6", chat({"role": "user", "content": {"a": 1}}), "messages[0].content is an object, not a string"),
    ("C6", chat({"role": "user", "content": []}), "messages[0].content is an empty list, not a string"),
    ("C6", chat({"role": "user", "content": ["a"]}),
     "messages[0].content[0] is a string, not an object with type and text"),
    ("C6", said({"from": "gpt", "value": None}),
     "conversations[1].value is null, not a string; only an assistant turn with tool_calls may have none"),
    ("C6", {"messages": 5}, "messages is a number (5), not a list"),
    ("C6", {"messages": "[{"},
     "messages is not valid JSON: character 3: expected a key in double quotes, but the JSON ends here; complete it"),
    ("C6", {"instruction": 5, "output": "a"}, "instruction is a number (5), not a string"),
    ("C6", {"instruction": "q", "output": ["a"]}, "output is a list, not a string"),
    ("C6", {"instruction": "q", "input": 1, "output": "a"}, "input is a number (1), not a string"),
    ("C6", {"instruction": "q", "output": "a", "history": [["only"]]},
     "history[0] is a list of 1, not a [question, answer] pair"),
    ("C6", {"prompt": "q", "completion": [A]},
     "prompt is a string and completion is a list; give two strings or two lists of messages"),
    ("C6", {"text": 5}, "text is a number (5), not a string"),
    ("C12", {"text": "ab\0c"}, "text contains NUL (U+0000) at character 3; remove it from the data"),
    ("C12", chat({"role": "user", "content": "ab\U000f5a14c"}, A),
     "messages[0].content contains the private-use character U+F5A14 at character 3; remove it from the data"),
    ("C12", chat({"role": "user", "content": "é\ud83d!"}),
     "messages[0].content contains the lone surrogate U+D83D at character 2; "
     "half a character was lost when the data was written"),
    ("C12", {"text": ""}, "text is empty; there is nothing to learn"),
    ("C15", chat({"role": "tool", "content": "3"}),
     "messages[0] is a tool result without a call (at the start); an assistant turn with tool_calls must come first"),
    ("C15", chat(Q, {"role": "tool", "content": "3"}),
     "messages[1] is a tool result without a call (after a user turn); "
     "an assistant turn with tool_calls must come first"),
    ("C15", chat(*ASK, {"role": "tool", "content": "3", "tool_call_id": "c9"}),
     "messages[2].tool_call_id 'c9' matches no call; calls before it: 'c1'"),
    ("C15", chat(Q, A, {"role": "tool", "content": "3", "tool_call_id": "c1"}),
     "messages[2].tool_call_id 'c1' matches no call; calls before it: none"),
    ("C15", chat({"role": "user", "content": "q", "tool_calls": ASK[1]["tool_calls"]}),
     "messages[0].tool_calls is a list in a user turn; only an assistant turn has tool calls"),
    ("calls", chat(Q, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}),
     "messages[1].tool_calls[0].arguments missing; keys: name"),
    ("calls", chat(Q, {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{a}"}]}),
     "messages[1].tool_calls[0].arguments is not valid JSON: character 2: expected a key in double quotes"),
    ("calls", chat(Q, {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": [1]}]}),
     "messages[1].tool_calls[0].arguments is a list, not an object"),
    ("calls", said({"from": "function_call", "value": "add(1)"}),
     "conversations[1].value is not valid JSON: character 1: expected a value"),
    ("calls", chat(Q) | {"tools": "[1]"}, "tools[0] is a number (1), not an object"),
    ("calls", chat(Q) | {"tools": [{"description": "x"}]}, "tools[0].name is null, not a string"),
    ("parts", parts({"type": "image_url", "image_url": {"url": "x"}}),
     "messages[1].content[0] is a picture, but a model that is trained here writes none; remove it"),
    ("parts", parts({"type": "video", "video": "x"}),
     "messages[1].content[0] (video) holds videos, which cannot be trained on yet, so its words would lose their "
     "meaning; remove the row"),
    ("parts", parts({"type": "code", "text": "x"}),
     "messages[1].content[0].type 'code' cannot be trained on; only text, image, reasoning and tool_call parts can"),
    ("parts", parts({"text": "x"}),
     "messages[1].content[0].type None cannot be trained on; only text, image, reasoning and tool_call parts can"),
    ("parts", parts({"type": "text"}), "messages[1].content[0].text is null, not a string"),
    ("parts", parts({"type": "text", "text": "x"}, {"type": "reasoning", "value": "y"}),
     "messages[1].content[1] (reasoning) is out of order; parts must be reasoning, then text, then tool calls"),
    ("parts", chat({"role": "user", "content": [{"type": "reasoning", "value": "y"}]}),
     "messages[0] has reasoning, but is a user turn; only an assistant turn may have reasoning"),
    ("reasoning", chat(Q, A | {"thinking": "x", "reasoning": "y"}),
     "messages[1] has thinking and reasoning with different values; keep one"),
    ("weights", chat(Q, A | {"loss_weight": 0.5}),
     "messages[1].loss_weight is 0.5; only 0 (no loss) and 1 (loss) are allowed"),
    ("C21", chat(Q, A | {"weight": float("nan")}),
     "messages[1].weight is nan; only 0 (no loss) and 1 (loss) are allowed"),
    ("C21", chat(Q, A | {"weight": -1}), "messages[1].weight is -1; only 0 (no loss) and 1 (loss) are allowed"),
    ("weights", chat(Q, A | {"train": "yes"}), "messages[1].train is a string; give true or false, or 1 or 0"),
    ("weights", chat(Q, A | {"train": True, "weight": 0}),
     "messages[1] has train and weight with different values; keep one"),
    ("system", chat({"role": "system", "content": "s"}, Q) | {"system": "t"},
     "system is given, but the conversation also has a system turn; keep one"),
    ("C21", {"input_ids": [1, 2], "labels": [1]}, "labels has 1 values, but input_ids has 2; the lengths must match"),
    ("C21", {"input_ids": [1, -2]}, "input_ids[1] is -2; token ids start at 0"),
    ("C21", {"input_ids": [1, float("nan")]}, "input_ids[1] is nan, not an integer"),
    ("C21", {"input_ids": [1, 2.0]}, "input_ids[1] is a number (2.0), not an integer"),
    ("C21", {"input_ids": []}, "input_ids is empty; there is nothing to learn"),
    ("C21", {"input_ids": [1, 2], "labels": [-100, None]}, "labels[1] is null, not an integer"),
    ("C21", {"input_ids": [1, 2, 3], "labels": [2, 3, -100]},
     "labels[0] is 2, but input_ids[0] is 1; a label is -100 or the token at the same index (not shifted)"),
    ("C21", {"input_ids": [1, 2], "loss_mask": [0, 0.5]},
     "loss_mask[1] is 0.5; only 0 (no loss) and 1 (loss) are allowed"),
    ("C21", {"input_ids": [1, 0], "attention_mask": [1, 0]},
     "attention_mask[1] is 0: the row is padded; remove the padding"),
    ("C21", {"input_ids": [1, 2], "loss_mask": [0, 1], "labels": [1, 2]},
     "loss_mask and labels both set which tokens carry loss; keep one"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "message"), [case[1:] for case in ROWS], ids=[f"{c[0]}-{n}" for n, c in enumerate(ROWS)]
)
def test_bad_rows(row: dict[str, Any], message: str) -> None:
    raw = RawRow(Origin("train.jsonl", 8), row)
    parser = make_parser(SourceConfig(path="train.jsonl"), raw)
    with pytest.raises(DataError) as caught:
        parser.parse(raw)
    assert str(caught.value) == f"train.jsonl:8: {message}"


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
def test_rows_like_the_bad_ones_are_read(row: dict[str, Any]) -> None:
    raw = RawRow(Origin("train.jsonl", 8), row)
    assert make_parser(SourceConfig(path="train.jsonl"), raw).parse(raw)


# first row, settings -> start of the message
FIRST_ROWS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("C10", {"id": 1, "mesages": [Q, A]}, {},
     "train.jsonl:1: no column 'messages'; found 'mesages' (did you mean?); rename it, or set columns: "
     "{messages: mesages}; columns found: id, mesages"),
    ("C10", {"instruction": "q", "outputs": "a"}, {},
     "train.jsonl:1: no column 'output'; found 'outputs' (did you mean?); rename it, "
     "or set columns: {output: outputs}; columns found: instruction, outputs"),
    ("C10", {"id": 1, "mesages": []}, {},
     "train.jsonl:1: no column 'messages'; found 'mesages' (did you mean?); rename it; columns found: id, mesages"),
    ("C10", {"id": 1, "mesages": []}, {"format": "messages"},
     "train.jsonl:1: no column 'messages'; found 'mesages' (did you mean?)"),
    ("C10", {"question": "q", "answer": "a"}, {},
     "train.jsonl:1: no known format has these columns; set columns: {instruction: question, output: answer}; "
     "columns found: question, answer"),
    ("C10", {"q": "q", "a": "a"}, {},
     "train.jsonl:1: no known format has these columns; map yours, such as columns: {instruction: q, output: a}, or "
     "rename them to (messages), (instruction, output), (prompt, completion), (text) or (chosen, rejected); "
     "columns found: q, a"),
    ("C10", {"messages": None, "x": 1}, {}, "train.jsonl:1: no known format has these columns, as 'messages' is null"),
    ("C10", {"q": 1}, {"format": "text"}, "train.jsonl:1: no column 'text', which format text needs; columns found: q"),
    ("C10", {}, {}, "train.jsonl:1: no known format has these columns"),
    ("columns", {"question": "q", "answer": "a"}, {"columns": {"instruction": "qestion", "output": "answer"}},
     "train.jsonl:1: no column 'qestion' (did you mean 'question'?), set by columns: {instruction: qestion}; "
     "columns found: question, answer"),
    ("columns", {"question": "q", "answer": "a"}, {"columns": {"instructions": "question"}},
     "train.jsonl: columns: 'instructions' is not a column of any format; did you mean 'instruction'?"),
    ("roles", chat(Q), {"roles": {"Agent": "robot"}},
     "train.jsonl: roles: Agent is mapped to 'robot'; allowed: system, user, assistant, tool, function_call"),
    ("system", {"text": "t"}, {"system": "s"},
     "train.jsonl:1: system is set, but text rows are not conversations; remove system"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "settings", "message"), [c[1:] for c in FIRST_ROWS], ids=[f"{c[0]}-{n}" for n, c in enumerate(FIRST_ROWS)]
)
def test_first_rows_that_fit_no_format(row: dict[str, Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        make_parser(SourceConfig(path="train.jsonl", **settings), RawRow(Origin("train.jsonl", 1), row))
    assert str(caught.value).startswith(message)
    if "C10" in message and row:
        assert str(caught.value).endswith("columns found: " + ", ".join(row))


FIX = "all rows of a source need one schema: list this file as a separate source, or fix the row"
MIXED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (chat(Q, A), {"conversations": [Q]},
     f"b.jsonl:1: no column 'messages', but a.jsonl:1 has it (messages rows); columns found: conversations; {FIX}"),
    ({"instruction": "q", "output": "a"}, {"instruction": "q", "result": "a"},
     f"b.jsonl:1: no column 'output', but a.jsonl:1 has it (alpaca rows); columns found: instruction, result; {FIX}"),
    ({"prompt": "q", "completion": "a"}, {"prompt": [Q], "completion": [A]},
     f"b.jsonl:1: prompt is a list, but a string at a.jsonl:1; {FIX}"),
    ({"text": "t"}, {"text": ["t"]}, f"b.jsonl:1: text is a list, but a string at a.jsonl:1; {FIX}"),
    ({"input_ids": [1], "labels": [1]}, {"input_ids": [1]},
     f"b.jsonl:1: no column 'labels', but a.jsonl:1 has it (tokens rows); columns found: input_ids; {FIX}"),
    ({"input_ids": [1]}, {"input_ids": [1], "loss_mask": [1]},
     f"b.jsonl:1: has a column 'loss_mask', but a.jsonl:1 has none; {FIX}"),
]  # fmt: skip


@pytest.mark.parametrize(("first", "other", "message"), MIXED)
def test_mixed_schemas_name_both_places_and_the_field(
    first: dict[str, Any], other: dict[str, Any], message: str
) -> None:
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
            bad.append(str(error))
    assert kept == ["a.jsonl:1", "b.jsonl:2"]
    assert bad == [message]
