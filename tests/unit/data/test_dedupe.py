"""`data.dedupe`: rows that repeat an earlier one are left out and counted, and no other row is."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from row_cases import data_config, write_rows
from test_build_resumed import assert_equal
from test_lost_reasoning import KEEPS

import flatout
from flatout.cli.main import main
from flatout.config.schema import DataConfig
from flatout.data.build import open_or_build
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


def test_the_command_drops_equal_rows_of_all_sources_and_says_so(tmp_path, small_tokenizer_dir, capsys):
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


def test_off_keeps_all_rows_and_names_the_setting(tmp_path, small_tokenizer_dir):
    said: list[str] = []
    file = write_rows(tmp_path / "rows.jsonl", [chat("q", "a"), chat("q", "a")])
    store = open_or_build(data_config(tmp_path, file), str(small_tokenizer_dir), log=said.append)
    assert (store.num_samples, store.meta.counts["equal_rows"], store.meta.counts["duplicates"]) == (2, 0, 1)
    assert any("1 samples are duplicates; they are kept; data.dedupe=exact leaves out" in line for line in said)
    assert store.meta.settings["dedupe"] == "off"


def many(num_rows: int) -> list[Row]:
    """Rows of which every fifth is equal to an earlier one."""
    rows = [chat(text_of(n, 8), text_of(n + 9000, 8)) for n in range(num_rows)]
    for n in range(10, num_rows):
        other = random.Random(n).randrange(n)
        if n % 5 == 0:
            rows[n] = rows[other]
    return rows


def test_any_number_of_processes_keeps_the_same_rows(tmp_path, small_tokenizer_dir):
    rows = many(2600)  # more chunks than are in flight at once
    file = write_rows(tmp_path / "rows.jsonl", rows)
    one, two = (
        open_or_build(data_config(tmp_path / str(n), file, dedupe="exact", num_procs=n), str(small_tokenizer_dir))
        for n in (1, 2)
    )
    assert_equal(one, two)
    assert one.meta.fingerprint == two.meta.fingerprint
    assert one.meta.counts["equal_rows"] > 100
    texts = [json.dumps(row) for row in rows]
    first = [row for row, own in enumerate(texts) if texts.index(own) == row]
    assert [row - 1 for _, row in places(one)] == first


TOKEN_ROWS = st.lists(
    st.lists(st.tuples(st.integers(5, 7), st.booleans()), min_size=2, max_size=4), min_size=1, max_size=60
)


@given(rows=TOKEN_ROWS)
@hypothesis_settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_exact_drops_no_row_whose_ids_or_mask_differ(tmp_path, small_tokenizer_dir, rows):
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


def reasoned(*turns: tuple[str, str]) -> Row:
    messages = [
        {"role": role, "content": text, **({"reasoning_content": f"so {text}"} if role == "assistant" else {})}
        for question, answer in turns
        for role, text in (("user", question), ("assistant", answer))
    ]
    return {"messages": messages}


def test_rows_are_compared_whole_where_each_becomes_several_samples(tmp_path, small_tokenizer_dir):
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


def test_settings_are_told_apart(tmp_path, small_tokenizer_dir):
    """By the fingerprint, and by name where a built set is opened; rows in memory are as good as a file."""
    rows, tokenizer = [chat("q", "a"), chat("q", "a"), chat("q", "b")], str(small_tokenizer_dir)
    settings: dict[str, Any] = {"root": tmp_path, "template": "chatml"}
    store = flatout.build_data(rows, tokenizer=tokenizer, name="d", dedupe="exact", **settings)
    assert store.num_samples == 2
    assert store.meta.settings["dedupe"] == "exact"
    with pytest.raises(UsageError, match="differs: dedupe=exact, but off is configured"):
        flatout.build_data(rows, tokenizer=tokenizer, name="d", dedupe="off", **settings)
    for same in ({"dedupe": "exact"}, {}):
        assert open_or_build(DataConfig(name="d", root=tmp_path, **same), tokenizer).num_samples == 2
    assert DataConfig.model_validate({"dedupe": json.loads("false")}).dedupe == "off", "a bare `off` in YAML"
    with pytest.raises(UsageError, match=r"dedupe: .* datatrove or text-dedup") as refused:
        flatout.build_data(rows, tokenizer=tokenizer, name="d", dedupe="near", **settings)
    assert refused.value.fixes[0].settings == {"data.dedupe": "exact"}
