"""The plan of a run: epochs, ragged ends, resume, fingerprints, held-out splits, and what is refused."""

import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from plans import make_eval_plan, make_plan

from flatout.config.schema import BatchConfig
from flatout.errors import DataError, UsageError
from flatout.planner.cost import COST_BY_TOKENS, CostModel
from flatout.planner.steps.step_plan import BatchLayout
from flatout.planner.steps.training_plan import split_held_out

COST = CostModel(per_token=100.0, per_pair=1.0, per_label=10.0)


def lengths_of(count, seed=0):
    lengths = np.random.default_rng(seed).integers(2, 60, count)
    return lengths, lengths // 2


def plan_of(count=50, num_ranks=2, seed=7, sample_ids=None, micro_batch_tokens=100, **batch):
    lengths, labels = lengths_of(count)
    settings = BatchConfig(**{"samples_per_step": 8, **batch})
    return make_plan(
        lengths,
        labels,
        settings,
        micro_batch_tokens=micro_batch_tokens,
        seed=seed,
        num_ranks=num_ranks,
        cost=COST,
        sample_ids=sample_ids,
    )


def test_an_epoch_is_every_sample_once_with_its_ragged_end():
    plan = plan_of(epochs=2)
    steps = list(plan.steps())
    assert (plan.steps_per_epoch, plan.num_steps, len(steps)) == (7, 14, 14)
    assert [len(step.sample_ids) for step in steps] == [8, 8, 8, 8, 8, 8, 2] * 2
    assert [step.epoch for step in steps] == [0] * 7 + [1] * 7
    assert [step.index for step in steps] == list(range(14))
    for epoch in (0, 1):
        seen = Counter(i for step in steps if step.epoch == epoch for i in step.sample_ids)
        assert seen == Counter(range(50))
    assert [s.sample_ids for s in steps[:7]] != [s.sample_ids for s in steps[7:]]


def test_blocks_do_not_show(monkeypatch):
    whole = list(plan_of(epochs=2).steps())
    monkeypatch.setattr("flatout.planner.steps.training_plan.BLOCK_SAMPLES", 20)
    assert list(plan_of(epochs=2).steps()) == whole


@pytest.mark.parametrize(
    ("epochs", "max_steps", "expected"),
    [(1, None, 7), (3, None, 21), (0.5, None, 4), (0.01, None, 1), (1.5, None, 11), (1, 3, 3), (1, 100, 100)],
)
def test_length_of_the_run(epochs, max_steps, expected):
    plan = plan_of(epochs=epochs, max_steps=max_steps)
    assert plan.num_steps == expected == len(list(plan.steps()))


def test_epochs_are_decimal_numbers():
    # 1.1 x 10 is 11.000000000000002 in floating point
    assert plan_of(80, epochs=1.1).num_steps == 11


def test_a_longer_run_starts_with_the_shorter_one():
    short, long = plan_of(epochs=1), plan_of(max_steps=30)
    assert list(short.steps()) == list(long.steps())[:7]
    assert short.fingerprint == long.fingerprint


def test_without_shuffling_the_order_is_the_datas():
    ids = [i for step in plan_of(shuffle=False).steps() for i in step.sample_ids]
    assert ids == list(range(50))


def test_fingerprint_changes_with_all_that_decides_the_steps():
    lengths, labels = lengths_of(50)
    other_lengths, other_labels = lengths.copy(), labels.copy()
    other_lengths[[3, 4]] += 1
    other_labels[5] += 1
    batch = BatchConfig(samples_per_step=8)

    def fingerprint(lengths=lengths, labels=labels, batch=batch, tokens=100, seed=0, **more):
        return make_plan(lengths, labels, batch, micro_batch_tokens=tokens, seed=seed, num_ranks=1, **more).fingerprint

    variants = [
        fingerprint(),
        fingerprint(seed=1),
        fingerprint(lengths=other_lengths),
        fingerprint(labels=other_labels),
        fingerprint(batch=batch.model_copy(update={"samples_per_step": 9})),
        fingerprint(batch=batch.model_copy(update={"shuffle": False})),
        fingerprint(sample_ids=range(49)),
        fingerprint(sample_ids=range(1, 50)),
    ]
    assert len(set(variants)) == len(variants)
    assert fingerprint() == fingerprint(lengths=lengths.astype(np.int32), labels=labels.astype(np.uint16))
    assert fingerprint() == fingerprint(sample_ids=range(50))
    assert fingerprint() == fingerprint(tokens=999)


def test_fingerprint_knows_which_of_equal_samples_are_planned():
    first, second = (
        make_plan([5] * 9, [2] * 9, BatchConfig(), micro_batch_tokens=100, seed=0, num_ranks=1, sample_ids=ids)
        for ids in (range(8), range(1, 9))
    )
    assert first.fingerprint != second.fingerprint


