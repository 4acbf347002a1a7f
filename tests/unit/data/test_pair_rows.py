"""Pairs of answers and labelled answers: every form of rows becomes the tokens and masks of a plain rendering."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from row_cases import Row, cases, write_rows
from transformers import PreTrainedTokenizerFast

from flatout.cli.main import main
from flatout.config.schema import DataConfig
from flatout.data import store_writer
from flatout.data.build import open_or_build
from flatout.data.token_store import TokenStore
from flatout.errors import DataError
from flatout.io.json_file import read_json
from flatout.planner.steps.training_plan import split_held_out

Build = Callable[..., TokenStore]


def turns(*texts: str, first: str = "user") -> list[Row]:
    """Turns of user and assistant in turn."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]


Q, G, B = turns("hello there"), turns("yes", first="assistant"), turns("no \n it is", first="assistant")


@pytest.fixture
def build(tmp_path, small_tokenizer_dir):
    """Builds rows in process."""
    told: list[str] = []

    def run(rows: list[Row], settings: Row | None = None, *, source: Row | None = None, **more: Any) -> TokenStore:
        told.clear()
        file = write_rows(tmp_path / "rows.jsonl", rows)
        values = {"name": "d", "root": tmp_path / "data", "template": "chatml", "num_procs": 1, **(settings or {})}
        config = DataConfig.model_validate(values | {"sources": [{"path": str(file), **(source or {})}]})
        return open_or_build(config, str(small_tokenizer_dir), log=told.append, **more)

    run.told = told  # type: ignore[attr-defined]
    return run


