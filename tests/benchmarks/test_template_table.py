"""The referee of chat templates passes what is right, and finds text and labels that are not."""

import json
import re
import shutil
from pathlib import Path

import pytest
import template_table
from template_table import KINDS, Referee, main, make_tokenizer
from transformers import AutoTokenizer

from flatout.data.templates import template

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "chat_templates"
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
        return referee.judge("chat", [(text, list(ranges))], False)[:2]

    assert verdict(text, (begin, end)) == ("accepted", "")
    header = begin - len("assistant\n")
    question = text.index(template_table.KINDS["chat"][0]["content"])
    faults = {
        "is no rendering": (text.replace("user", "human"), (begin, end)),
        "have loss": (text,),
        "labels outside of answers: ['Zqa']": (text, (begin, begin + 3)),
        "the end ''": (text, (begin, end - len("<|im_end|>"))),
        "part of the generation prompt": (text, (header, end)),
        "labels outside": (text, (question, question + 7), (begin, end)),
        "generation prompt: '\\n<|im_start|>": (text, (question, end)),
    }
    for why, (other, *ranges) in faults.items():
        found, reason = verdict(other, *ranges)
        assert (found, why in reason) == ("WRONG", True), reason


def test_another_prompt_is_told_or_silent(stored):
    referee, text, span = stored
    referee.tokenizer.chat_template = SOURCE.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    for said, verdict in ((False, "silent"), (True, "told")):
        assert referee.judge("chat", [(text, [span])], said)[0] == verdict


def test_a_header_behind_an_answer_is_found_whatever_the_template_takes_for_its_end(tiny, tmp_path):
    asks = SOURCE.partition("{% if add")[0] + "{{ '<|im_start|>assistant\n' }}"
    tokenizer = make_tokenizer(AutoTokenizer.from_pretrained(tiny.model_dir), asks, tmp_path / "tokenizer")
    referee, (question, answer) = Referee(tokenizer), (message["content"] for message in KINDS["chat"])
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n<|im_start|>"
    begin = text.index(answer)
    end = begin + len(answer) + len("<|im_end|>")
    assert referee.judge("chat", [(text, [(begin, end)])], True)[0] == "accepted"
    found, why, _ = referee.judge("chat", [(text, [(begin, len(text))])], True)
    assert (found, "<|im_start|>" in why) == ("WRONG", True)


def test_reasoning_behind_a_closed_block_is_found(tiny, tmp_path):
    shuts = SOURCE.replace("{{ m.content }}", "{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}")
    shuts = shuts.replace("assistant\n{% endif", "assistant\n<think></think>{% endif")
    tokenizer = make_tokenizer(AutoTokenizer.from_pretrained(tiny.model_dir), shuts, tmp_path / "tokenizer")
    referee = Referee(tokenizer)
    for kind, verdict in (("chat", "accepted"), ("reasoning in text", "WRONG")):
        text = tokenizer.apply_chat_template(KINDS[kind], tokenize=False)
        span = (text.index("</think>") + len("</think>"), text.rindex("<|im_end|>") + len("<|im_end|>"))
        assert referee.judge(kind, [(text, [span])], False)[0] == verdict


@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data beside the repository")
def test_real_templates_have_no_silent_wrong(tiny, tmp_path, monkeypatch, capsys):
    (tmp_path / "all").mkdir()
    for file in sorted(SHARED.glob("*.jinja")):
        shutil.copy(file, tmp_path / "all")
    monkeypatch.setattr("sys.argv", ["template_table.py", str(tmp_path / "all"), "--tokenizer", str(tiny.model_dir)])
    status, printed = main(), capsys.readouterr().out
    assert status == 0, printed
    assert int(re.search(r"26 templates: (\d+) accepted", printed)[1]) > 300
