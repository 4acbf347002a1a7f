"""Builds that end early: killed, or refused as soon as that is certain; the next one goes on from what is done."""

from __future__ import annotations

import os
import re
import time
from typing import Any

import numpy as np
import pytest
from row_cases import data_config, write_rows

from flatout.cli.main import main
from flatout.data.build import open_or_build
from flatout.data.token_store import TokenStore
from flatout.errors import DataError
from flatout.io.json_file import read_json
from tests.warm_process import WarmProcess

ARRAYS = ("token_ids", "loss_mask", "offsets", "num_label_tokens", "hashes", "files", "rows")


def assert_equal(one: TokenStore, other: TokenStore) -> None:
    for name in ARRAYS:
        assert np.array_equal(np.asarray(getattr(one, name)), np.asarray(getattr(other, name)))
    for name in ("counts", "files", "max_token_id", "end_of_turn", "template"):
        assert getattr(one.meta, name) == getattr(other.meta, name)
    reports = [read_json(store.folder / "report.json") for store in (one, other)]
    for name in ("counts", "length_percentiles", "bad_rows", "rows"):
        assert reports[0][name] == reports[1][name]


def test_a_killed_build_goes_on_from_its_shards(tmp_path, small_tokenizer_dir, capsys):
    """SIGKILL the command after its first shard; the same command again finishes what is left, equal to the byte.

    A bad row of the first shard is still counted, and rows behind it that repeat some of before are still left out.
    """
    ids = np.random.default_rng(0).integers(5, 295, (512, 4200)).tolist()
    rows = [{"input_ids": row, "labels": row} for row in (*ids, *ids[:256], *ids[400:500])]
    rows.insert(3, {"input_ids": "broken"})
    file = write_rows(tmp_path / "rows.jsonl", rows)
    command = ["data", "build", str(file), "--tokenizer", str(small_tokenizer_dir)]
    command += ["--name", "d", "--root", str(tmp_path / "data"), "--max-tokens", "0", "--num-procs", "1"]
    command += ["--on-bad-row", "skip", "--dedupe", "exact"]
    journal = tmp_path / "data" / "built_dataset" / ".d.tmp" / "build.jsonl"
    killed = WarmProcess(["-m", "flatout", *command], os.environ, tmp_path / "log")
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 1):
        assert killed.poll() is None, "ended before its first shard"
        time.sleep(0.002)
    killed.kill()
    killed.wait()
    num_shards = journal.read_bytes().count(b"\n") - 1
    assert main(command) == 0
    said = " ".join(capsys.readouterr().err.split())
    found = re.search(r"going on from an earlier build, which finished ([\d,]+) rows", said)
    assert found, said
    assert int(found[1].replace(",", "")) == num_shards * 512  # two chunks of 256 rows fill a shard
    assert not journal.parent.exists()
    store = TokenStore.open(tmp_path / "data" / "built_dataset" / "d")
    assert store.meta.counts["equal_rows"] == 356
    assert [store.sample(index).token_ids.tolist() for index in range(store.num_samples)] == ids
    config = data_config(tmp_path / "whole", file, on_bad_row="skip", dedupe="exact", template=None)
    assert_equal(store, open_or_build(config, str(small_tokenizer_dir)))


def chats(num_rows: int, *, empty_every: int) -> list[dict[str, Any]]:
    words = "the answer is yes " * 40
    return [
        {
            "messages": [
                {"role": "user", "content": f"question {number}"},
                {"role": "assistant", "content": "" if number % empty_every == 0 else words},
            ]
        }
        for number in range(1, num_rows + 1)
    ]


def test_a_refusal_comes_once_it_is_certain_and_keeps_what_is_done(tmp_path, small_tokenizer_dir):
    rows = write_rows(tmp_path / "rows.jsonl", chats(1500, empty_every=60))
    said: list[str] = []
    with pytest.raises(DataError, match=r"8 of the first 512 of at most 1501 rows have no answer to learn from"):
        open_or_build(data_config(tmp_path / "data", rows), str(small_tokenizer_dir), log=said.append)
    assert said[-1].startswith("512 rows are tokenized;")
    told = data_config(tmp_path / "data", rows, on_bad_row="skip")
    store = open_or_build(told, str(small_tokenizer_dir), log=said.append)
    assert "going on from an earlier build, which finished 512 rows" in said
    whole = open_or_build(data_config(tmp_path / "other", rows, on_bad_row="skip"), str(small_tokenizer_dir))
    assert_equal(store, whole)
    assert store.meta.fingerprint == whole.meta.fingerprint
    assert store.meta.counts["no_labels"] == 25


def test_as_many_empty_rows_as_are_allowed_do_not_end_a_build(tmp_path, small_tokenizer_dir):
    """Beyond the limit in the first chunks, but not of all rows: nothing is certain, and the set is built."""
    rows = (
        chats(300, empty_every=60)
        + [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}] * 4800
    )
    file = write_rows(tmp_path / "rows.jsonl", rows)
    store = open_or_build(data_config(tmp_path / "data", file), str(small_tokenizer_dir))
    assert (store.num_samples, store.meta.counts["no_labels"]) == (5095, 5)


def test_a_begun_build_of_other_rows_is_not_gone_on_with(tmp_path, small_tokenizer_dir):
    rows = write_rows(tmp_path / "rows.jsonl", chats(600, empty_every=60))
    with pytest.raises(DataError, match="8 of the first 512 of"):
        open_or_build(data_config(tmp_path / "data", rows), str(small_tokenizer_dir))
    write_rows(rows, chats(600, empty_every=61))
    said: list[str] = []
    store = open_or_build(
        data_config(tmp_path / "data", rows, on_bad_row="skip"), str(small_tokenizer_dir), log=said.append
    )
    assert not any("going on" in line for line in said)
    assert store.meta.counts["no_labels"] == 9
