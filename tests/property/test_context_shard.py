"""Cutting micro-batches into shards: every token and label once, right positions and keys, even work."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.models.context.shard import MIN_CHUNK_TOKENS, ContextShard
from flatout.models.packed import PackedBatch, flatten_samples


def batch_of(lengths: list[int]) -> PackedBatch:
    """Documents of these lengths whose token ids are unique; about half of the tokens are labels."""
    ids, draw = np.split(np.arange(1, sum(lengths) + 1), np.cumsum(lengths)[:-1]), np.random.default_rng(0)
    return flatten_samples([(own, draw.random(len(own)) < 0.5) for own in ids])


def documents(batch: PackedBatch) -> dict[int, tuple[int, int]]:
    """Of each token id, its document and its position."""
    bounds = batch.cu_seqlens.tolist()
    owner = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    rows = zip(batch.token_ids.tolist(), owner.tolist(), batch.position_ids.tolist(), strict=True)
    return {token: (document, position) for token, document, position in rows}


def pairs_of(shard: PackedBatch) -> int:
    """The query-key pairs of a shard's attention."""
    assert shard.keys is not None
    queries, keys = (bounds.diff().long() for bounds in (shard.cu_seqlens, shard.keys.cu_seqlens))
    return int((queries * (keys - queries) + queries * (queries + 1) // 2).sum())


sizes = st.lists(st.one_of(st.integers(1, 40), st.integers(1, 3000)), min_size=1, max_size=12)


@settings(deadline=None, max_examples=20)
@given(lengths=sizes, num_shards=st.sampled_from([1, 2, 3, 4, 8]), is_padded=st.booleans())
def test_every_token_is_in_one_share_with_the_keys_before_it(lengths, num_shards, is_padded):
    batch, number = batch_of(lengths), None
    if is_padded:
        number = ContextShard(num_shards, 0).num_boundaries(len(lengths))
    shards = [ContextShard(num_shards, place).of(batch, number) for place in range(num_shards)]
    known, gathered = documents(batch), torch.cat([shard.token_ids for shard in shards])
    assert sorted(gathered[gathered > 0].tolist()) == sorted(known)
    assert {shard.num_tokens for shard in shards} == {len(gathered) // num_shards}
    if is_padded:
        assert all(shard.num_tokens % 128 == 0 and len(shard.cu_seqlens) == number for shard in shards)
    labels = []
    for shard in shards:
        assert torch.equal(shard.sample_counts == 0, shard.token_ids == 0)
        assert shard.keys is not None
        assert len(shard.keys.cu_seqlens) == len(shard.cu_seqlens)
        assert shard.cu_seqlens[-1] == shard.num_tokens
        assert shard.keys.cu_seqlens[-1] == len(shard.keys.rows)
        labels += list(zip(shard.token_ids[shard.label_rows].tolist(), shard.label_ids.tolist(), strict=True))
        bounds = zip(shard.cu_seqlens.tolist(), shard.keys.cu_seqlens.tolist(), strict=True)
        begin, key_begin = next(bounds)
        for end, key_end in bounds:
            queries = shard.token_ids[begin:end].tolist()
            keys = gathered[shard.keys.rows[key_begin:key_end]].tolist()
            assert end - begin <= shard.max_seqlen
            assert key_end - key_begin <= shard.keys.max_seqlen
            # a query is the last of the keys that it attends to
            assert keys[len(keys) - len(queries) :] == queries
            real = [token for token in keys if token]
            if real:
                document, last = known[real[-1]]
                assert [known[token] for token in real] == [(document, position) for position in range(last + 1)]
                # padding follows its document
                assert keys[: len(real)] == real
            begin, key_begin = end, key_end
        real_rows = shard.sample_counts > 0
        positions = [known[token][1] for token in shard.token_ids[real_rows].tolist()]
        assert shard.position_ids[real_rows].tolist() == positions
    rows, ids = batch.token_ids[batch.label_rows].tolist(), batch.label_ids.tolist()
    assert sorted(labels) == sorted(zip(rows, ids, strict=True))


@pytest.mark.parametrize("num_shards", [2, 4, 8])
@pytest.mark.parametrize("kind", ["one", "few", "many", "mixed"])
def test_every_rank_has_the_same_work(kind, num_shards):
    draw = np.random.default_rng(1)
    lengths = {
        "one": [32 * 1024],
        # a long one that does not fill its rank's tokens, and others that are cut, too
        "few": [9000, 17001, 4097, 2300],
        # chats, the longest first, as plans have them
        "many": sorted(np.clip(draw.lognormal(5.5, 0.8, 200).astype(int), 10, 2000).tolist(), reverse=True),
        "mixed": [6000, 5000, *sorted(np.clip(draw.lognormal(5.5, 0.8, 100).astype(int), 10, 900), reverse=True)],
    }[kind]
    batch = batch_of(lengths)
    shards = [ContextShard(num_shards, place).of(batch) for place in range(num_shards)]
    pairs = [pairs_of(shard) for shard in shards]
    # a layer multiplies a token by 12 H^2 weights, a pair by 2 H: FLOPs in those of a pair, for H = 1024
    flops = [6 * 1024 * shard.num_tokens + own for shard, own in zip(shards, pairs, strict=True)]
    assert max(flops) <= 1.05 * sum(flops) / num_shards
    # attention alone, too, where it is much
    assert max(pairs) <= (1.02 if kind in ("one", "few") else 1.6) * sum(pairs) / num_shards
    whole = sum(length * (length + 1) // 2 for length in lengths)
    # padding is less than 2 N tokens a long document
    assert whole <= sum(pairs) <= 1.02 * whole


def test_padding_is_little_and_whole_documents_stay_whole():
    lengths = [400] * 30
    batch = batch_of(lengths)
    shards = [ContextShard(4, place).of(batch) for place in range(4)]
    # 8 chunks of 1,500 tokens cut at most 7 documents
    assert sum(len(shard.cu_seqlens) - 1 for shard in shards) <= 30 + 7 + 1
    assert sum(shard.num_tokens for shard in shards) - sum(lengths) < 8
    long = 2 * 4 * MIN_CHUNK_TOKENS + 1
    shards = [ContextShard(4, place).of(batch_of([long])) for place in range(4)]
    assert [len(shard.cu_seqlens) - 1 for shard in shards] == [2] * 4
    assert sum(shard.num_tokens for shard in shards) - long == 7


def test_a_filler_has_no_label_and_is_padding():
    batch = flatten_samples([(np.arange(10), np.zeros(10, bool))])
    batch.sample_counts[:] = 0
    for place in range(2):
        shard = ContextShard(2, place).of(batch)
        assert shard.num_label_tokens == 0
        assert not shard.sample_counts.any()
