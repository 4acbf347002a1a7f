"""What a planned run will do, in figures and as lines of text: for `flatout plan` and for pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flatout.config.schema import Config
from flatout.errors import ResourceError
from flatout.parallel.rank import Rank
from flatout.planner.devices import ANY_DEVICE, DEVICES, GIB, Device
from flatout.planner.memory.budget import MemoryDecision, budget_bytes, longest_document_tokens, memory_model
from flatout.planner.totals import PlanTotals, add_up, totals_lines
from flatout.trainer.decide import PlannedRun
from flatout.trainer.fit_memory import fit_plan
from flatout.trainer.memory_check import largest_pass, size_of


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """The totals of a plan, and what was decided for `device` (None: no GPU was given)."""

    totals: PlanTotals
    strategy: str
    decision: MemoryDecision
    device: Device | None
    longest_document_tokens: int | None
    sharing: str
    context_ranks: int

    def __str__(self) -> str:
        return "\n".join(f"{name:<18} {text}" for name, text in self.rows(()))

    def rows(self, events: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[tuple[str, str]]:
        """Yield the summary and what planning reported as pairs of name and text."""
        needed, budget = self.totals.memory, self.decision.budget_bytes
        if self.device and needed and budget:
            sizes = f"{needed.total_bytes / GIB:.1f} GiB of {budget / GIB:.1f}"
            yield "fits", f"{sizes}, {(budget - needed.total_bytes) / GIB:.1f} to spare on {self.device.name}"
        yield from totals_lines(self.totals)
        if not self.totals.num_shared_tokens:
            yield "prefixes", self.sharing
        if self.context_ranks > 1:
            yield "context", f"{self.context_ranks} ranks share each micro-batch, and count as one rank above"
        if self.totals.num_ranks * self.context_ranks > 1:
            yield "strategy", self.strategy
        if self.device:
            yield f"on {self.device.name}", self.decision.reason
            yield "longest document", f"{self.longest_document_tokens:,} tokens, alone in a micro-batch"
        for kind, facts in events:
            yield kind, ", ".join(f"{name} {value}" for name, value in facts.items())


def fit_devices(config: Config, planned: PlannedRun, rank: Rank) -> dict[str, str]:
    """Say for every GPU of `DEVICES` how the planned steps fit on it, by the fitted constants of the memory model."""
    found = {}
    for device in DEVICES.values():
        try:
            plan, layout, decision = fit_plan(config, planned.shape, planned.plan, rank, device)
        except ResourceError as error:
            found[device.name] = f"cannot train: {str(error).partition(';')[0]}"
            continue
        largest = largest_pass(plan)
        estimate = None if largest is None else decision.estimate(size_of(largest[2]))
        if estimate is None:
            found[device.name] = "no step has labels"
            continue
        strategy = f"{layout.strategy}, " if rank.world > 1 else ""
        found[device.name] = (
            f"{strategy}{decision.micro_batch_tokens:,} tokens per micro-batch, recompute {decision.recompute}: "
            f"{estimate.total_bytes / GIB:.1f} of {budget_bytes(config, device) / GIB:.1f} GiB"
        )
    return found


def summarize_plan(
    config: Config, planned: PlannedRun, device: Device | None, tokens_per_s: float | None = None
) -> PlanSummary:
    """Go through every step of a plan. `tokens_per_s`, over all ranks, adds a time estimate."""
    decision, layout = planned.memory, planned.parallel_layout
    model = decision.model or memory_model(config, planned.shape, ANY_DEVICE, layout)
    totals = add_up(
        planned.plan,
        num_held_out=planned.store.num_samples - planned.plan.num_samples,
        tokens_per_s=tokens_per_s,
        memory_of=lambda size: model.estimate(size, decision.recompute, accumulates=decision.accumulates),
    )
    if planned.mismatched is not None:
        others = add_up(planned.mismatched.plan, rank_counts=())
        # of a training pass, the forward pass is 2 of 4 products with frozen weights, and 2 of 6 with trained ones
        flops = totals.flops + others.flops / (3 if config.method == "full" else 2)
        totals = replace(totals, num_estimate_tokens=others.num_tokens, flops=flops)
    longest = None
    if device is not None:
        longest = longest_document_tokens(config, planned.shape, device, totals.label_share, layout)
    return PlanSummary(totals, layout.reason, decision, device, longest, planned.sharing, layout.context_ranks)
