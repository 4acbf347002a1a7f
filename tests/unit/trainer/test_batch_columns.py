"""The columns of a batch are those of its samples, however they are packed, shared, padded or dealt to ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flatout.data.columns import Column
from flatout.data.store_writer import new_store
from flatout.data.token_store import StoreMeta, TokenStore
from flatout.errors import UsageError
from flatout.models.context.shard import ContextShard
from flatout.models.packed import PackedBatch
from flatout.planner.steps.step_plan import MicroBatch
from flatout.trainer.batch_loader import BatchLoader

META = StoreMeta("pairs", "f" * 32, "tok", "t" * 32, "", "", 300, sources=("a.jsonl",), files=("a.jsonl",))
SIZES, LENGTHS = [2, 1, 3, 2], [90, 70, 4, 80, 60, 90, 1, 70]
PREFIXES = [68, 0, 40, 0]
NAMES = ("weight", "ref_logprob", "kind")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Units of 2, 1, 3 and 2 samples. A token's weight is its position in the store, a sample's value its number."""
    rng, ids, masks = np.random.default_rng(0), [], []
    for unit, size in enumerate(SIZES):
        prefix = rng.integers(0, 300, PREFIXES[unit])
        for _ in range(size):
            length = LENGTHS[len(ids)]
            rest = rng.integers(0, 300, length - len(prefix))
            ids.append(np.concatenate([prefix, rest]).astype(np.int32))
            masks.append((rng.random(length) < 0.6) & (np.arange(length) > len(prefix)))
    folder = tmp_path_factory.mktemp("store") / "d"
    columns = {
        "weight": Column("float32", "token", "m"), "ref_logprob": Column("float32", "sample", "m"),
        "kind": Column("int32", "unit", "m"),
    }  # fmt: skip
    values: dict[str, Any] = {
        "weight": np.arange(sum(LENGTHS), dtype=np.float32),
        "ref_logprob": np.arange(8, dtype=np.float32),
        "kind": np.arange(4, dtype=np.int32),
    }
    count = np.ones(8, np.int64)
    with new_store(folder, 300, columns=columns) as writer:
        writer.append(
            np.concatenate(ids), np.concatenate(masks), np.array(LENGTHS), np.zeros(8, np.int32), count,
            np.array(SIZES), values,
        )  # fmt: skip
        writer.finish(replace(META, max_token_id=299), {"counts": {}})
    return TokenStore.open(folder)


def micro_batch(store: TokenStore, ids: tuple[int, ...], **more: Any) -> MicroBatch:
    num_label_tokens = 0 if more.get("is_filler") else int(store.num_label_tokens[list(ids)].sum())
    return MicroBatch(ids, int(store.lengths[list(ids)].sum()), num_label_tokens, **more)


def read(store: TokenStore, batch: MicroBatch, shard: ContextShard | None = None) -> PackedBatch:
    loader = BatchLoader(store, torch.device("cpu"), shard, max_documents=8, max_prefixes=4, columns=NAMES)
    (made,) = loader.batches([batch])
    loader.close()
    return made


def expected(store: TokenStore, ids: tuple[int, ...]) -> list[tuple[int, int, float, float, int]]:
    """Of each label in the order of the samples: token id, sample, weight, the sample's value and its unit's kind."""
    units, found = [0, 0, 1, 2, 2, 2, 3, 3], []
    for sample in ids:
        own_ids, mask = store.sample(sample).pair
        for place in np.flatnonzero(mask):
            weight = float(store.offsets[sample] + place)
            found.append((int(own_ids[place]), sample, weight, float(sample), units[sample]))
    return found


def seen(batch: PackedBatch, ids: tuple[int, ...]) -> list[tuple[int, int, float, float, int]]:
    own, columns = batch.label_samples, batch.columns
    assert len(batch.label_ids) == len(own) == len(columns["weight"])
    return list(
        zip(
            batch.label_ids.tolist(),
            [ids[sample] for sample in own.tolist()],
            columns["weight"].tolist(),
            columns["ref_logprob"][own].tolist(),
            columns["kind"][batch.sample_units[own]].tolist(),
            strict=True,
        )
    )


CUTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "in order": ((0, 1, 2, 3, 4, 5, 6, 7), {}),
    "permuted, with holes": ((6, 7, 0, 1, 2), {}),
    "shared": ((0, 1, 3, 4, 5, 2), {"shared": ((68, 2), (40, 3))}),
    "rows": ((5, 3, 4, 6, 7), {"row_length": 96}),
    "padded": ((6, 7, 3, 4, 5), {"fill_tokens": 1000}),
}


@pytest.mark.parametrize("name", CUTS)
def test_each_label_has_the_columns_of_its_token_sample_and_unit(store, name):
    ids, more = CUTS[name]
    batch = read(store, micro_batch(store, ids, **more))
    assert seen(batch, ids) == expected(store, ids)
    assert (batch.num_samples, batch.num_units) == (len(ids), len({(0, 0, 1, 2, 2, 2, 3, 3)[i] for i in ids}))
    assert batch.columns["weight"].dtype == torch.float32


@pytest.mark.parametrize("num_shards", [2, 3])
def test_the_shards_of_ranks_have_each_label_once_and_all_samples(store, num_shards):
    ids = (3, 4, 5, 0, 1, 2)
    shards = [read(store, micro_batch(store, ids), ContextShard(num_shards, place)) for place in range(num_shards)]
    assert sorted(label for shard in shards for label in seen(shard, ids)) == sorted(expected(store, ids))
    assert {(shard.num_samples, shard.num_units) for shard in shards} == {(6, 3)}


def test_a_filler_has_no_sample_and_no_unit(store):
    filler = read(store, micro_batch(store, (2,), is_filler=True))
    assert (filler.num_tokens, filler.num_samples, filler.num_units) == (4, 0, 0)
    assert {name: len(values) for name, values in filler.columns.items()} == dict.fromkeys(NAMES, 0)
    assert read(store, micro_batch(store, (2,))).num_samples == 1


def test_nothing_is_gathered_unless_asked(store):
    loader = BatchLoader(store, torch.device("cpu"), max_documents=8)
    (batch,) = loader.batches([micro_batch(store, (0, 1))])
    loader.close()
    assert batch.loss_columns is None
    with pytest.raises(UsageError, match="declares neither"):
        _ = batch.label_samples


@pytest.mark.gpu
def test_columns_reach_the_gpu(store):
    loader = BatchLoader(store, torch.device("cuda"), max_documents=8, columns=NAMES)
    (batch,) = loader.batches([micro_batch(store, (6, 7, 0, 1, 2))])
    assert {values.device.type for values in batch.columns.values()} == {"cuda"}
    assert seen(batch, (6, 7, 0, 1, 2)) == expected(store, (6, 7, 0, 1, 2))
    loader.close()
