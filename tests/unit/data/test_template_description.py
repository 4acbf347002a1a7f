"""A template is described once, and what follows from it: stops carry loss, no edge inside a tag, nothing of others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from row_cases import bracketed
from transformers import PreTrainedTokenizerBase

from flatout.cli.main import main
from flatout.config.data import DataConfig
from flatout.data.conversation import Conversation, Message, Origin, ToolCall
from flatout.data.encode import Encoder, UnencodableError
from flatout.data.templates.template import ChatTemplate
from flatout.data.token_store import TokenStore
from flatout.data.tokenize import SampleTokenizer, TokenizeOptions
from flatout.data.tokenizer import load_tokenizer
from flatout.errors import DataError

TAGS = [
    "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>", "<call>", "</call>", "<|turn>", "<turn|>",
    "<|result>", "<result|>",
]  # fmt: skip
LAST = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
# the next role's marker is what stops an answer
GLM = LAST + (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% elif m.role == 'tool' %}<|observation|>"
    "{{ m.content }}{% elif m.role == 'assistant' %}<|assistant|>"
    "{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>"
    "{% else %}@@{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>%%{% endif %}"
)
# GLM-4.7's: the prompt opens the reasoning, an answer without any closes it, and both begin with "<"
GLM_OPEN = GLM.replace("@@", "</think>").replace("%%", "{{ '</think>' if enable_thinking == false else '<think>' }}")
GLM = GLM.replace("@@", "").replace("%%", "")
# Qwen3.5's: the prompt opens the reasoning, and the last answer has it in any case
OPENED = LAST + (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n"
    "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# R1-Distill's: the prompt opens the reasoning, and no answer has it
ADDED = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}{% if m.role == 'assistant' %}"
    "<|endoftext|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
# DeepSeek-V3.2's: the question writes the header of the answer
ASKED = LAST + (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}<|assistant|>"
    "{{ '<think>' if loop.index0 == ns.last else '</think>' }}{% else %}{% if loop.index0 > ns.last %}</think>"
    "{% endif %}{{ m.content }}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|user|>\n<|assistant|><think>{% endif %}"
)
# Gemma 4's: a tool's result stands inside the model's turn, before its text
INSIDE = (
    "{% set ns = namespace(role='', open=false) %}{% for m in messages %}{% if m.role != 'tool' %}"
    "{% set next = messages[loop.index0 + 1] if not loop.last else m %}"
    "{% if not (m.role == 'assistant' and ns.role == 'assistant') %}{{ '<|turn>' + m.role + '\n' }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
    "{% if m.tool_calls %}<|result>{% if next.role == 'tool' %}{{ next.content }}<result|>{% endif %}{% endif %}"
    "{{ m.content }}{% if m.content %}{{ '<turn|>\n' }}{% endif %}"
    "{% set ns.open = m.tool_calls and not m.content %}{% set ns.role = m.role if ns.open or m.role != 'assistant' %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt and not ns.open %}"
    "{{ '<|turn>assistant\n' + ('' if enable_thinking else '<think></think>') }}{% endif %}"
)
# the end stands behind a break, and the prompt continues the last answer (Nemotron)
CONTINUED = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role != 'assistant' or not add_generation_prompt or "
    "not loop.last %}{{ '\n<turn|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'assistant' %}<|assistant|>{% endif %}"
)
# Apertus': a turn stays open over calls and results, which stand inside of it, until the next question
OPEN_TURN = (
    "{% set ns = namespace(open=false) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if ns.open %}<turn|>{% set ns.open = false %}{% endif %}<|user|>{{ m.content }}"
    "{% elif m.role == 'assistant' %}{% if not ns.open %}<|assistant|>{% set ns.open = true %}{% endif %}"
    "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | map(attribute='function') | list | tojson }}</call>"
    "{% endif %}"
    "{% elif m.role == 'tool' %}[{{ m.content }}]{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.open %}<|assistant|>{% endif %}"
)
# the same, and the next question's marker is what ends the turn
OPEN_GLM = OPEN_TURN.replace("<turn|>", "")
# reasoning and text are turns of their own, of which the prompt opens the second (HALVES) or the first
HALVES = (
    "{% for m in messages %}{% if m.reasoning_content %}<|observation|>{{ m.reasoning_content }}<turn|>"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}<turn|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TWICE = HALVES.replace("<|observation|>", "<|assistant|>")
NO_END = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)

U1, U2, A1, A2 = Message("user", "q"), Message("user", "r"), Message("assistant", "a"), Message("assistant", "b")
CALL = Message("assistant", "", tool_calls=(ToolCall("get", {"x": "y"}, "call00000"),))
RESULT = Message("tool", "42", name="get", tool_call_id="call00000")
CALLED = '<call>{"name": "get", "arguments": {"x": "y"}}</call>'
CLOSED = CALLED.removeprefix("<call>").replace('{"name', '[{"name').replace("</call>", "]</call>")


@pytest.fixture(scope="module")
def tokenizer(small_tokenizer_dir):
    return load_tokenizer(str(small_tokenizer_dir), added=dict.fromkeys(TAGS, True))


def _tokenizer(tokenizer: PreTrainedTokenizerBase, source: str, **options: Any) -> SampleTokenizer:
    return SampleTokenizer(
        TokenizeOptions("small", "t", source, DataConfig(lost_reasoning="train", **options)), tokenizer
    )


def _labelled(made: SampleTokenizer, *turns: Message) -> str:
    """Return a conversation's text from its token ids, with what carries loss in brackets."""
    conversation = Conversation(turns, Origin("t.jsonl", 3))
    if not (pieces := made(conversation).pieces):
        return made.masked(conversation)[0].text
    return bracketed(made.tokenizer, pieces[0].token_ids, pieces[0].loss_mask)


