from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatout.data.store_writer import StoreWriter, new_store
from flatout.data.token_store import StoreMeta, TokenStore
from flatout.data.tokenizer import load_tokenizer
from flatout.errors import DataError

META = StoreMeta(
    "d", "f" * 32, "tok", "t" * 32, "chatml", "{{ messages }}", 300, {"max_tokens": 64}, ("a.jsonl",), ("a.jsonl",)
)


Samples = list[tuple[list[int], list[bool]]]


def _append(writer: StoreWriter, part: Samples, first: int) -> None:
    writer.append(
        np.concatenate([np.array(ids, np.int32) for ids, _ in part]),
        np.concatenate([np.array(loss_mask, np.bool_) for _, loss_mask in part]),
        np.array([len(ids) for ids, _ in part], np.int64),
        np.zeros(len(part), np.int32),
        np.arange(first + 1, first + 1 + len(part), dtype=np.int64),
    )


def _write(
    folder: Path, samples: Samples, per_append: int = 2, num_ids: int = 300, *, ends_shards: bool = False
) -> TokenStore:
    with new_store(folder, num_ids) as writer:
        for begin in range(0, len(samples), per_append):
            _append(writer, samples[begin : begin + per_append], begin)
            if ends_shards:
                writer.close_shard({})
        writer.finish(replace(META, max_token_id=writer.max_token_id), {"counts": {}})
    return TokenStore.open(folder)


SAMPLES = [([5, 6, 7], [False, True, True]), ([8], [False]), ([9, 299], [False, True])]


@pytest.mark.parametrize(("num_ids", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.int32)])
@pytest.mark.parametrize("per_append", [1, 2, 3])
def test_what_is_written_is_read(tmp_path, per_append, num_ids, dtype):
    store = _write(tmp_path / "d", SAMPLES, per_append, num_ids)
    assert store.num_samples == 3
    assert store.offsets.tolist() == [0, 3, 4, 6]
    assert store.lengths.tolist() == [3, 1, 2]
    assert store.num_label_tokens.tolist() == [2, 0, 1]
    assert (store.token_ids.dtype, store.loss_mask.dtype) == (dtype, np.bool_)
    assert isinstance(store.token_ids, np.memmap)
    for index, (ids, loss_mask) in enumerate(SAMPLES):
        got_ids, got_mask = store.sample(index).pair
        assert (got_ids.tolist(), got_mask.tolist()) == (ids, loss_mask)
        assert (got_ids.dtype, got_mask.dtype) == (np.int32, np.bool_)
    assert str(store.origin(2)) == "a.jsonl:3"
    assert store.meta == replace(META, max_token_id=299)


def test_an_id_beyond_the_columns_type_is_refused(tmp_path):
    with pytest.raises(ValueError, match="token id 70000 is beyond"):
        _write(tmp_path / "d", [([5, 70_000], [False, True])], num_ids=1 << 16)
    assert _write(tmp_path / "d", [([5, 70_000], [False, True])], num_ids=70_001).sample(0).token_ids.tolist() == [
        5,
        70_000,
    ]


@pytest.mark.parametrize("per_shard", [1, 2, 5, 100])
def test_a_mask_of_any_shards_is_the_same(tmp_path, per_shard):
    rng = np.random.default_rng(per_shard)
    lengths = rng.integers(1, 40, 60)
    samples = [(rng.integers(0, 300, n).tolist(), (rng.random(n) < 0.5).tolist()) for n in lengths]
    store = _write(tmp_path / "d", samples, per_append=per_shard, ends_shards=True)
    mask = np.concatenate([part for _, part in samples])
    ids = np.concatenate([part for part, _ in samples])
    assert np.array_equal(store.token_ids, ids)
    assert np.array_equal(np.asarray(store.loss_mask), mask)
    for index, (own_ids, own_mask) in enumerate(samples):
        assert [part.tolist() for part in store.sample(index).pair] == [own_ids, own_mask]
    for _ in range(50):
        start, end = sorted(rng.integers(0, len(mask) + 1, 2).tolist())
        assert np.array_equal(store.loss_mask[start:end], mask[start:end])
        places = rng.integers(0, len(mask), (3, 5))
        assert np.array_equal(store.loss_mask[places], mask[places])
    assert np.array_equal(store.loss_mask[mask], mask[mask])


