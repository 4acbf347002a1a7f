"""No part of a row vanishes in a template unseen, and turns are found by few renderings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from flatout.data.conversation import Conversation, Message, Origin, ToolCall
from flatout.data.loss_mask.mask import Masker
from flatout.data.loss_mask.turns import Rendering, TurnFinder
from flatout.data.templates.template import OURS, ChatTemplate, choose_template, template_text
from flatout.data.tokenize import SampleTokenizer, TokenizeOptions
from flatout.errors import DataError

# each writes one part of a rendering, and each can be left out
SYSTEM = "{% if m.role == 'system' %}[S]{{ m.content }}{% endif %}"
RESULT = "{% if m.role == 'tool' %}[T]{{ m.content }}{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}[C]{{ c.function | tojson }}{% endfor %}"
THOUGHT = "{% if m.reasoning_content %}[R]{{ m.reasoning_content }}{% endif %}"
SCHEMAS = "{% if tools %}[F]{{ tools | tojson }}{% endif %}"
TURNS = (
    "{% for m in messages %}@@{% if m.role in ['user', 'assistant'] %}[{{ m.role }}]%%{{ m.content }}<|im_end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
WHOLE = SCHEMAS + TURNS.replace("@@", SYSTEM + RESULT).replace("%%", THOUGHT + CALLS)
TOOLS = ({"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}},)


def _chat(*turns: Message, tools: Sequence[dict[str, Any]] = ()) -> Conversation:
    return Conversation(turns, Origin("t.jsonl", 7), tuple(tools))


CALL = Message("assistant", "", tool_calls=(ToolCall("get", {"city": "get"}, "call00000"),))
LOST = [
    ("system", SYSTEM, _chat(Message("system", "hi"), Message("user", "hi"), Message("assistant", "a")),
     r"messages\[0\] \(system\): the chat template drops its text"),
    ("result", RESULT, _chat(Message("user", "get"), CALL, Message("tool", "42"), Message("assistant", "It is 42.")),
     r"messages\[2\] \(tool\): the chat template drops its text"),
    ("calls", CALLS, _chat(Message("user", "get"), CALL, Message("tool", "1"), Message("assistant", "get")),
     r"messages\[1\] \(assistant\): the chat template drops its tool call"),
    ("schemas", SCHEMAS, _chat(Message("user", "get"), Message("assistant", "get"), tools=TOOLS),
     r"tools: the chat template drops them"),
    ("thought", THOUGHT, _chat(Message("user", "why"), Message("assistant", "why not", reasoning="why")),
     r"messages\[1\] \(assistant\): the chat template drops its reasoning"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "chat", "message"), [case[1:] for case in LOST], ids=[case[0] for case in LOST])
@pytest.mark.parametrize("acts_on_text", [False, True])
def test_a_part_that_vanishes_is_named_though_its_text_stands_elsewhere(part, chat, message, acts_on_text, template_of):
    whole = WHOLE
    if acts_on_text:  # so that marks change the text: what is left out is then found by replacing each part
        whole = WHOLE.replace("[{{ m.role }}]", "{{ m.content | length if m.role == 'user' }}[{{ m.role }}]")
    Masker(template_of(whole)).mask(replace(chat, messages=chat.messages))
    with pytest.raises(DataError, match=r"t\.jsonl:7: " + message):
        Masker(template_of(whole.replace(part, ""))).mask(chat)


def test_reasoning_before_the_last_question_is_counted(template_of):
    """Templates such as Qwen3's drop it there by design."""
    only_last = WHOLE.replace(THOUGHT, THOUGHT.replace("{% if m", "{% if loop.last and m"))
    first = (Message("user", "q"), Message("assistant", "a", reasoning="r"))
    assert Masker(template_of(only_last)).mask(_chat(*first, *first)).lost_reasoning == (1,)
    inline = (Message("user", "q"), Message("assistant", "<think>\nmm\n</think>\n\na"))
    cut = WHOLE.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}")
    assert Masker(template_of(cut)).mask(_chat(*inline, *inline)).lost_reasoning == (1,)


@dataclass(frozen=True)
class _Counting(ChatTemplate):
    """A template that counts the turns it renders."""

    counted: tuple[list[int], ...] = ([],)

    def render(self, messages: Any, *args: Any, **more: Any) -> str:
        self.counted[0].append(len(messages))
        return super().render(messages, *args, **more)


