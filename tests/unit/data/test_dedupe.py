"""`data.dedupe`: rows that repeat an earlier one are left out and counted, and no other row is."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from test_build_resumed import assert_equal, data_config, write_rows
from test_lost_reasoning import KEEPS

import flatout
from flatout.cli.main import main
from flatout.config.schema import DataConfig
from flatout.data.build import open_or_build
from flatout.data.conversation import Conversation, Message, Origin
from flatout.data.dedupe import Index
from flatout.data.row_keys import EXACT_WORDS, are_near, row_key
from flatout.data.token_store import TokenStore
from flatout.errors import DataError, UsageError
from flatout.io.json_file import read_json
from flatout.planner.steps.training_plan import split_held_out

Row = dict[str, Any]


def chat(question: str, answer: str, system: str = "", **flags: bool) -> Row:
    first = [{"role": "system", "content": system}] if system else []
    return {
        "messages": [*first, {"role": "user", "content": question}, {"role": "assistant", "content": answer, **flags}]
    }


def places(store: TokenStore) -> list[tuple[str, int]]:
    """File and row of each sample."""
    return [
        (Path(store.origin(index).source).name, store.origin(index).row_number) for index in range(store.num_samples)
    ]


def samples(store: TokenStore) -> list[tuple[bytes, bytes]]:
    found = [store.sample(index) for index in range(store.num_samples)]
    return [(one.token_ids.tobytes(), one.loss_mask.tobytes()) for one in found]


def text_of(seed: int, num_words: int) -> str:
    draw = random.Random(seed)
    return " ".join(f"{draw.choice('bcdfghklm')}{draw.choice('aeiou')}{draw.randrange(1000)}" for _ in range(num_words))


def edited(text: str, num_words: int, seed: int) -> str:
    words, draw = text.split(), random.Random(seed)
    for place in draw.sample(range(len(words)), num_words):
        words[place] = f"edit{draw.randrange(1000)}"
    return " ".join(words)


def test_the_command_drops_equal_rows_of_all_sources_and_says_so(
    tmp_path: Path, small_tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first of equal rows stays, as often as its source's weight says; rows that differ in the mask alone stay."""
    one = [chat("q", "a"), chat("q", "b"), chat("q", "a"), chat("q", "b", train=False), chat("r", "a")]
    two = [chat("r", "a"), chat("s", "a"), chat("q", "a", "be good"), chat("s", "a")]
    files = [write_rows(tmp_path / "one.jsonl", one), write_rows(tmp_path / "two.jsonl", two)]
    command = ["data", "build", *map(str, files), "--tokenizer", str(small_tokenizer_dir), "--template", "chatml"]
    command += ["--weight", "2", "--weight", "1", "--on-bad-row", "skip", "--root", str(tmp_path / "data")]
    assert main([*command, "--name", "d", "--dedupe", "exact"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    store = TokenStore.open(tmp_path / "data/built_dataset/d")
    first, second = [("one.jsonl", row) for row in (1, 2, 5)], [("two.jsonl", row) for row in (2, 3)]
    assert sorted(places(store)) == sorted([*first, *first, *second])
    report = read_json(store.folder / "report.json")
    assert {Path(file).name: rows for file, rows in report["rows"]["equal_rows"].items()} == {
        "one.jsonl": [3],
        "two.jsonl": [1, 4],
    }
    counts = store.meta.counts
    assert (counts["rows"], counts["kept"], counts["no_labels"], counts["equal_rows"]) == (9, 5, 1, 3)
    assert counts["near_rows"] == 0
    sources = [{"path": str(file)} for file in files]
    config = data_config(tmp_path / "off", files[0], sources=sources, on_bad_row="skip")
    whole = open_or_build(config, str(small_tokenizer_dir))
    stays = first + second
    lost = [num for num, place in zip(whole.lengths.tolist(), places(whole), strict=True) if place not in stays]
    assert counts["deduped_tokens"] == sum(lost)
    assert counts["tokens"] == whole.meta.counts["tokens"] - sum(lost)
    assert "3 rows were dropped: equal to an earlier row (data.dedupe)" in said
    assert f"dropped copies of rows held {sum(lost)} tokens" in said
    assert main(["data", "show", "d", "--root", str(tmp_path / "data"), "-n", "1"]) == 0
    assert "dropped: equal to an earlier row: 3" in capsys.readouterr().out
    # what stays has no sample on both sides, copies by weight included
    train, held_out = split_held_out(store.row_keys, 0.4, 0, store.hashes)
    assert len(held_out)
    assert not set(store.hashes[train]) & set(store.hashes[held_out])


def test_off_keeps_all_rows_and_names_the_setting(tmp_path: Path, small_tokenizer_dir: Path) -> None:
    said: list[str] = []
    file = write_rows(tmp_path / "rows.jsonl", [chat("q", "a"), chat("q", "a")])
    store = open_or_build(data_config(tmp_path, file), str(small_tokenizer_dir), log=said.append)
    assert (store.num_samples, store.meta.counts["equal_rows"], store.meta.counts["duplicates"]) == (2, 0, 1)
    assert any("1 samples are duplicates; they are kept; data.dedupe=exact leaves out" in line for line in said)
    assert store.meta.settings["dedupe"] == "off"


BASE = [chat(text_of(seed, 40), text_of(seed + 1000, 60), "be good") for seed in range(30)]


def both(change: Callable[[str], str]) -> Callable[[str, str], Row]:
    return lambda question, answer: chat(change(question), change(answer))


COPIES = {
    "white space and case": both(lambda text: text.upper().replace(" ", "  \n")),
    "one word": both(lambda text: edited(text, 1, 5)),
    "an end": both(lambda text: text + " and more"),
    "another system prompt": lambda question, answer: chat(question, answer, text_of(7, 200)),
}
OTHERS = {
    "a third of the words": both(lambda text: edited(text, len(text.split()) // 3, 5)),
    "another order": both(lambda text: " ".join(random.Random(1).sample(text.split(), len(text.split())))),
    "some words of the answer": lambda question, answer: chat(question, edited(answer, 6, 5)),
    "some words of the question": lambda question, answer: chat(edited(question, 5, 5), answer),
}


@pytest.mark.parametrize("what", [*COPIES, *OTHERS])
def test_near_finds_edited_copies_and_no_others(tmp_path: Path, small_tokenizer_dir: Path, what: str) -> None:
    change = (COPIES | OTHERS)[what]
    changed = [change(text_of(seed, 40), text_of(seed + 1000, 60)) for seed in range(30)]
    rows = write_rows(tmp_path / "rows.jsonl", BASE + changed)
    store = open_or_build(data_config(tmp_path, rows, dedupe="near"), str(small_tokenizer_dir))
    assert {row for _, row in places(store)} >= set(range(1, 31))
    assert store.meta.counts["equal_rows"] == 0
    found = store.meta.counts["near_rows"]
    # an index of 0.86, as for one of 40 words, is close to where rows count as near
    assert found >= (10 if what == "one word" else 28) if what in COPIES else found == 0


LONG = text_of(3, 300)


def segments(*parts: tuple[str, bool]) -> Row:
    return {"segments": [{"text": text, "label": label} for text, label in parts]}


def turns(*contents: tuple[str, str, dict[str, Any]]) -> Row:
    return {"messages": [{"role": role, "content": text, **flags} for role, text, flags in contents]}


def ranged(start: str, answer: str) -> Row:
    detail = [
        {"begin_offset": 0, "end_offset": len(start) - 1, "train": False},
        {"begin_offset": len(start), "end_offset": len(start + answer) - 1, "train": True},
    ]
    return turns(("user", "q", {}), ("assistant", start + answer, {"train_detail": detail}))


SIDES: dict[str, tuple[Callable[[str], Row], dict[str, Any]]] = {
    "segments": (lambda end: segments((LONG + " ", False), (end, True)), {}),
    "a silent answer": (
        lambda end: turns(("assistant", LONG, {"train": False}), ("user", "q", {}), ("assistant", end, {})),
        {},
    ),
    "ranges of an answer": (lambda end: ranged(LONG + " ", end), {}),
    "all": (lambda end: turns(("user", LONG, {"train": False}), ("assistant", end, {})), {"loss_type": "all"}),
}


@pytest.mark.parametrize("what", SIDES)
def test_what_carries_no_loss_is_no_answer(tmp_path: Path, small_tokenizer_dir: Path, what: str) -> None:
    """Different short answers behind one long text without loss stay; an edited copy of the text goes."""
    make, settings = SIDES[what]
    rows = write_rows(tmp_path / "rows.jsonl", [make("Paris is one"), make("Rome was another"), make("PARIS is one")])
    config = data_config(tmp_path, rows, dedupe="near", max_tokens=None, **settings)
    store = open_or_build(config, str(small_tokenizer_dir))
    assert [row for _, row in places(store)] == [1, 2]


def test_all_learns_the_question_too(tmp_path: Path, small_tokenizer_dir: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [chat(LONG, "Paris"), chat(LONG, "Rome")])
    for loss_type, num_kept in (("response_only", 2), ("all", 1)):
        config = data_config(tmp_path / loss_type, rows, dedupe="near", max_tokens=None, loss_type=loss_type)
        assert open_or_build(config, str(small_tokenizer_dir)).num_samples == num_kept


@pytest.mark.parametrize("system", ["", "be good", text_of(8, 60)])
def test_a_cut_row_is_compared_by_what_is_stored(tmp_path: Path, small_tokenizer_dir: Path, system: str) -> None:
    """Rows that differ only in front of the cut stay; rows that differ only behind it go."""
    front, other, behind = text_of(1, 150), text_of(2, 150), text_of(3, 3000)
    if system:
        rows = [chat("q", f"{front} {behind}", system), chat("q", f"{other} {behind}", system)]
        rows.append(chat("q", f"{front} {text_of(4, 3000)}", system))
    else:
        rows = [{"text": f"{front} {behind}"}, {"text": f"{other} {behind}"}]
        rows.append({"text": f"{front} {text_of(4, 3000)}"})
    file = write_rows(tmp_path / "rows.jsonl", rows)
    config = data_config(tmp_path, file, dedupe="near", max_tokens=500, too_long="truncate")
    store = open_or_build(config, str(small_tokenizer_dir))
    assert [row for _, row in places(store)] == [1, 2]


def test_an_index_refuses_rows_that_it_cannot_name() -> None:
    keys = np.broadcast_to(np.zeros((1, 10), np.uint64), (1 << 29, 10))
    with pytest.raises(DataError, match="536,870,912 different rows exceed the 536,870,911"):
        Index(2, 8, 1).add(keys, (1 << 29) - 1)


ITEMS = ["Rome", "Oslo", "Lima", "Cairo", "Delhi", "Quito", "Paris", "Accra"]
TEMPLATES = {
    "short": lambda a, b, n: chat(f"What is {n} + {n * 7 % 50}?", f"It is {n + n * 7 % 50}."),
    "filled in": lambda a, b, n: chat(
        f"How do I get from {a} to {b} with {n} bags? Name the train, and what it costs.",
        f"From {a} to {b}, take train {n}, which leaves {a} at {n % 24}:05. {n} bags cost {n * 3} more.",
    ),
    "one question, many answers": lambda a, b, n: chat(
        "Write a sentence about a town that you like, in simple words, without naming the country.", f"{a} {n} {b}."
    ),
    "one answer, many questions": lambda a, b, n: chat(f"Is {a} (district {n}) in the same country as {b}?", "No."),
    "a long system prompt": lambda a, b, n: chat(f"{a}, {n}?", f"{b}.", text_of(0, 300)),
    "a long system prompt and one answer": lambda a, b, n: chat(f"{a}, {n}, {b}?", "No.", text_of(0, 300)),
    "two languages": lambda a, b, n: chat(
        f"请把第{n}号城市{a}翻译成中文。", f"{a}是第{n}号，{b}不是，他们相隔{n * 3}公里。"
    ),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_near_leaves_different_rows_of_a_template_alone(
    tmp_path: Path, small_tokenizer_dir: Path, template: str
) -> None:
    rows = [TEMPLATES[template](ITEMS[n % 8], ITEMS[(n // 8 + n + 1) % 8], 100 + n) for n in range(64)]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    store = open_or_build(data_config(tmp_path, file, dedupe="near"), str(small_tokenizer_dir))
    assert (store.num_samples, store.meta.counts["near_rows"]) == (64, 0)


def key_of(question: str, answer: str) -> Any:
    row = Conversation((Message("user", question), Message("assistant", answer)), Origin("x", 1))
    return row_key("near", row, ())


@pytest.mark.parametrize("num_edits", [1, 4, 8, 20])
def test_signatures_are_as_alike_as_the_shingles(num_edits: int) -> None:
    """Their bytes for prompts and for answers each estimate the Jaccard index, which decides."""
    expected, found = [], []
    for seed in range(40):
        questions, answers = text_of(seed, 100), text_of(seed + 5000, 100)
        others = edited(questions, num_edits, seed), edited(answers, 2 * num_edits, seed)
        # a word has four bytes of prompts, and four of answers
        one, other = (key_of(*texts)[EXACT_WORDS:].view(np.uint8) for texts in ((questions, answers), others))
        found.append((one == other).reshape(-1, 2, 4).mean((0, 2)))
        pairs = (("user", questions, others[0]), ("assistant", answers, others[1]))
        shingles = [
            [{tuple([role, *text.split()][i : i + 3]) for i in range(99)} for text in pair] for role, *pair in pairs
        ]
        expected.append([len(one & other) / len(one | other) for one, other in shingles])
    assert np.abs(np.mean(found, axis=0) - np.mean(expected, axis=0)).max() < 0.03


def many(num_rows: int) -> list[Row]:
    """Rows of which every fifth is equal to an earlier one, and every seventh an edited copy."""
    rows = [chat(text_of(n, 30), text_of(n + 9000, 30)) for n in range(num_rows)]
    for n in range(10, num_rows):
        other = random.Random(n).randrange(n)
        if n % 5 == 0:
            rows[n] = rows[other]
        elif n % 7 == 0:
            question, answer = (turn["content"] for turn in rows[other]["messages"])
            rows[n] = chat(question.upper(), answer + " it is")
    return rows


def test_any_number_of_processes_keeps_the_same_rows(tmp_path: Path, small_tokenizer_dir: Path) -> None:
    rows = many(800)
    file = write_rows(tmp_path / "rows.jsonl", rows)
    one, three = (
        open_or_build(data_config(tmp_path / str(n), file, dedupe="near", num_procs=n), str(small_tokenizer_dir))
        for n in (1, 3)
    )
    assert_equal(one, three)
    assert one.meta.fingerprint == three.meta.fingerprint
    assert one.meta.counts["equal_rows"] > 100
    assert one.meta.counts["near_rows"] > 80
    # each row that went is near one that stayed before it, and none that stayed is
    keys = np.stack([key_of(*(turn["content"] for turn in row["messages"])) for row in rows])
    stayed = [row - 1 for _, row in places(one)]
    for row in range(800):
        before = [other for other in stayed if other < row]
        assert are_near(keys[before], keys[row]).any() == (row not in stayed)


TOKEN_ROWS = st.lists(
    st.lists(st.tuples(st.integers(5, 7), st.booleans()), min_size=2, max_size=4), min_size=1, max_size=60
)


@given(rows=TOKEN_ROWS)
@hypothesis_settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_exact_drops_no_row_whose_ids_or_mask_differ(
    tmp_path: Path, small_tokenizer_dir: Path, rows: list[list[tuple[int, bool]]]
) -> None:
    """What stays is the first of each different row, in the order of the file."""
    lines = [
        {"input_ids": [token for token, _ in row] + [9], "labels": [t if m else -100 for t, m in row] + [9]}
        for row in rows
    ]
    file = write_rows(tmp_path / "rows.jsonl", lines)
    whole, exact = (
        open_or_build(data_config(tmp_path / policy, file, template=None, dedupe=policy), str(small_tokenizer_dir))
        for policy in ("off", "exact")
    )
    assert samples(exact) == list(dict.fromkeys(samples(whole)))
    assert exact.meta.counts["equal_rows"] == whole.num_samples - exact.num_samples


@given(seed=st.integers(0, 1000), bits=st.sampled_from([1, 20, 64]))
@hypothesis_settings(max_examples=6, deadline=None)
def test_an_index_finds_the_first_row_of_each_place(seed: int, bits: int) -> None:
    """Through several growths, with few and many different words, for one place of two words and for three of one."""
    draw = np.random.default_rng(seed)
    keys = draw.integers(0, (1 << bits) - 1, (5000, 5), dtype=np.uint64, endpoint=True)
    for first, places, width in ((0, 1, 2), (2, 3, 1)):
        index, done = Index(first, places, width), 0
        known: dict[tuple[int, ...], int] = {}
        for row, words in enumerate(keys.tolist()):
            for place in range(places):
                at = first + place * width
                known.setdefault((place, *words[at : at + width]), row)
        while done < len(keys):
            some = int(draw.integers(1, 2000))
            index.add(keys[: done + some], done)
            done += some
        others = draw.integers(0, (1 << bits) - 1, (300, 5), dtype=np.uint64, endpoint=True)
        wanted = np.concatenate([keys[::7], others])
        expected = [
            [known.get((p, *words[first + p * width : first + (p + 1) * width]), -1) for p in range(places)]
            for words in wanted.tolist()
        ]
        assert index.find(keys, wanted).reshape(-1, places).tolist() == expected


def reasoned(*turns: tuple[str, str]) -> Row:
    messages = [
        {"role": role, "content": text, **({"reasoning_content": f"so {text}"} if role == "assistant" else {})}
        for question, answer in turns
        for role, text in (("user", question), ("assistant", answer))
    ]
    return {"messages": messages}


def test_rows_are_compared_whole_where_each_becomes_several_samples(tmp_path: Path, small_tokenizer_dir: Path) -> None:
    """Two conversations that begin alike share a sample and both stay; a repeated one goes with all its samples."""
    rows = [reasoned(("a", "b"), ("c", "d")), reasoned(("a", "b"), ("e", "f")), reasoned(("a", "b"), ("c", "d"))]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    template = tmp_path / "question.jinja"
    template.write_text(KEEPS["question"])
    config = data_config(tmp_path, file, template=str(template), dedupe="exact")
    store = open_or_build(config, str(small_tokenizer_dir))
    assert [row for _, row in places(store)] == [1, 1, 2, 2]
    counts = store.meta.counts
    assert (counts["equal_rows"], counts["split_by_question"], counts["questions"], counts["duplicates"]) == (
        1,
        2,
        4,
        1,
    )
    with pytest.raises(DataError, match="2 rows have one content"):
        split_held_out(store.row_keys, 0.3, 0, store.hashes)


def test_settings_are_told_apart(tmp_path: Path, small_tokenizer_dir: Path) -> None:
    """By the fingerprint, and by name where a built set is opened; rows in memory are as good as a file."""
    rows, tokenizer = [chat("q", "a"), chat("q", "a"), chat("q", "b")], str(small_tokenizer_dir)
    settings: dict[str, Any] = {"root": tmp_path, "template": "chatml"}
    store = flatout.build_data(rows, tokenizer=tokenizer, name="d", dedupe="exact", **settings)
    assert store.num_samples == 2
    assert store.meta.settings["dedupe"] == "exact"
    for other in ("near", "off"):
        with pytest.raises(UsageError, match=f"differs: dedupe=exact, but {other} is configured"):
            flatout.build_data(rows, tokenizer=tokenizer, name="d", dedupe=other, **settings)
        with pytest.raises(DataError, match=f"was built with dedupe=exact, but {other} is configured"):
            open_or_build(DataConfig(name="d", root=tmp_path, dedupe=other), tokenizer)
    for same in ({"dedupe": "exact"}, {}):
        assert open_or_build(DataConfig(name="d", root=tmp_path, **same), tokenizer).num_samples == 2
    assert DataConfig.model_validate({"dedupe": json.loads("false")}).dedupe == "off", "a bare `off` in YAML"
    with pytest.raises(ValueError, match="'exact', 'near' or 'off'"):
        DataConfig.model_validate({"dedupe": "fuzzy"})
