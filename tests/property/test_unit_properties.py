"""A unit is planned whole, whatever the data, layout, ranks, budget and memory, unless its loss does not need that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import make_eval_plan, make_plan

from flatout.config.schema import BatchConfig
from flatout.errors import DataError, UsageError
from flatout.models.packed import flatten_samples
from flatout.planner.cost import COST_BY_TOKENS, CostModel
from flatout.planner.steps.prefixes import MIN_PREFIX_TOKENS, UnitPrefixes, find_prefixes
from flatout.planner.steps.step_plan import BatchLayout, MicroBatch, StepPlan
from flatout.planner.steps.training_plan import TrainingPlan, split_held_out

COST = CostModel(per_token=50.0, per_pair=1.0, per_label=7.0)


class Data(NamedTuple):
    """Samples (ids, mask) in units of `sizes`, whose prefixes have `prefixes` tokens (0: some or none)."""

    samples: list[tuple[Any, Any]]
    sizes: list[int]
    prefixes: list[int]

    @property
    def offsets(self) -> Any:
        return np.cumsum([0, *self.sizes])

    @property
    def units(self) -> Any:
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    @property
    def lengths(self) -> Any:
        return np.array([len(ids) for ids, _ in self.samples])

    @property
    def labels(self) -> Any:
        return np.array([int(mask.sum()) for _, mask in self.samples])

    def index(self, *, declared: bool) -> UnitPrefixes:
        ids, masks = (np.concatenate(parts) for parts in zip(*self.samples, strict=True))
        found = find_prefixes(ids.astype(np.int32), masks, np.cumsum([0, *self.lengths]))
        return UnitPrefixes.of(self.offsets, np.array(self.prefixes) if declared else None, found)

    @property
    def budget(self) -> int:
        """The least that holds every unit, in any layout."""
        return max(size * max(self.lengths[self.units == unit]) for unit, size in enumerate(self.sizes)) + 16 * 4


@st.composite
def data_sets(draw: Any) -> Data:
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    texts = [random.integers(0, 3, 200) for _ in range(3)]
    sizes, samples, prefixes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=16)), [], []
    for size in sizes:
        shared = draw(st.sampled_from([0, 63, 64, 65, 150]))
        prefix = texts[random.integers(3)][:shared]
        for place in range(size):
            # the tokens right behind the prefix differ, so that it is all that the unit shares
            own = np.concatenate([prefix, [3 + place], random.integers(0, 3, random.integers(1, 40))])
            samples.append((own, np.arange(len(own)) > shared))
        prefixes.append(shared if size > 1 and shared >= MIN_PREFIX_TOKENS else 0)
    return Data(samples, sizes, prefixes)


layouts = st.fixed_dictionaries(
    {
        "num_ranks": st.sampled_from([1, 2, 3]),
        "kind": st.sampled_from(["packed", "rows", "declared", "found"]),
        "lockstep": st.sampled_from([None, "lockstep", "experts"]),
        "shuffle": st.booleans(),
        "per_step": st.integers(1, 6),
        "seed": st.integers(0, 2**63),
    }
)


def plan_of(data: Data, layout: dict[str, Any], ids: Any = None, parts_units: bool = False) -> TrainingPlan:
    kind, num_ranks = layout["kind"], layout["num_ranks"]
    budget = int(max(data.lengths)) + 16 * 4 if parts_units else data.budget
    plan = make_plan(
        data.lengths, data.labels, BatchConfig(samples_per_step=layout["per_step"], shuffle=layout["shuffle"]),
        micro_batch_tokens=budget, seed=layout["seed"], num_ranks=num_ranks, cost=COST, sample_ids=ids,
        parts_units=parts_units,
        pass_overhead_tokens=64 if kind == "rows" else None, unit_offsets=data.offsets,
        prefixes=data.index(declared=kind == "declared") if kind in ("declared", "found") else None,
    )  # fmt: skip
    together = num_ranks if layout["lockstep"] == "experts" else 1
    return plan.with_layout(budget, COST, lockstep=layout["lockstep"] is not None, expert_ranks=together)


def assert_whole(data: Data, batches: Sequence[MicroBatch]) -> None:
    """Every unit of these micro-batches is in one of them, with all its samples in the order of the data set."""
    for batch in batches:
        order = np.argsort(data.units[list(batch.sample_ids)], kind="stable")
        assert (np.diff(np.array(batch.sample_ids)[order]) > 0).all()
        units, counts = np.unique(data.units[list(batch.sample_ids)], return_counts=True)
        assert counts.tolist() == [data.sizes[unit] for unit in units]
        assert batch.num_padded_tokens <= max(data.budget, batch.fill_tokens)


def assert_step(data: Data, step: StepPlan) -> None:
    real = [batch for batch in step.micro_batches if not batch.is_filler]
    assert_whole(data, step.micro_batches)
    assert sorted(i for batch in real for i in batch.sample_ids) == sorted(step.sample_ids)
    assert (
        step.num_label_tokens == sum(batch.num_label_tokens for batch in real) == data.labels[[*step.sample_ids]].sum()
    )


@pytest.mark.parametrize("parts_units", [False, True])
@given(data=data_sets(), layout=layouts)
@settings(max_examples=60, deadline=None)
def test_steps_count_units_and_a_pass_parts_one_only_where_it_may(parts_units, data, layout):
    plan = plan_of(data, layout, parts_units=parts_units)
    most = int(max(data.lengths)) + 16 * 4 if parts_units else data.budget
    assert plan.steps_per_epoch == -(-len(data.sizes) // layout["per_step"])
    seen: list[int] = []
    for step in plan.steps():
        real = [batch for batch in step.micro_batches if not batch.is_filler]
        assert sorted(i for batch in real for i in batch.sample_ids) == sorted(step.sample_ids)
        units, counts = np.unique(data.units[list(step.sample_ids)], return_counts=True)
        assert counts.tolist() == [data.sizes[unit] for unit in units]
        assert len(units) == min(layout["per_step"], len(data.sizes) - len(seen))
        seen += units.tolist()
        assert len(step.sample_ids) <= plan.most_samples_per_step
        for batch in step.micro_batches:
            assert batch.num_padded_tokens <= max(most, batch.fill_tokens)
            packed = flatten_samples([data.samples[i] for i in batch.sample_ids], shared=batch.shared)
            assert packed.num_tokens == batch.num_tokens - batch.num_shared_tokens
            assert parts_units or len(batch.sample_ids) <= plan.batch_bounds["max_documents"]
        if not parts_units:
            assert_step(data, step)
        for rank, own in enumerate(step.by_rank):
            if not any(not batch.is_filler for batch in own):
                continue
            taken = sorted(i for batch in own for i in batch.sample_ids if not batch.is_filler)
            for budget in {plan.largest_unit(own), plan.largest_unit(own) if parts_units else data.budget}:
                cut = plan.resplit(step, rank, budget)
                assert max(batch.num_padded_tokens for batch in cut) <= max(budget, plan.largest_unit(own))
                assert sorted(i for batch in cut for i in batch.sample_ids) == taken
                if not parts_units:
                    assert_whole(data, cut)
    assert sorted(seen) == list(range(len(data.sizes)))
    assert list(plan.steps(plan.num_steps // 2)) == list(plan.steps())[plan.num_steps // 2 :]


@given(data_sets(), st.sampled_from([1, 2, 3]), st.booleans(), st.booleans())
@settings(max_examples=20, deadline=None)
def test_evaluation_packs_whole_units(data, num_ranks, lockstep, rows):
    layout = BatchLayout(num_ranks, data.budget, COST, lockstep, 64 if rows else None)
    plan = make_eval_plan(data.lengths, data.labels, layout=layout, unit_offsets=data.offsets)
    assert_step(data, plan)


@given(data_sets(), layouts, st.floats(0.05, 0.9))
@settings(max_examples=20, deadline=None)
def test_a_unit_is_held_out_whole(data, layout, fraction):
    rows, content = np.arange(len(data.samples)), np.arange(len(data.samples)) % max(2, len(data.samples) - 1)
    if len(data.sizes) < 3:
        return
    train, held_out = split_held_out(rows, fraction, layout["seed"], content, data.offsets)
    assert not set(data.units[train]) & set(data.units[held_out])
    assert sorted([*train, *held_out]) == list(range(len(data.samples)))
    for step in plan_of(data, layout, train).steps():
        assert_step(data, step)
        assert set(step.sample_ids) <= set(train)
    one_rank = BatchLayout(1, data.budget, COST_BY_TOKENS)
    evaluated = make_eval_plan(data.lengths, data.labels, held_out, layout=one_rank, unit_offsets=data.offsets)
    assert_step(data, evaluated)


@given(data_sets())
@settings(max_examples=15, deadline=None)
def test_a_unit_knows_what_it_shares_declared_or_found(data):
    declared, found = (data.index(declared=way).tokens.tolist() for way in (True, False))
    assert declared == found == data.prefixes


PAIRS: dict[str, Any] = {
    "lengths": [5, 6, 7, 4],
    "num_label_tokens": [2, 2, 2, 2],
    "batch": BatchConfig(samples_per_step=1),
}
HOW: dict[str, Any] = {"seed": 0, "num_ranks": 1, "unit_offsets": [0, 2, 4]}


def test_part_of_a_unit_is_refused_and_a_whole_one_is_planned():
    with pytest.raises(DataError, match="1 of the 2 samples of unit 2 are chosen; a unit is planned whole"):
        make_plan(**PAIRS, **HOW, micro_batch_tokens=100, sample_ids=[0, 1, 2])
    assert make_plan(**PAIRS, **HOW, micro_batch_tokens=100, sample_ids=[2, 3]).step(0).sample_ids == (2, 3)


@pytest.mark.parametrize(("pass_overhead_tokens", "least"), [(None, 11), (64, 14)])
def test_a_unit_over_the_budget_is_refused_and_one_that_fits_is_planned(pass_overhead_tokens, least):
    more = {"pass_overhead_tokens": pass_overhead_tokens}
    with pytest.raises(UsageError, match=rf"the unit of sample [02] has {least} tokens, more than batch.micro_batch"):
        make_plan(**PAIRS, **HOW, **more, micro_batch_tokens=least - 1)
    (parted, *_) = make_plan(**PAIRS, **HOW, **more, micro_batch_tokens=least - 1, parts_units=True).steps()
    assert len(parted.micro_batches) == 2
    steps = list(make_plan(**PAIRS, **HOW, **more, micro_batch_tokens=least).steps())
    assert sorted(step.sample_ids for step in steps) == [(0, 1), (2, 3)]


def test_a_plan_of_single_samples_is_the_one_of_before_and_units_make_another():
    """Version 1 of plans: checkpoints of releases without units have these fingerprints."""
    settings: dict[str, Any] = {"micro_batch_tokens": 100, "seed": 3, "num_ranks": 2}
    lengths, labels, batch = [5, 6, 7, 4], [2, 2, 2, 2], BatchConfig(samples_per_step=2)

    def fingerprint(**more: Any) -> str:
        return make_plan(lengths, labels, batch, **settings, **more).fingerprint

    assert fingerprint() == "3986d064c4d8baa9902710713307d84a"
    units = [fingerprint(unit_offsets=offsets) for offsets in ([0, 2, 4], [0, 1, 4], [0, 1, 2, 4])]
    assert len({fingerprint(), *units}) == 4