CASES = {
    "next marker": (GLM, (U1, A1, U2, A2), "<|user|>q<|assistant|>⟦a<|user|>⟧r<|assistant|>⟦b<|user|>⟧"),
    "marker of a result": (GLM, (U1, CALL, RESULT, A2),
                           f"<|user|>q<|assistant|>⟦{CALLED}<|observation|>⟧42<|assistant|>⟦b<|user|>⟧"),
    "a call at the end": (GLM, (U1, CALL), f"<|user|>q<|assistant|>⟦{CALLED}<|observation|>⟧"),
    "silent at the end": (GLM, (U1, A1, U2, replace(A2, train=False)),
                          "<|user|>q<|assistant|>⟦a<|user|>⟧r<|assistant|>b"),
    "</think> for <think>": (GLM_OPEN, (U1, A1, U2, A2),
                             "<|user|>q<|assistant|>⟦</think>a<|user|>⟧r<|assistant|>⟦</think>b<|user|>⟧"),
    "header by the question": (ASKED, (U1, A1, U2, A2),
                               "<|user|>q<|assistant|>⟦</think>a<|endoftext|>⟧<|user|>r<|assistant|><think>"
                               "⟦</think>b<|endoftext|>⟧"),
    "result inside": (INSIDE, (U1, CALL, RESULT, A2, U2, A1),
                      f"<|turn>user\nq<turn|>\n<|turn>assistant\n⟦{CALLED}<|result>⟧42<result|>⟦b<turn|>⟧\n"
                      "<|turn>user\nr<turn|>\n<|turn>assistant\n⟦a<turn|>⟧\n"),
    "result inside, beside text": (INSIDE, (U1, replace(CALL, content="so"), RESULT, U2, A1),
                                   f"<|turn>user\nq<turn|>\n<|turn>assistant\n⟦{CALLED}<|result>⟧42<result|>⟦so<turn|>⟧\n"
                                   "<|turn>user\nr<turn|>\n<|turn>assistant\n⟦a<turn|>⟧\n"),
    "end behind a break": (CONTINUED, (U1, A1, U2, A2),
                           "<|user|>q\n<turn|>\n<|assistant|>⟦a\n<turn|>⟧\n<|user|>r\n<turn|>\n<|assistant|>"
                           "⟦b\n<turn|>⟧\n"),
    "a call's own end": (OPEN_TURN, (U1, CALL, RESULT, A2, U2, A1),
                         f"<|user|>q<|assistant|>⟦{CLOSED}⟧[42]⟦b<turn|>⟧<|user|>r<|assistant|>⟦a<turn|>⟧"),
    "a call's own end, next marker": (OPEN_GLM, (U1, CALL, RESULT, A2, U2, A1),
                                      f"<|user|>q<|assistant|>⟦{CLOSED}⟧[42]⟦b<|user|>⟧r<|assistant|>⟦a<|user|>⟧"),
    "one half": (HALVES, (U1, A1), "<|user|>q<turn|><|assistant|>⟦a<turn|>⟧"),
    "a stop that is text": (GLM, (U1, replace(A1, content="a<|user|>")), "<|user|>q<|assistant|>⟦a<|user|><|user|>⟧"),
    "no answer with loss": (GLM, (U1, replace(A1, train=False), U2), "<|user|>q<|assistant|>a<|user|>r"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "turns", "expected"), CASES.values(), ids=CASES)
