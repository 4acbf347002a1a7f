"""A plan in numbers and in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from flatout.plan.devices import GIB
from flatout.plan.memory import MemoryEstimate, MicroBatchSize
from flatout.plan.steps import RunPlan
from flatout.plan.types import StepPlan

# steps, evenly spread over the run, that stand for the balance at other numbers of ranks
NUM_BALANCE_STEPS = 500


@dataclass(frozen=True, slots=True)
class Balance:
    """Mean and worst of the steps' balance (mean / max of the ranks' planned FLOPs) at one number of ranks."""

    num_ranks: int
    mean: float
    worst: float


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What a run will do. Counts are over the whole run; `num_samples` is the data set's, `epochs` passes over it.

    `num_naive_tokens` is what a padding loader would compute for the same steps (`flatout.plan.padding`), `time_s` is
    None unless the throughput is known. All is exact but the balance at other numbers of ranks, which looks at
    `NUM_BALANCE_STEPS` steps, and the memory, an estimate.
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

    @property
    def label_share(self) -> float:
        return self.num_label_tokens / self.num_tokens

    @property
    def padding_avoided(self) -> float:
        """Share of the padding loader's tokens that are padding."""
        return 1.0 - self.num_tokens / self.num_naive_tokens


def explain(
    plan: RunPlan,
    *,
    rank_counts: Sequence[int] = (1, 2, 4, 8),
    num_held_out: int = 0,
    tokens_per_s: float | None = None,
    memory_of: Callable[[MicroBatchSize], MemoryEstimate | None] | None = None,
) -> PlanReport:
    """Walk every step of the plan and count.

    `memory_of` maps the largest micro-batch to its memory; `tokens_per_s` are useful tokens a
    second over all ranks.
    """
    num_tokens = num_labels = num_micro_batches = num_naive = max_tokens = max_labels = max_documents = 0
    flops = balance_sum = 0.0
    worst_balance = 1.0
    step: StepPlan | None = None
    for step in plan.steps():
        num_tokens += step.num_tokens
        num_labels += step.num_label_tokens
        num_naive += plan.naive_tokens(step)
        flops += plan.flops(step)
        balance_sum += step.balance
        worst_balance = min(worst_balance, step.balance)
        for rank in step.ranks:
            num_micro_batches += len(rank)
            for micro_batch in rank:
                max_tokens = max(max_tokens, micro_batch.num_tokens)
                max_labels = max(max_labels, micro_batch.num_label_tokens)
                max_documents = max(max_documents, len(micro_batch.sample_ids))
    balances = {count: _balance_at(plan, count) for count in rank_counts if count != plan.layout.num_ranks}
    balances[plan.layout.num_ranks] = Balance(plan.layout.num_ranks, balance_sum / plan.num_steps, worst_balance)
    return PlanReport(
        num_ranks=plan.layout.num_ranks,
        num_steps=plan.num_steps,
        num_samples=plan.num_samples,
        num_held_out=num_held_out,
        epochs=plan.epoch_after(step) if step else 0.0,
        num_tokens=num_tokens,
        num_label_tokens=num_labels,
        num_micro_batches=num_micro_batches,
        max_micro_batch_tokens=max_tokens,
        max_micro_batch_labels=max_labels,
        max_micro_batch_documents=max_documents,
        num_naive_tokens=num_naive,
        flops=flops,
        balances=tuple(balances[count] for count in sorted(balances)),
        memory=memory_of(MicroBatchSize(max_tokens, max_labels, max_documents)) if memory_of else None,
        time_s=num_tokens / tokens_per_s if tokens_per_s else None,
        fingerprint=plan.fingerprint,
    )


def _balance_at(plan: RunPlan, num_ranks: int) -> Balance:
    other = replace(plan, layout=replace(plan.layout, num_ranks=num_ranks))
    values = [step.balance for step in other.sampled_steps(NUM_BALANCE_STEPS)]
    return Balance(num_ranks, sum(values) / len(values), min(values))


def render(report: PlanReport) -> str:
    """The report as aligned lines of plain text."""
    return "\n".join(f"{name:<16} {value}" for name, value in _rows(report))


def render_step(step: StepPlan) -> str:
    """One step, rank by rank and micro-batch by micro-batch, as plain text."""
    lines = [
        f"step {step.index}, epoch {step.epoch}: {len(step.sample_ids)} samples, {step.num_tokens:,} tokens, "
        f"{step.num_label_tokens:,} label tokens, balance {step.balance:.3f}"
    ]
    for index, rank in enumerate(step.ranks):
        tokens = sum(micro_batch.num_tokens for micro_batch in rank)
        lines.append(f"  rank {index}: {tokens:,} tokens in {_count(len(rank), 'micro-batch', 'micro-batches')}")
        for micro_batch in rank:
            ids = " ".join(map(str, micro_batch.sample_ids))
            lines.append(f"    {micro_batch.num_tokens:>7,} tokens {micro_batch.num_label_tokens:>7,} labels: {ids}")
    return "\n".join(lines)


def _rows(report: PlanReport) -> Iterator[tuple[str, str]]:
    held_out = f", {report.num_held_out:,} held out" if report.num_held_out else ""
    yield "steps", f"{report.num_steps:,}"
    yield "samples", f"{report.num_samples:,}{held_out}, {report.epochs:.4g} epochs"
    yield "tokens", f"{report.num_tokens:,}, of them {report.label_share:.1%} label tokens"
    per_step = report.num_micro_batches / report.num_steps
    yield (
        "micro-batches",
        f"{report.num_micro_batches:,} on {_count(report.num_ranks, 'rank', 'ranks')}, {per_step:.1f} a step, "
        f"the largest {report.max_micro_batch_tokens:,} tokens",
    )
    yield (
        "padding avoided",
        f"{report.padding_avoided:.1%} of the {report.num_naive_tokens:,} tokens of a loader that pads each batch "
        "to its longest sample, at the same budget",
    )
    yield from _balance_rows(report)
    petaflops = report.flops / 1e15
    yield "compute", f"{petaflops:,.0f} PFLOP" if petaflops >= 100 else f"{petaflops:.3g} PFLOP"
    if report.memory:
        yield from _memory_rows(report.memory)
    if report.time_s is not None:
        yield "time", _duration(report.time_s)
    yield "fingerprint", report.fingerprint


def _balance_rows(report: PlanReport) -> Iterator[tuple[str, str]]:
    for balance in report.balances:
        mark = " (this run)" if balance.num_ranks == report.num_ranks else ""
        name = f"balance, {_count(balance.num_ranks, 'rank', 'ranks')}"
        yield name, f"mean {balance.mean:.3f}, worst step {balance.worst:.3f} of planned FLOPs{mark}"


def _memory_rows(memory: MemoryEstimate) -> Iterator[tuple[str, str]]:
    parts = (
        ("weights", memory.weights_bytes),
        ("adapter", memory.adapter_bytes),
        ("gradients", memory.gradients_bytes),
        ("optimizer", memory.optimizer_bytes),
        ("activations", memory.activations_bytes),
        ("working", memory.working_bytes),
    )
    detail = ", ".join(f"{name} {_size(num_bytes)}" for name, num_bytes in parts if num_bytes)
    yield "memory, a rank", f"about {_size(memory.total_bytes)} (estimate: {detail})"


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= 0.01 * GIB else f"{num_bytes / (1 << 20):.2f} MiB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