def test_a_subset_is_planned_alone():
    ids = np.array([3, 8, 11, 30, 49])
    plan = plan_of(sample_ids=ids, samples_per_step=2)
    assert Counter(i for step in plan.steps() for i in step.sample_ids) == Counter(ids.tolist())
    lengths, _ = lengths_of(50)
    assert sum(step.num_tokens for step in plan.steps()) == lengths[ids].sum()
    assert plan.naive_tokens(plan.step(0)) >= plan.step(0).num_tokens


def test_epoch_after_is_exact_by_samples():
    plan = plan_of(epochs=2)
    done = [plan.epoch_after(step) for step in plan.steps()]
    assert done[:2] == [8 / 50, 16 / 50]
    assert (done[6], done[7], done[13]) == (1.0, 1 + 8 / 50, 2.0)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_step_cut_again_is_the_step_of_a_plan_with_that_budget(num_ranks):
    for ids in (None, range(5, 50, 2)):
        plan, tight = (plan_of(num_ranks=num_ranks, sample_ids=ids, micro_batch_tokens=n) for n in (1000, 70))
        for step, expected in zip(plan.steps(), tight.steps(), strict=True):
            assert tuple(plan.resplit(step, rank, 70) for rank in range(num_ranks)) == expected.by_rank
        assert list(plan.with_layout(70, COST).steps()) == list(tight.steps())
        assert plan.with_layout(70, COST).fingerprint == plan.fingerprint
    with pytest.raises(UsageError, match=r"batch\.micro_batch_tokens=40"):
        plan_of().with_layout(40, COST)


def test_a_step_split_again_counts_no_filler():
    """In lockstep, a rank without samples repeats another one's, which must not be counted twice."""
    plan = make_plan([30, 20], [15, 10], BatchConfig(samples_per_step=1), micro_batch_tokens=40, seed=0, num_ranks=3)
    for step in plan.with_layout(40, COST, lockstep=True).steps():
        assert sum(batch.is_filler for batch in step.micro_batches) == 2
        again = [batch for rank in range(3) for batch in plan.resplit(step, rank, 30)]
        assert [batch.sample_ids for batch in again] == [step.sample_ids]
        assert sum(batch.num_label_tokens for batch in again) == step.num_label_tokens


def test_naive_loader_pads_each_ranks_share():
    batch = BatchConfig(samples_per_step=4, shuffle=False)
    plan, one, tight = (
        make_plan([10, 2, 9, 4], [1] * 4, batch, micro_batch_tokens=tokens, seed=0, num_ranks=ranks)
        for tokens, ranks in ((40, 2), (40, 1), (25, 1))
    )
    assert plan.naive_tokens(plan.step(0)) == 2 * 10 + 2 * 9
    assert one.naive_tokens(one.step(0)) == 4 * 10
    assert tight.naive_tokens(tight.step(0)) == 2 * 10 + 2 * 9


def test_a_sample_over_the_budget_names_the_settings():
    with pytest.raises(UsageError) as error:
        plan_of(micro_batch_tokens=40)
    message = str(error.value)
    lengths, _ = lengths_of(50)
    assert f"sample {lengths.argmax()} has {lengths.max()} tokens" in message
    assert "batch.micro_batch_tokens=40" in message
    assert "data.max_tokens" in message
    with pytest.raises(UsageError, match=r"sample 3 has 9 tokens"):
        make_plan([1, 1, 1, 9], [1] * 4, BatchConfig(), micro_batch_tokens=4, seed=0, num_ranks=1, sample_ids=[1, 3])


@pytest.mark.parametrize(
    ("lengths", "labels", "sample_ids", "message"),
    [
        ([], [], None, "the data set is empty"),
        ([3], [1], [], "the data set is empty"),
        ([3, 0], [1, 0], None, "sample 1 has no tokens"),
        ([3, 2], [1, 3], None, "sample 1 has 3 label tokens of 2 tokens"),
        ([3, 2], [1, -1], None, "sample 1 has -1 label tokens"),
        ([3, 2], [1], None, "equal 1-d shapes"),
        ([3, 2], [0, 0], None, "none of the 2 samples has a label token"),
        ([3, 2], [1, 1], [0, 0], "ascending and unique"),
        ([3, 2], [1, 1], [1, 0], "ascending and unique"),
        ([3, 2], [1, 1], [0, 2], "from 0 to 1"),
    ],
)
def test_impossible_data_is_refused(lengths, labels, sample_ids, message):
    with pytest.raises(DataError, match=message):
        make_plan(lengths, labels, BatchConfig(), micro_batch_tokens=100, seed=0, num_ranks=1, sample_ids=sample_ids)


def test_a_step_without_labels_is_planned_and_says_so():
    batch = BatchConfig(samples_per_step=1)
    plan = make_plan([5] * 10, [1] * 9 + [0], batch, micro_batch_tokens=10, seed=0, num_ranks=1)
    assert [step.sample_ids for step in plan.steps() if step.num_label_tokens == 0] == [(9,)]