def test_the_loss_covers_the_answer_and_what_stops_it(source, turns, expected, tokenizer):
    made = _tokenizer(tokenizer, source)
    assert _labelled(made, *turns) == expected
    raw = ChatTemplate("t", source, tokenizer).raw_messages(turns)
    rendered = str(tokenizer.apply_chat_template(raw, chat_template=source, tokenize=False))
    stored = expected.replace("⟦", "").replace("⟧", "")
    # the whole rendering, and nothing but a stop behind it
    assert stored in (rendered, *(rendered + stop for stop in made.description.stops))


def test_an_answer_half_of_which_would_be_learnt_is_refused(tokenizer):
    made, thinks = _tokenizer(tokenizer, HALVES), replace(A1, content="Yes.", reasoning="why")
    with pytest.raises(DataError, match=r"part of an answer \('Yes\.'\) is outside the range found for"):
        _labelled(made, U1, thinks)
    with pytest.raises(DataError, match=r"messages\[1\] \(assistant\): '<turn\|>', which ends an answer, is inside"):
        _labelled(_tokenizer(tokenizer, TWICE), U1, thinks)
    assert _labelled(made, U1, replace(thinks, train=False), U2, A2).endswith("<|assistant|>⟦b<turn|>⟧")


def test_text_that_is_moved_behind_a_result_needs_an_end_of_its_own(tokenizer):
    moved = INSIDE.replace("{% if m.content %}{{ '<turn|>", "{% if m.content and not m.tool_calls %}{{ '<turn|>")
    assert moved != INSIDE
    beside = replace(CALL, content="so")
    for turns in ((U1, beside, RESULT, A2), (U1, beside, RESULT, A2, U2, A1)):
        with pytest.raises(DataError, match=r"messages\[1\]: it writes the text beside a tool call behind the tool's"):
            _labelled(_tokenizer(tokenizer, moved), *turns)
    assert "<|result>⟧42<result|>⟦b<turn|>⟧" in _labelled(_tokenizer(tokenizer, moved), U1, CALL, RESULT, A2)


def test_empty_reasoning_that_the_prompt_opens_carries_no_loss(tokenizer):
    trained, masked = (_tokenizer(tokenizer, OPENED, empty_reasoning=value) for value in ("train", "mask"))
    assert _labelled(trained, U1, A1).endswith("assistant\n<think>\n⟦\n</think>\n\na<|im_end|>⟧\n")
    assert _labelled(masked, U1, A1).endswith("assistant\n<think>\n\n</think>\n\n⟦a<|im_end|>⟧\n")
    thinking = _labelled(masked, U1, replace(A1, reasoning="why"))
    assert thinking.endswith("assistant\n<think>\n⟦why\n</think>\n\na<|im_end|>⟧\n")
    assert _labelled(_tokenizer(tokenizer, GLM_OPEN, empty_reasoning="mask"), U1, A1).endswith("</think>⟦a<|user|>⟧")
    assert not any("empty_reasoning" in problem.what for problem in masked.description.problems)
    useless = _tokenizer(tokenizer, ADDED, empty_reasoning="mask").description
    assert any("empty_reasoning=mask changes nothing" in problem.what for problem in useless.problems)


