"""The referee of chat templates passes what is right, and finds text and labels that are not."""

import pytest
import template_table
from template_table import KINDS, Referee, make_tokenizer
from transformers import AutoTokenizer

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