def test_ranks_must_exist():
    with pytest.raises(UsageError, match="ranks is 0"):
        plan_of(num_ranks=0)
    with pytest.raises(IndexError):
        plan_of().step(7)


def test_held_out_split():
    train, held_out = split_held_out(range(1000), 0.1, seed=3)
    assert len(held_out) == 100
    assert sorted([*train, *held_out]) == list(range(1000))
    assert (np.diff(train) > 0).all()
    assert (np.diff(held_out) > 0).all()
    again = split_held_out(range(1000), 0.1, seed=3)
    assert (again[1] == held_out).all()
    assert (split_held_out(range(1000), 0.1, seed=4)[1] != held_out).any()
    assert [len(ids) for ids in split_held_out(range(2), 0.001, seed=0)] == [1, 1]
    assert [len(ids) for ids in split_held_out(range(3), 0.999, seed=0)] == [1, 2]
    with pytest.raises(DataError, match="cannot be split"):
        split_held_out(range(1), 0.5, seed=0)
    with pytest.raises(UsageError, match=r"eval\.fraction"):
        split_held_out(range(10), 0.0, seed=0)


def test_samples_of_one_row_are_held_out_together():
    keys = np.repeat(np.arange(100)[::-1], np.arange(100) % 3 + 1)
    train, held_out = split_held_out(keys, 0.2, seed=3)
    assert len(set(keys[held_out])) == 20
    assert not set(keys[train]) & set(keys[held_out])
    once = [split_held_out(some, 0.2, seed=3)[1].tolist() for some in (range(100), np.arange(100)[::-1] * 7)]
    assert once[0] == once[1]


def test_eval_plan_reads_in_order_and_does_not_depend_on_ranks():
    lengths, labels = lengths_of(50)
    ids = np.arange(0, 50, 3)
    plans = [make_eval_plan(lengths, labels, ids, layout=BatchLayout(ranks, 100, COST)) for ranks in (1, 2, 5)]
    for plan in plans:
        assert plan.sample_ids == tuple(ids)
        assert plan.num_label_tokens == labels[ids].sum()
        micro_batches = sorted(plan.micro_batches, key=lambda m: m.sample_ids)
        assert [i for m in micro_batches for i in m.sample_ids] == ids.tolist()
        assert max(m.num_tokens for m in micro_batches) <= 100
        assert micro_batches == list(plans[0].by_rank[0])
    assert plans[1].balance > 0.9
    full = make_eval_plan([50, 50, 1], [1, 1, 1], layout=BatchLayout(1, 100, COST_BY_TOKENS))
    assert [m.sample_ids for m in full.by_rank[0]] == [(0, 1), (2,)]
    with pytest.raises(DataError, match="no loss"):
        make_eval_plan([3, 4], [0, 0], layout=BatchLayout(1, 100, COST_BY_TOKENS))


def test_equal_content_is_held_out_together():
    # every content ten times, in rows that lie far apart
    contents = np.tile(np.arange(40, dtype=np.uint64), 10)
    train, held_out = split_held_out(range(400), 0.1, seed=3, hashes=contents)
    assert len(set(contents[held_out])) == 4
    assert len(held_out) == 40
    assert not set(contents[train]) & set(contents[held_out])
    assert split_held_out(range(400), 0.1, seed=3)[1].tolist() != held_out.tolist(), "by row it would not be"
    # rows that are chained by windows they share are one group: 0-1, 1-2
    rows, windows = [0, 0, 1, 1, 2, 2, 3, 4, 5, 6], [1, 2, 2, 3, 3, 4, 5, 6, 7, 8]
    for seed in range(8):
        sides = split_held_out(rows, 0.5, seed=seed, hashes=windows)
        assert any(set(range(6)) <= set(side.tolist()) for side in sides)


def test_without_copies_content_changes_no_split():
    for seed in range(3):
        by_row = split_held_out(range(100), 0.2, seed=seed)
        by_content = split_held_out(range(100), 0.2, seed=seed, hashes=np.arange(100)[::-1])
        assert [side.tolist() for side in by_row] == [side.tolist() for side in by_content]


def test_a_content_with_more_copies_than_the_evaluation_should_have_is_trained_on():
    contents = np.concatenate([np.zeros(60), np.arange(1, 41)])
    for seed in range(8):
        held_out = split_held_out(range(100), 0.1, seed=seed, hashes=contents)[1]
        assert (held_out >= 60).all()
    with pytest.raises(DataError, match="100 rows have one content and cannot be split"):
        split_held_out(range(100), 0.1, seed=0, hashes=np.zeros(100))


def test_planning_needs_neither_torch_nor_transformers():
    code = (
        "import json, pkgutil, sys, importlib, flatout.planner\n"
        "for module in pkgutil.iter_modules(flatout.planner.__path__):\n"
        "    importlib.import_module('flatout.planner.' + module.name)\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "datasets", "tokenizers"} & set(json.loads(loaded.stdout))
