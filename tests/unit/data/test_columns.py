"""Columns of a token store: written with it or added later, read by name, whole or not there; and its units."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_disk import BROKEN_DISK, FULL_DISK, Death, FaultyDisk

from flatout.data.add_column import add_column
from flatout.data.columns import Column
from flatout.data.store_writer import new_store
from flatout.data.token_store import StoreMeta, TokenStore
from flatout.errors import DataError, ResourceError, UsageError
from flatout.io.durable_io import DurableIO

META = StoreMeta("pairs", "f" * 32, "tok", "t" * 32, "", "", 300, sources=("a.jsonl",), files=("a.jsonl",))
SIZES = [2, 1, 3, 2]
LENGTHS = [9, 7, 4, 8, 6, 9, 7, 7]
PREFIXES = [3, 0, 4, 0]
COLUMNS = {
    "weight": Column("float32", "token", "how much a token counts"),
    "ref_logprob": Column("float64", "sample", "log-probability by the reference"),
    "kind": Column("int8", "unit", "0 pair, 1 single, 2 group"),
    "prefix_tokens": Column("int32", "unit", "tokens that the samples begin with in common"),
}


def values_of(sizes: Sequence[int] = SIZES, seed: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "weight": rng.random(sum(LENGTHS)).astype(np.float32),
        "ref_logprob": -rng.random(len(LENGTHS)),
        "kind": np.arange(len(sizes), dtype=np.int8),
        "prefix_tokens": np.array(PREFIXES[: len(sizes)], np.int32),
    }


def tokens_of() -> tuple[np.ndarray, np.ndarray]:
    """Ids of which the samples of a unit share those that PREFIXES says, and a mask without labels there."""
    ids, masks = [], []
    for unit, (size, shared) in enumerate(zip(SIZES, PREFIXES, strict=True)):
        prefix = np.arange(shared, dtype=np.int32) + 50 * unit
        for place in range(size):
            length = LENGTHS[len(ids)]
            own = np.concatenate([prefix, np.full(length - shared, 200 + place, np.int32)])
            ids.append(own)
            masks.append(np.arange(length) > shared)
    return np.concatenate(ids), np.concatenate(masks)


def write(
    folder: Path, columns: dict[str, Column] | None = None, *, shards: Sequence[int] = (8,), units: bool = True
) -> TokenStore:
    """Write the store in shards of so many samples, which are whole units."""
    columns, (ids, mask), values = COLUMNS if columns is None else columns, tokens_of(), values_of()
    per = {name: column.per for name, column in columns.items()}
    with new_store(folder, 300, columns=columns) as writer:
        first, sizes = 0, SIZES if units else [1] * len(LENGTHS)
        for count in shards:
            edges = np.cumsum([0, *sizes])
            own_units = slice(int(np.searchsorted(edges, first)), int(np.searchsorted(edges, first + count)))
            own_tokens = slice(sum(LENGTHS[:first]), sum(LENGTHS[: first + count]))
            where = {"token": own_tokens, "sample": slice(first, first + count), "unit": own_units}
            writer.append(
                ids[own_tokens], mask[own_tokens], np.array(LENGTHS[first : first + count]),
                np.zeros(count, np.int32), np.arange(first + 1, first + 1 + count),
                np.array(sizes[own_units]) if units else None,
                {name: values[name][where[per[name]]] for name in columns},
            )  # fmt: skip
            writer.close_shard({})
            first += count
        writer.finish(replace(META, max_token_id=writer.max_token_id), {"counts": {}})
    return TokenStore.open(folder)


@pytest.mark.parametrize("shards", [(8,), (3, 5), (2, 1, 3, 2)])
def test_columns_and_units_are_read_as_they_were_written(tmp_path, shards):
    store, values, ends = write(tmp_path / "d", shards=shards), values_of(), np.cumsum(LENGTHS)
    assert store.unit_offsets is not None
    assert store.unit_offsets.tolist() == [0, 2, 3, 6, 8]
    assert store.units_of(np.arange(8)).tolist() == [0, 0, 1, 2, 2, 2, 3, 3]
    assert np.array_equal(store.extra["prefix_tokens"], PREFIXES)
    assert all(isinstance(array, np.memmap) for array in store.extra.values())
    for index, unit in enumerate([0, 0, 1, 2, 2, 2, 3, 3]):
        sample = store.sample(index, list(COLUMNS))
        assert np.array_equal(sample.columns["weight"], values["weight"][ends[index] - LENGTHS[index] : ends[index]])
        assert sample.columns["ref_logprob"] == values["ref_logprob"][index]
        assert (sample.columns["kind"], sample.columns["prefix_tokens"]) == (unit, PREFIXES[unit])
        assert store.sample(index, ["kind"]).columns.keys() == {"kind"}
        assert not store.sample(index).columns
    recorded = json.loads((tmp_path / "d" / "manifest.json").read_text())["columns"]
    for name, column in COLUMNS.items():
        assert (recorded[name]["dtype"], recorded[name]["per"], recorded[name]["meaning"]) == (
            column.dtype, column.per, column.meaning,
        )  # fmt: skip
        assert len(recorded[name]["fingerprint"]) == 32
    assert len({column["fingerprint"] for column in recorded.values()}) == len(recorded)


def test_a_store_without_units_has_units_of_one(tmp_path):
    store = write(tmp_path / "d", {}, units=False)
    assert store.unit_offsets is None
    assert store.units_of(np.array([3, 1])).tolist() == [3, 1]


@pytest.mark.parametrize(("name", "index"), [("weight", 7), ("ref_logprob", None), ("kind", None)])
@pytest.mark.parametrize("later", [False, True])
def test_a_damaged_column_is_named(tmp_path, name, index, later):
    column = COLUMNS[name]
    store = write(tmp_path / "d", {} if later else {name: column}, shards=(3, 5))
    if later:
        store = add_column(store.folder, name, values_of()[name], per=column.per, meaning=column.meaning)
    file = store.folder / store.columns[name].file
    data = bytearray(file.read_bytes())
    data[-1] ^= 4
    file.write_bytes(data)
    with pytest.raises(DataError, match=rf"{file.name}: shard 1 \(samples 4 to 8\): the content does not match"):
        TokenStore.open(store.folder).sample(index or 0)


def test_a_column_is_added_later_and_replaced(tmp_path):
    plain = write(tmp_path / "d", {}, shards=(3, 5))
    before = {name: column.fingerprint for name, column in plain.columns.items()}
    marks = []
    for seed in (1, 2, 2, 1):
        own = values_of(SIZES, seed)
        store = add_column(plain.folder, "ref_logprob", own["ref_logprob"], per="sample", meaning="by step 0")
        assert [store.sample(i, ["ref_logprob"]).columns["ref_logprob"] for i in range(8)] == own[
            "ref_logprob"
        ].tolist()
        marks.append(store.columns["ref_logprob"].fingerprint)
        assert {name: store.columns[name].fingerprint for name in plain.columns} == {
            name: before[name] for name in plain.columns
        }
        assert len(list(plain.folder.glob("ref_logprob*.npy"))) == 1
    assert marks[0] == marks[3] != marks[1] == marks[2]
    again = add_column(plain.folder, "weight", values_of()["weight"], per="token", meaning="weights")
    assert again.extra.keys() == {"ref_logprob", "weight"}
    kinds = add_column(plain.folder, "kind", values_of()["kind"], per="unit", meaning="kinds")
    assert [int(kinds.sample(i, ["kind"]).columns["kind"]) for i in range(8)] == [0, 0, 1, 2, 2, 2, 3, 3]


@pytest.mark.parametrize("fault", ["die", "torn", BROKEN_DISK, FULL_DISK])
def test_a_column_is_whole_or_not_there_whenever_a_write_ends(tmp_path, fault):
    store, first, second = write(tmp_path / "d", {}), *(values_of(seed=seed)["ref_logprob"] for seed in (1, 2))

    def put(values: np.ndarray, disk: FaultyDisk) -> None:
        add_column(store.folder, "ref_logprob", values, per="sample", meaning="m", durable_io=DurableIO(disk))

    put(first, FaultyDisk())
    counting = FaultyDisk()
    put(second, counting)
    assert counting.num_operations > 5
    found = set()
    for at in range(counting.num_operations):
        put(first, FaultyDisk())
        with suppress(Death, ResourceError):
            put(second, FaultyDisk(at, fault))
        now = TokenStore.open(store.folder).sample(3, ["ref_logprob"]).columns["ref_logprob"]
        assert now in (first[3], second[3])
        found.add(float(now))
    assert len(found) == 2, "both ends were met"


def check(folder: Path, name: str, values: Any, per: str) -> TokenStore:
    return add_column(folder, name, np.asarray(values), per=per, meaning="m")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "per", "right", "wrong", "kind", "message"),
    [
        (
            "w",
            "token",
            np.ones(57, np.float32),
            np.ones(56, np.float32),
            DataError,
            r"shape \[56\].*each token: \[57\]",
        ),
        ("w", "sample", np.ones(8), np.full(8, np.nan), DataError, "expected finite values of type float64"),
        ("w", "unit", [0, 1, 2, 3], [0, 1, 2], DataError, r"shape \[3\]; expected one for each unit: \[4\]"),
        ("w", "sample", np.ones(8), np.ones(8, np.complex64), UsageError, "type complex64, expected one of bool, int8"),
        (
            "prefix_tokens",
            "unit",
            [3, 0, 4, 0],
            [3, 0, 5, 0],
            DataError,
            "prefix_tokens of unit 2 is 5, but its samples",
        ),
        ("prefix_tokens", "unit", [3, 0, 4, 0], [3.0, 0, 4, 0], UsageError, "expected integers per unit, got float64"),
    ],
)
def test_values_that_fit_are_taken_and_others_are_refused(tmp_path, name, per, right, wrong, kind, message):
    store = write(tmp_path / "d", {})
    with pytest.raises(kind, match=message):
        check(store.folder, name, wrong, per)
    assert not TokenStore.open(store.folder).extra
    assert np.array_equal(check(store.folder, name, right, per).extra[name], right)


def test_only_a_partial_column_may_lack_values(tmp_path):
    store, values = write(tmp_path / "d", {}), np.where(np.arange(8) % 2, 1.5, np.nan)
    with pytest.raises(DataError, match="expected finite values"):
        add_column(store.folder, "w", values, per="sample", meaning="m")
    stored = add_column(store.folder, "w", values, per="sample", meaning="m", partial=True).extra["w"]
    assert np.array_equal(stored, values, equal_nan=True)


@pytest.mark.parametrize(("wrong", "right"), [("loss_mask", "mask"), ("../x", "x_2"), ("Weight", "weight")])
def test_a_name_that_is_taken_or_no_name_is_refused(tmp_path, wrong, right):
    store = write(tmp_path / "d", {})
    with pytest.raises(UsageError, match="a column cannot be called"):
        check(store.folder, wrong, np.ones(8), "sample")
    assert right in check(store.folder, right, np.ones(8), "sample").extra


def test_a_missing_column_is_named_with_the_data_set_and_what_to_do(tmp_path):
    store = write(tmp_path / "d", {"kind": COLUMNS["kind"]})
    store.require_columns(["kind"], "objective dpo")
    with pytest.raises(DataError, match=r"'pairs' has no column 'ref_logprob', which objective dpo needs.*add_column"):
        store.require_columns(["kind", "ref_logprob"], "objective dpo")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"units": np.array([2, 2])}, "they must add up to the 3 samples"),
        ({"units": np.array([3, 0])}, "each of at least 1"),
        ({"columns": {}}, r"columns \[\] are given, but it has \['kind'\]"),
        ({"columns": {"kind": np.zeros(3, np.int8)}}, r"shape \[3\]; expected one for each unit: \[2\]"),
    ],
)
def test_samples_that_do_not_make_whole_units_are_refused(tmp_path, change, message):
    one = np.ones(3, np.int64)
    right: dict[str, Any] = {"units": np.array([2, 1]), "columns": {"kind": np.zeros(2, np.int8)}}
    with new_store(tmp_path / "d", 300, columns={"kind": COLUMNS["kind"]}) as writer:
        for own in (right | change, right):
            context: Callable[[], Any] = lambda own=own: writer.append(  # noqa: E731
                np.arange(6, dtype=np.int32), np.arange(6) % 2 == 1, 2 * one, np.zeros(3, np.int32), one, **own
            )
            if own is right:
                context()
            else:
                with pytest.raises(DataError, match=message):
                    context()
        writer.finish(META, {"counts": {}})
    assert TokenStore.open(tmp_path / "d").num_samples == 3
