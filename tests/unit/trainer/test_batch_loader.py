"""The loader looks ahead: the same batches in the same order, whatever was foreseen; no error and no thread is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest
import torch

from flatout.data.token_store import TokenSample
from flatout.errors import DataError
from flatout.models.packed import PackedBatch, flatten_samples
from flatout.planner.steps.step_plan import MicroBatch, StepPlan
from flatout.trainer.batch_loader import NUM_PREFETCHED, BatchLoader

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
needs_gpu = pytest.mark.gpu


class Store:
    """Sample i has 3 + i % 50 tokens; `read` lists what was asked for, sample `bad` raises."""

    folder = "made-up"

    def __init__(self, bad: int | None = None, slow_s: float = 0.0) -> None:
        self.bad, self.slow_s, self.read = bad, slow_s, []

    def sample(self, index: int, columns: Sequence[str] = ()) -> TokenSample:
        time.sleep(self.slow_s)
        self.read.append(index)
        if index == self.bad:
            raise DataError(f"sample {index} is damaged")
        draw = np.random.default_rng(index)
        length = 3 + index % 50
        return TokenSample(draw.integers(0, 1000, length).astype(np.int32), draw.random(length) < 0.5)


def micro_batch(*ids: int) -> MicroBatch:
    masks = [Store().sample(i).loss_mask for i in ids]
    # the first token of a document is predicted by nothing
    num_label_tokens = sum(int(mask[1:].sum()) for mask in masks)
    return MicroBatch(ids, num_tokens=sum(map(len, masks)), num_label_tokens=num_label_tokens)


def step(index: int, micro_batches: Sequence[MicroBatch], others: Sequence[MicroBatch] = ()) -> StepPlan:
    ids = tuple(i for batch in micro_batches for i in batch.sample_ids)
    return StepPlan(index, 0, ids, 1, 1, (tuple(others), tuple(micro_batches)), 1.0)


def make_loader(store: Any, device: torch.device = CPU) -> BatchLoader:
    return BatchLoader(store, device, max_documents=8)


def plain(loader: BatchLoader, batches: Sequence[MicroBatch]) -> list[PackedBatch]:
    return [
        flatten_samples([Store().sample(i).pair for i in batch.sample_ids], num_boundaries=loader.num_boundaries)
        for batch in batches
    ]


def assert_equal(ours: Sequence[PackedBatch], truth: Sequence[PackedBatch]) -> None:
    assert len(ours) == len(truth)
    for one, other in zip(ours, truth, strict=True):
        if one.cu_seqlens_cpu is not None:
            assert torch.equal(one.cu_seqlens_cpu, other.cu_seqlens)
        for mine, true in zip(astuple(replace(one, cu_seqlens_cpu=None)), astuple(other), strict=True):
            assert torch.equal(mine.cpu(), true) if isinstance(true, torch.Tensor) else mine == true


STEPS = [
    step(0, [micro_batch(1, 2), micro_batch(3)], [micro_batch(90)]),
    step(1, [micro_batch(4, 5, 6)], [micro_batch(91)]),
    step(2, [], [micro_batch(92)]),
    step(3, [micro_batch(7), micro_batch(7), micro_batch(8, 1)]),
]


@pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=needs_gpu)])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_steps_and_batches_are_those_of_the_plan(device, num_steps):
    store = Store()
    loader = make_loader(store, device)
    seen, ours = [], []
    for now in loader.prefetching(STEPS[:num_steps], rank=1):
        seen.append(now)
        ours += list(loader.batches(now.by_rank[1]))
    loader.close()
    expected = [batch for now in STEPS[:num_steps] for batch in now.by_rank[1]]
    assert seen == STEPS[:num_steps]
    assert_equal(ours, plain(loader, expected))
    assert all(tensor.device == device for batch in ours for tensor in (batch.token_ids, batch.label_rows))
    # nothing is read twice, and nothing of another rank
    assert store.read == [i for batch in expected for i in batch.sample_ids]


def test_the_next_micro_batches_are_ready_before_they_are_asked_for():
    """Across the step's border; and no more of them than the look-ahead."""
    store = Store()
    loader = make_loader(store)
    steps = loader.prefetching(STEPS, rank=1)
    batches = loader.batches(next(steps).by_rank[1])
    next(batches)
    settle(loader)
    assert store.read == [1, 2, 3, 4, 5, 6]
    next(batches)
    settle(loader)
    assert store.read == [1, 2, 3, 4, 5, 6]  # two steps ahead lies one without work for this rank
    next(loader.batches(next(steps).by_rank[1]))
    settle(loader)
    assert store.read == [1, 2, 3, 4, 5, 6, 7]
    loader.close()


