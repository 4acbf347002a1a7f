"""When launching kernels takes longer than computing them: decided from the plan alone."""

from collections import Counter
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from plans import make_plan
from transformers import AutoConfig, AutoModelForCausalLM

from flatout.config.read import make_config
from flatout.config.schema import BatchConfig
from flatout.models.experts.block import experts_modules
from flatout.models.packed import PackedSize, packed_size
from flatout.parallel.rank import Rank
from flatout.planner.cost import make_cost
from flatout.planner.host_bound import HOST_S_PER_LAYER, is_host_bound
from flatout.planner.settings import PlanSettings
from flatout.planner.steps.training_plan import TrainingPlan
from flatout.track.callback import Reporter
from flatout.trainer.graph_sizes import best_size_buckets, count_sizes, make_size_buckets, plan_graphs
from flatout.trainer.model_shape import make_shape
from flatout.trainer.planned_run import open_and_plan

SIZES: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
}
SHAPE = make_shape(SIZES)
EXPERTS = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_experts": 4, "vocab_size": 64}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_experts_are_recorded_where_their_products_do_not_wait(tiny, tmp_path, dtype):
    """Decided before any GPU is asked, so a name of a device is enough here."""
    config = tiny.config(tmp_path / "run", method="lora", compile="off")
    planned = open_and_plan(config, Reporter(), Rank())
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **EXPERTS), dtype=dtype)
    assert experts_modules(model)
    why, _ = plan_graphs(config, planned, model, torch.device("cuda"), 0)
    assert ("read the experts' boundaries" in str(why)) == (dtype != torch.bfloat16)


def plan_of(micro_batch_tokens: int) -> TrainingPlan:
    lengths = np.full(64, 512, np.int32)
    cost = make_cost(PlanSettings.of(make_config({"model": {"name": "m"}})), SHAPE)
    return make_plan(
        lengths, lengths // 2, BatchConfig(samples_per_step=32, shuffle=False),
        micro_batch_tokens=micro_batch_tokens, seed=0, num_ranks=1, cost=cost,
    )  # fmt: skip


def test_the_border_is_where_a_micro_batch_takes_the_hosts_time():
    plan = plan_of(16384)
    [step, *_] = plan.steps()
    border = plan.flops(step) / (SHAPE.num_layers * HOST_S_PER_LAYER)
    assert is_host_bound(plan, SHAPE, border * 1.01)
    assert not is_host_bound(plan, SHAPE, border * 0.99)


def test_smaller_micro_batches_wait_for_the_host():
    """At a speed where one micro-batch a step keeps the GPU busy, sixteen of the same step do not."""
    [whole, *_] = plan_of(16384).steps()
    flops_per_s = plan_of(16384).flops(whole) / (SHAPE.num_layers * HOST_S_PER_LAYER) / 4
    assert not is_host_bound(plan_of(16384), SHAPE, flops_per_s)
    assert is_host_bound(plan_of(1024), SHAPE, flops_per_s)


def test_a_size_goes_up_to_the_next_rung():
    size_buckets = (512, 1024)
    assert [packed_size([n], size_buckets=size_buckets).num_tokens for n in (1, 512, 513, 1024, 1025)] == [
        512,
        512,
        1024,
        1024,
        1152,
    ]
    # the tail's document counts for the longest one
    assert packed_size([100, 413], size_buckets=size_buckets) == PackedSize(1024, 512)
    assert packed_size([100, 413]) == PackedSize(640, 512)


def test_a_ladder_fills_up_little_and_a_longer_run_gets_more_rungs():
    draw = np.random.default_rng(0)
    lengths = np.clip(np.exp(draw.normal(6.0, 0.8, 32 * 400)), 32, 2048).astype(int)
    plan = make_plan(
        lengths, lengths // 2, BatchConfig(samples_per_step=32, max_steps=5000),
        micro_batch_tokens=2**20, seed=0, num_ranks=2,
    )  # fmt: skip
    counts = count_sizes(plan, 1)
    bucket_sets = [make_size_buckets(counts, run_s) for run_s in (10.0, 1000.0, 10_000.0)]
    assert [len(size_buckets) for size_buckets in bucket_sets] == sorted(
        len(size_buckets) for size_buckets in bucket_sets
    )
    assert len(bucket_sets[0]) == 16 < len(bucket_sets[-1]) <= 40
    num_tokens = sum(size.num_tokens * count for size, count in counts.items())
    for size_buckets, most in zip(bucket_sets[::2], (0.02, 0.005), strict=True):
        assert all(low < high and high % 128 == 0 for low, high in pairwise((0, *size_buckets)))
        filled = count_sizes(plan, 1, size_buckets=size_buckets)
        assert {size.num_tokens for size in filled} <= set(size_buckets)
        assert 0 <= sum(size.num_tokens * count for size, count in filled.items()) / num_tokens - 1 < most


def test_few_sizes_are_all_rungs():
    assert make_size_buckets(Counter({PackedSize(640, 512): 3, PackedSize(128, 128): 1}), 1.0) == (128, 640)


def test_no_ladder_fills_up_less():
    draw = np.random.default_rng(1)
    sizes = np.sort(draw.choice(np.arange(1, 40), 9, replace=False)) * 128
    weights = draw.integers(1, 9, len(sizes))

    def filled(size_buckets: tuple[int, ...]) -> int:
        buckets = np.array(size_buckets)
        return int((buckets[np.searchsorted(buckets, sizes)] * weights).sum())

    bucket_sets = best_size_buckets(sizes, weights, 20)
    assert [len(size_buckets) for size_buckets in bucket_sets] == list(range(1, 10))
    for size_buckets in bucket_sets:
        # the largest size is a bucket of every size_buckets that holds them all
        others = combinations(sizes[:-1].tolist(), len(size_buckets) - 1)
        assert filled(tuple(size_buckets.tolist())) == min(filled((*other, int(sizes[-1]))) for other in others)
