from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flatout.data.statistics import padding_share, statistics_lines
from flatout.data.token_store import StoreMeta, TokenStore


def _store(lengths: list[int], labels: list[int]) -> TokenStore:
    total = sum(lengths)
    counts = {"rows": len(lengths) + 2, "bad": 2, "duplicates": 1}
    meta = StoreMeta("d", "f", "t", "t", "c", "c", 9, counts=counts)
    none = np.zeros(len(lengths))
    return TokenStore(
        folder=Path("d"),
        token_ids=np.zeros(total, np.int32),
        loss_mask=np.zeros(total, np.bool_),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        num_label_tokens=np.array(labels, np.int64),
        hashes=none.astype(np.uint64),
        files=none.astype(np.int32),
        rows=none.astype(np.int64),
        meta=meta,
    )


def test_padding_of_one_batch_is_what_a_hand_counts():
    assert padding_share(np.array([1, 3, 4, 8]), 4) == pytest.approx(1 - 16 / 32)
    assert padding_share(np.array([1, 3, 4, 8]), 1) == 0.0
    assert padding_share(np.full(10, 7), 4) == 0.0  # a ragged last batch pads nothing


def test_numbers():
    text = "\n".join(statistics_lines(_store([1, 2, 3, 4, 5, 100], [0, 1, 2, 3, 4, 40])))
    bars = [(1, 1, 1), (2, 2, 1), (3, 4, 2), (5, 8, 1), (9, 16, 0), (17, 32, 0), (33, 64, 0), (65, 128, 1)]
    assert "\n".join(f"{low:>7}-{high:<7} {count:>9,} {'█' * 20 * count}" for low, high, count in bars) in text
    for part in (
        "samples 6  tokens 115  label",
        "label tokens 50 (43.5%)",
        "p50 4",
        "p100 100",
        "bad rows skipped: 2",
        "duplicates: 1",
    ):
        assert part in text


def test_what_was_lost_and_whose_the_tokens_are_in_eighty_columns(tmp_path):
    store = _store([10, 20, 30, 40], [1, 2, 3, 10])
    mask = np.zeros(100, np.bool_)
    mask[[9, 12, 14, 40, 41, 42, *range(90, 100)]] = True
    percentiles = {"p50": 25, "p90": 9000, "p95": 9000, "p99": 9000, "p100": 9000}
    (tmp_path / "report.json").write_text(json.dumps({"length_percentiles": percentiles}))
    counts = {**store.meta.counts, "tokens": 400, "label_tokens": 64, "truncated_tokens": 300, "truncated_labels": 48}
    meta = replace(
        store.meta,
        counts=counts,
        settings={"max_tokens": 40},
        sources=("chats", "more/*.jsonl", "org/set"),
        files=("chats/a.jsonl", "chats/b.jsonl", "more/" + "long" * 20 + ".jsonl", "org/set[train]"),
    )
    shown = statistics_lines(
        replace(store, folder=tmp_path, loss_mask=mask, meta=meta, files=np.array([0, 1, 2, 3], np.int32))
    )
    for line in (
        "a sample: 21.0 tokens without loss (prompts), 4.0 with (answers)",
        "turns with loss: 1.2 a sample, at most 2",
        "rows before the cut: p50 25  p90 9000  p95 9000  p99 9000  p100 9000",
        "lost to max_tokens=40: 300 of 400 tokens (75.0%)",
        "lost to max_tokens=40: 48 of 64 label tokens (75.0%)",
        "   40.0% of tokens   62.5% of labels          1 samples  org/set",
        "   30.0% of tokens   18.8% of labels          2 samples  chats",
        "   30.0% of tokens   18.8% of labels          1 samples  more/*.jsonl",
    ):
        assert line in shown
    assert max(map(len, shown)) <= 80
