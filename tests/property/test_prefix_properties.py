"""Prefixes that samples share: found exactly, grouped without loss, and planned without a change to any step."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import make_plan

from flatout.config.schema import BatchConfig
from flatout.models.packed import flatten_samples
from flatout.planner.cost import CostModel
from flatout.planner.steps.prefixes import MIN_PREFIX_TOKENS, PrefixIndex, find_prefixes

BUDGET = 700
COST = CostModel(per_token=50.0, per_pair=1.0, per_label=7.0)
Sample = tuple[Any, Any]


@st.composite
def data_sets(draw: Any) -> list[Sample]:
    """Samples that begin with parts of a few long texts of few different tokens."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    texts = [random.integers(0, 2, 300) for _ in range(draw(st.integers(1, 3)))]
    samples = []
    for _ in range(draw(st.integers(2, 40))):
        kept = draw(st.sampled_from([0, 63, 64, 65, 66, 130, 200, 299]))
        ids = np.concatenate([texts[random.integers(len(texts))][:kept], random.integers(0, 2, random.integers(1, 60))])
        loss_mask = np.zeros(len(ids), bool)
        if draw(st.booleans()):
            loss_mask[random.integers(0, len(ids)) :] = True
        loss_mask[0] = False
        samples.append((ids, loss_mask))
    return samples


def index_of(samples: list[Sample]) -> PrefixIndex:
    ids, masks = (np.concatenate(parts) for parts in zip(*samples, strict=True))
    offsets = np.cumsum([0, *(len(own) for own, _ in samples)])
    return find_prefixes(ids.astype(np.int32), masks, offsets)


def common(one: Sample, other: Sample) -> int:
    """Tokens that two samples can share, by the definition: equal, and before the last one ahead of the first label."""
    num_tokens = 0
    for place in range(min(len(one[0]), len(other[0])) - 1):
        if one[0][place] != other[0][place] or one[1][place + 1] or other[1][place + 1]:
            break
        num_tokens += 1
    return num_tokens if num_tokens >= MIN_PREFIX_TOKENS else 0


@given(data_sets())
@settings(max_examples=20, deadline=None)
def test_any_two_samples_share_what_they_have_in_common(samples):
    index = index_of(samples)
    for one, other in combinations(range(len(samples)), 2):
        groups = index.groups([one, other])
        expected = common(samples[one], samples[other])
        assert [tuple(group) for group in groups] == ([(expected, [0, 1])] if expected else [])


