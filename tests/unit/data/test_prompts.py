"""Prompts of a run: every form of rows becomes what the model is asked, and rewards get the whole row."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from row_cases import Row, cases, write_rows
from transformers import PreTrainedTokenizerFast

from flatout.cli.main import main
from flatout.config.schema import DataConfig
from flatout.data.build import open_or_build, refuse_early
from flatout.data.prompts import PromptSet, read_prompts
from flatout.data.templates.template import ChatTemplate, template_text
from flatout.errors import DataError, UsageError

ASK = {"role": "user", "content": "hello there"}
SYSTEM = {"role": "system", "content": "be good"}


@pytest.fixture
def read(tmp_path, small_tokenizer_dir):
    def read(rows: list[Row], source: Row | None = None, most: int | None = None, **settings: Any) -> PromptSet:
        write_rows(tmp_path / "rows.jsonl", rows)
        values = {"sources": [{"path": str(tmp_path / "rows.jsonl"), **(source or {})}], "template": "chatml"}
        config = DataConfig.model_validate(values | {"num_procs": 1} | settings)
        return read_prompts(config, str(small_tokenizer_dir), limits={"rollout.max_prompt_tokens": most})

    return read


@pytest.mark.parametrize("case", cases("prompts.jsonl"), ids=lambda case: case["is"])
def test_every_form_asks_its_turns_and_keeps_its_row(read, case, small_tokenizer: PreTrainedTokenizerFast):
    row, turns = case["row"], case["asks"]
    prompt = read([row])[0]
    template = ChatTemplate.checked(*template_text(small_tokenizer, "chatml", "small"), small_tokenizer)
    text = template.render(turns, generation_prompt=True)
    assert list(prompt.token_ids) == small_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert text.endswith("assistant\n")
    assert list(prompt.messages) == turns
    assert prompt.is_text == case.get("text", False)  # what TRL's functions get as one, whatever the column's name
    assert prompt.row == row
    assert str(prompt.origin).endswith("rows.jsonl:1")


def test_what_is_dropped_repeated_and_counted(read):
    rows = [{"prompt": f"hello {k}", "k": k} for k in range(6)]
    long = {"prompt": "hello " * 50, "k": 9}
    prompts = read([*rows, long, {"prompt": 3, "k": 0}, rows[1]], most=40, on_bad_row="skip", dedupe="exact")
    assert [prompt.row["k"] for prompt in prompts] == [0, 1, 2, 3, 4, 5]
    assert prompts.lengths.max() <= 40
    assert [prompts.counts[name] for name in ("rows", "too_long", "bad", "equal_rows")] == [9, 1, 1, 1]
    assert prompts.stop_tokens == ("<|im_end|>",)
    assert prompts.offsets.tolist() == np.cumsum([0, *prompts.lengths]).tolist()
    assert len(read(rows, {"weight": 2.0})) == 12
    assert len(read(rows, num_samples=4)) == 4
    (longer,) = prompts.longer
    assert list(longer.settings) == ["rollout.max_prompt_tokens"]
    whole = read([*rows, long], most=longer.settings["rollout.max_prompt_tokens"])
    assert (len(whole), len(whole.longer)) == (7, 0)
    with pytest.raises(DataError, match="1 of 7 rows are over max_tokens=40") as refused:
        read([*rows, long], most=40, too_long="error")
    assert refused.value.fixes[0] == longer
    with pytest.raises(DataError, match="no prompts are left") as refused:
        read([long], max_tokens=40)
    assert list(refused.value.fixes[0].settings) == ["data.max_tokens"]


def test_the_fingerprint_is_of_tokens_and_rows(read):
    row = {"prompt": "hello", "answer": 1}
    marks = [read([one]).fingerprint for one in (row, {"answer": 1, "prompt": "hello"}, row | {"answer": 2})]
    assert marks[0] == marks[1] != marks[2]
    assert read([row], template="zephyr").fingerprint != marks[0]


def test_without_a_template_a_text_is_continued(read, small_tokenizer):
    assert small_tokenizer.decode(read([{"prompt": "hello there"}], template=None)[0].token_ids) == "hello there"
    with pytest.raises(DataError, match="has no chat template"):
        read([{"prompt": [SYSTEM, ASK]}], template=None)


BAD: dict[str, tuple[Row, str]] = {
    "an answer at its end": ({"messages": [ASK, {"role": "assistant", "content": "yes"}]}, "is an assistant turn, and"),
    "an empty question": ({"prompt": "  "}, "prompt is empty; there is nothing to answer"),
    "no question": ({"prompt": ""}, "has no prompt; give it as prompt"),
    "a video": ({"prompt": "hello", "video": "a.mp4"}, "video"),
}


@pytest.mark.parametrize("name", BAD)
def test_rows_that_ask_nothing_are_refused(read, name):
    row, said = BAD[name]
    with pytest.raises(DataError, match=said):
        read([row])


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"Task": "hello there", "answer": "yes it is"}, "Task"),
        ({"user": "hello there", "about": "a long remark", "id": "row-1"}, "user"),
        ({"task": "hello there", "remark": "a long remark"}, None),
        ({"n": 3, "answer": "yes it is"}, None),
    ],
)
def test_the_only_text_that_can_be_a_question_is_offered_as_the_prompt(read, tmp_path, row, column):
    """Otherwise, the columns are named."""
    with pytest.raises(DataError) as refused:
        read([row])
    assert all(name in refused.value.text for name in row)
    if column is None:
        assert not refused.value.fixes
        return
    (fix,) = refused.value.fixes
    assert fix.settings["data.sources"][0]["columns"] == {"prompt": column}
    assert read([row], fix.settings["data.sources"][0])[0].text == "hello there"


def test_prompts_and_rows_with_answers_are_not_taken_for_each_other(read, small_tokenizer_dir, tmp_path):
    read([{"prompt": "hello", "completion": "yes"}])
    path = str(tmp_path / "rows.jsonl")
    for source in ({"format": "messages"}, {"format": "prompt_completion"}):
        with pytest.raises(UsageError, match="is of rows with answers, not of prompts"):
            read([{"prompt": "hello", "completion": "yes"}], source)
    for setting in ({"loss_type": "all"}, {"too_long": "truncate"}, {"special_tokens": "text"}):
        with pytest.raises(UsageError, match="prompts stay whole"):
            read([{"prompt": "hello"}], **setting)
    asked = {"path": path, "format": "prompts"}
    config = DataConfig.model_validate({"sources": [asked], "root": tmp_path, "template": "chatml"})
    for make in (open_or_build, refuse_early):
        with pytest.raises(DataError, match="prompts rows, whose answers a run samples") as refused:
            make(config, str(small_tokenizer_dir))
        assert refused.value.fixes[0].settings == {"objective": "grpo"}


def test_prompts_are_shown(read, small_tokenizer_dir, tmp_path, capsys):
    read([{"question": "hello there", "answer": "yes"}])
    run = tmp_path / "rl.yaml"
    data = {"sources": [{"path": str(tmp_path / "rows.jsonl"), "format": "prompts"}], "template": "chatml"}
    run.write_text(json.dumps({"model": str(small_tokenizer_dir), "data": data}))
    assert main(["data", "show", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n" in shown
    assert "row.answer: 'yes'" in shown
    # rows with answers: what is trained on, built if it is not there
    rows = [{"instruction": "hello there", "output": "a quiet yes"}]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = {"root": str(tmp_path / "sets"), "sources": [str(tmp_path / "rows.jsonl")], "template": "chatml"}
    run.write_text(json.dumps({"model": str(small_tokenizer_dir), "data": data}))
    assert main(["data", "show", str(run)]) == 0
    assert "a quiet yes" in capsys.readouterr().out
