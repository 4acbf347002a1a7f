"""Text, prompt/completion and rows already tokenised; and which format a row is taken for."""

from typing import Any

import pytest

from flatout.config.schema import SourceConfig
from flatout.data.conversation import Origin, PlainText, Sample, TokenRow
from flatout.data.formats import detect, make_parser
from flatout.data.rows import RawRow

ORIGIN = Origin("x.jsonl", 7)


def parsed(row: dict[str, Any], **settings: Any) -> Sample:
    raw = RawRow(ORIGIN, row)
    return make_parser(SourceConfig(path="x.jsonl", **settings), raw).parse(raw)


def test_text_and_prompt_completion_keep_every_character() -> None:
    assert parsed({"text": "  a\r\n", "id": 1}) == PlainText("  a\r\n", ORIGIN)
    assert parsed({"prompt": " p ", "completion": " c"}) == PlainText(" c", ORIGIN, prompt=" p ")
    assert parsed({"prompt": "p", "chosen": "c", "rejected": "r"}) == PlainText("c", ORIGIN, prompt="p")
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
def test_tokenised_rows(columns: dict[str, Any], trained: tuple[bool, ...]) -> None:
    assert parsed({"input_ids": [7, 8, 9]} | columns) == TokenRow((7, 8, 9), trained, ORIGIN)


ROOT = {"message_id": "1", "parent_id": None, "text": "t", "role": "prompter"}
TURN = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("tokens", {"input_ids": [1], "text": "t"}),
        ("oasst", ROOT),
        ("messages", {"messages": [TURN], "prompt": "p", "completion": "c"}),
        ("messages", {"conversations": [TURN]}),
        ("messages", {"messages": []}),
        ("sharegpt", {"conversations": []}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "q"}]}),
        ("prompt_completion", {"prompt": "p", "completion": "c", "text": "t"}),
        ("prompt_completion", {"prompt": "p", "chosen": "c", "rejected": "r"}),
        ("alpaca", {"instruction": "i", "input": None, "output": "o", "text": "all of it"}),
        ("alpaca", {"messages": None, "instruction": "i", "output": "o"}),
        ("text", {"text": "t", "role": "x"}),
    ],
)
def test_detection(name: str, row: dict[str, Any]) -> None:
    assert detect(row, ORIGIN) == name


def test_the_setting_goes_before_detection() -> None:
    row = {"messages": [TURN], "text": "t"}
    assert parsed(row, format="text") == PlainText("t", ORIGIN)
