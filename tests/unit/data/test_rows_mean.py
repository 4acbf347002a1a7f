"""Rows mean what they say: each flag, picture, label and variable of a row is honoured, or named in an error.

Each refusal stands beside the nearest row that is accepted. All of it goes through `flatout data build`.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from flatout.data import templates
from flatout.data.templates.template import OURS
from tests.usual import every

Row = dict[str, Any]
QUESTION, GOOD = {"role": "user", "content": "q"}, {"role": "assistant", "content": "good"}
BAD = {"role": "assistant", "content": "bad"}
HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "good"}


def chat(**flag: Any) -> Row:
    return {"messages": [QUESTION, BAD | flag, QUESTION, GOOD]}


def said(**flag: Any) -> Row:
    return {"conversations": [HUMAN, {"from": "gpt", "value": "bad", **flag}, HUMAN, GPT]}


PEERS = (
    "train", "training", "trainable", "loss", "loss_weight", "loss_scale", "loss_mask", "step_loss_mask", "weight"
)  # fmt: skip


@pytest.mark.parametrize("make", [chat, said])
@pytest.mark.parametrize("off", [False, 0, 0.0])
def test_flags_that_peers_document_decide_about_loss(build, make, off):
    on = type(off)(1)
    built = build([make(**{name: value}) for name in PEERS for value in (off, on)])
    assert built.code == 0, built.printed
    plain = build([make(train=False), make()]).learnt
    assert built.learnt == plain * len(PEERS)
    assert "bad" not in plain[0]
    assert "bad" in plain[1]


@pytest.mark.parametrize("make", [chat, said])
@pytest.mark.parametrize(
    ("name", "value"), [("learn", True), ("learn", 0), ("masked", False), ("mask", 1), ("toxic", 1.0)]
)
def test_an_unknown_flag_stops_the_build_until_it_is_told(build, make, name, value):
    refused = build([make(**{name: value})])
    assert refused.code == 3
    assert re.search(rf"rows\.jsonl:1: \w+\[1\]\.{name} is ", refused.printed)
    meanings = ("ignored", "train", "masked")
    assert refused.tries[:3] == [["--key", f"{name}={meaning}"] for meaning in meanings]
    told = {
        meaning: build([make(**{name: value})], *words) for meaning, words in zip(meanings, refused.tries, strict=False)
    }
    assert [built.code for built in told.values()] == [0, 0, 0]
    learnt = {meaning: "bad" in built.learnt[0] for meaning, built in told.items()}
    assert learnt == {"train": bool(value), "masked": not value, "ignored": True}


def test_other_unread_keys_are_named_and_counted(build):
    odd = QUESTION | {"id": 0, "lang": "en", "turn_index": 1, "score": 0.5, "none": None}
    built = build([{"messages": [odd, GOOD]}, {"messages": [QUESTION, GOOD]}, {"messages": [odd, GOOD]}])
    assert built.code == 0
    assert (
        "keys of turns that are not read: id (2 rows), lang (2 rows), turn_index (2 rows), score (2 rows)"
        in built.printed
    )
    assert built.counts["key:lang"] == 2
    assert "keys of turns" not in build([{"messages": [QUESTION, GOOD]}]).printed


@pytest.mark.parametrize("name", ["role", "content", "tool_calls", "name"])
def test_keys_that_are_read_cannot_be_given_another_meaning(build, name):
    build([chat()], "--key", f"{name}=ignored").refuses(f"keys: {name!r} is a key that flatout reads")
    wrong = build([chat()], "--key", "bad=lossless")
    assert (
        wrong.code,
        "--key bad: expected mapping of text to one of train, masked, train_detail, ignored" in wrong.printed,
    ) == (2, True)


ANSWER = "keep this, not this"


def detail(*ranges: tuple[int, int, bool]) -> list[Row]:
    return [{"begin_offset": begin, "end_offset": end, "train": train} for begin, end, train in ranges]


@pytest.mark.parametrize("name", ["train_detail", "training_detail"])
def test_ranges_of_characters_carry_loss_as_in_axolotl(build, name):
    def row(**keys: Any) -> Row:
        return {"messages": [QUESTION, {"role": "assistant", "content": ANSWER, **keys}]}

    built = build([
        row(**{name: detail((0, 8, True), (9, 18, False))}),
        row(**{name: detail((11, 18, True))}),  # what no range names carries no loss
        row(**{name: detail((0, 18, True))}),
        row(**{name: detail((0, 8, True)), "train": True}),
        row(),
    ])  # fmt: skip
    ended = "<|im_end|>"
    assert [learnt.rstrip("\n") for learnt in built.learnt] == [
        f"keep this{ended}", f"not this{ended}", f"{ANSWER}{ended}", f"keep this{ended}", f"{ANSWER}{ended}",
    ]  # fmt: skip
    none = build(
        [row(), row(**{name: []}), row(**{name: detail((0, 8, True)), "train": False})], "--on-bad-row", "skip"
    )
    assert (none.counts["no_labels"], len(none.samples)) == (2, 1)
    for ranges, message in [
        (detail((0, 19, True)), "end_offset 19 is beyond the text, whose last character has offset 18"),
        (detail((5, 4, True)), "the range 5 to 4 is empty or overlaps"),
        (detail((0, 8, True), (8, 9, False)), "the range 8 to 9 is empty or overlaps"),
        ([{"begin_offset": "0", "end_offset": 1, "train": True}], "begin_offset is a string, not an integer"),
    ]:
        refused = build([row(**{name: ranges})])
        assert (refused.code, message in refused.printed) == (3, True), refused.printed


@pytest.mark.parametrize("is_marked", [True, False])
@pytest.mark.parametrize("template", OURS)
def test_ranges_hold_under_every_template(build, tmp_path, template, is_marked):
    if not is_marked:  # as the templates of models are
        source = Path(templates.__file__).with_name(f"{template}.jinja").read_text()
        template = str(tmp_path / "unmarked.jinja")
        Path(template).write_text(re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", source))
    answer = {"role": "assistant", "content": ANSWER}
    rows = [{"messages": [QUESTION, turn]} for turn in (answer | {"train_detail": detail((5, 8, True))}, answer)]
    built = build(rows, template=template)
    assert built.code == 0, built.printed
    part, whole = built.learnt
    assert whole.count(ANSWER) == 1
    assert part == whole.replace(ANSWER, "this")  # what the template writes around the answer is learnt as before


def test_parts_of_a_text_carry_loss_by_their_flags(build):
    def parts(*flags: Any) -> Row:
        texts = [{"type": "text", "text": text} | flag for text, flag in zip(("one ", "two"), flags, strict=True)]
        return {"messages": [QUESTION, {"role": "assistant", "content": texts}]}

    built = build([parts({}, {"train": False}), parts({"weight": 0}, {"weight": 1}), parts({}, {})])
    assert [learnt.partition("<")[0] for learnt in built.learnt] == ["one ", "two", "one two"]
    build([parts({}, {"draft": True})]).refuses("messages[1].content[1].draft is true")


def test_segments_have_one_flag(build):
    def row(**keys: Any) -> Row:
        return {"segments": [{"text": "ask ", "label": False}, {"text": "answer", "label": True} | keys]}

    built = build([row(), row(train=True), row(lang="en")])
    assert (built.code, built.counts["key:lang"], len(set(built.learnt))) == (0, 1, 1)
    assert build([row(masked=True)]).code == 3
    assert "differently" in build([row(train=False)]).printed


FILLED: list[tuple[str, Any]] = [
    ("image", "a.jpg"), ("images", ["a.jpg"]), ("video", "a.mp4"), ("videos", ["a.mp4"]), ("audio", {"bytes": "x"}),
    ("audios", ["a.wav"]), ("image_path", "a.png"), ("images", [{"bytes": None, "path": "a.png"}]),
]  # fmt: skip


@pytest.mark.parametrize(("column", "value"), [FILLED[0], FILLED[-1]])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [QUESTION, GOOD]}, {"conversations": [HUMAN, GPT]}, {"instruction": "q", "output": "good"},
        {"prompt": "q", "completion": "good"}, {"text": "q good"},
    ],
    ids=lambda row: next(iter(row)),
)  # fmt: skip
def test_pictures_and_sounds_never_become_words(build, row, column, value):
    refused = build([row | {column: value}])
    assert refused.code == 3
    # without turns there is no place for a picture; with them, this tokenizer comes with no image processor
    expected = {
        "text": rf"'{column}' holds images, which are read in chats \(messages, .*\) and not in text rows",
        "prompt": "has pictures, but prompt is a text without turns",
    }
    says = expected.get(next(iter(row)), rf"{column}\[0\]\S* is a picture, but '.*' has no image processor")
    assert re.search(rf"rows\.jsonl:1: {says}", refused.printed)
    # a row without one in the same set is trained, and so is one whose picture is told to be of no account
    kept = build([row, row | {column: None}, row | {column: []}, row | {column: value}], "--on-bad-row", "skip")
    assert (kept.code, len(kept.samples), kept.counts["bad"]) == (0, 3, 1)
    assert build([row | {column: value}], "--key", f"{column}=ignored").code == 0


@pytest.mark.parametrize(("column", "value"), every(4, FILLED))
def test_every_column_of_media_is_known(build, column, value):
    row = {"instruction": "q", "output": "good"}
    is_shown = column in ("image", "images", "image_path")
    says = rf"{column}\[0\]\S* is a picture, but" if is_shown else f"'{column}' holds"
    assert re.search(says, build([row | {column: value}]).printed)
    tree = {"message_id": "1", "parent_id": None, "text": "q", "role": "prompter", column: value}
    reply = tree | {"message_id": "2", "parent_id": "1", "role": "assistant"}
    converter = Path(__file__).parents[3] / "examples" / "formats" / "oasst.py"
    assert re.search(says, build([tree, reply], "--format", f"{converter}:rows").printed)
    # a column of that name that is told to hold the text is text
    assert build([{"t": "q", column: "a photo of it"}], "--column", f"text={column}").code == 0


@pytest.mark.parametrize("column", ["images"])
@pytest.mark.parametrize("mark", ["<image>", "<video>", "<audio>", "<|image_pad|>"])
def test_a_mark_beside_a_column_of_media_is_proof(build, column, mark):
    marked = {"messages": [{"role": "user", "content": f"{mark}\nWhat is it?"}, GOOD]}
    for value in (None, [], "a.jpg"):
        build([marked | {column: value}], "--key", f"{column}=ignored").refuses(f"the text holds {mark}")
    alone = build([marked])
    assert (alone.code, alone.counts["media_marks"], "1 rows contain <image>" in alone.printed) == (0, 1, True)


@pytest.mark.parametrize("part", [
    {"type": "image"}, {"type": "image_url", "image_url": {"url": "u"}}, {"type": "input_audio", "input_audio": {}},
    {"type": "video", "video": "v.mp4"},
])  # fmt: skip
def test_parts_with_media_are_refused(build, part):
    def row(*parts: Row) -> Row:
        return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "q"}]}, GOOD]}

    refused = build([row(part)])
    says = {
        "image": "images has 0 pictures, but the turns have 1 picture parts without a picture",
        "image_url": "messages[0].content[0].image_url.url is a picture, but",
    }.get(part["type"], f"messages[0].content[0] ({part['type']}) holds")
    assert (refused.code, says in refused.printed) == (3, True)
    assert build([row()]).code == 0
    assert build([{"messages": [QUESTION | {"images": ["a.jpg"]}, GOOD]}]).code == 3
    assert build([{"messages": [QUESTION | {"images": []}, GOOD]}]).code == 0


@pytest.mark.parametrize(("name", "bad", "good"), [("train", False, True), ("loss", 0, 1), ("masked", True, False),
                                                   ("weight", "0", "1"), ("learn", "false", "true")])  # fmt: skip
def test_flags_of_a_whole_row(build, name, bad, good):
    row = {"instruction": "q", "output": "good"}
    build([row | {name: bad}]).refuses("this row is not to be learnt")
    assert build([row | {name: good}]).code == 0
    assert build([row | {name: bad}], "--key", f"{name}=ignored").code == 0


ADVISED: list[Row] = [
    {"instruction": "who", "context": "about him", "response": "he", "category": "qa"},
    {"question": "what", "context": "about it", "answer": "it"},
    {"problem": "2 and 2", "solution": "we add them", "answer": "4"},
    {"problem": "2 and 2", "solution": "we add them: 4", "answer": "4"},
    {"question": "why", "reasoning": "let us see", "answer": "so"},
    {"input": "say", "output": "said"},
    {"Question": "say", "Response": "said", "id": "7"},
    {"query": "say", "response": "said", "system_prompt": "be good"},
]


@pytest.mark.parametrize("row", every(3, ADVISED), ids=lambda row: "-".join(row))
def test_advice_works_and_names_every_column_with_meaning(build, row):
    refused = build([row])
    assert refused.code == 3
    built = build([row], *refused.tries[0], template="qwen3")
    assert built.code == 0, built.printed
    for name, value in row.items():
        told = refused.printed
        assert value in built.samples[0][0] or re.search(rf"not read then: .*\b{name}\b", told), (name, told)
        if name in ("category", "id"):
            assert name in told


@pytest.mark.parametrize("bad", ["no", "yes", "bad"])
def test_a_rejected_answer_is_no_verdict_of_its_row(build, bad):
    rows = [{"prompt": "q ", "chosen": "good", "rejected": bad}]
    built = build(rows, "--column", "completion=chosen")
    assert (built.code, "good" in built.learnt[0]) == (0, True), built.printed
    assert build([{"prompt": "q ", "completion": "good", "rejected": True}]).code == 3


def test_advice_that_would_not_work_is_not_given(build):
    refused = build([{"question": "what", "answer": ["it"]}])
    assert (refused.code, refused.tries) == (3, [])
    build([{"chosen": "Human: q Assistant: good", "rejected": "Human: q Assistant: bad"}]).refuses(
        "the answers have no first message in common"
    )
    near = build([{"mesages": "text"}])
    assert (near.code, "did you mean" in near.printed, near.tries) == (3, True, [])
    assert build([{"mesages": [QUESTION, GOOD]}]).tries == [["--column", "messages=mesages"]]


def test_an_unread_column_with_meaning_is_told_with_its_remedy(build):
    row = {"instruction": "who", "output": "he", "context": "about him", "id": 7}
    built = build([row])
    assert "ignored: context, id (columns={input: context} reads context too)" in built.printed
    told = build([row], "--column", "input=context")
    assert ("ignored: id" in told.printed, "about him" in told.samples[0][0]) == (True, True)


TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}


def call(name: str, call_id: str | None = None, arguments: Any = "{}") -> Row:
    return {"function": {"name": name, "arguments": arguments}} | ({"id": call_id} if call_id else {})


def test_markup_that_stands_twice_is_counted_and_said(build):
    clean = {
        "tools": [TOOL],
        "messages": [
            {"role": "system", "content": "be good"}, QUESTION,
            {"role": "assistant", "content": "", "tool_calls": [call("get")]},
            {"role": "tool", "content": "sunny"}, GOOD,
        ],
    }  # fmt: skip
    listed, wrapped = json.loads(json.dumps(clean)), json.loads(json.dumps(clean))
    listed["messages"][0]["content"] = f"You may call <tools>{json.dumps([TOOL])}</tools>"
    wrapped["messages"][3]["content"] = "<tool_response>\nsunny\n</tool_response>"
    built = build([clean, listed, wrapped], template="qwen3")
    assert (built.code, built.counts["doubled_markup"]) == (0, 2)
    assert "2 rows hold markup that the chat template writes too" in built.printed
    alone = build([clean], template="qwen3")
    assert (alone.counts["doubled_markup"], "markup" in alone.printed) == (0, False)


FOREIGN = ["<s>[INST] q [/INST] good</s>", "### Human: q\n### Assistant: good", "USER: q ASSISTANT: good",
           "<start_of_turn>user\nq<end_of_turn>", "### Instruction:\nq\n\n### Response:\ngood"]  # fmt: skip


@pytest.mark.parametrize("text", every(3, FOREIGN))
def test_markup_of_another_model_is_counted_and_said(build, text):
    rows = [{"text": text}, {"text": "an [INST] alone, a Human: and a ### heading"}]
    # markers that are tokens of another model stop the build, headings do not
    allowed = ("--special-tokens", "text") if text[0] == "<" else ()
    assert not allowed or build(rows).code == 3
    built = build(rows, *allowed)
    assert (built.code, built.counts["foreign_markup"]) == (0, 1)
    assert "1 rows contain chat markup in their texts (" in built.printed
    turns = build([{"messages": [{"role": "user", "content": text}, GOOD]}, {"messages": [QUESTION, GOOD]}], *allowed)
    assert turns.counts["foreign_markup"] == 1
    assert build(rows[1:]).counts["foreign_markup"] == 0


def test_results_of_parallel_calls_go_into_their_order(build):
    def row(*ids: str | None) -> Row:
        results = [{"role": "tool", "content": f"of {i}"} | ({"tool_call_id": i} if i else {}) for i in ids]
        calls = {"role": "assistant", "content": "", "tool_calls": [call("get", "a"), call("get", "b")]}
        return {"messages": [QUESTION, calls, *results, GOOD]}

    built = build([row("a", "b"), row("b", "a"), row("b"), row(None, None)], template="qwen3")
    assert (built.code, built.counts["sorted_results"]) == (0, 1)
    assert built.samples[0] == built.samples[1]
    assert "1 rows had results of parallel calls out of order; their ids put them in order" in built.printed


def test_arguments_as_openai_publishes_them(build):
    twice = json.dumps(json.dumps({"city": "Rome"}))
    rows = [
        {"messages": [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call("get", None, given)]}]}
        for given in (twice, '{"city": "Rome"}', {"city": "Rome"}, "", '""', "{}")
    ]
    built = build(rows, template="qwen3")
    assert built.code == 0, built.printed
    assert (len(set(built.samples[:3])), len(set(built.samples[3:]))) == (1, 1)
    assert "Rome" in built.learnt[0]
    refused = build(
        [{"messages": [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call("get", None, "[1]")]}]}]
    )
    refused.refuses("arguments is a list, not an object")


KWARGS = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if mood %}({{ mood }}) {% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_a_row_has_variables_of_its_own_for_the_template(build):
    Path("mood.jinja").write_text(KWARGS)

    def row(**variables: Any) -> Row:
        return {"messages": [QUESTION, GOOD], "chat_template_kwargs": variables}

    rows = [row(mood="sad"), row(), row(mood=None), row(mood="", tools_of_another=[]), {"messages": [QUESTION, GOOD]}]
    built = build(rows, "--template-arg", "mood=glad", template="mood.jinja")
    assert built.code == 0, built.printed
    assert [re.findall(r"\((\w+)\)", text)[:1] for text, _ in built.samples] == [
        ["sad"],
        ["glad"],
        ["glad"],
        [],
        ["glad"],
    ]
    build([row(thinking=True)], template="mood.jinja").refuses(
        "rows.jsonl:1: chat_template_kwargs: chat template 'mood.jinja' does not read 'thinking'"
    )
    assert build([row(thinking=True)], "--key", "chat_template_kwargs=ignored", template="mood.jinja").code == 0
    assert build([row() | {"chat_template_kwargs": "loud"}], template="mood.jinja").code == 3


def test_turns_as_a_struct_of_lists(build):
    import pyarrow as pa
    import pyarrow.parquet as pq

    turns = {"role": ["user", "assistant"], "content": ["q", "good"], "train": [None, True]}
    pq.write_table(pa.table({"messages": [turns, turns]}), "rows.parquet")
    built = build(None, path="rows.parquet")
    assert (built.code, built.learnt) == (0, build([{"messages": [QUESTION, GOOD]}] * 2).learnt)
    build([{"messages": {"role": ["user", "assistant"], "content": ["q"]}}]).refuses(
        "different lengths (role 2, content 1)"
    )
    stream = io.StringIO(json.dumps({"conversations": {"from": ["human", "gpt"], "value": ["q", "good"]}}))
    assert build([json.load(stream)]).learnt == built.learnt[:1]
