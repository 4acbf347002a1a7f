"""Plans of streams: windows of any size, carried over, nothing lost."""

from collections import Counter

import numpy as np
import pytest

from flatout.config.schema import BatchConfig
from flatout.errors import UsageError
from flatout.plan.steps import make_plan
from flatout.plan.stream import plan_stream

BATCH = BatchConfig(samples_per_step=8)


def windows_of(sizes, seed=0):
    rng = np.random.default_rng(seed)
    for size in sizes:
        lengths = rng.integers(2, 90, size)
        yield lengths, lengths // 2


def steps_of(sizes, batch=BATCH, num_ranks=2, seed=5):
    return list(plan_stream(windows_of(sizes), batch, micro_batch_tokens=200, seed=seed, num_ranks=num_ranks))


def test_every_sample_once_over_all_windows():
    steps = steps_of([30, 3, 0, 41, 1])
    assert Counter(i for step in steps for i in step.sample_ids) == Counter(range(75))
    assert [len(step.sample_ids) for step in steps] == [8] * 9 + [3]
    assert [step.index for step in steps] == list(range(10))
    lengths = np.concatenate([window[0] for window in windows_of([30, 3, 0, 41, 1])])
    for step in steps:
        assert step.num_tokens == lengths[list(step.sample_ids)].sum()
        assert step.num_label_tokens == (lengths // 2)[list(step.sample_ids)].sum()


def test_the_same_steps_for_any_number_of_ranks():
    for ranks in (1, 3, 8):
        same = [(s.sample_ids, s.num_label_tokens) for s in steps_of([30, 45], num_ranks=ranks)]
        assert same == [(s.sample_ids, s.num_label_tokens) for s in steps_of([30, 45])]


def test_samples_stay_in_their_window_and_are_shuffled_in_it():
    ids = [i for step in steps_of([40, 40]) for i in step.sample_ids]
    assert sorted(ids[:40]) == list(range(40))
    assert ids[:40] != list(range(40))
    assert [i - 40 for i in ids[40:]] != ids[:40]
    assert ids != [i for step in steps_of([40, 40], seed=6) for i in step.sample_ids]


def test_unshuffled_windows_are_one_unshuffled_run():
    batch = BATCH.model_copy(update={"shuffle": False})
    lengths, labels = (np.concatenate(arrays) for arrays in zip(*windows_of([13, 50, 2]), strict=True))
    whole = make_plan(lengths, labels, batch, micro_batch_tokens=200, seed=5, num_ranks=2)
    assert steps_of([13, 50, 2], batch) == list(whole.steps())


def test_windows_are_read_only_when_needed():
    read = []

    def endless():
        while True:
            read.append(len(read))
            yield [5] * 16, [1] * 16

    batch = BATCH.model_copy(update={"max_steps": 5})
    assert len(list(plan_stream(endless(), batch, micro_batch_tokens=200, seed=0, num_ranks=1))) == 5
    assert len(read) == 3


def test_what_a_stream_cannot_do_is_refused():
    with pytest.raises(UsageError, match=r"set batch\.max_steps"):
        steps_of([8], BATCH.model_copy(update={"epochs": 2.0}))
    windows = [([5] * 16, [1] * 16), ([5, 500], [1, 1])]
    with pytest.raises(UsageError, match=r"sample 17 has 500 tokens"):
        list(plan_stream(windows, BATCH, micro_batch_tokens=200, seed=0, num_ranks=1))
