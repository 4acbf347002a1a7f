"""The report: every number recounted from the steps."""

import numpy as np
import pytest
from plans import make_plan

from flatout.config.schema import BatchConfig
from flatout.planner.cost import CostModel
from flatout.planner.devices import GIB
from flatout.planner.memory.sizes import MemoryEstimate, MicroBatchSize
from flatout.planner.totals import add_up, totals_lines

COST = CostModel(per_token=1e12, per_pair=1e9, per_label=1e11)
MEMORY = MemoryEstimate(16 * GIB, GIB >> 10, 0, GIB >> 9, GIB // 2, 0)


@pytest.fixture
def plan():
    lengths = np.random.default_rng(0).integers(5, 100, 60)
    batch = BatchConfig(samples_per_step=16, epochs=1.5)
    return make_plan(lengths, lengths // 3, batch, micro_batch_tokens=250, seed=1, num_ranks=3, cost=COST)


def test_numbers_are_recounted(plan):
    report = add_up(plan, rank_counts=(1, 2), tokens_per_s=100.0)
    steps = list(plan.steps())
    lengths = plan.samples.lengths
    assert (report.num_steps, report.num_samples, report.num_ranks) == (6, 60, 3)
    assert report.epochs == 1 + 32 / 60
    assert report.num_tokens == sum(step.num_tokens for step in steps)
    assert report.label_share == sum(step.num_label_tokens for step in steps) / report.num_tokens
    micro_batches = [m for step in steps for m in step.micro_batches]
    assert report.num_micro_batches == len(micro_batches)
    assert report.max_micro_batch_tokens == max(m.num_tokens for m in micro_batches) <= 250
    assert report.max_micro_batch_labels == max(m.num_label_tokens for m in micro_batches)
    assert report.max_micro_batch_documents == max(len(m.sample_ids) for m in micro_batches)
    ids = np.array([i for step in steps for i in step.sample_ids])
    assert report.flops == pytest.approx(COST.flops(lengths[ids], (lengths // 3)[ids]).sum())
    assert report.time_s == report.num_tokens / 100.0
    assert 0 < report.padding_avoided < 1
    assert report.num_naive_tokens == sum(plan.naive_tokens(step) for step in steps)
    assert report.fingerprint == plan.fingerprint


def test_balance_at_other_numbers_of_ranks(plan):
    balances = {balance.num_ranks: balance for balance in add_up(plan, rank_counts=(1, 2, 16)).balances}
    assert sorted(balances) == [1, 2, 3, 16]
    assert balances[1].mean == balances[1].worst == 1.0
    own = [step.balance for step in plan.steps()]
    assert balances[3].mean == pytest.approx(np.mean(own))
    assert balances[3].worst == min(own)
    assert balances[16].worst < balances[2].worst


def test_the_largest_micro_batch_needs_the_memory(plan):
    seen = []

    def memory_of(size):
        seen.append(size)
        return MEMORY

    report = add_up(plan, num_held_out=7, tokens_per_s=0.5, memory_of=memory_of)
    largest = (report.max_micro_batch_tokens, report.max_micro_batch_labels, report.max_micro_batch_documents)
    assert seen == [MicroBatchSize(*largest)]
    assert report.memory == MEMORY
    told = dict(totals_lines(report))
    assert told.keys() >= {"memory per rank", "time"}
    assert "time" not in dict(totals_lines(add_up(plan)))
