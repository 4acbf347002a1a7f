"""When launching kernels takes longer than computing them: decided from the plan alone."""

from typing import Any

import numpy as np

from flatout.config.schema import BatchConfig
from flatout.plan.cost import make_cost
from flatout.plan.shape import ModelShape
from flatout.plan.steps import RunPlan, make_plan
from flatout.train.graphs import HOST_S_PER_LAYER, is_host_bound

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
SHAPE = ModelShape.from_config(SIZES)


def plan_of(micro_batch_tokens: int) -> RunPlan:
    lengths = np.full(64, 512, np.int32)
    cost = make_cost(SHAPE, method="lora", lora_rank=16, lora_targets="all-linear", recompute=False)
    return make_plan(
        lengths, lengths // 2, BatchConfig(samples_per_step=32, shuffle=False),
        micro_batch_tokens=micro_batch_tokens, seed=0, num_ranks=1, cost=cost,
    )  # fmt: skip


def test_the_border_is_where_a_micro_batch_takes_the_hosts_time() -> None:
    plan = plan_of(16384)
    [step, *_] = plan.steps()
    border = plan.flops(step) / (SHAPE.num_layers * HOST_S_PER_LAYER)
    assert is_host_bound(plan, SHAPE, border * 1.01)
    assert not is_host_bound(plan, SHAPE, border * 0.99)


def test_smaller_micro_batches_wait_for_the_host() -> None:
    """At a speed where one micro-batch a step keeps the GPU busy, sixteen of the same step do not."""
    [whole, *_] = plan_of(16384).steps()
    flops_per_s = plan_of(16384).flops(whole) / (SHAPE.num_layers * HOST_S_PER_LAYER) / 4
    assert not is_host_bound(plan_of(16384), SHAPE, flops_per_s)
    assert is_host_bound(plan_of(1024), SHAPE, flops_per_s)
