"""Templates that take tools, calls or reasoning in another spelling are trained, and refused where they take none."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from flatout.config.data import DataConfig
from flatout.data.conversation import Conversation, Message, Origin, ToolCall
from flatout.data.tokenize import SampleTokenizer, TokenizeOptions
from flatout.errors import DataError

TOOLS = ({"type": "function", "function": {"name": "get", "description": "d", "parameters": {"type": "object"}}},)
ASK, ANSWER = Message("user", "hello"), Message("assistant", "yes")
CALL = Message("assistant", "", tool_calls=(ToolCall("get", {"city": ["Köln", None]}, "call00000"),))
THOUGHT = Message("assistant", "yes", reasoning="hm")
TEXT = "{{ m.content }}"
CUT = "{{ m.content.split('</think>')[-1] }}"


def template(answer: str, prompt: str = "") -> str:
    """A ChatML template that writes an answer in this way, and whose generation prompt ends like this."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        f"{answer}{{% else %}}{TEXT}{{% endif %}}<|im_end|>\n{{% endfor %}}"
        f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{prompt}{{% endif %}}"
    )


NEEDS_A_LIST = "{% for t in tools %}{{ t | tojson }}{% endfor %}" + template(TEXT)
UNDER_A_NAME = "{% for t in xml_tools or [] %}[{{ t.name }}]{% endfor %}" + template(TEXT)
PASTED = template("{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}" + TEXT)
INSIDE = template("{# <think> #}" + TEXT)
OPENED = template(CUT, "<think>\n")
BEGUN = template(
    "{{ '<think>' if m.prefix and thinking else '</think>' }}" + CUT, "{{ '<think>' if thinking else '</think>' }}"
)
REASONED = "<|im_start|>assistant\n<think>\nhm\n</think>\n\nyes<|im_end|>"
TRAINED: dict[str, tuple[str, tuple[Message, ...], tuple[Any, ...], dict[str, Any], str, str]] = {
    # template, turns, tools, its variables, what the text has, what carries loss
    "a list for no tools": (NEEDS_A_LIST, (ASK, ANSWER), (), {}, "hello", "yes<|im_end|>"),
    "another variable": (UNDER_A_NAME, (ASK, ANSWER), TOOLS, {}, "[get]", "yes<|im_end|>"),
    "arguments as text": (PASTED, (ASK, CALL), (), {}, "get{", 'get{"city": ["Köln", null]}<|im_end|>'),
    "inside the content": (INSIDE, (ASK, THOUGHT), (), {}, REASONED, "<think>\nhm\n</think>\n\nyes<|im_end|>"),
    "an opened prompt": (OPENED, (ASK, THOUGHT), (), {}, REASONED, "hm\n</think>\n\nyes<|im_end|>"),
    "a begun answer": (BEGUN, (ASK, THOUGHT), (), {"thinking": True}, "<think>hm</think>", "hm</think>yes<|im_end|>"),
}


def trained(tokenizer: PreTrainedTokenizerFast, name: str, **changes: Any) -> list[tuple[str, str]]:
    """The text of each sample, and of its labels."""
    source, turns, tools, args, *_ = TRAINED[name]
    settings = DataConfig(template_args=changes.get("args", args))
    options = TokenizeOptions("small", "own", changes.get("source", source), settings)
    row = Conversation(changes.get("turns", turns), Origin("rows.jsonl", 1), tools)
    pieces = SampleTokenizer(options, tokenizer)(row).pieces
    return [
        (tokenizer.decode(piece.token_ids.tolist()), tokenizer.decode(piece.token_ids[piece.loss_mask].tolist()))
        for piece in pieces
    ]


@pytest.mark.parametrize("name", list(TRAINED))
def test_a_row_is_trained_in_the_spelling_that_its_template_takes(name, small_tokenizer):
    source, turns, _, args, has, learnt = TRAINED[name]
    [(text, labels)] = trained(small_tokenizer, name)
    assert has in text
    assert labels == learnt
    if turns[-1].reasoning:  # it follows exactly what inference shows
        prompt = small_tokenizer.apply_chat_template(
            [{"role": "user", "content": "hello"}],
            chat_template=source, tokenize=False, add_generation_prompt=True, **args,
        )  # fmt: skip
        assert text == f"{prompt}{labels}\n"


REFUSED = {
    "another variable": ({"source": UNDER_A_NAME.replace("xml_tools", "documents")}, "tools: the chat template drops"),
    "arguments as text": (
        {"source": PASTED.replace("m.tool_calls or []", "[]")},
        r"messages\[1\] \(assistant\): the chat template drops its tool call",
    ),
    "inside the content": (
        {"source": INSIDE.replace("<think>", "")},
        r"messages\[1\] \(assistant\): the chat template drops its reasoning",
    ),
    "a begun answer": ({"args": {"thinking": False}}, "drops its reasoning; give thinking to these rows alone"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_no_spelling_shows_is_refused(name, small_tokenizer):
    changes, message = REFUSED[name]
    with pytest.raises(DataError, match=message):
        trained(small_tokenizer, name, **changes)


@pytest.mark.parametrize("name", ["an opened prompt", "a begun answer"])
def test_reasoning_that_is_cut_in_every_answer_gives_a_sample_for_each(name, small_tokenizer):
    first, second = trained(small_tokenizer, name, turns=(ASK, THOUGHT, ASK, THOUGHT))
    [(alone, learnt)] = trained(small_tokenizer, name)
    assert first == (alone, learnt)
    assert second[0].endswith(alone.partition("<|im_start|>assistant")[2])
    assert second[0].count("hm") == 1
    assert second[1] == learnt
