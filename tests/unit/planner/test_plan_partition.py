"""Ranks of equal cost and micro-batches of equal size."""

import itertools

import numpy as np
import pytest

from flatout.planner.cost import CostModel
from flatout.planner.steps.packing import bin_pack, partition

# Qwen3-8B with LoRA rank 16
QWEN3_8B = CostModel(per_token=2.8e10, per_pair=2.06e6, per_label=2.5e9)


def chat_lengths(rng, count):
    return np.clip(np.exp(rng.normal(6.0, 0.8, count)), 32, 2048).astype(int)


def loads_of(parts, weights):
    return [sum(weights[item] for item in part) for part in parts]


def balance_of(parts, weights):
    loads = loads_of(parts, weights)
    return sum(loads) / len(loads) / max(loads)


@pytest.mark.parametrize(("num_samples", "num_ranks"), [(32, 2), (32, 4), (128, 4), (128, 8)])
def test_chat_like_steps_are_balanced(num_samples, num_ranks):
    rng = np.random.default_rng(0)
    balances = []
    for _ in range(300):
        lengths = chat_lengths(rng, num_samples)
        costs = QWEN3_8B.flops(lengths, lengths * 6 // 10).tolist()
        balances.append(balance_of(partition(costs, num_ranks), costs))
    assert min(balances) >= 0.985
    assert np.mean(balances) >= 0.995


def test_close_to_the_best_possible():
    rng = np.random.default_rng(1)
    ratios = []
    for _ in range(40):
        weights = rng.integers(1, 100, 9).tolist()
        best = min(
            max(np.bincount(choice, weights=weights, minlength=3))
            for choice in itertools.product(range(3), repeat=9)
            if choice[0] == 0
        )
        ratios.append(max(loads_of(partition(weights, 3), weights)) / best)
    # Graham's bound is 4/3 - 1/9
    assert max(ratios) <= 1.12
    assert np.mean(ratios) <= 1.03


def test_fewer_samples_than_ranks_leave_the_last_ones_empty():
    assert partition([5.0, 9.0], 4) == [[1], [0], [], []]
    assert partition([], 3) == [[], [], []]


def test_ties_go_to_the_lower_index():
    assert partition([1.0] * 6, 3) == [[0, 3], [1, 4], [2, 5]]


def test_no_parts_is_refused():
    with pytest.raises(ValueError, match="num_parts"):
        partition([1.0], 0)


def test_a_little_over_the_budget_is_levelled():
    lengths = [1000] * 19
    sizes = loads_of(bin_pack(lengths, 16_384), lengths)
    assert sizes == [10_000, 9_000]


def fewest(lengths, budget):
    """Exact bin packing by dynamic programming over subsets: (bins, fill of the last one) is minimal."""
    best = [(1, 0)] + [(len(lengths) + 1, 0)] * (2 ** len(lengths) - 1)
    for subset in range(2 ** len(lengths)):
        bins, fill = best[subset]
        for item, length in enumerate(lengths):
            if not subset >> item & 1:
                grown = (bins, fill + length) if fill + length <= budget else (bins + 1, length)
                best[subset | 1 << item] = min(best[subset | 1 << item], grown)
    return best[-1][0]


@pytest.mark.parametrize("budget", [100, 120, 200, 300])
def test_packing_is_nearly_always_the_fewest(budget):
    rng = np.random.default_rng(budget)
    extra = []
    for _ in range(100):
        lengths = rng.integers(10, 100, 9).tolist()
        extra.append(len(bin_pack(lengths, budget)) - fewest(lengths, budget))
    assert min(extra) >= 0
    assert max(extra) <= 1
    assert sum(extra) <= 3


def test_largest_micro_batch_first_and_stable_inside():
    lengths = [30, 70, 20, 60, 10]
    parts = bin_pack(lengths, 100)
    sizes = loads_of(parts, lengths)
    assert sizes == sorted(sizes, reverse=True)
    assert all(part == sorted(part) for part in parts)


def test_a_sample_over_the_budget_is_refused():
    with pytest.raises(ValueError, match="101 tokens does not fit in 100"):
        bin_pack([5, 101], 100)


def test_nothing_packs_to_nothing():
    assert bin_pack([], 100) == []


def test_best_fit_steps_in_where_levelling_cannot_fit():
    lengths = [39, 85, 42, 53, 91, 85, 35, 24, 97]
    assert len(bin_pack(lengths, 100)) == fewest(lengths, 100) == 6


def test_best_fit_is_levelled_too():
    # best-fit decreasing alone leaves micro-batches of 75, 82, 84, 97, 98 and 100
    lengths = [75, 38, 50, 82, 38, 29, 98, 12, 30, 84]
    assert sorted(loads_of(bin_pack(lengths, 100), lengths)) == [82, 84, 87, 88, 97, 98]
