from __future__ import annotations

import resource
import signal
from typing import Any

import pytest

from flatout.config.data import DataConfig
from flatout.data.conversation import Conversation, Message, Origin
from flatout.data.loss_mask.mask import Masker
from flatout.data.templates.template import OURS, choose_template
from flatout.data.tokenize import SampleTokenizer, TokenizeOptions
from flatout.errors import DataError
from flatout.io import template_limits
from flatout.io.template_limits import TemplateLimitError

# name -> the whole text of a chat with a system prompt, what is trained in ⟦ ⟧ (eos here is <|im_end|>)
FULL = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    "⟦a<|im_end|>⟧\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n⟦ b\n<|im_end|>⟧\n",
    "qwen3": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    "⟦<think>\n\n</think>\n\na<|im_end|>⟧\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"
    "⟦<think>\n\n</think>\n\n b\n<|im_end|>⟧\n",
    "llama-3": "<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nq"
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n⟦a<|eot_id|>⟧<|start_header_id|>user<|end_header_id|>"
    "\n\nr<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n⟦ b\n<|eot_id|>⟧",
    "gemma": "<start_of_turn>user\nS\n\nq<end_of_turn>\n<start_of_turn>model\n⟦a<end_of_turn>⟧\n"
    "<start_of_turn>user\nr<end_of_turn>\n<start_of_turn>model\n⟦ b\n<end_of_turn>⟧\n",
    "mistral": "[INST] S\n\nq[/INST]⟦ a<|im_end|>⟧[INST] r[/INST]⟦  b\n<|im_end|>⟧",
    "phi": "<|system|>\nS<|end|>\n<|user|>\nq<|end|>\n<|assistant|>\n⟦a<|end|>⟧\n<|user|>\nr<|end|>\n"
    "<|assistant|>\n⟦ b\n<|end|>⟧\n",
    "zephyr": "<|system|>\nS<|im_end|>\n<|user|>\nq<|im_end|>\n<|assistant|>\n⟦a<|im_end|>⟧\n<|user|>\nr<|im_end|>\n"
    "<|assistant|>\n⟦ b\n<|im_end|>⟧\n",
    "alpaca": "S\n\n### Instruction:\nq\n\n### Response:\n⟦a<|im_end|>⟧\n\n### Instruction:\nr\n\n### Response:\n"
    "⟦ b\n<|im_end|>⟧\n\n",
    "plain": "Sq⟦a<|im_end|>⟧r⟦ b\n<|im_end|>⟧",
}
CHAT = Conversation(
    (Message("system", "S"), Message("user", "q"), Message("assistant", "a"), Message("user", "r"),
     Message("assistant", " b\n")),
    Origin("t", 1),
)  # fmt: skip


def _bracketed(masked: object) -> str:
    text: str = masked.text  # type: ignore[attr-defined]
    for start, end in reversed(masked.spans):  # type: ignore[attr-defined]
        text = f"{text[:start]}⟦{text[start:end]}⟧{text[end:]}"
    return text


@pytest.mark.parametrize("name", OURS)
def test_our_templates_letter_by_letter_and_each_prompt_begins_the_text(name, small_tokenizer):
    template = choose_template(small_tokenizer, name, "small")
    assert _bracketed(Masker(template).mask(CHAT)) == FULL[name]
    raw = template.raw_messages(CHAT.messages)
    full = template.render(raw)
    for turn in (2, 4):
        assert full.startswith(template.render(raw[:turn], generation_prompt=True))
        assert full.startswith(template.render(raw[: turn + 1]))


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama-3", "mistral"])
def test_our_templates_with_tools(name, small_tokenizer, chats):
    masked = Masker(choose_template(small_tokenizer, name, "small")).mask(chats["tool"])
    call, last = (masked.text[start:end] for start, end in masked.spans)
    assert '"get"' in call
    assert '{"city": "Rome", "n": 3}' in call
    assert last.strip().startswith(("sunny", "<think>\n\n</think>\n\nsunny"))
    assert '"description": "d"' in masked.text
    assert masked.text.count('"x": 1') + masked.text.count('\\"x\\": 1') == 1


# ordinary mistakes of an author and hostile ones, whatever Python raises for them
MISTAKES = [
    "{{ nothing.at.all }}", "{% for %}", "{{ raise_exception('no') }}", "{{ ''.__class__.__mro__ }}", "{% break %}",
    "{{ '{1}'.format(1) }}", "{{ 'x'.encode('nope') }}", "{{ '\\ud800' }}", "{{ 1 / 0 }}", "{{ 'abc' | nope }}",
    "{{ [1, 2] | slice(0) | list }}", "{{ strftime_now(1) }}", "{{ self.x() }}", "{{ cycler() }}",
    "{{ messages[9].content.x }}",
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_broken_or_unsafe_template_is_refused(mistake, template_of):
    """At once, and where it is rendered for an answer only, at the row."""
    with pytest.raises(DataError, match="'inline' cannot render a single user turn"):
        template_of(mistake)
    if mistake not in ("{% for %}", "{% break %}", "{{ 'abc' | nope }}"):  # which are no templates at all
        answers = "{% if m.role == 'assistant' %}" + mistake + "{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
        with pytest.raises(DataError, match="chat template 'inline'"):
            Masker(template_of("{% for m in messages %}" + answers)).mask(CHAT)


ROLES = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("attack", "limit"),
    [
        (LOOP, r"took more than 1 s; it may loop"),
        ("{{ 'x' * 9999999999 }}", "GiB of memory"),
        ("{{ '%9999999999s' % 'x' }}", "GiB of memory"),
        (
            "{% set n = namespace(s='xxxx') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
            "GiB of memory",
        ),
    ],
)
def test_a_template_that_takes_all_time_or_memory_is_stopped_at_its_row(attack, limit, small_tokenizer, monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 1)
    monkeypatch.setattr(template_limits, "MAX_BYTES", 1 << 28)
    before = resource.getrlimit(resource.RLIMIT_AS)
    turns = (Message("user", "bomb"), Message("assistant", "a"))
    for source, where in (
        (
            ROLES + "{% if messages[0].content == 'bomb' %}" + attack + "{% endif %}",
            r"rows\.jsonl:7: chat template 'evil'",
        ),
        (ROLES + attack, "chat template 'evil'"),
    ):
        tokenizer = SampleTokenizer(
            TokenizeOptions("small", "evil", source, DataConfig(end_of_turn="none")), small_tokenizer
        )
        with pytest.raises(TemplateLimitError, match=f"^{where} .*{limit}"):
            tokenizer(Conversation(turns, Origin("rows.jsonl", 7)))
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0


THINKS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' and enable_thinking is not defined %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_variables_of_a_template_and_its_empty_reasoning(small_tokenizer):
    chat = Conversation((Message("user", "q"), Message("assistant", "a")), Origin("rows.jsonl", 1))

    def learned(**settings: Any) -> str:
        sample = SampleTokenizer(TokenizeOptions("small", "own", THINKS, DataConfig(**settings)), small_tokenizer)(chat)
        return str(small_tokenizer.decode(sample.pieces[0].token_ids[sample.pieces[0].loss_mask].tolist()))

    assert learned() == "<think>\n\n</think>\n\na<|im_end|>"
    assert learned(empty_reasoning="mask") == "a<|im_end|>"
    assert learned(template_args={"enable_thinking": False}) == "a<|im_end|>"
    for wrong in ("enable_thinkin", "tools", "messages"):
        with pytest.raises(DataError, match=f"chat template 'own' does not read '{wrong}'"):
            learned(template_args={wrong: False})
