"""`flatout plan run.yaml [section.name=value ...]`: shows what a run will do before it takes any GPU."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flatout.cli.screen import WIDTH, rows
from flatout.config.read import load_config
from flatout.errors import UsageError
from flatout.parallel.rank import Rank
from flatout.plan.devices import ANY_DEVICE, DEVICES
from flatout.plan.explain import PlanReport, explain
from flatout.plan.memory.budget import MemoryDecision, longest_document_tokens, memory_model
from flatout.plan.steps.step_plan import StepPlan
from flatout.track.callback import MemoryCallback, Reporter

MAX_RANKS = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("config", type=Path, help="a YAML file, or a .py file that sets `config` (which runs as code)")
    parser.add_argument("overrides", nargs="*", metavar="section.name=value", help="e.g. batch.samples_per_step=64")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="plan for N GPUs (default 1)")
    parser.add_argument("--tokens-per-s", type=float, metavar="X", help="tokens/s over all ranks; adds a time estimate")
    parser.add_argument("--device", metavar="GPU", help="plan memory for this GPU: h200, h100, a100-80, 4090, t4 ...")
    parser.add_argument("--step", type=int, metavar="I", help="print the ranks and micro-batches of step I (from 0)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Plan and print. Returns 0; raises FlatoutError for a configuration or data that cannot be planned."""
    from flatout.train.planning import plan_run

    if not 1 <= args.ranks <= MAX_RANKS:
        raise UsageError(f"--ranks is {args.ranks:,}; expected 1 to {MAX_RANKS:,}")
    if args.tokens_per_s is not None and not 0 < args.tokens_per_s < math.inf:
        raise UsageError(f"--tokens-per-s is {args.tokens_per_s:g}; expected a finite number above 0")
    if args.device is not None and args.device.lower() not in DEVICES:
        raise UsageError(f"--device is {args.device}; expected one of {', '.join(DEVICES)}")
    device = DEVICES[args.device.lower()] if args.device is not None else None
    config, recorder = load_config(args.config, args.overrides), MemoryCallback()
    planned = plan_run(config, Reporter(recorder), Rank(0, args.ranks), lambda: device)
    plan, shape, decision, layout = planned.plan, planned.shape, planned.memory, planned.parallel_layout
    if args.step is not None:
        if not 0 <= args.step < plan.num_steps:
            raise UsageError(f"--step is {args.step}; the run has steps 0 to {plan.num_steps - 1}")
        step = plan.step(args.step)
        print(json.dumps(asdict(step)) if args.json else "\n".join(step_lines(step)))
        return 0
    model = decision.model or memory_model(config, shape, ANY_DEVICE, layout)
    report = explain(
        plan,
        num_held_out=planned.store.num_samples - plan.num_samples,
        tokens_per_s=args.tokens_per_s,
        memory_of=lambda size: model.estimate(size, decision.recompute, accumulates=decision.accumulates),
    )
    longest = longest_document_tokens(config, shape, device, report.label_share, layout) if device else None
    if args.json:
        print(json.dumps(_plain_values(report, layout.reason, decision, longest)))
        return 0
    lines = list(report_rows(report))
    if args.ranks > 1:
        lines.append(("strategy", layout.reason))
    if device:
        lines.append((f"on {device.name}", decision.reason))
        lines.append(("longest document", f"{longest:,} tokens, alone in a micro-batch"))
    lines += [(kind, ", ".join(f"{name} {value}" for name, value in facts.items())) for kind, facts in recorder.events]
    print(rows(lines))
    return 0


def _plain_values(
    report: PlanReport, strategy: str, decision: MemoryDecision, longest_document: int | None
) -> dict[str, Any]:
    """Return the report with the memory's total, and for a GPU what was decided for it."""
    values = asdict(report)
    values["strategy"] = strategy
    if report.memory:
        values["memory"]["total_bytes"] = report.memory.total_bytes
    if longest_document is not None:
        values |= {
            "micro_batch_tokens": decision.micro_batch_tokens,
            "recompute": decision.recompute,
            "transposed_weights": decision.transposed_weights,
            "memory_budget_bytes": decision.budget_bytes,
            "longest_document_tokens": longest_document,
            "decision": decision.reason,
        }
    return values


def report_rows(report: PlanReport) -> Iterator[tuple[str, str]]:
    """Yield the report as pairs of name and text."""
    held_out = f", {report.num_held_out:,} held out" if report.num_held_out else ""
    each_step = f"{report.num_micro_batches / report.num_steps:.1f} per step"
    largest = f"at most {report.max_micro_batch_tokens:,} tokens each"
    naive = f"{report.num_naive_tokens:,} tokens of batches padded to their longest sample"
    yield "steps", f"{report.num_steps:,}"
    yield "samples", f"{report.num_samples:,}{held_out}, {report.epochs:.4g} epochs"
    yield "tokens", f"{report.num_tokens:,}, {report.label_share:.1%} of them label tokens"
    yield "micro-batches", f"{report.num_micro_batches:,} on {_ranks(report.num_ranks)}, {each_step}, {largest}"
    yield "padding avoided", f"{report.padding_avoided:.1%} of the {naive} at the same budget"
    for balance in report.balances:
        mark = " (this run)" if balance.num_ranks == report.num_ranks else ""
        text = f"mean {balance.mean:.3f}, worst step {balance.worst:.3f} of planned FLOPs{mark}"
        yield f"balance, {_ranks(balance.num_ranks)}", text
    petaflops = report.flops / 1e15
    yield "compute", f"{petaflops:,.0f} PFLOP" if petaflops >= 100 else f"{petaflops:.3g} PFLOP"
    if memory := report.memory:
        parts = ("weights", "adapter", "gradients", "optimizer", "activations", "working")
        sizes = {name: getattr(memory, f"{name}_bytes") for name in parts}
        detail = ", ".join(f"{name} {_size(num_bytes)}" for name, num_bytes in sizes.items() if num_bytes)
        yield "memory per rank", f"about {_size(memory.total_bytes)} (estimate: {detail})"
    if report.time_s is not None:
        minutes, seconds = divmod(round(report.time_s), 60)
        hours, minutes = divmod(minutes, 60)
        yield "time", f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
    yield "fingerprint", report.fingerprint


def step_lines(step: StepPlan) -> Iterator[str]:
    """Yield the lines of one step: each rank's micro-batches, with the ids of their samples."""
    yield f"step {step.index}, epoch {step.epoch}: {len(step.sample_ids)} samples, balance {step.balance:.3f}"
    yield f"{step.num_tokens:,} tokens, {step.num_label_tokens:,} label tokens"
    for index, rank in enumerate(step.ranks):
        tokens = sum(micro_batch.num_tokens for micro_batch in rank)
        yield f"  rank {index}: {tokens:,} tokens in {len(rank):,} micro-batch{'' if len(rank) == 1 else 'es'}"
        for micro_batch in rank:
            filler = ", a filler" if micro_batch.is_filler else ""
            yield f"    {micro_batch.num_tokens:,} tokens, {micro_batch.num_label_tokens:,} labels{filler}"
            ids = " ".join(map(str, micro_batch.sample_ids))
            yield from textwrap.wrap(ids, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _ranks(number: int) -> str:
    return f"{number:,} rank{'' if number == 1 else 's'}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 0.01 * 2**30 else f"{num_bytes / 2**20:.2f} MiB"
