"""What ends an answer, what asks for one, and what another says: rows of known words, to the letter, by the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from row_cases import bracketed
from transformers import PreTrainedTokenizerBase

from flatout.cli.main import main
from flatout.data.token_store import TokenStore
from flatout.data.tokenizer import load_tokenizer

TAGS = ["<|user|>", "<|assistant|>", "<|system|>", "<|start|>", "<|end|>", "<turn|>"]
TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
ASKED = TURNS + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
# phi4_mini's, ToolACE's and Command-A's: it asks for an answer behind each text
ASKS = TURNS + "<|assistant|>"
STARTS = TURNS.replace("<|{{ m.role }}|>", "<|start|>{{ m.role }}\n") + "{{ '<|start|>assistant\n' }}"
# Command-R+'s: a system turn behind each text says what to write
TELLS = TURNS + "<|system|>Write Action.<|end|>{% if add_generation_prompt %}<|assistant|>{% endif %}"
# GLM's: the next turn's header is all that ends one
HEADERS = ASKED.replace("<|end|>", "")
# Apertus' and Gemma 4's: what follows an answer goes on in its turn
GOES_ON = (
    "{% for m in messages %}{% if m.role != 'assistant' or loop.first or messages[loop.index0 - 1].role == 'user' %}"
    "<|{{ m.role }}|>{% endif %}{{ m.content }}{% if loop.last or messages[loop.index0 + 1].role != m.role %}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Exaone's: unless it is told to think, its prompt closes the block for reasoning
SHUTS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ '<think>\n' if enable_thinking else '<think></think>' }}{% endif %}"
)
# Mistral's for parallel tools: a system text of its own, at inference alone
DEFAULTS = "{{ tools | tojson if tools else '' }}" + ASKED.replace(
    "{{ m.content }}", "{{ 'Be kind. ' if tools and add_generation_prompt and loop.last else '' }}{{ m.content }}"
)
# Mistral's first: no header stands before an answer
BARE = "<|start|>{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% else %}{{ m.content }}<|end|>" + (
    "{% endif %}{% endfor %}"
)
U, A, B = (
    {"role": role, "content": word} for role, word in (("user", "Ask"), ("assistant", "Say"), ("assistant", "Add"))
)
THINKS = {**A, "reasoning_content": "Why"}
WROTE = {**A, "content": "<think>\nWhy\n</think>\n\nSay"}


@pytest.fixture
def build(small_tokenizer_dir, tmp_path, monkeypatch, capsys):
    """Build a row with the command; return (its text with labels in brackets, or none; what was printed)."""
    monkeypatch.chdir(tmp_path)
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(str(small_tokenizer_dir), added=dict.fromkeys(TAGS, True))
    tokenizer.save_pretrained("model")

    def built(source: str, turns: list[dict[str, str]], *options: str, **columns: Any) -> tuple[str | None, str]:
        Path("t.jinja").write_text(source)
        Path("rows.jsonl").write_text(json.dumps({"messages": turns, **columns}) + "\n")
        command = ["data", "build", "rows.jsonl", "--tokenizer", "model", "--name", "x", "--template", "t.jinja"]
        status = main([*command, "--num-procs", "1", "--replace", *options])
        printed = " ".join(capsys.readouterr().err.split())
        if status:
            return None, printed
        store = TokenStore.open(Path("data/built_dataset/x"))
        samples = (store.sample(index).pair for index in range(store.num_samples))
        return "".join(bracketed(tokenizer, *pair) for pair in samples), printed

    return built


@pytest.mark.parametrize(
    ("source", "turns", "expected"),
    [
        (ASKED, [U, A, U, B], "<|user|>Ask<|end|><|assistant|>⟦Say<|end|>⟧<|user|>Ask<|end|><|assistant|>⟦Add<|end|>⟧"),
        (ASKS, [U, A, U, B], "<|user|>Ask<|end|><|assistant|>⟦Say<|end|>⟧<|user|>Ask<|end|><|assistant|>⟦Add<|end|>⟧"),
        (STARTS, [U, A], "<|start|>user\nAsk<|end|><|start|>assistant\n⟦Say<|end|>⟧"),
        (HEADERS, [U, A, U, B], "<|user|>Ask<|assistant|>⟦Say<|user|>⟧Ask<|assistant|>⟦Add<|user|>⟧"),
        (ASKED, [U, A, B], "<|user|>Ask<|end|><|assistant|>⟦Say<|end|>⟧<|assistant|>⟦Add<|end|>⟧"),
        (BARE, [A, U, B], "<|start|>⟦Say<|end|>⟧[Ask]⟦Add<|end|>⟧"),
        (SHUTS, [U, A], "<|user|>Ask<|end|><|assistant|>⟦Say<|end|>⟧"),
    ],
    ids=["usual", "asks", "asks by start", "headers", "two answers", "answer first", "closed block"],
)  # fmt: skip
def test_the_answers_and_what_ends_them_carry_loss(build, source, turns, expected):
    assert build(source, turns)[0] == expected
    meta = TokenStore.open(Path("data/built_dataset/x")).meta
    assert meta.stop_tokens == (("<|user|>",) if source == HEADERS else ("<|end|>",))


def test_a_turn_of_the_system_behind_an_answer_carries_no_loss_and_is_told(build):
    text, printed = build(TELLS, [U, A])
    assert text == "<|user|>Ask<|end|><|assistant|>⟦Say<|end|>⟧"
    assert "but inference shows '<|system|>Write Action.<|end|><|assistant|>'" in printed
    assert "1 answers follow other text than inference shows" in printed


@pytest.mark.parametrize(("source", "header"), [(GOES_ON, ""), (HEADERS, "<|assistant|>")])
def test_two_answers_without_an_end_between_them_become_two_samples(build, source, header):
    asked = "<|user|>Ask<|end|><|assistant|>" if source == GOES_ON else "<|user|>Ask<|assistant|>"
    end = "<|end|>" if source == GOES_ON else "<|user|>"
    text, printed = build(source, [U, A, B])
    assert text == f"{asked}⟦Say{end}⟧{asked}Say{header}⟦Add{end}⟧"
    assert "1 conversations became 2 samples" in printed
    text, printed = build(source, [U, A, B], "--lost-reasoning", "train")
    assert text is None
    assert "messages[1] (assistant): another answer follows, and nothing ends this one; join the two" in printed
    assert build(source, [U, {**A, "content": "Say Add"}])[0]


def test_reasoning_is_not_trained_behind_a_closed_block(build):
    text, printed = build(SHUTS, [U, THINKS])
    assert text is None
    assert "give enable_thinking to these rows alone" in printed
    assert "try --template-arg enable_thinking=true" in printed
    text, _ = build(SHUTS, [U, THINKS], "--template-arg", "enable_thinking=true")
    assert text == "<|user|>Ask<|end|><|assistant|><think>\n⟦Why\n</think>\n\nSay<|end|>⟧"
    assert build(SHUTS, [U, THINKS], chat_template_kwargs={"enable_thinking": True})[0] == text
    closed = ASKED.replace("{{ m.content }}", "{% if m.role == 'assistant' %}</think>{% endif %}{{ m.content }}")
    text, printed = build(closed, [U, WROTE])
    assert text is None
    assert "messages[1] (assistant): the template writes '</think>' before its reasoning" in printed
    assert build(closed, [U, A])[0] == "<|user|>Ask<|end|><|assistant|>⟦</think>Say<|end|>⟧"


def test_what_inference_alone_shows_is_told_wherever_it_stands(build):
    tools = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {}}}]
    _, printed = build(DEFAULTS, [U, A], tools=tools)
    assert "1 answers follow other text than inference shows" in printed
    assert "an answer with tools is trained after" in printed
    assert "than inference shows" not in build(DEFAULTS, [U, A])[1]


def test_reasoning_in_tags_is_told_where_the_template_writes_it_otherwise(build):
    own = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    source = ASKED.replace("{{ m.content }}", own)
    text, printed = build(source, [U, WROTE])
    assert text == "<|user|>Ask<|end|><|assistant|>⟦<think>\nWhy\n</think>\n\nSay<|end|>⟧"
    assert "1 answers have reasoning in <think> tags, which stay as they are" in printed
    text, printed = build(source, [U, THINKS])
    assert text == "<|user|>Ask<|end|><|assistant|>⟦<think>Why</think>Say<|end|>⟧"
    assert "<think> tags" not in printed


def test_an_earlier_answer_is_no_problem_where_each_question_is_a_sample(build):
    last = "{{ '<think></think>' if loop.last and m.role == 'assistant' else '' }}{{ m.content }}"
    source = ASKED.replace("{{ m.content }}", last).replace("<|assistant|>{% endif", "<|assistant|><think>{% endif")
    text, printed = build(source, [U, A, U, B])
    assert text.count("⟦</think>") == 2
    assert "an earlier answer" not in printed
    assert "an earlier answer is trained after" in build(source, [U, A, U, B], "--lost-reasoning", "train")[1]
