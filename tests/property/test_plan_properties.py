"""What holds for every plan, whatever the data and the settings."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import make_eval_plan, make_plan

from flatout.config.schema import BatchConfig
from flatout.planner.cost import CostModel
from flatout.planner.steps.packing import ROW_MULTIPLE, bin_pack, cut_padded, partition, row_length
from flatout.planner.steps.step_plan import BatchLayout
from flatout.planner.steps.training_plan import split_held_out

BUDGET = 64
COST = CostModel(per_token=50.0, per_pair=1.0, per_window_pair=2.0, window=9, per_label=7.0)

samples = st.lists(st.tuples(st.integers(1, BUDGET), st.integers(1, BUDGET)), min_size=1, max_size=90).map(
    lambda rows: (np.array([length for length, _ in rows]), np.array([min(row) for row in rows]))
)
batches = st.builds(
    BatchConfig,
    samples_per_step=st.integers(1, 20),
    epochs=st.sampled_from([0.3, 1.0, 1.5, 2.0]),
    max_steps=st.sampled_from([None, None, 1, 5]),
    shuffle=st.booleans(),
)
seeds = st.integers(0, 2**63)


def plan_of(data, batch, seed, num_ranks):
    return make_plan(*data, batch, micro_batch_tokens=BUDGET, seed=seed, num_ranks=num_ranks, cost=COST)


@given(samples, batches, seeds)
@settings(max_examples=60, deadline=None)
def test_whole_epochs_hold_every_sample_once(data, batch, seed):
    plan = plan_of(data, batch.model_copy(update={"epochs": 2.0, "max_steps": None}), seed, 2)
    seen = {0: Counter(), 1: Counter()}
    for step in plan.steps():
        seen[step.epoch].update(step.sample_ids)
    assert seen[0] == seen[1] == Counter(range(len(data[0])))


@given(samples, batches, seeds)
@settings(max_examples=60, deadline=None)
def test_ranks_divide_the_same_global_steps(data, batch, seed):
    whole = plan_of(data, batch, seed, 1)
    one = list(whole.steps())
    for num_ranks in (2, 4, 7):
        assert plan_of(data, batch, seed, num_ranks).fingerprint == whole.fingerprint
        for alone, together in zip(one, plan_of(data, batch, seed, num_ranks).steps(), strict=True):
            assert alone.sample_ids == together.sample_ids
            assert (alone.num_tokens, alone.num_label_tokens) == (together.num_tokens, together.num_label_tokens)
            placed = [i for micro_batch in together.micro_batches for i in micro_batch.sample_ids]
            assert Counter(placed) == Counter(together.sample_ids)


@given(samples, batches, seeds, st.sampled_from([1, 2, 4, 7]))
@settings(max_examples=60, deadline=None)
def test_budgets_and_counts(data, batch, seed, num_ranks):
    lengths, labels = data
    for step in plan_of(data, batch, seed, num_ranks).steps():
        micro_batches = step.micro_batches
        assert sum(m.num_tokens for m in micro_batches) == step.num_tokens
        assert sum(m.num_label_tokens for m in micro_batches) == step.num_label_tokens > 0
        for micro_batch in micro_batches:
            ids = list(micro_batch.sample_ids)
            assert micro_batch.num_tokens == lengths[ids].sum() <= BUDGET
            assert micro_batch.num_label_tokens == labels[ids].sum()
        # inside a micro-batch samples keep the step's order
        place = {sample_id: index for index, sample_id in enumerate(step.sample_ids)}
        for micro_batch in micro_batches:
            places = [place[sample_id] for sample_id in micro_batch.sample_ids]
            assert places == sorted(places)


@given(samples, batches, seeds, st.sampled_from([1, 3]), st.data())
@settings(max_examples=40, deadline=None)
def test_a_plan_is_a_pure_function_and_resumes_anywhere(data, batch, seed, num_ranks, draw):
    plan = plan_of(data, batch, seed, num_ranks)
    steps = list(plan.steps())
    assert steps == list(plan_of(data, batch, seed, num_ranks).steps())
    start = draw.draw(st.integers(0, plan.num_steps))
    assert list(plan.steps(start)) == steps[start:]
    if start < plan.num_steps:
        assert plan.step(start) == steps[start]


@given(samples, batches, seeds, st.sampled_from([2, 4, 7]))
@settings(max_examples=40, deadline=None)
def test_ranks_are_within_one_sample_of_each_other(data, batch, seed, num_ranks):
    costs = COST.flops(*data)
    for step in plan_of(data, batch, seed, num_ranks).steps():
        loads = [sum(costs[i] for m in rank for i in m.sample_ids) for rank in step.by_rank]
        largest = max(costs[list(step.sample_ids)])
        assert max(loads) - min(loads) <= largest * (1 + 1e-12)
        assert 1 / num_ranks - 1e-12 <= step.balance <= 1 + 1e-12
        assert step.balance == pytest.approx(np.mean(loads) / max(loads))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(100, 400))
@settings(max_examples=300, deadline=None)
def test_micro_batches_are_level(lengths, budget):
    parts = bin_pack(lengths, budget)
    sizes = [sum(lengths[item] for item in part) for part in parts]
    assert sorted(item for part in parts for item in part) == list(range(len(lengths)))
    assert max(sizes) <= budget
    assert max(sizes) - min(sizes) <= max(lengths)


@given(st.lists(st.floats(1e-3, 1e15), max_size=60), st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_partition_places_every_item_once_within_grahams_bound(weights, num_parts):
    parts = partition(weights, num_parts)
    assert sorted(item for part in parts for item in part) == list(range(len(weights)))
    if weights:
        heaviest = max(sum(weights[item] for item in part) for part in parts)
        assert heaviest <= (sum(weights) / num_parts + max(weights)) * (1 + 1e-9)


@given(st.integers(2, 2000), st.floats(0.001, 0.999), seeds)
@settings(max_examples=60, deadline=None)
def test_splits_are_disjoint_and_complete(num_samples, fraction, seed):
    train, held_out = split_held_out(range(num_samples), fraction, seed)
    assert len(train)
    assert len(held_out)
    assert np.array_equal(np.sort(np.concatenate([train, held_out])), np.arange(num_samples))


@given(samples, batches, seeds, st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_in_lockstep_every_rank_takes_equally_many_micro_batches(data, batch, seed, num_ranks):
    free = plan_of(data, batch, seed, num_ranks)
    plan = free.with_layout(BUDGET, COST, lockstep=True)
    assert plan.fingerprint == free.fingerprint
    for step, without in zip(plan.steps(), free.steps(), strict=True):
        counts = {len(rank) for rank in step.by_rank}
        # never more passes than the busiest rank needs
        assert counts == {max(len(rank) for rank in without.by_rank)}
        real = [b for b in step.micro_batches if not b.is_filler]
        fillers = [b for b in step.micro_batches if b.is_filler]
        assert Counter(i for b in real for i in b.sample_ids) == Counter(without.sample_ids)
        assert sum(b.num_label_tokens for b in real) == step.num_label_tokens == without.num_label_tokens
        assert step.balance == without.balance
        for filler in fillers:
            (sample,) = filler.sample_ids
            assert sample in step.sample_ids
            assert filler.num_label_tokens == 0
            assert filler.num_tokens == data[0][sample] == min(data[0][list(step.sample_ids)])
    evaluated = make_eval_plan(*data, layout=BatchLayout(num_ranks, BUDGET, COST, lockstep=True))
    assert len({len(rank) for rank in evaluated.by_rank}) == 1
    assert sum(b.num_label_tokens for b in evaluated.micro_batches) == evaluated.num_label_tokens


@given(samples, batches, seeds, st.sampled_from([1, 2, 4, 7]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_rows_hold_the_same_steps_within_the_budget(data, batch, seed, num_ranks, lockstep):
    packed = plan_of(data, batch, seed, num_ranks)
    rows = replace(packed, batch_layout=replace(packed.batch_layout, pass_overhead_tokens=8, lockstep=lockstep))
    assert rows.fingerprint == packed.fingerprint
    for one, other in zip(packed.steps(), rows.steps(), strict=True):
        assert (one.sample_ids, one.num_tokens, one.num_label_tokens) == (
            other.sample_ids, other.num_tokens, other.num_label_tokens,
        )  # fmt: skip
        placed = Counter(i for m in other.micro_batches for i in m.sample_ids if not m.is_filler)
        assert placed == Counter(other.sample_ids)
        assert 0 < other.balance <= 1 + 1e-9
        assert not lockstep or len({len(rank) for rank in other.by_rank}) == 1
        for micro_batch in other.micro_batches:
            longest = data[0][list(micro_batch.sample_ids)].max()
            assert longest <= micro_batch.row_length < longest + ROW_MULTIPLE
            assert micro_batch.num_padded_tokens <= BUDGET or len(micro_batch.sample_ids) == 1
        for rank in range(num_ranks):
            again = rows.resplit(other, rank, BUDGET) if other.by_rank[rank] and not lockstep else ()
            assert Counter(i for m in again for i in m.sample_ids) <= Counter(other.sample_ids)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_no_other_cut_into_rows_costs_less(lengths, pass_overhead_tokens):
    def cost(parts):
        rows = [len(part) * COST.flops(row_length(max(lengths[i] for i in part)), 0) for part in parts]
        return float(sum(rows)) + len(parts) * pass_overhead_tokens * COST.per_token

    def cuts(items):
        if not items:
            yield []
        for size in range(1, len(items) + 1):
            if size == 1 or size * row_length(lengths[items[0]]) <= BUDGET * 2:
                yield from ([items[:size], *rest] for rest in cuts(items[size:]))

    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    found = cut_padded(lengths, BUDGET * 2, cost=COST, pass_overhead_tokens=pass_overhead_tokens)
    assert sorted(i for part in found for i in part) == list(range(len(lengths)))
    assert cost(found) <= min(map(cost, cuts(order))) * (1 + 1e-12)
    at_least = cut_padded(lengths, BUDGET * 2, cost=COST, pass_overhead_tokens=pass_overhead_tokens, at_least=5)
    assert len(at_least) >= min(5, len(lengths))