def rendered(tokenizer: PreTrainedTokenizerFast, prompt: list[Row], answer: list[Row]) -> tuple[list[int], list[int]]:
    """Token ids and mask of a plain rendering: of the answer's assistant turns with their end, nothing before."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    )
    plain: Any = {"chat_template": source, "return_dict": True, "return_assistant_tokens_mask": True}
    whole = tokenizer.apply_chat_template([*prompt, *answer], **plain)
    num_prompt = len(tokenizer.apply_chat_template(prompt, **plain)["input_ids"])
    mask = [flag if place >= num_prompt else 0 for place, flag in enumerate(whole["assistant_masks"])]
    return whole["input_ids"], mask


@pytest.mark.parametrize("case", cases("compared.jsonl"), ids=lambda case: case["is"])
def test_a_row_becomes_what_a_plain_rendering_gives(build, small_tokenizer, case):
    store = build([case["row"]] * 2, source=case["source"])
    answers, columns = case["answers"], case["columns"]
    wanted = [rendered(small_tokenizer, case["prompt"], answer) for answer in answers] * 2
    assert [[ids.tolist(), mask.astype(int).tolist()] for ids, mask in all_samples(store)] == [*map(list, wanted)]
    assert store.unit_starts is not None
    assert np.diff(np.append(np.flatnonzero(store.unit_starts), store.num_samples)).tolist() == [len(answers)] * 2
    assert {name: store.extra[name].tolist() for name in columns} == {k: [v, v] for k, v in columns.items()}
    assert store.extra.keys() - {"prefix_tokens"} == columns.keys()
    if len(answers) == 2:
        ids, masks = zip(*wanted[:2], strict=True)
        same = next(k for k, (a, b) in enumerate(zip(*ids, strict=False)) if a != b)
        assert store.extra["prefix_tokens"].tolist() == [min(same, masks[0].index(1) - 1)] * 2


TOOLS = [{"type": "function", "function": {"name": "get", "description": "d", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "id": "c1", "function": {"name": "get", "arguments": {"city": "Rome"}}}


def test_calls_results_and_tools_of_both_answers(build, small_tokenizer):
    """Only assistant turns behind the prompt are learnt, as of the same conversation in a supervised set."""
    called = [
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "no"},
        *turns("the answer", first="assistant"),
    ]
    prompt = [{"role": "system", "content": "be good"}, *turns("think", "hello", "hello there")]
    row = {"chosen": [*prompt, *called], "rejected": [*prompt, *B], "tools": TOOLS}
    pair = build([row], {"template": "qwen3"})
    silent = [{**turn, "train": False} if turn["role"] == "assistant" else turn for turn in prompt]
    alone = build([{"messages": [*silent, *answer], "tools": TOOLS} for answer in (called, B)], {"template": "qwen3"})
    for (ids, mask), (wanted, learnt), answer in zip(all_samples(pair), all_samples(alone), (called, B), strict=True):
        assert np.array_equal(ids, wanted)
        assert np.array_equal(mask, learnt)
        plain: Any = {"chat_template": pair.meta.template_text, "tools": TOOLS, "return_dict": True}
        assert ids.tolist() == small_tokenizer.apply_chat_template([*prompt, *answer], **plain)["input_ids"]
    learnt_texts = small_tokenizer.decode(all_samples(pair)[0][0][all_samples(pair)[0][1]])
    assert ("get" in learnt_texts, "the answer" in learnt_texts, "hello<" in learnt_texts) == (True, True, False)


def all_samples(store: TokenStore) -> list[tuple[Any, Any]]:
    return [store.sample(index).pair for index in range(store.num_samples)]


GOOD_PAIR = {"prompt": "hello there", "chosen": "yes", "rejected": "no"}
GOOD_LISTS = {"prompt": "hello there", "chosen": [*Q, *G], "rejected": [*Q, *B]}
CHAT_PAIR = {"messages": [*Q, *G], "rejected_response": "no"}
WRONG: list[tuple[Row, str]] = [
    ({"rejected": "yes"}, "chosen and rejected are equal, so neither is better"),
    ({"rejected": None}, "rejected is missing; every answer needs its text"),
    ({"rejected": ""}, "rejected is empty; every answer needs its text"),
    ({"rejected": " \n"}, "rejected is empty; every answer needs its text"),
    ({"chosen": 7}, r"chosen is a number \(7\); expected a text, a turn, or a list of turns"),
    ({"rejected": Q}, "rejected is a list, but a string at"),
    ({"chosen": [*Q, *G], "rejected": G}, "chosen and rejected differ in form: only one begins with the prompt"),
    ({"rejected": "no", "margin": 1}, "has a column 'margin', but .* has none"),
    ({"prompt": None}, "chosen begins with an answer, and there is no prompt"),
    ({"prompt": [*Q, *G]}, r"prompt\[1\] is an assistant turn, but the answers follow it"),
    ({"prompt": [*Q[:0], {**G[0], "train": True}, *Q]}, r"prompt\[0\] asks for loss in the prompt"),
    ({"chosen": [*Q, *G], "rejected": turns("other", "no")}, r"chosen\[0\]: the answers have no first message"),
    (
        {"chosen": [*Q, *G, *turns("a", "b")], "rejected": [*Q, *G, *turns("c", "d")]},
        r"chosen\[2\] \(user\) is where the answers part, so they follow different prompts",
    ),
    ({"chosen": [*Q, *G], "rejected": Q}, r"rejected\[0\] is the last turn, so there is no answer after the prompt"),
    (
        {"prompt": "other", "chosen": [*Q, *G], "rejected": [*Q, *B]},
        "prompt is not among the messages of chosen, which begins with a prompt of its own",
    ),
    ({"rejected_response": "yes"}, r"messages\[1\] and rejected_response are equal, so neither is better"),
    ({"rejected_response": None}, "rejected_response is missing; every answer needs its text"),
    ({"messages": [*Q, *G, *Q]}, r"messages\[2\] is a turn of user, so rejected_response has no answer beside it"),
    ({"messages": G}, r"messages\[0\] begins with an answer, and there is no prompt"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_row_that_is_no_pair_is_bad_and_counted(build, change, message):
    good = GOOD_LISTS if isinstance(change.get("chosen"), list) else GOOD_PAIR
    good = CHAT_PAIR if change.keys() & CHAT_PAIR.keys() else good
    if isinstance(change.get("prompt"), list):
        good = {**good, "prompt": Q}
    rows = [good, {**good, **change}, good]
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: {message}"):
        build(rows)
    kept = build(rows, {"on_bad_row": "skip"})
    assert (kept.meta.counts["bad"], kept.meta.counts["pairs"], kept.num_samples) == (1, 2, 4)
    assert build([good] * 3).num_samples == 6


def test_scores_that_contradict_the_pair_and_equal_tokens_are_bad(build, tmp_path):
    scored = {**GOOD_PAIR, "score_chosen": 2, "score_rejected": 1}
    with pytest.raises(DataError, match="score_chosen is 2 and score_rejected 3, so the rejected answer is the better"):
        build([scored, {**scored, "score_rejected": 3}])
    with pytest.raises(DataError, match=r"rows\.jsonl:2: has no margin and no scores, but .*:1 has"):
        build([scored, {**scored, "score_rejected": None}])
    with pytest.raises(DataError, match="score_rejected is true, not a finite number"):
        build([scored, {**scored, "score_rejected": True}])
    assert build([scored, {**scored, "score_rejected": 2}]).extra["margin"].tolist() == [1, 0]
    # a template that cuts white space makes two answers one
    trims = tmp_path / "trims.jinja"
    trims.write_text("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
                     "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")  # fmt: skip
    same = {**GOOD_PAIR, "rejected": "yes \n"}
    with pytest.raises(DataError, match=r"rows\.jsonl:2: two answers are the same tokens"):
        build([GOOD_PAIR, same], {"template": str(trims)})
    assert build([GOOD_PAIR, same]).num_samples == 4


LABELS = [
    (True, 1), (False, 0), (1, 1), (0, 0), (1.0, 1), (0.0, 0), ("true", 1), ("False", 0), ("1", 1), ("0", 0),
    ("good", 1), ("bad", 0), ("desirable", 1), ("Undesirable", 0), ("yes", 1), ("no", 0),
]  # fmt: skip


def test_labels_of_all_spellings(build):
    for labels in (LABELS[:6], LABELS[6:]):  # a source has one type
        rows = [{"prompt": "hello", "completion": "yes", "kto_tag": label} for label, _ in labels]
        store = build(rows)
        assert store.extra["label"].tolist() == [label for _, label in labels]
        assert (str(store.extra["label"].dtype), store.meta.counts["labelled"]) == ("int8", len(labels))
    for wrong in (2, -1, "maybe", "", None, 0.5):
        with pytest.raises(DataError, match=r"rows\.jsonl:2: kto_tag is .*true or false"):
            build([rows[0], {**rows[0], "kto_tag": wrong}])
    with pytest.raises(DataError, match=r"completion is empty|no answer"):
        build([rows[0], {**rows[0], "completion": ""}])


@pytest.mark.parametrize(
    ("pairs", "wanted"),
    [
        ("best_worst", [("a", "d", 3)]),
        ("adjacent", [("a", "b", 1), ("c", "d", 2)]),
        ("all", [("a", "b", 1), ("a", "c", 1), ("a", "d", 3), ("b", "d", 2), ("c", "d", 2)]),
    ],
)
def test_several_answers_make_the_pairs_that_are_asked_for(build, small_tokenizer, pairs, wanted):
    row = {"prompt": "hello", "responses": ["d", "b", "a", "c"], "scores": [0, 2, 3, 2]}
    store = build([row], source={"pairs": pairs})
    texts = [small_tokenizer.decode(ids[mask]).removesuffix("<|im_end|>") for ids, mask in all_samples(store)]
    margins = store.extra["margin"].tolist()
    assert [(*texts[2 * k : 2 * k + 2], margin) for k, margin in enumerate(margins)] == wanted
    with pytest.raises(DataError, match="responses has no two answers of different value"):
        build([row | {"scores": [1, 1, 1, 1]}], source={"pairs": pairs})
    each = [{"text": "a", "score": None, "rank": 2}, {"text": "b", "score": 8, "rank": 1}]
    mixed = all_samples(build([{"prompt": "q", "responses": each}], source={"pairs": pairs}))
    assert [small_tokenizer.decode(ids[mask]).removesuffix("<|im_end|>") for ids, mask in mixed] == ["b", "a"]
    each = [{"text": "a", "score": 8}, {"text": "b", "rank": 9}]
    with pytest.raises(DataError, match=r"responses\[1\] has no score; each answer needs one"):
        build([{"prompt": "q", "responses": each}], source={"pairs": pairs})
    with pytest.raises(DataError, match="scores has 2 values, but responses has 4"):
        build([row | {"scores": [1, 2]}], source={"pairs": pairs})


def test_a_unit_over_the_limit_falls_out_whole(build):
    long = {**GOOD_PAIR, "rejected": "the answer is " * 40}
    with pytest.raises(DataError, match=r"1 of 2 rows are over max_tokens=64 .*rows\.jsonl:2"):
        build([GOOD_PAIR, long], {"max_tokens": 64, "too_long": "error"})
    for policy in ("truncate", "split"):
        with pytest.raises(DataError, match=f"data.too_long={policy} would keep a part of an answer"):
            build([GOOD_PAIR, long], {"max_tokens": 64, "too_long": policy})
    with pytest.raises(DataError, match=r"max_tokens=64: 1 rows too long") as caught:
        build([GOOD_PAIR, long], {"max_tokens": 64})
    assert caught.value.fixes[1].settings == {"data.too_long": "drop"}
    store = build([GOOD_PAIR, long, GOOD_PAIR], {"max_tokens": 64, "too_long": "drop"})
    counts = store.meta.counts
    assert (store.rows.tolist(), counts["too_long"], counts["lost_pairs"], counts["pairs"]) == ([1, 1, 3, 3], 1, 1, 2)
    assert any("2 pairs of 3 rows, a unit each; 1 fell out" in line for line in build.told)  # type: ignore[attr-defined]
    assert list(read_json(store.folder / "report.json")["rows"]["too_long"].values()) == [[2]]
    whole = build([GOOD_PAIR, long, GOOD_PAIR])
    tokens = counts["tokens"], counts["tokens"] - counts["too_long_tokens"]
    assert tokens == (len(whole.token_ids), len(store.token_ids))
    default = build([GOOD_PAIR] * 200 + [long], {"max_tokens": 64})
    assert (default.num_samples, default.meta.counts["lost_pairs"]) == (400, 1)
    # of several pairs of one row, those with the long answer
    many = {"prompt": "hello", "responses": ["a", "the answer is " * 40, "b"], "scores": [3, 2, 1]}
    kept = build([many], {"max_tokens": 64, "too_long": "drop"}, source={"pairs": "all"})
    assert (kept.meta.counts["pairs"], kept.meta.counts["lost_pairs"], kept.extra["margin"].tolist()) == (1, 2, [2])


def test_settings_that_would_spoil_a_comparison_are_refused(build, tmp_path, small_tokenizer_dir):
    with pytest.raises(DataError, match="loss_type=all gives loss to prompts"):
        build([GOOD_PAIR], {"loss_type": "all"})
    other = tmp_path / "chats.jsonl"
    other.write_text(json.dumps({"messages": [*Q, *G]}) + "\n")
    mixed = {"sources": [{"path": str(other)}, {"path": str(tmp_path / "rows.jsonl")}]}
    config = {"name": "m", "root": tmp_path / "data", "template": "chatml", "num_procs": 1}
    with pytest.raises(DataError, match=r"(chats|rows)\.jsonl has .* rows and .* rows, which no"):
        open_or_build(DataConfig.model_validate(config | mixed), str(small_tokenizer_dir))
    assert build([GOOD_PAIR], {"loss_type": "response_only"}).num_samples == 2


def test_repeated_pairs_are_left_out_whole_and_swapped_ones_stay(build):
    words = "think the answer is yes there no hello system user assistant " * 3
    pair = {"prompt": "hello there", "chosen": f"{words} yes", "rejected": f"{words[20:]} no"}
    swapped = {**pair, "chosen": pair["rejected"], "rejected": pair["chosen"]}
    found = build([pair, swapped, pair], {"dedupe": "exact"})
    counts = found.meta.counts
    assert (found.rows.tolist(), counts["equal_rows"], counts["pairs"]) == ([1, 1, 2, 2], 1, 2)
    kept = build([pair, swapped, pair])
    assert (kept.num_samples, kept.meta.counts["duplicates"]) == (6, 1)
    judged = [{"prompt": "hello", "completion": words, "label": label} for label in (True, False, True)]
    assert build(judged, {"dedupe": "exact"}).extra["label"].tolist() == [1, 0]


def test_copies_by_weight_and_the_held_out_side_keep_units_whole(build):
    rows = [{"prompt": f"hello {k}", "responses": ["a", "b", f"c {k}"], "scores": [3, 2, 1]} for k in range(12)]
    store = build(rows, source={"pairs": "all", "weight": 2.0})
    assert store.unit_offsets is not None
    assert (store.num_samples, store.unit_offsets.tolist()) == (12 * 3 * 2 * 2, list(range(0, 145, 2)))
    assert store.extra["margin"].tolist() == [1, 2, 1] * 24
    sides = split_held_out(store.row_keys, 0.3, 5, store.hashes, store.unit_offsets)
    assert sorted([*sides[0], *sides[1]]) == list(range(144))
    for side in sides:
        assert len(side)
        assert set(side.tolist()) == {s ^ 1 for s in side.tolist()}
    assert not {store.rows[s] for s in sides[0]} & {store.rows[s] for s in sides[1]}


def test_an_interrupted_build_of_pairs_goes_on(build, monkeypatch):
    monkeypatch.setattr(store_writer, "SHARD_TOKENS", 3000)
    rows = [{**GOOD_PAIR, "chosen": f"yes {k}", "margin": k / 8} for k in range(700)]

    def interrupt(done: int, _: int | None) -> None:
        if done > 300:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(rows, progress=interrupt)
    store = build(rows)
    assert any("going on from an earlier build, which finished 5" in line for line in build.told)  # type: ignore[attr-defined]
    whole = build(rows, {"root": store.folder.parent / "other"})
    for name in ("token_ids", "loss_mask", "offsets", "rows", "unit_starts", "hashes"):
        assert np.array_equal(np.asarray(getattr(store, name)), np.asarray(getattr(whole, name)))
    assert store.extra["margin"].tolist() == whole.extra["margin"].tolist() == [k / 8 for k in range(700)]
    assert store.meta.counts == whole.meta.counts
    assert store.columns == whole.columns


def test_a_margin_that_one_source_lacks_is_left_out_and_said(build, tmp_path, small_tokenizer_dir):
    files = [tmp_path / "with.jsonl", tmp_path / "without.jsonl"]
    for file, more in zip(files, ({"margin": 1}, {}), strict=True):
        file.write_text(json.dumps(GOOD_PAIR | more) + "\n")
    told: list[str] = []
    config = {"name": "m", "root": tmp_path / "data", "template": "chatml", "num_procs": 1}
    config |= {"sources": [{"path": str(file)} for file in files]}
    store = open_or_build(DataConfig.model_validate(config), str(small_tokenizer_dir), log=told.append)
    assert (store.num_samples, set(store.extra)) == (4, {"prefix_tokens"})
    assert any("column margin is left out" in line and "without.jsonl" in line for line in told)


def test_show_prints_both_answers_side_by_side(tmp_path, small_tokenizer_dir, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt": "hello there " * 12, "chosen": "yes it is\n" * 4, "rejected": "no", "margin": 2.5},
        {"prompt": "你好", "chosen": "是的" * 30, "rejected": "没有" * 40, "margin": 1},
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["data", "build", "rows.jsonl", "--tokenizer", str(small_tokenizer_dir), "--template", "chatml"]
    assert main([*command, "--name", "p"]) == 0
    capsys.readouterr()
    assert main(["data", "show", "p"]) == 0
    shown = capsys.readouterr().out
    assert "--- Pair 1 (rows.jsonl:1, diverge at token " in shown
    assert ", margin 2.5) ---" in shown
    lines = shown.splitlines()
    assert any(line.split() == ["yes", "it", "is", "│", "no<|im_end|>"] for line in lines)
    assert any(line.startswith("chosen: ") and " │ rejected: " in line for line in lines)
    assert "pairs 2: chosen is the longer answer in 50.0%, as long in 0.0%" in shown
    assert "margins: mean 1.75" in shown
    assert max(map(len, shown.partition("\np: rows.jsonl; tokenizer")[0].splitlines())) <= 80
    assert main(["data", "show", "p", "--html"]) == 0
    page = Path("p.html").read_text()
    assert page.count(">chosen<") == page.count(">rejected<") == 2