def test_arrays_are_plain_npy(tmp_path):
    _write(tmp_path / "d", SAMPLES)
    assert np.load(tmp_path / "d" / "token_ids.npy", allow_pickle=False).tolist() == [5, 6, 7, 8, 9, 299]
    bits = np.load(tmp_path / "d" / "loss_mask.npy", allow_pickle=False)
    assert np.unpackbits(bits, bitorder="little").tolist() == [0, 1, 1, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("name", ["token_ids", "loss_mask"])
def test_a_damaged_shard_is_named_when_it_is_read_and_not_before(tmp_path, name):
    store = _write(tmp_path / "d", SAMPLES, per_append=1, ends_shards=True)
    whole = [[part.tolist() for part in store.sample(index).pair] for index in range(3)]
    _flip_bit(tmp_path / "d", name, -1)
    again = TokenStore.open(tmp_path / "d")
    assert [[part.tolist() for part in again.sample(index).pair] for index in range(2)] == whole[:2]
    for _ in range(2):
        with pytest.raises(DataError, match=rf"{name}\.npy: shard 2 \(samples 3 to 3\): the content does not match"):
            again.sample(2)


@pytest.mark.parametrize("name", ["offsets", "num_labels", "hashes", "files", "rows", "unit_starts"])
def test_damage_to_what_the_plan_reads_is_found_at_once(tmp_path, name):
    _write(tmp_path / "d", SAMPLES, per_append=1, ends_shards=True)
    _flip_bit(tmp_path / "d", name, {"files": -4, "unit_starts": -1}.get(name, -8))
    with pytest.raises(DataError, match=rf"{name}\.npy: shard 2 "):
        TokenStore.open(tmp_path / "d")


def test_a_begun_store_goes_on_from_its_last_whole_shard(tmp_path):
    def begin(identity: dict[str, int], upto: int, *, breaks: bool) -> list[dict[str, Any]]:
        states: list[Any] = []
        with new_store(tmp_path / "d", 300, identity, states.append) as writer:
            assert writer.num_samples == len(states)
            for number in range(len(states), upto):
                _append(writer, SAMPLES[number % 3 : number % 3 + 1], number)
                writer.close_shard({"number": number})
            if breaks:
                _append(writer, SAMPLES, 90)  # of a shard that is not finished
                raise RuntimeError("killed")
            writer.finish(replace(META, max_token_id=writer.max_token_id), {})
        return states

    with pytest.raises(RuntimeError):
        begin({"rows": 1}, 3, breaks=True)
    assert not (tmp_path / "d").exists()
    journal = tmp_path / ".d.tmp" / "build.jsonl"
    journal.write_bytes(journal.read_bytes() + b'{"shard": {"num_sam')  # torn by a power cut
    with pytest.raises(RuntimeError):
        begin({"rows": 1}, 5, breaks=True)
    _flip_bit(tmp_path / ".d.tmp", "rows", 8 * 4)  # the fifth sample's: four shards are whole
    assert [state["number"] for state in begin({"rows": 1}, 6, breaks=False)] == [0, 1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d"]
    store = TokenStore.open(tmp_path / "d")
    assert [store.sample(i).token_ids.tolist() for i in range(6)] == [SAMPLES[i % 3][0] for i in range(6)]
    assert (store.rows.tolist(), store.meta.max_token_id) == ([1, 2, 3, 4, 5, 6], 299)
    with pytest.raises(RuntimeError):
        begin({"rows": 1}, 2, breaks=True)
    assert begin({"rows": 2}, 2, breaks=False) == []  # of other rows
    assert TokenStore.open(tmp_path / "d").num_samples == 2


def _flip_bit(folder: Path, name: str = "token_ids", at: int = 2) -> None:
    """Change a byte of the data, counted from its start, or if negative from its end."""
    data = bytearray((folder / f"{name}.npy").read_bytes())
    data[at if at < 0 else 128 + at] ^= 4
    (folder / f"{name}.npy").write_bytes(data)


def _saved(values: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values, allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("rows.npy", lambda old: old.replace(b"(3,)}", b"(3,( "), "damaged or missing"),
        ("rows.npy", lambda old: _saved(np.array([{}, 1, 2], object)), "damaged or missing"),
        ("loss_mask.npy", lambda old: old[:-2], "damaged or missing"),
        ("offsets.npy", None, "damaged or missing"),
        ("num_labels.npy", lambda old: _saved(np.zeros(2, np.int64)), r"found int64 \(2,\), expected int64 \(3,\)"),
        ("manifest.json", lambda old: json.dumps(json.loads(old) | {"version": 99}).encode(),
         "found format version 99, but this flatout reads 4"),
        ("manifest.json", None, r"is not a built data set \(manifest\.json is missing\)"),
        ("manifest.json", lambda old: b"{", "not readable as JSON"),
    ],
)  # fmt: skip
def test_damage_is_named(tmp_path, name, damage, message):
    _write(tmp_path / "d", SAMPLES)
    file = tmp_path / "d" / name
    old = file.read_bytes()
    file.unlink()
    if damage is not None:
        file.write_bytes(damage(old))
    with pytest.raises(DataError, match=message) as caught:
        TokenStore.open(tmp_path / "d")
    assert name in caught.value.text


def test_a_failed_build_leaves_the_old_store(tmp_path):
    _write(tmp_path / "d", SAMPLES)

    def fail() -> None:
        with new_store(tmp_path / "d", 300) as writer:
            writer.append(*_one_sample())
            raise RuntimeError("power")

    with pytest.raises(RuntimeError, match="power"):
        fail()
    assert TokenStore.open(tmp_path / "d").num_samples == 3
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_new_build_takes_the_place_of_the_old(tmp_path):
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
        ({"columns": []}, r"manifest\.json: columns: input should be an object"),
        ({"columns": {"../x": {"dtype": "int32", "per": "token"}}}, r"columns\.\.\./x.*: string should match pattern"),
        ({"columns": {"x": {"dtype": "object", "per": "token"}}}, r"columns\.x\.dtype: input should be 'bits'"),
        ({"columns": {"x": {"dtype": "int32", "per": "token"}}}, r"columns: files is missing"),
        ({"shards": [{"num_samples": -1, "num_tokens": 6, "xxh3": {}}]}, r"num_samples: input should be greater"),
        (
            {"shards": [{"num_samples": 3, "num_tokens": 6, "xxh3": {}, "num_units": 3}]},
            r"columns\.token_ids\.fingerprint: found",
        ),
        ({"shards": []}, r"columns\.token_ids\.fingerprint: found"),
        ({"version": [2]}, r"found format version \[2\], but this flatout reads 4"),
        ({"files": []}, r"the arrays have inconsistent lengths"),
    ],
)
def test_an_edited_manifest_is_refused_by_field(tmp_path, changes, message):
    _write(tmp_path / "d", SAMPLES)
    _edit(tmp_path / "d", **changes)
    with pytest.raises(DataError, match=f"(?i){message}"):
        TokenStore.open(tmp_path / "d")


@pytest.mark.parametrize("config", ["5", '{"tokenizer_class": 5}'])
def test_a_tokenizer_of_wrong_types_is_told(config, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(config)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))
