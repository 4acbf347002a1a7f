"""Generation marks: our character ranges against transformers' own token mask, and against prefix rendering."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from flatout.data.conversation import Conversation, Message, Origin
from flatout.data.encode import Encoder
from flatout.data.loss_mask.mask import Masker
from flatout.data.templates.template import ChatTemplate
from flatout.data.tokenizer import load_tokenizer
from flatout.errors import DataError

TRAINING = [
    "deepseekv3", "gemma", "gemma3", "glm4moe", "gptoss", "llama3", "phi3", "qwen2_5", "qwen3", "qwen3_5_think",
    "qwen3_instruct_2507",
]  # fmt: skip

WITHOUT_REASONING = {"deepseekv3", "gemma", "gemma3", "llama3", "phi3", "qwen2_5", "qwen3_instruct_2507"}


def _template(shared: Path, name: str) -> ChatTemplate:
    tokenizer = load_tokenizer(str(shared / "tok_minimind"))
    source = (shared / "chat_templates" / f"{name}_training.jinja").read_text(encoding="utf-8")
    return ChatTemplate.checked(name, source, tokenizer)


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("chat", ["multi", "system", "tool", "think", "rounds"])
def test_equals_transformers_assistant_mask(name, chat, shared, chats):
    template = _template(shared, name)
    conversation = chats[chat]
    try:
        masked = Masker(template).mask(conversation)
    except DataError:
        assert (name, chat) in {
            (family, kind) for family in ("gemma", "gemma3", "llama3", "phi3") for kind in ("tool", "rounds")
        } | {("gemma", "system"), ("deepseekv3", "tool"), ("deepseekv3", "rounds")} | {
            (family, "think") for family in WITHOUT_REASONING
        }
        return
    ours = Encoder(template.tokenizer).encode(masked.text, masked.spans)
    theirs = template.tokenizer.apply_chat_template(
        template.raw_messages(conversation.messages),
        tools=[dict(tool) for tool in conversation.tools] or None,
        chat_template=template.source,
        return_assistant_tokens_mask=True,
        return_dict=True,
        tokenize=True,
    )
    if list(theirs["input_ids"]) == ours.token_ids.tolist():
        assert theirs["assistant_masks"] == ours.loss_mask.astype(int).tolist()
    else:  # a token reached over the edge of a range: ours is cut there, theirs trains or skips the whole token
        tokenizer = template.tokenizer
        text = tokenizer.decode(ours.token_ids)
        if (name, chat) == ("deepseekv3", "think"):  # it cuts an answer's reasoning off, which is trained all the same
            assert "<think>\nyes\n</think>\n\nc" in text
            text = text.replace("<think>\nyes\n</think>", "")
        assert tokenizer.decode(theirs["input_ids"]) == text
        assert len(theirs["input_ids"]) < len(ours.token_ids)


def test_most_families_need_no_cut(shared, chats):
    same = 0
    for name in TRAINING:
        template = _template(shared, name)
        masked = Masker(template).mask(chats["multi"])
        plain = template.tokenizer(masked.text, add_special_tokens=False)["input_ids"]
        same += plain == Encoder(template.tokenizer).encode(masked.text, masked.spans).token_ids.tolist()
    assert same >= 9


@pytest.mark.parametrize("name", ["gemma", "gemma3", "llama3", "qwen3", "qwen3_instruct_2507"])
def test_prefix_rendering_finds_what_the_marks_say(name, shared, chats):
    marked = _template(shared, name)
    unmarked = ChatTemplate(
        name, re.sub(r"\{%-? *(end)?generation *-?%\}", "{%- if 1 -%}{%- endif -%}", marked.source), marked.tokenizer
    )
    for chat in ("multi",) if name in WITHOUT_REASONING else ("multi", "think"):
        one, two = Masker(marked).mask(chats[chat]), Masker(unmarked).mask(chats[chat])
        assert one.text == two.text
        # these marks take in the newline after the end of turn; ours by prefix never does
        assert [one.text[a:b].rstrip() for a, b in one.spans] == [two.text[a:b] for a, b in two.spans]
        assert [a for a, _ in one.spans] == [a for a, _ in two.spans]


MARKED = (
    "{% for m in messages %}\n"
    "  {% if m.role == 'assistant' %}\n"
    "A:{% generation %}\n"
    "{{ m.content }};\n"
    "    {% endgeneration %}\n"
    "  {%- else %}U:{{ m.content }}\n"
    "  {% endif %}\n"
    "{% endfor %}"
)


def test_white_space_around_marks_is_transformers_own(template_of):
    chat = Conversation((Message("user", "q"), Message("assistant", "r")), Origin("t", 1))
    masked = Masker(template_of(MARKED)).mask(chat)
    assert masked.text == template_of(MARKED).render(template_of(MARKED).raw_messages(chat.messages))
    assert [masked.text[a:b] for a, b in masked.spans] == ["r;\n"]


def test_a_comment_about_marks_is_no_mark(template_of):
    source = (
        "{#- no {% generation %} here -#}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    )
    source += "{% if add_generation_prompt %}[assistant]{% endif %}"
    chat = Conversation((Message("user", "q"), Message("assistant", "r")), Origin("t", 1))
    masked = Masker(template_of(source)).mask(chat)
    assert [masked.text[a:b] for a, b in masked.spans] == ["r<|im_end|>"]


def test_a_row_with_the_mark_characters_is_refused(template_of):
    chat = Conversation((Message("user", "q\U000f5a01"), Message("assistant", "r")), Origin("t", 9))
    with pytest.raises(DataError, match=r"t:9: .*private-use"):
        Masker(template_of(MARKED)).mask(chat)


def test_marks_tell_the_end_of_turn(template_of):
    assert Masker(template_of(MARKED)).end_of_turn() == ";"
    assert np.all([mark not in Masker(template_of(MARKED)).end_of_turn() for mark in "\U000f5a01\U000f5a02"])
