"""Seconds and peak memory of planning every step of a data set of chat-like lengths, and how level its ranks are.

python benchmarks/plan_speed.py --samples 1000000 --ranks 4
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np

from flatout.config.schema import BatchConfig
from flatout.planner.cost import CostModel
from flatout.planner.steps.step_plan import BatchLayout
from flatout.planner.steps.training_plan import make_plan, select_samples

# Qwen3-8B, LoRA rank 16: per token, per query-key pair, per label token
COST = CostModel(per_token=2.8e10, per_pair=2.06e6, per_label=2.5e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--samples-per-step", type=int, default=32)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(6.0, 0.8, args.samples)), 32, 2048).astype(np.int32)
    num_label_tokens = (lengths * 0.6).astype(np.int32)
    batch = BatchConfig(samples_per_step=args.samples_per_step)
    before_bytes = _peak_bytes()
    started = time.perf_counter()
    layout = BatchLayout(args.ranks, args.micro_batch_tokens, COST)
    plan = make_plan(select_samples(lengths, num_label_tokens, None, layout), layout, batch, seed=0)
    fingerprint = plan.fingerprint
    num_samples, num_micro_batches, balances = 0, 0, []
    for step in plan.steps():
        num_samples += len(step.sample_ids)
        num_micro_batches += sum(len(rank) for rank in step.by_rank)
        balances.append(step.balance)
    seconds, peak_bytes = time.perf_counter() - started, _peak_bytes()
    assert num_samples == args.samples, "samples were lost"
    print(f"{plan.num_steps} steps, {num_micro_batches} micro-batches on {args.ranks} ranks, plan {fingerprint}")
    low = np.quantile(balances, 0.01)
    print(f"balance mean {np.mean(balances):.4f}, 1 % worst {low:.4f}, min {min(balances):.4f}")
    print(f"{seconds:.2f} s; peak memory {peak_bytes / 1e6:.0f} MB, of it {before_bytes / 1e6:.0f} MB before planning")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