def test_long_chats_take_few_renderings(small_tokenizer):
    template = _Counting("whole", WHOLE, small_tokenizer, counted=([],))
    masker = Masker(template)
    turns = [Message("user", "q"), CALL, Message("tool", "42"), Message("assistant", "a", reasoning="r")] * 90
    template.counted[0].clear()
    masked = masker.mask(_chat(*turns, tools=TOOLS))
    assert sum(template.counted[0]) < 20 * len(turns)
    assert [masked.text[a:b] for a, b in masked.spans] == 90 * [
        '[C]{"name": "get", "arguments": {"city": "get"}}<|im_end|>', "[R]ra<|im_end|>"
    ]  # fmt: skip
    template.counted[0].clear()
    for text in ("x", "y z"):  # a shape that is known: one rendering a row
        masker.mask(_chat(*[Message("user", text), Message("assistant", text)] * 20))
    assert template.counted[0].count(40) < 10
    template.counted[0].clear()
    masker.mask(_chat(*[Message("user", "new"), Message("assistant", " new\n")] * 20))
    assert template.counted[0] == [40]


PIECES = ["a", " ", "  ", "\n", "\n\n", "é", "hello", "the answer", ".", "{", '"', "<", "</x>", "<|im_end|>", "😀"]


@pytest.mark.parametrize("source", [*OURS, "whole"])
def test_turns_found_by_their_parts_are_those_that_are_proved(source, small_tokenizer, template_of):
    """Every turn on its own: see turns.TurnFinder, which renders a row for each of them."""
    template = template_of(WHOLE) if source == "whole" else choose_template(small_tokenizer, source, "small")
    masker, finder = Masker(template), TurnFinder(template)
    rng = random.Random(3)
    takes_calls = source in ("whole", "chatml", "qwen3", "llama-3", "mistral")
    takes_reasoning = source in ("whole", "chatml", "qwen3")
    for _ in range(60):
        turns = [Message("system", _text(rng))] if rng.random() < 0.3 else []
        for _ in range(rng.randint(1, 4)):
            turns.append(Message("user", _text(rng)))
            if takes_calls and rng.random() < 0.4:
                call = ToolCall("get", {"city": _text(rng), "n": 3}, "call00000")
                turns.append(Message("assistant", "", tool_calls=(call,)))
                turns.append(Message("tool", _text(rng), tool_call_id="call00000"))
            reasoning = _text(rng) if takes_reasoning and rng.random() < 0.3 else None
            turns.append(Message("assistant", _text(rng), reasoning=reasoning))
        chat = _chat(*turns, tools=TOOLS if takes_calls and rng.random() < 0.5 else ())
        masked = masker.mask(chat)
        rendering = Rendering(template, template.raw_messages(chat.messages), chat.tools, masked.text)
        answers = [k for k, message in enumerate(turns) if message.role == "assistant"]
        assert list(masked.spans) == [finder.span(rendering, k) for k in answers]


def _text(rng: random.Random) -> str:
    return "".join(rng.choices(PIECES, k=rng.randint(0, 6))) + "x" + rng.choice(["", " ", "\n"])


@pytest.mark.parametrize(
    "text", ["\U000f5a03\U000f5a04", "\U000f5a0399\U000f5a04", "\U000f5a05", "\U000f5a100\U000f5a11"]
)
def test_private_use_characters_are_text(text, small_tokenizer):
    masker = Masker(choose_template(small_tokenizer, "chatml", "small"))
    masked = masker.mask(_chat(Message("user", text), Message("assistant", text + "a")))
    assert [masked.text[a:b] for a, b in masked.spans] == [text + "a<|im_end|>"]


@pytest.mark.parametrize("text", ["\U000f5a03 7\U000f5a04<|im_end|>", "<|im_end|>\U000f5a101\U000f5a11"])
def test_private_use_characters_beside_control_tokens_are_refused(text, small_tokenizer):
    """They could pass for the stand-ins of special tokens."""
    options = TokenizeOptions("small", *template_text(small_tokenizer, "chatml", "small"))
    tokenizer = SampleTokenizer(options, small_tokenizer)
    with pytest.raises(DataError, match=r"t\.jsonl:7: .*(private-use|acts on the text around)"):
        tokenizer(_chat(Message("user", text), Message("assistant", "a")))
