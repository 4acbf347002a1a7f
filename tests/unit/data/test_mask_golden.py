"""Hand-written masks of real templates: what carries loss, letter by letter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flatout.data.conversation import Conversation
from flatout.data.loss_mask.mask import Masker
from flatout.data.templates.template import ChatTemplate, choose_template
from flatout.data.tokenizer import load_tokenizer
from flatout.errors import DataError

_QWEN_CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "Rome", "n": 3}}\n</tool_call>'
_LLAMA_CALL = '{"name": "get", "parameters": {"city": "Rome", "n": 3}}'
_GLM_CALL = (
    "<tool_call>get\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
    "<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
_DEEPSEEK_CALL = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n{"city": "Rome", "n": 3}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
_QWEN35_CALL = (
    "<tool_call>\n<function=get>\n<parameter=city>\nRome\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
_EMPTY = "<think>\n\n</think>\n\n"

# template file -> chat -> the texts that carry loss
GOLDEN: dict[str, dict[str, list[str]]] = {
    "qwen2_5": {
        "multi": ["hello<|im_end|>", "see you<|im_end|>"],
        "system": ["hello<|im_end|>"],
        "tool": [f"{_QWEN_CALL}<|im_end|>", "sunny<|im_end|>"],
    },
    "qwen3": {  # rewrites: thinking of turns before the last question is removed
        "multi": ["hello<|im_end|>", f"{_EMPTY}see you<|im_end|>"],
        "system": [f"{_EMPTY}hello<|im_end|>"],
        "tool": [f"{_QWEN_CALL}<|im_end|>", f"{_EMPTY}sunny<|im_end|>"],
        "think": ["hello<|im_end|>", "<think>\nyes\n</think>\n\nc<|im_end|>"],
        "rounds": [f"{_QWEN_CALL}<|im_end|>", "sunny<|im_end|>", f"{_QWEN_CALL}<|im_end|>", f"{_EMPTY}done<|im_end|>"],
    },
    "qwen3_5_think": {  # the generation prompt opens <think>, which the model is then not to write
        "multi": ["hello<|im_end|>", "\n</think>\n\nsee you<|im_end|>"],
        "tool": [f"\n</think>\n\n{_QWEN35_CALL}<|im_end|>", "\n</think>\n\nsunny<|im_end|>"],
        "think": ["hello<|im_end|>", "yes\n</think>\n\nc<|im_end|>"],
    },
    "llama3_1": {
        "multi": ["hello<|eot_id|>", "see you<|eot_id|>"],
        "system": ["hello<|eot_id|>"],
        "tool": [f"{_LLAMA_CALL}<|eot_id|>", "sunny<|eot_id|>"],
    },
    "llama3_2": {
        "multi": ["hello<|eot_id|>", "see you<|eot_id|>"],
        "tool": [f"{_LLAMA_CALL}<|eot_id|>", "sunny<|eot_id|>"],
        "rounds": [f"{_LLAMA_CALL}<|eot_id|>", "sunny<|eot_id|>", f"{_LLAMA_CALL}<|eot_id|>", "done<|eot_id|>"],
    },
    "gemma3": {"multi": ["hello<end_of_turn>", "see you<end_of_turn>"], "system": ["hello<end_of_turn>"]},
    "phi3": {  # ends the whole text by eos, which belongs to no turn
        "multi": ["hello<|end|>", "see you<|end|>"],
        "system": ["hello<|end|>"],
    },
    "glm4moe": {  # writes no end of turn: the next header is the stop
        "multi": ["\n<think></think>\nhello", "\n<think></think>\nsee you"],
        "tool": [f"\n<think></think>\n{_GLM_CALL}", "\n<think></think>\nsunny"],
        "think": ["\n<think></think>\nhello", "\n<think>yes</think>\nc"],
    },
    "deepseekv3": {  # takes arguments as text; a header only before answers to a user
        "multi": ["hello<｜end▁of▁sentence｜>", "see you<｜end▁of▁sentence｜>"],
        "system": ["hello<｜end▁of▁sentence｜>"],
        "tool": [f"{_DEEPSEEK_CALL}<｜end▁of▁sentence｜>", "sunny<｜end▁of▁sentence｜>"],
    },
    "gptoss": {  # another end of turn at the end of the conversation
        "multi": ["<|channel|>final<|message|>hello<|end|>", "<|channel|>final<|message|>see you<|return|>"],
        "tool": [
            ' to=functions.get<|channel|>commentary json<|message|>{"city": "Rome", "n": 3}<|call|>',
            "<|channel|>final<|message|>sunny<|return|>",
        ],
        "think": [
            "<|channel|>final<|message|>hello<|end|>",
            "<|channel|>analysis<|message|>yes<|end|><|start|>assistant<|channel|>final<|message|>c<|return|>",
        ],
    },
}
# tokenizer folder -> chat -> texts, for the templates that come with a tokenizer
OWN: dict[str, dict[str, list[str]]] = {
    "tok_minimind": {  # its prompt holds an empty thinking block; a turn that thinks departs from it
        "multi": ["hello<|im_end|>", "see you<|im_end|>"],
        "tool": [f"{_QWEN_CALL}<|im_end|>", "sunny<|im_end|>"],
        "think": ["let me\n</think>\n\nhello<|im_end|>", "yes\n</think>\n\nc<|im_end|>"],
    },
    "tok_mistral_v3": {"multi": [" hello</s>", " see you</s>"]},
}


WITHOUT_SCHEMAS = {"deepseekv3"}  # templates that have no place for them


def _trained(template: ChatTemplate, chat: Conversation) -> list[str]:
    if template.name.removesuffix(".jinja") in WITHOUT_SCHEMAS:
        chat = replace(chat, tools=())
    masked = Masker(template).mask(chat)
    return [masked.text[start:end] for start, end in masked.spans]


def _load(shared: Path, name: str) -> ChatTemplate:
    tokenizer = load_tokenizer(str(shared / "tok_minimind"))
    return choose_template(tokenizer, str(shared / "chat_templates" / f"{name}.jinja"), name)


@pytest.mark.parametrize("name", GOLDEN)
def test_real_template(name, shared, chats):
    template = _load(shared, name)
    assert {chat: _trained(template, chats[chat]) for chat in GOLDEN[name]} == GOLDEN[name]


@pytest.mark.parametrize("folder", OWN)
def test_own_template_of_a_real_tokenizer(folder, shared, chats):
    template = choose_template(load_tokenizer(str(shared / folder)), None, folder)
    assert {chat: _trained(template, chats[chat]) for chat in OWN[folder]} == OWN[folder]


def test_a_template_whose_turns_cannot_be_proved_is_refused(shared, chats):
    # DeepSeek's counts tool calls over the whole conversation, so varying one turn changes later ones
    with pytest.raises(DataError, match=r"t\.jsonl:3: .*deepseekv3.*messages\[\d\] .*cannot be proved"):
        _trained(_load(shared, "deepseekv3"), chats["rounds"])
