"""Conversations whose template leaves out earlier reasoning: each sample is what inference shows, and is asked for."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from plans import make_plan
from transformers import PreTrainedTokenizerFast

from flatout.cli.main import main
from flatout.config.data import DataConfig
from flatout.config.schema import BatchConfig
from flatout.data.conversation import Conversation, Message, Origin, ToolCall
from flatout.data.token_store import TokenStore
from flatout.data.tokenize import SampleTokenizer, TokenizedSample, TokenizeOptions
from flatout.errors import DataError
from flatout.planner.steps.training_plan import split_held_out

_TEMPLATE = (
    "{% set ns = namespace(ask=0) %}"
    "{% for m in messages if m.role == 'user' %}{% set ns.ask = loop.index %}{% endfor %}"
    "{% set ns.seen = 0 %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.seen = ns.seen + 1 %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}@{% if m.reasoning_content and KEPT %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function | tojson }}){% endfor %}<|im_end|>%\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION, LAST = _TEMPLATE.replace("KEPT", "ns.seen == ns.ask"), _TEMPLATE.replace("KEPT", "loop.last")
MARKS = {"@": "{% generation %}", "%\n": "{% endgeneration %}\n"}
KEEPS = {  # what keeps reasoning: answers of the last question, or the very last answer
    "question": QUESTION.replace("@", "").replace("%\n", "\n"),
    "last": LAST.replace("@", "").replace("%\n", "\n"),
    "marked": QUESTION.replace("@", MARKS["@"]).replace("<|im_end|>%\n", "<|im_end|>{% endgeneration %}\n"),
}
CALL = (ToolCall("get", {"city": "Rome"}, "call00000"),)
CHAT = (
    Message("system", "be brief"),
    Message("user", "one"), Message("assistant", "yes", reasoning="hello"),
    Message("user", "two"), Message("assistant", "", reasoning="there", tool_calls=CALL),
    Message("tool", "42", tool_call_id="call00000"), Message("assistant", "no", reasoning="think"),
    Message("user", "three"), Message("assistant", "the answer"),
)  # fmt: skip


def tokenized(
    tokenizer: PreTrainedTokenizerFast, source: str, turns: tuple[Message, ...] = CHAT, **options: Any
) -> TokenizedSample:
    to_tokens = SampleTokenizer(TokenizeOptions("small", "own", source, DataConfig(**options)), tokenizer)
    return to_tokens(Conversation(turns, Origin("rows.jsonl", 1)))


def raw(turns: tuple[Message, ...]) -> list[dict[str, Any]]:
    """The same turns as OpenAI writes them, without any of flatout's code."""
    calls = [
        {"type": "function", "id": c.call_id, "function": {"name": c.name, "arguments": c.arguments}} for c in CALL
    ]
    given: list[dict[str, Any]] = []
    for turn in turns:
        given.append({"role": turn.role, "content": turn.content})
        given[-1] |= {"reasoning_content": turn.reasoning} if turn.reasoning else {}
        given[-1] |= {"tool_calls": calls} if turn.tool_calls else {}
    return given


