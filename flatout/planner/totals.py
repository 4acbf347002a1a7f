"""Add up what all steps of a plan compute, in numbers and as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace

from flatout.errors import counted
from flatout.planner.memory.sizes import MemoryEstimate, MicroBatchSize
from flatout.planner.steps.step_plan import StepPlan
from flatout.planner.steps.training_plan import PlannedSamples, TrainingPlan

# steps, sampled evenly over the run, that estimate the balance at other numbers of ranks
NUM_BALANCE_STEPS = 500


@dataclass(frozen=True, slots=True)
class Balance:
    """Mean and worst balance of the steps (mean / max of the ranks' planned FLOPs) at one number of ranks."""

    num_ranks: int
    mean: float
    worst: float


@dataclass(frozen=True, slots=True)
class PlanTotals:
    """What a whole run will do."""

    num_ranks: int
    num_steps: int
    num_samples: int
    """Samples of the data set, without those held out."""
    num_held_out: int
    epochs: float
    num_tokens: int
    num_label_tokens: int
    num_micro_batches: int
    max_micro_batch_tokens: int
    max_micro_batch_labels: int
    max_micro_batch_documents: int
    num_naive_tokens: int
    """What a padding loader would compute for the same steps."""
    flops: float
    """With those of passes without gradients."""
    balances: tuple[Balance, ...]
    """At other numbers of ranks, from `NUM_BALANCE_STEPS` steps."""
    memory: MemoryEstimate | None
    time_s: float | None
    """None without a throughput."""
    fingerprint: str
    label_share: float
    padding_avoided: float
    """The share of `num_naive_tokens` that is padding and not computed here."""
    padding_share: float
    """The share of padding in the computed tokens."""
    num_shared_tokens: int = 0
    """Of `num_tokens`, those that are not computed again, as samples of one micro-batch share them."""
    num_estimate_tokens: int = 0
    """On top of `num_tokens`, for what an objective estimates before gradients."""
    num_reference_tokens: int = 0
    """On top, once, for an objective's reference."""
    num_units: int | None = None
    """Units of the data set; None where each sample is one."""
    layout: str = "packed"


def add_up(
    plan: TrainingPlan,
    *,
    rank_counts: Sequence[int] = (1, 2, 4, 8),
    num_held_out: int = 0,
    tokens_per_s: float | None = None,
    memory_of: Callable[[MicroBatchSize], MemoryEstimate | None] | None = None,
) -> PlanTotals:
    """Go through every step of the plan and sum up the counts.

    `memory_of` maps the largest micro-batch to its memory; `tokens_per_s` counts real tokens over all ranks.
    """
    num_tokens = num_label_tokens = num_micro_batches = num_naive = num_padded = num_shared = 0
    flops, epochs, largest = 0.0, 0.0, MicroBatchSize(0, 0, 0)
    balances: list[float] = []
    for step in plan.steps():
        num_tokens += step.num_tokens
        num_label_tokens += step.num_label_tokens
        num_micro_batches += len(step.micro_batches)
        num_naive += plan.naive_tokens(step)
        num_padded += step.num_padded_tokens
        num_shared += step.num_shared_tokens
        flops += plan.flops(step)
        epochs = plan.epoch_after(step)
        balances.append(step.balance)
        sizes = [astuple(batch.size) for batch in step.micro_batches]
        largest = MicroBatchSize(*map(max, zip(astuple(largest), *sizes, strict=True)))
    by_ranks = {plan.batch_layout.num_ranks: balances}
    for count in set(rank_counts) - {plan.batch_layout.num_ranks}:
        other = replace(plan, batch_layout=replace(plan.batch_layout, num_ranks=count))
        by_ranks[count] = [step.balance for step in other.sampled_steps(NUM_BALANCE_STEPS)]
    return PlanTotals(
        num_ranks=plan.batch_layout.num_ranks,
        num_steps=plan.num_steps,
        num_samples=plan.num_samples,
        num_held_out=num_held_out,
        epochs=epochs,
        num_tokens=num_tokens,
        num_label_tokens=num_label_tokens,
        num_micro_batches=num_micro_batches,
        max_micro_batch_tokens=largest.num_tokens,
        max_micro_batch_labels=largest.num_label_tokens,
        max_micro_batch_documents=largest.num_documents,
        num_naive_tokens=num_naive,
        flops=flops,
        balances=tuple(Balance(n, sum(values) / len(values), min(values)) for n, values in sorted(by_ranks.items())),
        memory=memory_of(largest) if memory_of else None,
        time_s=num_tokens / tokens_per_s if tokens_per_s else None,
        fingerprint=plan.fingerprint,
        label_share=num_label_tokens / num_tokens,
        padding_avoided=max(0.0, 1.0 - (num_padded + num_shared) / num_naive),
        padding_share=1.0 - (num_tokens - num_shared) / num_padded,
        num_shared_tokens=num_shared,
        num_units=None if plan.unit_offsets is None else plan.num_units,
        layout=plan.batch_layout.name,
    )


def with_forward_passes(
    totals: PlanTotals,
    estimates: Iterable[tuple[PlannedSamples, StepPlan]],
    reference: Iterable[tuple[PlannedSamples, StepPlan]],
) -> PlanTotals:
    """Add passes without gradients: estimates in each step, and a reference's before step 0.

    The throughput of steps has the time of estimates in it, so the time grows by the reference's share of the FLOPs.
    """
    (num_estimate, estimate_flops), (num_reference, reference_flops) = map(_forward_sums, (estimates, reference))
    in_steps = totals.flops + estimate_flops
    flops = in_steps + reference_flops
    return replace(
        totals,
        num_estimate_tokens=num_estimate,
        num_reference_tokens=num_reference,
        flops=flops,
        time_s=None if totals.time_s is None else totals.time_s * flops / in_steps,
    )


def _forward_sums(passes: Iterable[tuple[PlannedSamples, StepPlan]]) -> tuple[int, float]:
    sums = [(step.num_real_tokens, plan.forward_flops(step)) for plan, step in passes]
    return sum(tokens for tokens, _ in sums), sum(flops for _, flops in sums)


def totals_lines(totals: PlanTotals) -> Iterator[tuple[str, str]]:
    """Yield the totals as pairs of name and text."""
    held_out = f", {totals.num_held_out:,} held out" if totals.num_held_out else ""
    each_step = f"{totals.num_micro_batches / totals.num_steps:.1f} per step"
    largest = f"at most {totals.max_micro_batch_tokens:,} tokens each"
    naive = f"{totals.num_naive_tokens:,} tokens of batches padded to their longest sample"
    yield "steps", f"{totals.num_steps:,}"
    units = "" if totals.num_units is None else f" in {totals.num_units:,} units"
    yield "samples", f"{totals.num_samples:,}{units}{held_out}, {counted(totals.epochs, 'epoch', '.4g')}"
    yield "tokens", f"{totals.num_tokens:,}, {totals.label_share:.1%} of them label tokens"
    yield (
        "micro-batches",
        f"{totals.num_micro_batches:,} on {counted(totals.num_ranks, 'rank')}, {each_step}, {largest}",
    )
    yield "padding avoided", f"{totals.padding_avoided:.1%} of the {naive} at the same budget"
    if totals.padding_share:
        why = "each sample is a padded row" if totals.layout == "rows" else "ranks that share a pass fill it up alike"
        yield "padding", f"{totals.padding_share:.1%} of the tokens computed, as {why}"
    if totals.num_shared_tokens:
        token_share = totals.num_shared_tokens / totals.num_tokens
        yield "prefixes", f"shared: {totals.num_shared_tokens:,} tokens, {token_share:.1%}, are not computed again"
    if totals.num_estimate_tokens:
        token_share = totals.num_estimate_tokens / totals.num_tokens
        yield (
            "estimates",
            f"{totals.num_estimate_tokens:,} tokens more, {token_share:.1%}, in forward passes before gradients",
        )
    if totals.num_reference_tokens:
        count = f"{totals.num_reference_tokens:,} tokens"
        yield "reference", f"{count} in forward passes before step 0, unless an earlier run has computed them"
    for balance in totals.balances:
        mark = " (this run)" if balance.num_ranks == totals.num_ranks else ""
        text = f"mean {balance.mean:.3f}, worst step {balance.worst:.3f} of planned FLOPs{mark}"
        yield f"balance, {counted(balance.num_ranks, 'rank')}", text
    yield "compute", f"{totals.flops / 1e15:,.0f} PFLOP" if totals.flops >= 1e17 else f"{totals.flops / 1e15:.3g} PFLOP"
    if memory := totals.memory:
        parts = ("weights", "adapter", "gradients", "optimizer", "activations", "working", "reward_models", "process")
        sizes = {name.replace("_", " "): getattr(memory, f"{name}_bytes") for name in parts}
        detail = ", ".join(f"{name} {memory_size(num_bytes)}" for name, num_bytes in sizes.items() if num_bytes)
        yield "memory per rank", f"about {memory_size(memory.total_bytes)} (estimate: {detail})"
    if totals.time_s is not None:
        minutes, seconds = divmod(round(totals.time_s), 60)
        hours, minutes = divmod(minutes, 60)
        yield "time", f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
    yield "fingerprint", totals.fingerprint


def memory_size(num_bytes: int) -> str:
    """Return bytes as GiB, or as MiB if they are few."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 0.01 * 2**30 else f"{num_bytes / 2**20:.2f} MiB"