def test_a_template_without_a_stop_is_refused_until_told(tokenizer):
    with pytest.raises(DataError, match=r"'t': nothing that it writes ends an answer.*data\.end_of_turn"):
        _labelled(_tokenizer(tokenizer, NO_END), U1, A1)
    with pytest.raises(DataError, match=r"'<\|person\|>' opens the next turn, but is no token of this tokenizer"):
        _labelled(_tokenizer(tokenizer, GLM.replace("<|user|>", "<|person|>")), U1, A1)
    told = _tokenizer(tokenizer, NO_END, end_of_turn="<|endoftext|>")
    assert _labelled(told, U1, A1) == "[user] q\n[assistant] ⟦a\n<|endoftext|>⟧"
    assert told.description.stops == ("<|endoftext|>",)
    assert _labelled(_tokenizer(tokenizer, NO_END, end_of_turn="none"), U1, A1) == "[user] q\n[assistant] ⟦a⟧\n"
    with pytest.raises(DataError, match=r"end_of_turn '<\|endoftext\|>': .*ends an answer with '<\|im_end\|>'"):
        _labelled(_tokenizer(tokenizer, OPENED, end_of_turn="<|endoftext|>"), U1, A1)
    assert _labelled(_tokenizer(tokenizer, OPENED, end_of_turn="<|im_end|>"), U1, A1).endswith("a<|im_end|>⟧\n")


FACTS = [
    (GLM, "<|assistant|>", ("<|user|>", "<|observation|>"), [], ""),
    (GLM_OPEN, "<|assistant|><think>", ("<|user|>", "<|observation|>"), ["the last answer"],
     "{enable_thinking: false} makes them equal, but an answer with reasoning would then differ"),
    (OPENED, "<|im_start|>assistant\n<think>\n", ("<|im_end|>",), ["an earlier answer"], "data.lost_reasoning=split"),
    (ADDED, "<|assistant|><think>\n", ("<|endoftext|>",), ["the last answer"], "a copy of it (.jinja)"),
    (INSIDE, "<|turn>assistant\n<think></think>", ("<turn|>", "<|result>"), ["the last answer"],
     "enable_thinking: true"),
    (CONTINUED, "<|assistant|>", ("<turn|>",), [], ""),
]  # fmt: skip


@pytest.mark.parametrize(("source", "prompt", "stops", "differ", "remedy"), FACTS)
def test_what_training_and_inference_show_is_compared_and_mended(source, prompt, stops, differ, remedy, tokenizer):
    made = _tokenizer(tokenizer, source)
    found = made.description
    assert (found.prompt, found.stops, [mismatch.answer for mismatch in found.mismatches]) == (prompt, stops, differ)
    assert max(map(len, found.lines())) <= 80
    turns = (U1, A1, U2, A2) if differ == ["an earlier answer"] else (U1, A1)
    assert made(Conversation(turns, Origin("t", 1))).outcome.noticed["unlike_prompt"] == bool(differ)
    if differ:
        problem = next(problem for problem in found.problems if "inference shows" in problem.what)
        assert repr(found.mismatches[0].shown) in problem.what
        assert repr(found.mismatches[0].trained) in problem.what
        assert remedy in problem.remedy
    if "enable_thinking" in remedy:  # the remedy is what it says
        mended = _tokenizer(tokenizer, source, template_args={"enable_thinking": "true" in remedy})
        assert "the last answer" not in [mismatch.answer for mismatch in mended.description.mismatches]
        assert mended(Conversation(turns, Origin("t", 1))).outcome.noticed["unlike_prompt"] == 0


def test_a_variable_that_moves_the_difference_is_no_cure_for_all_rows(tokenizer):
    thinks, told = replace(A1, reasoning="why"), {}
    for value in (True, False):
        made = _tokenizer(tokenizer, GLM_OPEN, template_args={"enable_thinking": value})
        unlike = [made(Conversation((U1, a), Origin("t", 1))).outcome.noticed["unlike_prompt"] for a in (A1, thinks)]
        assert unlike == [int(value), int(not value)]
        told[value] = next(p.remedy for p in made.description.problems if "inference shows" in p.what)
    suits = r"{{enable_thinking: {}}} makes them equal, but an answer {} reasoning would then differ: set it if no row"
    assert suits.format("false", "with") in told[True]
    assert suits.format("true", "without") in told[False]
    # a prompt that is right for both kinds
    whole = GLM_OPEN.replace("'</think>' if enable_thinking == false", "'' if enable_thinking == false")
    remedy = _tokenizer(tokenizer, whole).description.problems[-1].remedy
    assert remedy == "data.template_args={enable_thinking: false} makes them equal"