def settle(loader: BatchLoader) -> None:
    for future in list(loader._staged.values()):
        future.result()


def test_waiting_is_counted_only_where_the_host_was_blocked():
    loader = make_loader(Store(slow_s=0.05))
    batches = loader.batches([micro_batch(1), micro_batch(2)])
    next(batches)
    assert loader.wait_s >= 0.05
    settle(loader)
    before_s = loader.wait_s
    next(batches)
    assert loader.wait_s - before_s < 0.05
    loader.close()


class HeldStore(Store):
    """Sample 3 is not read before `opened` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()

    def sample(self, index: int, columns: Sequence[str] = ()) -> TokenSample:
        assert index != 3 or self.opened.wait(60)
        return super().sample(index)


def test_micro_batches_cut_again_are_served_and_stale_ones_dropped():
    """A step is cut anew in the middle, as after running out of memory; the steps after it go on as planned."""
    store = HeldStore()
    loader = make_loader(store)
    steps = loader.prefetching(STEPS, rank=1)
    first = next(steps)
    halves = [micro_batch(1), micro_batch(2), micro_batch(3)]
    ours = [next(loader.batches(first.by_rank[1]))]

    def open_when_dropped():
        """Samples 4 to 6 wait behind sample 3 until they have been dropped."""
        while any(4 in staged.sample_ids for staged in list(loader._staged)):
            time.sleep(0.001)
        store.opened.set()

    threading.Thread(target=open_when_dropped, daemon=True).start()
    ours += list(loader.batches(halves))
    settle(loader)
    assert len(loader._staged) <= NUM_PREFETCHED
    second = next(steps)
    ours += list(loader.batches(second.by_rank[1]))
    assert_equal(ours, plain(loader, [first.by_rank[1][0], *halves, *second.by_rank[1]]))
    assert store.read.count(4) == 1
    loader.close()


def test_leaving_early_leaves_nothing_behind():
    before = set(threading.enumerate())  # others may end meanwhile
    loader = make_loader(Store(slow_s=0.01))
    for _ in loader.batches(STEPS[0].by_rank[1]):
        break
    (ours,) = set(threading.enumerate()) - before
    loader.close()
    assert not ours.is_alive()
    assert not loader._staged
    make_loader(Store()).close()


def test_an_error_surfaces_where_its_micro_batch_is_used():
    loader = make_loader(Store(bad=3))
    batches = loader.batches(STEPS[0].by_rank[1])
    assert_equal([next(batches)], plain(loader, [micro_batch(1, 2)]))
    with pytest.raises(DataError, match="sample 3 is damaged"):
        next(batches)
    # and again when asked again, with other batches untouched
    with pytest.raises(DataError, match="sample 3 is damaged"):
        list(loader.batches([micro_batch(3)]))
    assert_equal(list(loader.batches([micro_batch(4)])), plain(loader, [micro_batch(4)]))
    loader.close()


@pytest.mark.gpu
def test_memory_is_not_given_out_again_while_a_late_kernel_reads_it():
    """The training stream is far behind the host: batches freed by the host must not be overwritten by later ones."""
    loader = make_loader(Store(), CUDA)
    micro_batches = [micro_batch(i, i + 1) for i in range(200)]
    sums = []
    for batch in loader.batches(micro_batches):
        torch.cuda._sleep(2_000_000)
        sums.append(batch.token_ids.sum())
        del batch
    loader.close()
    truth = [batch.token_ids.sum().item() for batch in plain(loader, micro_batches)]
    assert torch.stack(sums).tolist() == truth


def test_a_mask_with_other_labels_than_the_plan_counts_is_refused():
    loader = make_loader(Store())
    planned = micro_batch(1, 2)
    wrong = [replace(planned, num_label_tokens=planned.num_label_tokens + 1)]
    with pytest.raises(DataError, match=r"samples \[1, 2\] have \d+ label tokens, .*; rebuild the data set"):
        list(loader.batches(wrong))
    loader.read_from(loader.store)
    with pytest.raises(DataError, match="start the run again, which checks the answers of the round"):
        list(loader.batches(wrong))
    loader.close()
