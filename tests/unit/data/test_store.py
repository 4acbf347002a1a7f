from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flatout.data.token_store import StoreMeta, TokenStore, new_store
from flatout.data.tokenizer import load_tokenizer
from flatout.errors import DataError

META = StoreMeta(
    "d", "f" * 32, "tok", "t" * 32, "chatml", "{{ messages }}", 300, {"max_tokens": 64}, ("a.jsonl",), ("a.jsonl",)
)


def _write(folder: Path, samples: list[tuple[list[int], list[bool]]], per_append: int = 2) -> TokenStore:
    with new_store(folder) as writer:
        for begin in range(0, len(samples), per_append):
            part = samples[begin : begin + per_append]
            writer.append(
                np.concatenate([np.array(ids, np.int32) for ids, _ in part]),
                np.concatenate([np.array(loss_mask, np.bool_) for _, loss_mask in part]),
                np.array([len(ids) for ids, _ in part], np.int64),
                np.zeros(len(part), np.int32),
                np.arange(begin + 1, begin + 1 + len(part), dtype=np.int64),
            )
        writer.finish(replace(META, max_token_id=writer.max_token_id), {"counts": {}})
    return TokenStore.open(folder)


SAMPLES = [([5, 6, 7], [False, True, True]), ([8], [False]), ([9, 299], [False, True])]


@pytest.mark.parametrize("per_append", [1, 2, 3])
def test_what_is_written_is_read(tmp_path: Path, per_append: int) -> None:
    store = _write(tmp_path / "d", SAMPLES, per_append)
    assert store.num_samples == 3
    assert store.offsets.tolist() == [0, 3, 4, 6]
    assert store.lengths.tolist() == [3, 1, 2]
    assert store.num_labels.tolist() == [2, 0, 1]
    assert (store.token_ids.dtype, store.loss_mask.dtype) == (np.int32, np.bool_)
    assert isinstance(store.token_ids, np.memmap)
    for index, (ids, loss_mask) in enumerate(SAMPLES):
        got_ids, got_mask = store.sample(index)
        assert (got_ids.tolist(), got_mask.tolist()) == (ids, loss_mask)
    assert str(store.origin(2)) == "a.jsonl:3"
    assert store.meta == replace(META, max_token_id=299)


def test_arrays_are_plain_npy(tmp_path: Path) -> None:
    _write(tmp_path / "d", SAMPLES)
    assert np.load(tmp_path / "d" / "token_ids.npy", allow_pickle=False).tolist() == [5, 6, 7, 8, 9, 299]


def _flip_bit(folder: Path) -> None:
    data = bytearray((folder / "token_ids.npy").read_bytes())
    data[130] ^= 4
    (folder / "token_ids.npy").write_bytes(data)


def _cut(folder: Path) -> None:
    data = (folder / "loss_mask.npy").read_bytes()
    (folder / "loss_mask.npy").write_bytes(data[:-2])


def _remove(folder: Path) -> None:
    (folder / "offsets.npy").unlink()


def _newer(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"version": 99}))


def _shorten(folder: Path) -> None:
    np.save(folder / "num_labels.npy", np.zeros(2, np.int64))


def _pickle(folder: Path) -> None:
    np.save(folder / "rows.npy", np.array([{}, 1, 2], dtype=object), allow_pickle=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_flip_bit, r"token_ids\.npy: the content does not match its hash"),
        (_cut, r"loss_mask\.npy: damaged or missing"),
        (_remove, r"offsets\.npy: damaged or missing"),
        (_newer, r"manifest\.json: found format version 99, but this flatout reads 2"),
        (_shorten, r"num_labels\.npy: found int64 \(2,\), expected int64 \(3,\)"),
        (_pickle, r"rows\.npy: damaged or missing"),
        (lambda folder: (folder / "manifest.json").unlink(), r"is not a built data set \(manifest\.json is missing\)"),
        (lambda folder: (folder / "manifest.json").write_text("{"), r"manifest\.json: not readable as JSON"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    _write(tmp_path / "d", SAMPLES)
    damage(tmp_path / "d")
    with pytest.raises(DataError, match=message):
        TokenStore.open(tmp_path / "d")


def test_a_failed_build_leaves_the_old_store(tmp_path: Path) -> None:
    _write(tmp_path / "d", SAMPLES)

    def fail() -> None:
        with new_store(tmp_path / "d") as writer:
            writer.append(*_one_sample())
            raise RuntimeError("power")

    with pytest.raises(RuntimeError, match="power"):
        fail()
    assert TokenStore.open(tmp_path / "d").num_samples == 3
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_new_build_takes_the_place_of_the_old(tmp_path: Path) -> None:
    _write(tmp_path / "d", SAMPLES)
    assert _write(tmp_path / "d", SAMPLES[:1]).num_samples == 1
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def _one_sample() -> tuple[np.ndarray, ...]:  # type: ignore[type-arg]
    ones = np.ones(1, np.int64)
    return ones.astype(np.int32), ones.astype(np.bool_), ones, ones.astype(np.int32), ones


def _edit(folder: Path, **changes: object) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for name, value in changes.items():
        (manifest if name in manifest else manifest["meta"])[name] = value
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": 1}, r"manifest\.json: meta\.counts: input should be an object"),
        ({"counts": {"rows": "many"}}, r"meta\.counts\.rows: input should be a valid integer"),
        ({"tokenizer": None}, r"meta\.tokenizer: input should be a valid string"),
        ({"surprise": 1}, r"meta\.surprise: unexpected keyword argument"),
        ({"arrays": []}, r"manifest\.json: arrays: input should be an object"),
        ({"arrays": {"offsets": {"length": -1, "xxh3_128": ""}}}, r"arrays\.offsets\.length: input should be greater"),
        ({"version": [2]}, r"found format version \[2\], but this flatout reads 2"),
        ({"files": []}, r"the arrays have inconsistent lengths"),
    ],
)
def test_an_edited_manifest_is_refused_by_field(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    _write(tmp_path / "d", SAMPLES)
    _edit(tmp_path / "d", **changes)
    with pytest.raises(DataError, match=message):
        TokenStore.open(tmp_path / "d")


def test_a_torn_header_is_told(tmp_path: Path) -> None:
    with new_store(tmp_path / "x") as writer:
        one = np.ones(1, np.int64)
        writer.append(np.array([1, 2], np.int32), np.array([False, True]), one * 2, np.zeros(1, np.int32), one)
        writer.finish(StoreMeta("x", "f", "t", "d", "", "", 9, files=("rows",)), {})
    path = tmp_path / "x" / "rows.npy"
    path.write_bytes(path.read_bytes().replace(b"(1,)}", b"(1,( "))
    with pytest.raises(DataError, match=r"rows\.npy: damaged or missing"):
        TokenStore.open(tmp_path / "x")


@pytest.mark.parametrize("config", ["5", '{"tokenizer_class": 5}'])
def test_a_tokenizer_of_wrong_types_is_told(config: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(config)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))