def test_results_are_described_in_a_whole_conversation(tokenizer):
    # Mistral's: users and answers without calls must alternate, and a question follows no result
    strict = (
        "{% set ns = namespace(i=0) %}{% for m in messages if m.role == 'user' or m.role == 'assistant' and not "
        "m.tool_calls %}{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
        "{% set ns.i = ns.i + 1 %}{% endfor %}"
    )
    row = (U1, CALL, RESULT, A2)
    assert "42" in _labelled(_tokenizer(tokenizer, strict + GLM), *row)
    assert _tokenizer(tokenizer, strict + GLM).description.results == "written"
    refuses = "{% if messages | selectattr('role', 'equalto', 'tool') | list %}{{ raise_exception('no') }}{% endif %}"
    assert _tokenizer(tokenizer, refuses + GLM).description.results == "refused"
    assert _tokenizer(tokenizer, GLM.replace("m.role == 'tool'", "false")).description.results == "dropped"
    with pytest.raises(DataError, match="rejects it: no"):
        _labelled(_tokenizer(tokenizer, refuses + GLM), *row)


ENDS_TWICE = HALVES.replace("{{ m.content }}<turn|>", "{{ m.content }}<call><turn|>")


@pytest.mark.parametrize("loss_type", ["response_only", "all"])
@pytest.mark.parametrize(
    ("source", "told", "problem"),
    [
        (HALVES, "<turn|>", ""),
        (HALVES, "<|turn|>", "'<turn|>'"),
        (HALVES, "turn", "'<turn|>'"),
        (HALVES, "|", "'<turn|>'"),
        (HALVES, "none", "'<turn|>'"),
        (ENDS_TWICE, "<turn|>", ""),
        (ENDS_TWICE, "<call>", "'<call><turn|>', of which '<turn|>' stops it"),
        (ENDS_TWICE, "<call><turn|>", "'<call><turn|>', of which '<turn|>' stops it"),
        (ENDS_TWICE, "none", "'<call><turn|>', of which '<turn|>' stops it"),
    ],
)
def test_a_told_end_is_the_templates_stop_or_an_error(source, told, problem, loss_type, tokenizer):
    made = _tokenizer(tokenizer, source, end_of_turn=told, loss_type=loss_type)
    if problem:
        with pytest.raises(DataError) as refused:
            _labelled(made, U1, A1)
        assert str(refused.value) == (
            f"data.end_of_turn {told!r}: chat template 't' ends an answer with {problem}; "
            "remove the setting, or choose another template"
        )
    else:
        assert _labelled(made, U1, A1).endswith(f"{told}⟧")
        assert made.description.stops == (told,)


@pytest.mark.parametrize("told", ["<turn|>", "none"])
def test_a_told_end_takes_the_place_of_the_next_turns_marker(told, tokenizer):
    made, end = _tokenizer(tokenizer, GLM, end_of_turn=told), "" if told == "none" else told
    assert _labelled(made, U1, A1) == f"<|user|>q<|assistant|>⟦a{end}⟧"
    assert made.description.stops == ((told,) if end else ())


