"""The referee of chat templates passes what is right, and finds text and labels that are not."""

import json
import shutil

import pytest
import template_table
from template_table import KINDS, Referee, main, make_tokenizer
from transformers import AutoTokenizer

from flatout.data.templates import template

SOURCE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_folder_of_templates_is_judged(tiny, tmp_path, monkeypatch, capsys):
    (tmp_path / "all").mkdir()
    for name in ("alpaca", "qwen3"):
        shutil.copy(template.__file__.replace("template.py", f"{name}.jinja"), tmp_path / "all")
    options = ["--tokenizer", str(tiny.model_dir), "--json", str(tmp_path / "t.json"), "--docs", str(tmp_path / "t.md")]
    monkeypatch.setattr("sys.argv", ["template_table.py", str(tmp_path / "all"), *options])
    assert main() == 0
    assert "0 silent, 0 WRONG" in capsys.readouterr().out
    alpaca, qwen3 = (entry["verdicts"] for entry in json.loads((tmp_path / "t.json").read_text())["templates"])
    assert (alpaca["chat"], alpaca["call"], qwen3["call"]) == ("accepted", "refused", "accepted")
    assert "2 public chat templates of 2 families" in (tmp_path / "t.md").read_text()


@pytest.fixture
def stored(tiny, tmp_path):
    """A referee, and the text and label ranges of a row of one question as they should be stored."""
    tokenizer = make_tokenizer(AutoTokenizer.from_pretrained(tiny.model_dir), SOURCE, tmp_path / "tokenizer")
    question, answer = (message["content"] for message in KINDS["chat"])
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
    begin = text.index(answer)
    return Referee(tokenizer), text, (begin, begin + len(answer) + len("<|im_end|>"))


def test_a_right_row_is_accepted_and_each_fault_is_found(stored):
    referee, text, (begin, end) = stored

    def verdict(text, *ranges):
        return referee.judge("chat", [(text, list(ranges))], [], {"<|im_end|>"})

    assert verdict(text, (begin, end)) == ("accepted", "")
    header = begin - len("assistant\n")
    question = text.index(template_table.KINDS["chat"][0]["content"])
    faults = {
        "is no rendering": (text.replace("user", "human"), (begin, end)),
        "have loss": (text,),
        "left out": (text, (begin, begin + 3)),
        "no stop": (text, (begin, end - len("<|im_end|>"))),
        "part of the generation prompt": (text, (header, end)),
        "labels outside": (text, (question, question + 7), (begin, end)),
        "of another turn": (text, (question, end)),
    }
    for why, (other, *ranges) in faults.items():
        found, reason = verdict(other, *ranges)
        assert (found, why in reason) == ("WRONG", True), reason


def test_another_prompt_is_told_or_silent(stored):
    referee, text, span = stored
    referee.tokenizer.chat_template = SOURCE.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    for notes, verdict in (([], "silent"), (["trained after 'a', but inference shows 'b'"], "told")):
        assert referee.judge("chat", [(text, [span])], notes, {"<|im_end|>"})[0] == verdict
