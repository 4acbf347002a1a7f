"""Summarize a plan in numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flatout.plan.memory.estimate import MemoryEstimate, MicroBatchSize
from flatout.plan.steps.run_plan import RunPlan

# steps, sampled evenly over the run, that estimate the balance at other numbers of ranks
NUM_BALANCE_STEPS = 500


@dataclass(frozen=True, slots=True)
class Balance:
    """Mean and worst balance of the steps (mean / max of the ranks' planned FLOPs) at one number of ranks."""

    num_ranks: int
    mean: float
    worst: float


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What a run will do. Counts are over the whole run, but `num_samples` is the size of the data set.

    `num_naive_tokens` is what a padding loader would compute for the same steps, `padding_avoided` the share of them
    that is padding; `time_s` is None unless the throughput
    is known. Everything is exact except the balance at other numbers of ranks, taken from `NUM_BALANCE_STEPS` steps,
    and the memory, which is estimated.
    """

    num_ranks: int
    num_steps: int
    num_samples: int
    num_held_out: int
    epochs: float
    num_tokens: int
    num_label_tokens: int
    num_micro_batches: int
    max_micro_batch_tokens: int
    max_micro_batch_labels: int
    max_micro_batch_documents: int
    num_naive_tokens: int
    flops: float
    balances: tuple[Balance, ...]
    memory: MemoryEstimate | None
    time_s: float | None
    fingerprint: str
    label_share: float
    padding_avoided: float


def explain(
    plan: RunPlan,
    *,
    rank_counts: Sequence[int] = (1, 2, 4, 8),
    num_held_out: int = 0,
    tokens_per_s: float | None = None,
    memory_of: Callable[[MicroBatchSize], MemoryEstimate | None] | None = None,
) -> PlanReport:
    """Go through every step of the plan and sum up the counts.

    `memory_of` maps the largest micro-batch to its memory; `tokens_per_s` counts real tokens over all ranks.
    """
    num_tokens = num_labels = num_micro_batches = num_naive = 0
    largest = MicroBatchSize(0, 0, 0)
    flops = epochs = 0.0
    balances: list[float] = []
    for step in plan.steps():
        num_tokens += step.num_tokens
        num_labels += step.num_label_tokens
        num_naive += plan.naive_tokens(step)
        flops += plan.flops(step)
        epochs = plan.epoch_after(step)
        balances.append(step.balance)
        for batch in (batch for rank in step.ranks for batch in rank):
            num_micro_batches += 1
            largest = MicroBatchSize(
                max(largest.num_tokens, batch.num_tokens),
                max(largest.num_labels, batch.num_label_tokens),
                max(largest.num_documents, len(batch.sample_ids)),
            )
    by_ranks = {plan.layout.num_ranks: balances}
    for count in set(rank_counts) - {plan.layout.num_ranks}:
        other = replace(plan, layout=replace(plan.layout, num_ranks=count))
        by_ranks[count] = [step.balance for step in other.sampled_steps(NUM_BALANCE_STEPS)]
    return PlanReport(
        num_ranks=plan.layout.num_ranks,
        num_steps=plan.num_steps,
        num_samples=plan.num_samples,
        num_held_out=num_held_out,
        epochs=epochs,
        num_tokens=num_tokens,
        num_label_tokens=num_labels,
        num_micro_batches=num_micro_batches,
        max_micro_batch_tokens=largest.num_tokens,
        max_micro_batch_labels=largest.num_labels,
        max_micro_batch_documents=largest.num_documents,
        num_naive_tokens=num_naive,
        flops=flops,
        balances=tuple(Balance(count, sum(each) / len(each), min(each)) for count, each in sorted(by_ranks.items())),
        memory=memory_of(largest) if memory_of else None,
        time_s=num_tokens / tokens_per_s if tokens_per_s else None,
        fingerprint=plan.fingerprint,
        label_share=num_labels / num_tokens,
        padding_avoided=1.0 - num_tokens / num_naive,
    )