def learnt(tokenizer: PreTrainedTokenizerFast, piece: Any) -> list[str]:
    """The text of each range of labels."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], piece.loss_mask, [False]]).astype(np.int8)))
    return [tokenizer.decode(piece.token_ids[a:b].tolist()) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@pytest.mark.parametrize("keeps", list(KEEPS))
def test_each_sample_is_what_inference_shows(keeps, small_tokenizer):
    source = KEEPS[keeps]
    # (end of the sample, its answers): for each question, or for each answer if only the very last keeps its reasoning
    expected = [(3, [2]), (5, [4]), (7, [6]), (9, [8])] if keeps == "last" else [(3, [2]), (7, [4, 6]), (9, [8])]
    sample = tokenized(small_tokenizer, source)
    assert len(sample.pieces) == len(expected)
    assert (sample.outcome.noticed["split_by_question"], sample.outcome.noticed["questions"]) == (1, len(expected))
    for piece, (end, answers) in zip(sample.pieces, expected, strict=True):
        text = small_tokenizer.apply_chat_template(raw(CHAT[:end]), chat_template=source, tokenize=False)
        assert small_tokenizer.decode(piece.token_ids.tolist()) == text
        shown = []
        for answer in answers:
            prompt = small_tokenizer.apply_chat_template(
                raw(CHAT[:answer]), chat_template=source, tokenize=False, add_generation_prompt=True
            )
            assert text.startswith(prompt)
            shown.append(text[len(prompt) :].partition("<|im_end|>")[0] + "<|im_end|>")
        assert learnt(small_tokenizer, piece) == shown
    assert "".join(learnt(small_tokenizer, sample.pieces[0])) == "<think>hello</think>yes<|im_end|>"


@pytest.mark.parametrize("keeps", list(KEEPS))
def test_mask_and_train_keep_one_sample(keeps, small_tokenizer):
    masked, trained = (tokenized(small_tokenizer, KEEPS[keeps], lost_reasoning=policy) for policy in ("mask", "train"))
    assert masked.outcome.noticed["reasoning_masked"] == trained.outcome.noticed["reasoning_dropped"] == 3
    assert learnt(small_tokenizer, masked.pieces[0]) == ["the answer<|im_end|>"]
    call = '({"name": "get", "arguments": {"city": "Rome"}})<|im_end|>'
    assert learnt(small_tokenizer, trained.pieces[0]) == ["yes<|im_end|>", call, "no<|im_end|>", "the answer<|im_end|>"]
    assert np.array_equal(masked.pieces[0].token_ids, trained.pieces[0].token_ids)


def test_what_loses_nothing_with_loss_stays_whole(small_tokenizer):
    source = KEEPS["question"]
    kept = tokenized(small_tokenizer, source.replace("ns.seen == ns.ask", "true"))
    assert len(kept.pieces) == 1
    assert not kept.outcome.noticed["split_by_question"]
    unlearnt = (*CHAT[:2], Message("assistant", "yes", reasoning="hello", train=False), *CHAT[7:])
    assert [learnt(small_tokenizer, piece) for piece in tokenized(small_tokenizer, source, unlearnt).pieces] == [
        ["the answer<|im_end|>"]
    ]
    # reasoning that no form of the row shows is refused, beside its twin above
    with pytest.raises(DataError, match=r"messages\[2\] \(assistant\): the chat template drops its reasoning"):
        tokenized(small_tokenizer, source.replace("ns.seen == ns.ask", "false").replace("think>", "why>"))


ENDS = "{{ '<|endoftext|>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}"
REWRITTEN = {  # an earlier answer ends otherwise, or the tools stand before the last question
    "ends": ("<|im_start|>{{ m.role }}\n{{ m.content }}" + ENDS, False),
    "tools": (
        "{% if tools and loop.index0 == (messages | length - 1) // 2 * 2 %}[{{ tools[0].function.name }}]{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>",
        True,
    ),
}


@pytest.mark.parametrize("name", list(REWRITTEN))
def test_answers_that_a_later_question_rewrites_are_split_too(name, small_tokenizer):
    turn, with_tools = REWRITTEN[name]
    source = f"{{% for m in messages %}}{turn}\n{{% endfor %}}"
    source += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tools = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}] if with_tools else []
    turns = tuple(turn for turn in CHAT if turn.role in ("user", "assistant") and turn.content)
    turns = tuple(Message(turn.role, turn.content) for turn in turns)
    to_tokens = SampleTokenizer(TokenizeOptions("small", "own", source), small_tokenizer)
    sample = to_tokens(Conversation(turns, Origin("rows.jsonl", 1), tuple(tools)))
    assert len(sample.pieces) == 3
    for piece, end in zip(sample.pieces, (2, 4, 6), strict=True):
        given: dict[str, Any] = {"chat_template": source, "tools": tools or None, "tokenize": False}
        prompt = small_tokenizer.apply_chat_template(raw(turns[: end - 1]), add_generation_prompt=True, **given)
        text = small_tokenizer.decode(piece.token_ids.tolist())
        assert text == small_tokenizer.apply_chat_template(raw(turns[:end]), **given)
        assert text == f"{prompt}{learnt(small_tokenizer, piece)[0]}\n"
    if with_tools:  # without them, nothing is moved
        assert len(to_tokens(Conversation(turns, Origin("rows.jsonl", 1))).pieces) == 1


def test_every_token_is_a_label_once_with_loss_on_all(small_tokenizer):
    pieces = tokenized(small_tokenizer, KEEPS["question"], loss_type="all").pieces
    texts = ["".join(learnt(small_tokenizer, piece)) for piece in pieces]
    assert [text.partition("\n")[0] for text in texts[1:]] == ["two<|im_end|>", "three<|im_end|>"]
    assert texts[0].startswith("system\nbe brief")
    assert "<think>hello</think>yes" in texts[0]
    assert not any("hello" in text or "yes" in text for text in texts[1:])


def test_one_count_for_what_the_samples_of_a_row_lose(small_tokenizer):
    whole = tokenized(small_tokenizer, KEEPS["question"])
    limit = len(whole.pieces[0].token_ids) + 1
    cut = tokenized(small_tokenizer, KEEPS["question"], max_tokens=limit)
    assert cut.outcome.fate == "truncated"
    assert cut.outcome.num_tokens == max(len(piece.token_ids) for piece in whole.pieces)
    assert cut.outcome.size.tokens == sum(len(piece.token_ids) for piece in whole.pieces)
    lost = cut.outcome.size.labels - sum(int(piece.loss_mask.sum()) for piece in cut.pieces)
    assert cut.outcome.lost.labels == lost > 0
    dropped = tokenized(small_tokenizer, KEEPS["question"], max_tokens=limit, too_long="drop")
    assert (dropped.outcome.fate, len(dropped.pieces)) == ("too_long", 1)


@pytest.fixture
def thinking(tiny, tmp_path):
    """A run on chats of three questions with reasoning, under a template that keeps only that of the last."""
    (tmp_path / "own.jinja").write_text(KEEPS["question"])
    rows = [json.loads(line)["messages"] for line in tiny.chats.read_text().splitlines()]
    chats = [turn for messages in rows for turn in messages if turn["role"] in ("user", "assistant")]
    answers = [
        (ask, answer) for ask, answer in pairwise(chats) if (ask["role"], answer["role"]) == ("user", "assistant")
    ]
    with (tmp_path / "chats.jsonl").open("w") as file:
        for place in range(0, 60, 3):
            turns = [
                t
                for ask, a in answers[place : place + 3]
                for t in (ask, a | {"content": a["content"] * 8, "reasoning_content": "hm"})
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    data = {"root": str(tmp_path), "sources": [{"path": str(tmp_path / "chats.jsonl")}], "max_tokens": None}
    sections = {"data": data | {"template": str(tmp_path / "own.jinja")}, "eval": {"fraction": 0.2}}
    from flatout.config.read import dump_config

    (tmp_path / "run.yaml").write_text(
        dump_config(tiny.config(tmp_path / "run", batch={"max_steps": 2, "samples_per_step": 12}, **sections))
    )
    return tmp_path


def test_the_command_says_it_and_computes_what_is_shared_once(thinking, tiny, capsys):
    build = ["data", "build", "chats.jsonl", "--tokenizer", str(tiny.model_dir), "--template", "own.jinja"]
    build = [str(thinking / part) if part in ("chats.jsonl", "own.jinja") else part for part in build]
    for policy, told in {
        "split": "20 conversations became 60 samples, one for each question",
        "mask": "40 answers carry no loss: the chat template drops their reasoning",
        "train": "40 turns lost their reasoning: the chat template drops it",
    }.items():
        options = ["--root", str(thinking / policy), "--name", "a", "--lost-reasoning", policy]
        assert main([*build, *options]) == 0
        assert told in " ".join(capsys.readouterr().err.split())
    assert main([*build, "--root", str(thinking / "no"), "--name", "a", "--lost-reasoning", "drop"]) == 2
    assert "--lost-reasoning: expected one of split, mask, train" in capsys.readouterr().err

    store = TokenStore.open(thinking / "split" / "built_dataset" / "a")
    assert main(["data", "show", "a", "--root", str(thinking / "split")]) == 0
    assert "conversations with a sample for each question (data.lost_reasoning): 20" in capsys.readouterr().out
    train_ids, eval_ids = split_held_out(store.row_keys, 0.2, 3)
    rows = np.asarray(store.rows)
    assert len(eval_ids) == 12
    assert not set(rows[train_ids]) & set(rows[eval_ids])

    assert main(["plan", str(thinking / "run.yaml"), "batch.share_prefix=on"]) == 0
    planned = " ".join(capsys.readouterr().out.split())
    shared = re.search(r"prefixes shared: ([\d,]+) tokens, ([\d.]+)%, are not computed again", planned)
    assert shared, planned
    assert float(shared[2]) > 12  # 3.4 where samples are drawn on their own


@pytest.mark.parametrize("num_rows", [1, 7, 400])
def test_samples_of_a_row_follow_each_other_in_every_epoch(num_rows):
    sizes = np.arange(num_rows) % 4 + 1
    keys = np.repeat(np.arange(num_rows) * 10, sizes)
    batch = BatchConfig(samples_per_step=3, epochs=2.0)
    ones = np.full(len(keys), 4)
    together, apart = (
        make_plan(ones, ones - 1, batch, micro_batch_tokens=64, seed=5, num_ranks=1, row_keys=row_keys)
        for row_keys in (keys, None)
    )
    assert together.fingerprint != apart.fingerprint
    orders = [[i for step in together.steps() if step.epoch == epoch for i in step.sample_ids] for epoch in (0, 1)]
    for order in orders:
        assert sorted(order) == list(range(len(keys)))
        assert (np.diff(keys[order]) != 0).sum() == num_rows - 1
    assert num_rows < 400 or orders[0] != orders[1]
    assert [step.sample_ids for step in together.steps(start=2)] == [s.sample_ids for s in list(together.steps())[2:]]