@given(data_sets(), st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_groups_share_what_they_say_and_save_no_less_than_one_group(samples, random):
    index, ids = index_of(samples), list(range(len(samples)))
    random.shuffle(ids)
    ids = ids[: max(2, len(ids) // 2)]
    groups = index.groups(ids)
    members = [member for group in groups for member in group.members]
    assert len(members) == len(set(members))
    for num_tokens, own in groups:
        assert len(own) >= 2
        assert all(
            common(samples[ids[a]], samples[ids[b]]) >= num_tokens >= MIN_PREFIX_TOKENS for a, b in pairwise(own)
        )
    saved = sum(num_tokens * (len(own) - 1) for num_tokens, own in groups)
    for one, other in combinations(ids, 2):
        shared = common(samples[one], samples[other])
        alike = [each for each in ids if each == one or common(samples[one], samples[each]) >= shared > 0]
        # every greedy choice that starts from a pair: never more than twice what the groups save
        assert shared * (len(alike) - 1) <= 2 * saved


def plans(samples: list[Sample], num_ranks: int, lockstep: bool, shuffle: bool, seed: int = 0) -> tuple[Any, Any]:
    lengths, labels = (np.array(each) for each in zip(*((len(ids), mask.sum()) for ids, mask in samples), strict=True))
    labels[0] = max(1, labels[0])
    batch = BatchConfig(samples_per_step=7, shuffle=shuffle)
    settings = {"micro_batch_tokens": BUDGET, "seed": seed, "num_ranks": num_ranks, "cost": COST}
    made = [make_plan(lengths, labels, batch, prefixes=each, **settings) for each in (None, index_of(samples))]
    apart, together = (plan.with_layout(BUDGET, COST, lockstep=lockstep) for plan in made)
    return apart, together


@given(data_sets(), st.sampled_from([1, 2, 3]), st.booleans(), st.booleans(), st.integers(0, 2**63))
@settings(max_examples=20, deadline=None)
def test_sharing_changes_no_step_and_keeps_the_budget(samples, num_ranks, lockstep, shuffle, seed):
    apart, together = plans(samples, num_ranks, lockstep, shuffle, seed)
    assert together.fingerprint == apart.fingerprint
    for without, step in zip(apart.steps(), together.steps(), strict=True):
        assert (step.sample_ids, step.num_tokens) == (without.sample_ids, without.num_tokens)
        assert step.num_label_tokens == without.num_label_tokens
        batches = [batch for batch in step.micro_batches if not batch.is_filler]
        placed = [sample_id for batch in batches for sample_id in batch.sample_ids]
        assert sorted(placed) == sorted(step.sample_ids)
        assert not lockstep or len({len(rank) for rank in step.by_rank}) == 1
        assert together.flops(step) <= apart.flops(without) * (1 + 1e-12)
        computed = 0
        for batch in batches:
            packed = flatten_samples([samples[each] for each in batch.sample_ids], shared=batch.shared)
            assert packed.num_tokens == batch.num_padded_tokens <= BUDGET
            assert packed.num_label_tokens == sum(int(samples[each][1].sum()) for each in batch.sample_ids)
            assert int(packed.sample_counts.sum()) == batch.num_tokens
            assert len(batch.sample_ids) <= together.batch_bounds["max_documents"]
            assert len(batch.shared) <= together.batch_bounds["max_prefixes"]
            computed += packed.num_tokens
        assert computed == step.num_padded_tokens == step.num_real_tokens
        assert 1 / num_ranks - 1e-12 <= step.balance <= 1 + 1e-12
    assert list(together.steps(together.num_steps // 2)) == list(together.steps())[together.num_steps // 2 :]


@pytest.mark.parametrize(("kept", "expected"), [(63, 0), (64, 64), (65, 65), (300, 300)])
def test_borders(kept, expected):
    """`kept` equal tokens, one without a label after them, then labels."""
    random = np.random.default_rng(0)
    prefix = random.integers(0, 1000, kept)
    samples = []
    for first in (1001, 1002):
        ids = np.concatenate([prefix, [first], random.integers(0, 1000, 20)])
        samples.append((ids, np.arange(len(ids)) > kept))
    assert [tuple(group) for group in index_of(samples).groups([0, 1])] == ([(expected, [0, 1])] if expected else [])


def test_whole_prompts_and_identical_samples_share_all_but_the_token_that_predicts():
    prompt, answers = np.arange(100), ([1, 2, 3], [4, 5], [1, 2, 3], [])
    samples = [(np.array([*prompt, *each]), np.arange(100 + len(each)) >= 100) for each in answers]
    assert [tuple(group) for group in index_of(samples).groups(range(4))] == [(99, [0, 1, 2, 3])]


def test_a_longer_prefix_of_fewer_wins_where_it_saves_more():
    """Ten chats with one system prompt of 100 tokens; three of them also share a document of 1,000 tokens."""
    random = np.random.default_rng(0)
    system, document = random.integers(0, 1000, 100), random.integers(0, 1000, 1000)
    texts = [random.integers(0, 1000, 50) for _ in range(10)]
    starts = [np.concatenate([system, document]) if place < 3 else system for place in range(10)]
    whole = [np.concatenate(parts) for parts in zip(starts, texts, strict=True)]
    samples = [(ids, np.zeros(len(ids), bool)) for ids in whole]
    groups = sorted(tuple(group) for group in index_of(samples).groups(range(10)))
    assert groups == [(100, [3, 4, 5, 6, 7, 8, 9]), (1100, [0, 1, 2])]


def test_answers_to_one_prompt_stay_on_one_rank_and_a_system_prompt_does_not_unbalance_them():
    random = np.random.default_rng(0)
    system = random.integers(0, 1000, 100)
    prompts = [np.concatenate([system, random.integers(0, 1000, 200)]) for _ in range(8)]
    samples = []
    for prompt in prompts:
        for _ in range(4):
            ids = np.concatenate([prompt, random.integers(0, 1000, 40)])
            samples.append((ids, np.arange(len(ids)) > 300))
    index, lengths = index_of(samples), np.full(32, 340)
    batch = BatchConfig(samples_per_step=32, shuffle=False)
    plan = make_plan(lengths, lengths // 9, batch, micro_batch_tokens=2000, seed=0, num_ranks=4, prefixes=index)
    step = plan.step(0)
    assert step.num_real_tokens == 8 * (300 + 4 * 40)
    assert step.balance == pytest.approx(1.0)
    for rank in step.by_rank:
        assert len({sample_id // 4 for each in rank for sample_id in each.sample_ids}) == 2