def test_text_before_inline_reasoning_is_no_text_that_may_vanish(tokenizer):
    cut = OPENED.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}").replace(
        "{{ m.reasoning_content or '' }}", "{{ m.content.split('</think>')[0].split('<think>')[-1] }}"
    )
    inline = replace(A1, content="intro <think>why</think> a")
    with pytest.raises(DataError, match=r"t\.jsonl:3: messages\[1\] \(assistant\): the chat template drops part of it"):
        _labelled(_tokenizer(tokenizer, cut), U1, inline)
    assert "⟦why\n</think>\n\n a<|im_end|>⟧" in _labelled(
        _tokenizer(tokenizer, cut), U1, replace(inline, content=" <think>why</think> a")
    )
    whole = CONTINUED  # keeps what it is given
    assert "⟦intro <think>why</think> a\n<turn|>⟧" in _labelled(_tokenizer(tokenizer, whole), U1, inline)
    halved = CONTINUED.replace("{{ m.content }}", "{{ m.content[:30] }}")
    with pytest.raises(DataError, match=r"messages\[0\] \(user\): the chat template drops part of it"):
        _labelled(_tokenizer(tokenizer, halved), replace(U1, content="a question of " + 9 * "words "), A1)
    _labelled(_tokenizer(tokenizer, halved), U1, A1)


def test_no_edge_of_the_loss_lies_inside_a_token_that_stays_whole(tokenizer):
    encoder, text = Encoder(tokenizer), "q<think>a</think>"
    for edge in (1, 8, 9, 17):
        ids = encoder.encode(text, [(edge, 17)] if edge < 17 else []).token_ids.tolist()
        assert tokenizer.decode(ids) == text
    for edge in (2, 7, 12, 16):
        with pytest.raises(UnencodableError, match=r"inside the token '</?think>', at character"):
            encoder.encode(text, [(edge, 17)])
    marked = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<{% generation %}think>{{ m.content }}<|im_end|>"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(DataError, match=r"t\.jsonl:3: the loss would begin or end inside the token '<think>'"):
        _labelled(_tokenizer(tokenizer, marked), U1, A1)
    assert "<think>⟦a<|im_end|>⟧" in _labelled(
        _tokenizer(tokenizer, marked.replace("<{% generation %}think>", "<think>{% generation %}")), U1, A1
    )


def test_the_command_tells_the_description_and_the_set_keeps_it(tmp_path, tokenizer, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tokenizer.save_pretrained("model")
    Path("own.jinja").write_text(GLM_OPEN)
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["data", "template", "own.jinja", "--tokenizer", "model"]) == 0
    told = capsys.readouterr().out
    assert "what stops it, with loss:        '<|user|>', '<|observation|>'" in told
    assert "enable_thinking: false" in told
    command = ["data", "build", "rows.jsonl", "--tokenizer", "model", "--name", "x", "--template", "own.jinja"]
    assert main([*command, "--num-procs", "1"]) == 0
    printed = " ".join(capsys.readouterr().err.split())
    assert "1 answers follow other text than inference shows" in printed
    assert "inference shows '<|assistant|><think>'" in printed
    meta = TokenStore.open(Path("data/built_dataset/x")).meta
    assert meta.stop_tokens == ("<|user|>", "<|observation|>")
    assert main(["data", "show", "x"]) == 0
    assert "an answer opens with:" in capsys.readouterr().out
    assert main(["data", "template", "own.jinja"]) == 2
    assert "--tokenizer" in capsys.readouterr().err
    assert main(["data", "template", "chatml", "--tokenizer", "model"]) == 0


@pytest.mark.parametrize("name", ["glm4moe", "qwen3_5_think", "diffusion_gemma", "gptoss", "deepseekv3", "phi3"])
def test_real_templates_are_described(name, shared):
    stops = {
        "glm4moe": (), "qwen3_5_think": ("<|im_end|>",), "diffusion_gemma": ("<turn|>", "<|tool_response>"),
        "gptoss": ("<|return|>", "<|call|>"), "deepseekv3": ("<｜end▁of▁sentence｜>",), "phi3": ("<|end|>",),
    }  # fmt: skip
    source = (shared / "chat_templates" / f"{name}.jinja").read_text()
    plain = load_tokenizer(str(shared / "tok_minimind"))
    assert SampleTokenizer(TokenizeOptions("t", name, source), plain).description.stops == stops[name]
    if name == "glm4moe":  # a tokenizer that has the markers: they stop
        own = load_tokenizer(str(shared / "tok_minimind"), added={"<|user|>": True, "<|observation|>": True})
        found = SampleTokenizer(TokenizeOptions("t", name, source), own).description
        assert (found.stops, found.stops_from) == (("<|user|>", "<|observation|>"), "next turn")
