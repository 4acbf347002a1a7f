"""Text, prompt/completion and rows already tokenized; and which format a row is taken for."""

from typing import Any

import pytest

from flatout.config.data import DataConfig
from flatout.config.schema import SourceConfig
from flatout.data.conversation import Conversation, Origin, PlainText, Sample, TokenRow
from flatout.data.rows.formats.parser import make_parser
from flatout.data.rows.read import RawRow
from flatout.data.tokenize import SampleTokenizer, TokenizeOptions
from flatout.errors import DataError

ORIGIN = Origin("x.jsonl", 7)


def parsed(row: dict[str, Any], **settings: Any) -> Sample:
    raw = RawRow(ORIGIN, row)
    return make_parser(SourceConfig(path="x.jsonl", **settings), raw).parse(raw)


def test_text_and_prompt_completion_keep_every_character():
    assert parsed({"text": "  a\r\n", "id": 1}) == PlainText("  a\r\n", ORIGIN)
    assert parsed({"prompt": " p ", "completion": " c"}) == PlainText(" c", ORIGIN, prompt=" p ")
    chosen = {"prompt": "p", "chosen": "c", "rejected": "r"}
    assert parsed(chosen, columns={"completion": "chosen"}) == PlainText("c", ORIGIN, prompt="p")
    assert parsed({"q": "p", "a": "c"}, columns={"prompt": "q", "completion": "a"}) == PlainText(
        "c", ORIGIN, prompt="p"
    )


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


TURN = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("tokens", {"input_ids": [1], "text": "t"}),
        ("messages", {"messages": [TURN], "prompt": "p", "completion": "c"}),
        ("messages", {"conversations": [TURN]}),
        ("messages", {"messages": []}),
        ("sharegpt", {"conversations": []}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "q"}]}),
        ("prompt_completion", {"prompt": "p", "completion": "c", "text": "t"}),
        ("alpaca", {"instruction": "i", "input": None, "output": "o", "text": "all of it"}),
        ("alpaca", {"messages": None, "instruction": "i", "output": "o"}),
        ("text", {"text": "t", "role": "x"}),
    ],
)
def test_detection(name, row):
    assert make_parser(SourceConfig(path="x.jsonl"), RawRow(ORIGIN, row)).format == name


def test_the_setting_goes_before_detection():
    row = {"messages": [TURN], "text": "t"}
    assert parsed(row, format="text") == PlainText("t", ORIGIN)


@pytest.mark.parametrize("names", [("question", "answer"), ("query", "response"), ("input", "output")])
def test_the_columns_to_set_are_named_and_work(names):
    row = dict(zip(names, ("q", "a"), strict=True))
    with pytest.raises(DataError) as caught:
        parsed(row)
    (source,) = caught.value.fixes[0].settings["data.sources"]
    assert source["columns"] == dict(zip(("instruction", "output"), names, strict=True))
    sample = parsed(row, columns=source["columns"])
    assert isinstance(sample, Conversation)
    assert [message.content for message in sample.messages] == ["q", "a"]  # the input is the question, not both


def test_segments_say_what_carries_loss(small_tokenizer_dir):
    pieces = [("<|im_start|>q", False), ("yes<|im_end|>", True), ("\nthink", False), ("hello", True)]
    row = {"segments": [{"text": text, "label": label} for text, label in pieces]}
    tokenizer = SampleTokenizer(TokenizeOptions(str(small_tokenizer_dir), "", None, DataConfig(special_tokens="keep")))
    for rows, learned in ((row, "yes<|im_end|>hello<|im_end|>"), ({"segments": row["segments"][:3]}, "yes<|im_end|>")):
        text = tokenizer(parsed(rows)).pieces[0]
        assert tokenizer.tokenizer.decode(text.token_ids[text.loss_mask].tolist()) == learned
    with pytest.raises(DataError, match=r"segments\[0\]\.label is null; give true or false"):
        parsed({"segments": [{"text": "a"}]})
