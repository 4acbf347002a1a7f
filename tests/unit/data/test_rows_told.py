"""Rows are trained as their writer means them: markers, verdicts, files for testing, class names, pictures, prompts.

Each refusal stands beside the nearest rows that are accepted, and the commands that an error prints are typed. All of
it goes through `flatout data build`; what is trained is compared with texts written by hand.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerFast

import flatout
from flatout.config.schema import DataConfig
from flatout.data.build import open_or_build
from flatout.data.token_store import TokenStore
from flatout.data.tokenizer import load_tokenizer
from flatout.errors import DataError
from tests.usual import every, usual

Row = dict[str, Any]
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
OTHER = "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n"
CHATML = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def turns(asked: str, answer: str) -> list[Row]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


# format -> the row of a prompt and of a good and a bad answer, and the number of samples
FORMS: dict[str, tuple[Callable[[str, str, str], Row], int]] = {
    "pairs": (lambda p, a, b: {"prompt": p, "chosen": a, "rejected": b}, 2),
    "kto": (lambda p, a, b: {"prompt": p, "completion": a, "label": True}, 1),
    "ranked": (lambda p, a, b: {"prompt": p, "answers": [a, b], "scores": [2, 1]}, 2),
    "choice": (lambda p, a, b: {"prompt": p, "answer_a": b, "answer_b": a, "winner": "b"}, 2),
    "alpaca": (lambda p, a, b: {"instruction": p, "output": a}, 1),
    "messages": (lambda p, a, b: {"messages": turns(p, a)}, 1),
    "sharegpt": (
        lambda p, a, b: {"conversations": [{"from": "human", "value": p}, {"from": "gpt", "value": a}]}, 1,
    ),
    "prompt_completion": (lambda p, a, b: {"prompt": p, "completion": a}, 1),
    "lists": (lambda p, a, b: {"prompt": turns(p, a)[:1], "completion": turns(p, a)[1:]}, 1),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_rows_with_the_markers_of_a_template_stop_the_build_and_can_be_trained_as_they_stand(build, form):
    make, num_samples = FORMS[form]
    row = make(PROMPT, "sure<|im_end|>", "no<|im_end|>")
    refused = build([row] * 3).refuses("3 of 3 texts contain special tokens of the tokenizer")
    plain = [] if form == "prompt_completion" else ["--template", "plain"]
    assert refused.steps[0][-2 - len(plain) :] == ["--special-tokens", "keep", *plain]
    kept = build([row] * 3, "--special-tokens", "keep", template="plain")
    assert kept.samples[:num_samples] == [
        (f"{PROMPT}sure<|im_end|>", "sure<|im_end|>"), (f"{PROMPT}no<|im_end|>", "no<|im_end|>"),
    ][:num_samples]  # fmt: skip
    # as text, every marker is letters: the only tokens are those that are written around them
    spelt = build([row] * 3, "--special-tokens", "text")
    assert spelt.code == 0
    build([make(OTHER, "sure<end_of_turn>", "no<end_of_turn>")] * 3).refuses("3 of 3 texts contain <start_of_turn>")
    assert build([make(OTHER, "sure<end_of_turn>", "no")] * 3, "--special-tokens", "text").code == 0
    assert build([make("hi", "sure", "no")] * 3).code == 0


def test_kept_markers_are_tokens_and_nothing_is_added(build, small_tokenizer):
    chat = {"messages": [*turns(PROMPT, "a<|im_end|>\n"), *turns(PROMPT, "b"), {"role": "user", "content": "c"}]}
    chat["messages"][1]["train"] = False
    built = build([chat], "--special-tokens", "keep", template="plain")
    assert built.samples == [(f"{PROMPT}a<|im_end|>\n{PROMPT}bc<|im_end|>", "b")]
    ids = TokenStore.open(Path("data/built_dataset/x")).sample(0).token_ids.tolist()
    pieces = [f"{PROMPT}a<|im_end|>\n{PROMPT}", "b", "c<|im_end|>"]
    assert ids == [one for piece in pieces for one in small_tokenizer(piece, add_special_tokens=False)["input_ids"]]
    assert "no chat template is applied" in built.printed
    called = {"type": "function", "function": {"name": "f", "arguments": {}}}
    tools = {"messages": [*turns("q", "")[:1], {"role": "assistant", "content": "", "tool_calls": [called]}]}
    build([tools], "--special-tokens", "keep", template="plain").refuses("tools, reasoning or pictures beside them")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("asked", "answer"), [("abc\n", "def"), ("abc ", "def"), ("abc", " def"), ("abc", "def")])
def test_plain_joins_texts_as_they_stand(build, form, asked, answer):
    make, num_samples = FORMS[form]
    built = build([make(asked, answer, "ghi")], template="plain")
    wanted = [(f"{asked}{text}<|im_end|>", f"{text}<|im_end|>") for text in (answer, "ghi")]
    assert built.samples == wanted[:num_samples], built.printed


def test_rows_in_memory_are_checked_as_files_are(tmp_path, small_tokenizer_dir, small_tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows, given = [FORMS["pairs"][0](PROMPT, "sure<|im_end|>", "no<|im_end|>")] * 3, {"name": "m", "replace": True}
    with pytest.raises(DataError, match=r"3 of 3 texts contain special tokens of the tokenizer \(row 1 of your data,"):
        flatout.build_data(rows, tokenizer=str(small_tokenizer_dir), template="chatml", **given)
    store = flatout.build_data(
        rows, tokenizer=str(small_tokenizer_dir), template="plain", special_tokens="keep", **given
    )
    assert small_tokenizer.decode(store.sample(1).token_ids) == f"{PROMPT}no<|im_end|>"


@pytest.mark.parametrize("form", ["pairs", "kto", "whole"])
def test_plain_leaves_speakers_in_the_text(build, form):
    prompt = "\n\nHuman: q\n\nAssistant: one\n\nHuman: more?\n\nAssistant:"
    rows = {"whole": {"chosen": f"{prompt} yes", "rejected": f"{prompt} no"}}
    built = build([rows[form] if form in rows else FORMS[form][0](prompt, " yes", " no")], template="plain")
    wanted = [(f"{prompt}{text}<|im_end|>", f"{text}<|im_end|>") for text in (" yes", " no")]
    assert built.samples == wanted[: len(built.samples)]


def test_control_tokens_in_answers_are_told_apart(build):
    words = [{"messages": turns("q", f"words {number}")} for number in range(19)]
    learnt = build([{"messages": turns("q", "a<|im_end|>")}, *words])
    assert "1 rows contain control tokens as text; they were encoded as text, and in answers of 1 rows they carry loss (rows.jsonl:1)" in learnt.printed  # fmt: skip  # noqa: E501
    asked = build([{"messages": turns("q<|im_end|>", "a")}, *words])
    assert "they were encoded as text" in asked.printed
    assert "they carry loss" not in asked.printed


ASKED, MADE = {"instruction": "q"}, {"output": "bad one"}
BAD = [
    {"accepted": False}, {"is_accepted": 0}, {"thumbs_up": False}, {"thumbs_up": "no"}, {"thumbs_down": True},
    {"label": False}, {"label": 0}, {"label": "0"}, {"label": "thumbs_down"}, {"label": "bad"}, {"label": "Rejected"},
    {"label": "undesirable"}, {"feedback": "thumbs down"}, {"verdict": "rejected"}, {"is_correct": False},
    {"rejected": True}, {"quality": "bad"}, {"thumbs_down": 1}, {"is_wrong": "yes"}, {"disliked": "disliked"},
    {"label": [False]}, {"thumbs_down": [True]},
]  # fmt: skip
GOOD = [
    {"accepted": True}, {"thumbs_up": 1}, {"thumbs_down": False}, {"label": "good"}, {"label": 1}, {"label": "World"},
    {"correct": 0}, {"verdict": "it depends"}, {"feedback": "too long"}, {"label": 3}, {"rejected": False},
    {"label": ["World", "Sport"]}, {"thumbs_up": [True]}, {"thumbs_down": "no"}, {"label": None}, {"label": ""},
    {"label": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("verdict", usual(BAD, [BAD[0], BAD[4], BAD[5], BAD[7], BAD[12], BAD[-1]]), ids=str)
def test_a_bad_answer_is_never_learnt_in_silence(build, run, verdict):
    ((name, value),) = verdict.items()
    value = value[0] if isinstance(value, list) else value
    other = {0: 1, 1: 0, "0": "1", "no": "yes", "yes": "no", "disliked": "good"}
    good: Row = {name: not value if isinstance(value, bool) else other.get(value, "good")}
    good = {name: [good[name]]} if isinstance(verdict[name], list) else good
    rows = [{**ASKED, "output": "good one", **good}, {**ASKED, **MADE, **verdict}]
    refused = build(rows).refuses(f"rows.jsonl:2: {name} is ")
    done = {" ".join(step[-4:]): run(step) for step in refused.steps}
    learns = [built for words, built in done.items() if "--format kto" in words]
    assert [(built.code, built.labels) for built in learns] == [(0, [1, 0])]
    assert learns[0].learnt == ["good one<|im_end|>", "bad one<|im_end|>"]
    left_out = next(built for words, built in done.items() if words.endswith("--on-bad-row skip"))
    assert left_out.learnt == ["good one<|im_end|>"]
    ignored = next(built for words, built in done.items() if words.endswith("=ignored"))
    assert ignored.learnt == ["good one<|im_end|>", "bad one<|im_end|>"]


@pytest.mark.parametrize("verdict", usual(GOOD, [GOOD[0], GOOD[2], GOOD[5], GOOD[-2], GOOD[-6]]), ids=str)
def test_what_is_no_bad_verdict_is_trained(build, verdict):
    built = build([{**ASKED, **MADE, **verdict}])
    assert built.learnt == ["bad one<|im_end|>"], built.printed


def test_the_label_of_a_text_is_its_class(build):
    assert build([{"text": "words", "label": "negative"}]).code == 0
    assert build([{"text": "words", "accepted": False}]).code == 3


CHOICES: list[tuple[Row, str]] = [
    ({"question": "q", "answer_a": "one", "answer_b": "two", "winner": "b"}, "two"),
    ({"question": "q", "answer_a": "one", "answer_b": "two", "winner": "model_a"}, "one"),
    ({"prompt": "q", "response_1": "one", "response_2": "two", "preference": 1}, "one"),
    ({"prompt": "q", "output_1": "one", "output_2": "two", "preference": 2.0}, "two"),
    ({"prompt": "q", "response_0": "one", "response_1": "two", "better_response_id": 1}, "two"),
    ({"prompt": "q", "response_0": "one", "response_1": "two", "better_response_id": 0}, "one"),
    ({"context": turns("q", "")[:1], "response1": "one", "response2": "two", "overall_preference": -3}, "one"),
    ({"context": turns("q", "")[:1], "response1": "one", "response2": "two", "overall_preference": 1}, "two"),
    ({"instruction": "q", "Response_A": "one", "Response_B": "two", "chosen": "B"}, "two"),
]


@pytest.mark.parametrize(("row", "better"), every(3, CHOICES))
def test_of_two_answers_the_better_one_is_chosen_row_by_row(build, row, better):
    worse = {"one": "two", "two": "one"}[better]
    wanted = [(f"{CHATML.format('q')}{text}<|im_end|>\n", f"{text}<|im_end|>") for text in (better, worse)]
    assert build([row]).samples == wanted
    assert build([row], "--format", "preference").samples == wanted


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"question": "q", "answer_a": "x", "answer_b": "y", "winner": "tie"}, "winner is 'tie', which names neither"),
        (
            {"question": "q", "answer_a": "x", "answer_b": "y", "winner": 1},
            "winner is a number (1), which names neither",
        ),
        ({"prompt": "q", "response1": "x", "response2": "y", "overall_preference": 0}, "names neither response1 nor"),
        ({"prompt": "q", "completion": "a", "rejected": "b"}, "it has no column of the chosen answer: name it chosen"),
        ({"question": "q", "answer_a": "x", "answer_b": "y"}, "no column says which is better: write the better one"),
    ],
)
def test_two_answers_without_a_clear_verdict_are_refused(build, row, why):
    refused = build([row])
    assert (refused.code, why in refused.printed, "--column" in refused.printed) == (3, True, False), refused.printed


def test_more_than_two_answers_are_no_pair(build, run):
    quiz = {"question": "q", "answerA": "x", "answerB": "y", "answerC": "z", "label": "1"}
    refused = build([quiz]).refuses("no known format has these columns")
    assert run(refused.steps[0]).code == 0  # an example, with columns that the rows have
    named = build([{"id": 1, "score": 2.5}])
    assert ("rename them to (messages), (instruction, output)" in named.printed, named.steps) == (True, [])


PREFERENCES: dict[str, Row] = {
    "OpenAI": {
        "input": {"messages": turns("q", "")[:1], "tools": [], "parallel_tool_calls": True},
        "preferred_output": turns("", "one")[1:], "non_preferred_output": turns("", "two")[1:],
    },
    "LLaMA-Factory v1": {"chosen_messages": turns("q", "one"), "rejected_messages": turns("q", "two")},
    "accepted": {"prompt": "q", "accepted": "one", "rejected": "two"},
    "hh-rlhf": {"prompt": "\n\nHuman: q\n\nAssistant:", "chosen": " one", "rejected": " two"},
    "hh-rlhf, marked answers": {"prompt": "Human: q\n\nAssistant: ", "chosen": "Assistant: one", "rejected": "two"},
    "hh-rlhf, whole": {"chosen": "\n\nHuman: q\n\nAssistant: one", "rejected": "\n\nHuman: q\n\nAssistant: two"},
}  # fmt: skip


@pytest.mark.parametrize("form", PREFERENCES)
def test_preference_rows_of_others_are_read(build, form):
    built = build([PREFERENCES[form]])
    wanted = [(f"{CHATML.format('q')}{text}<|im_end|>\n", f"{text}<|im_end|>") for text in ("one", "two")]
    assert built.samples == wanted, built.printed


def test_tools_of_a_nested_chat_are_read(build):
    tool = {"type": "function", "function": {"name": "lookup", "description": "d", "parameters": {"type": "object"}}}
    row = {"conversation": {"messages": turns("q", "a"), "tools": [tool]}}
    assert "lookup" in build([row], template="qwen3").samples[0][0]
    assert build([{"conversation": {"messages": turns("q", "a")}}]).samples == [
        (f"{CHATML.format('q')}a<|im_end|>\n", "a<|im_end|>")
    ]


def test_spoken_turns_are_told_apart_in_every_format(build):
    text = f"{CHATML.format('q')}one<|im_end|>\n{CHATML.format('more?')}"
    prompt = "\n\nHuman: q\n\nAssistant: one\n\nHuman: more?\n\nAssistant:"
    kto = build([{"prompt": prompt, "completion": " two", "label": True}])
    assert kto.samples == [(f"{text}two<|im_end|>\n", "two<|im_end|>")]
    chat = build([{"conversations": f"{prompt} two"}])
    assert chat.samples == [(f"{text}two<|im_end|>\n", "one<|im_end|>two<|im_end|>")]
    # an answer that only quotes the markers is an answer
    quoted = build([{"prompt": "q", "chosen": "see\n\nHuman: x", "rejected": "two"}])
    assert quoted.samples[0][1] == "see\n\nHuman: x<|im_end|>"
    joined = build([{"prompt": prompt, "completion": " two"}])
    assert joined.samples == [(f"{prompt} two<|im_end|>", " two<|im_end|>")]


FOLDERS: list[tuple[tuple[str, ...], str, list[str], str]] = [
    (("chats.jsonl", "chats_test.jsonl"), "d", ["chats"], "1 of 2 files are left out: chats_test.jsonl"),
    (("a.jsonl", "a_valid.jsonl"), "d", ["a"], "1 of 2 files are left out: a_valid.jsonl"),
    (("a.jsonl", "held_out.jsonl"), "d", ["a"], "1 of 2 files are left out: held_out.jsonl"),
    (("a.jsonl", "chatsDev.jsonl"), "d", ["a"], "1 of 2 files are left out: chatsDev.jsonl"),
    (("train.jsonl", "test.jsonl"), "d/*.jsonl", ["train"], "1 of 2 files are left out: test.jsonl"),
    (("train/x.jsonl", "eval/x.jsonl"), "d/*/x.jsonl", ["train/x"], "1 of 2 files are left out: eval/x.jsonl"),
    (("test.jsonl",), "d", ["test"], "test.jsonl: its name says test; its rows are read as any others"),
    (("a.jsonl", "a_test.jsonl"), "d/a_test.jsonl", ["a_test"], "a_test.jsonl: its name says test"),
    (("contest.jsonl", "latest.jsonl", "protest_data.jsonl"), "d", ["contest", "latest", "protest_data"], "d[3 files]"),
    (("a.jsonl", "train.jsonl"), "d", ["a", "train"], "d[2 files]"),
]  # fmt: skip


@pytest.mark.parametrize(("names", "path", "trained", "said"), every(2, FOLDERS))
def test_files_named_for_testing_are_left_out_and_told(build, names, path, trained, said):
    for name in names:
        file = Path("d", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"instruction": "q", "output": name.removesuffix(".jsonl")}) + "\n")
    built = build(None, path=path)
    assert built.learnt == [f"{name}<|im_end|>" for name in trained]
    assert said in built.printed


def table(path: str, columns: dict[str, list[Any]], names: list[str]) -> None:
    """A parquet file as `datasets` writes one with a ClassLabel."""
    features = {"label": {"names": names, "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    parquet.write_table(pyarrow.table(columns).replace_schema_metadata(metadata), path)


def test_class_labels_have_their_names_in_their_order(build):
    table("c.parquet", {"text": ["a", "b", "c"], "label": [1, 0, 1]}, ["zeta", "alpha"])
    built = build(None, "--format", "classify", path="c.parquet")
    assert built.labels == [1, 0, 1]
    assert "2 labels: zeta (1), alpha (2)" in built.printed
    table("k.parquet", {"prompt": ["q", "q"], "completion": ["a", "b"], "label": [0, 1]}, ["good", "bad"])
    assert build(None, "--format", "kto", path="k.parquet").labels == [1, 0]
    build(None, path="k.parquet").refuses("k.parquet:2: label is bad, so this answer is a bad example")
    table("n.parquet", {"text": ["a", "b"], "label": [0, -1]}, ["x", "y"])
    assert "n.parquet:2: label is null" in build(None, "--format", "classify", path="n.parquet").printed


def test_classes_that_differ_in_case_and_labels_that_are_all_alike_are_told(build):
    rows = [{"text": "a", "label": "Pos"}, {"text": "b", "label": "pos"}, {"text": "c", "label": "neg"}]
    told = build(rows, "--format", "classify")
    assert (told.code, "labels that differ in case alone are classes of their own: Pos, pos" in told.printed) == (
        0,
        True,
    )
    assert "differ in case" not in build(rows[1:], "--format", "classify").printed
    answers = [{"prompt": "q", "completion": f"a{n}", "label": n < 2} for n in range(3)]
    assert "2 labelled answers, a unit each; all are good" in build(answers[:2]).printed
    assert "all are" not in build(answers).printed


@pytest.mark.parametrize("form", ["prompt_completion", "alpaca", "messages"])
def test_answers_that_repeat_their_prompt_get_a_word(build, form):
    make = FORMS[form][0]
    told = build([make(f"question {n}", f"question {n} yes", "") for n in range(3)])
    assert (told.code, "3 answers begin with their prompt" in told.printed) == (0, True)
    assert "begin with their prompt" not in build([make(f"question {n}", "yes", "") for n in range(3)]).printed


def test_a_table_named_txt_gets_a_word(build):
    Path("q.txt").write_text("q1\ta1\nq2\ta2\n")
    assert "text files have a tab in each line" in build(None, path="q.txt").printed
    Path("q.tsv").write_text("instruction\toutput\nq1\ta1\nq2\ta2\n")
    assert build(None, path="q.tsv").learnt == ["a1<|im_end|>", "a2<|im_end|>"]
    Path("q.txt").write_text("words\nand\ta tab\n")
    assert "tab in each line" not in build(None, path="q.txt").printed


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        ("User: Hi\nAssistant: Hello\n", True),
        ("### Human: Hi\n### Assistant: Hello\n", True),
        ("**Q**: 1 + 1?\n**A**: 2\n", True),
        ("User: a person of the system.\nGroup: many of them.\n", False),
        ("The user: asks.\nThe assistant: answers.\n", False),
    ],
)
def test_a_chat_in_a_text_file_is_told_to_be_a_document(build, text, is_told):
    Path("chat.txt").write_text(text)
    printed = build(None, path="chat.txt").printed
    assert ("1 text files have lines such as User: and Assistant:" in printed) == is_told


@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_of_rows_is_read_whatever_its_name(build, indent):
    rows = [{"instruction": "q", "output": f"a{n}"} for n in range(12)]
    Path("rows.jsonl").write_text(json.dumps(rows, indent=indent))
    built = build(None)
    assert built.learnt == [f"a{n}<|im_end|>" for n in range(12)]
    Path("rows.jsonl").write_text(json.dumps(rows, indent=indent)[:-3])
    assert build(None).code == 3


def test_lines_that_are_no_rows_say_what_to_change(build):
    row = {"instruction": "q", "output": "a"}
    Path("rows.jsonl").write_text(f"{json.dumps(row)},\n{json.dumps(row)}\n")
    assert "rows.jsonl:1:36: a comma follows the row; remove it" in build(None).printed
    Path("rows.jsonl").write_text(json.dumps(row, indent=2))
    assert "rows.jsonl:1: the row goes on in the next line; write each row on one line" in build(None).printed


@pytest.mark.parametrize("keys", [("role", "text"), ("speaker", "text"), ("author", "message")])
def test_turns_with_other_keys_are_read_by_the_command_that_the_error_prints(build, run, keys):
    refused = build([{"messages": [{keys[0]: "user", keys[1]: "q"}, {keys[0]: "assistant", keys[1]: "a"}]}])
    assert (refused.code, len(refused.steps)) == (3, 1)
    assert run(refused.steps[0]).samples == [(f"{CHATML.format('q')}a<|im_end|>\n", "a<|im_end|>")]


def test_the_proposed_length_keeps_the_rows(build, run):
    rows = [{"instruction": f"hello there {n}", "output": "yes the answer " * 20} for n in range(20)]
    refused = build(rows, "--max-tokens", "16")
    assert (refused.code, "--too-long drop" in refused.printed) == (3, False)  # it would drop every row
    assert len(run(refused.steps[0]).samples) == 20


@pytest.mark.parametrize("form", ["pairs", "kto", "choice"])
def test_pictures_beside_compared_answers_are_refused_for_the_true_reason(build, form):
    row = FORMS[form][0]("q", "a", "b")
    build([{**row, "image": "x.png"}]).refuses("'image' holds images, which are read in chats")
    assert build([{**row, "image": None}]).code == 0
    assert build([{**row, "image": "x.png"}], "--key", "image=ignored").code == 0


def test_settings_of_sources_keep_their_names_in_errors(run):
    refused = run(["plan", "model=m", "data=X", "data.sources=[{path:Y}]"])
    assert (refused.code, "data.sources.0.path: YAML needs a blank after the colon: path: Y" in refused.printed) == (
        2,
        True,
    )
    assert "did you mean data?" not in refused.printed
    named = run(["plan", "model=m", "data=X", "data.sources=[{path: Y, formt: kto}]"])
    assert (named.code, "data.sources.0.formt: unknown key; did you mean format?" in named.printed) == (2, True)


def test_a_tokenizer_with_other_files_is_told_by_its_digest(
    tmp_path, small_tokenizer_dir, small_tokenizer, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(small_tokenizer_dir, tmp_path / "tok")
    Path("rows.jsonl").write_text(json.dumps({"text": "words"}))
    built = DataConfig(name="x", sources=[{"path": "rows.jsonl"}])
    open_or_build(built, str(folder))
    assert open_or_build(DataConfig(name="x"), str(folder)).num_samples == 1
    other = PreTrainedTokenizerFast.from_pretrained(folder)
    other.add_tokens(["<more>"])
    other.save_pretrained(folder)
    with pytest.raises(DataError, match=r"with 0 new tokens of digest \w{8}, but its digest is \w{8};"):
        open_or_build(DataConfig(name="x"), str(folder))


def test_new_tokens_get_their_ids_in_their_order(small_tokenizer_dir):
    added = {"<b>": False, "<s1>": True, "<a>": False, "<|im_end|>": True, "<s0>": True}
    tokenizer = load_tokenizer(str(small_tokenizer_dir), added=added)
    size = len(load_tokenizer(str(small_tokenizer_dir)))
    ids = tokenizer.convert_tokens_to_ids(["<b>", "<a>", "<s1>", "<s0>"])
    assert ids == [size, size + 1, size + 2, size + 3]
    assert {"<s1>", "<s0>"} <= {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
