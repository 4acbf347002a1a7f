"""Every kind of conversation under our own templates and under public ones: none is trained wrongly in silence.

The referee renders the rows with plain transformers; it uses nothing of flatout but the stored samples.
"""

import re
import shutil
from pathlib import Path

import pytest
import template_table
from template_table import KINDS, Referee, main, make_tokenizer
from transformers import AutoTokenizer

from flatout.data import templates

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "chat_templates"
SOURCE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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


@pytest.mark.parametrize(
    ("folder", "num_templates", "min_accepted"),
    [
        (Path(templates.__file__).parent, 9, 120),
        pytest.param(
            SHARED, 26, 300,
            marks=[pytest.mark.exhaustive, pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data")],
        ),
    ],
)  # fmt: skip
def test_no_template_is_silent_or_wrong(folder, num_templates, min_accepted, tiny, tmp_path, monkeypatch, capsys):
    (tmp_path / "all").mkdir()
    for file in sorted(folder.glob("*.jinja")):
        shutil.copy(file, tmp_path / "all")
    monkeypatch.setattr("sys.argv", ["template_table.py", str(tmp_path / "all"), "--tokenizer", str(tiny.model_dir)])
    status, printed = main(), capsys.readouterr().out
    assert status == 0, printed
    assert int(re.search(rf"{num_templates} templates: (\d+) accepted", printed)[1]) > min_accepted
