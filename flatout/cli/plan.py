"""`flatout plan run.yaml [section.name=value ...]`: what a run will do, before any GPU is held."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.errors import UsageError

if TYPE_CHECKING:
    from flatout.plan.budget import MemoryDecision
    from flatout.plan.devices import Device
    from flatout.plan.explain import PlanReport
    from flatout.plan.shape import ModelShape


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("config", type=Path, help="a YAML file, or a .py file that sets `config` (which runs as code)")
    parser.add_argument("overrides", nargs="*", metavar="section.name=value", help="such as batch.samples_per_step=64")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="plan for N GPUs (default 1)")
    parser.add_argument(
        "--tokens-per-s", type=float, metavar="X", help="useful tokens a second over all ranks; adds a time estimate"
    )
    parser.add_argument(
        "--device", metavar="GPU", help="plan the memory of this GPU: h200, h100, a100-80, 4090, t4 ..."
    )
    parser.add_argument("--step", type=int, metavar="I", help="print step I (from 0): its ranks and micro-batches")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Plan and print; 0, or a FlatoutError for a configuration or data that cannot be planned."""
    from flatout.config.read import load_config
    from flatout.parallel.rank import Rank
    from flatout.plan.budget import longest_document_tokens, memory_model
    from flatout.plan.devices import ANY_DEVICE
    from flatout.plan.explain import explain, render, render_step
    from flatout.track.record import Trackers
    from flatout.train.planning import plan_run

    if args.ranks < 1:
        raise UsageError(f"--ranks is {args.ranks}; expected at least 1")
    if args.tokens_per_s is not None and not args.tokens_per_s > 0:
        raise UsageError(f"--tokens-per-s is {args.tokens_per_s:g}; expected more than 0")
    device = device_of(args.device)
    config = load_config(args.config, args.overrides)
    planned = plan_run(config, Trackers(), Rank(0, args.ranks), lambda: device)
    plan, shape, decision = planned.plan, planned.shape, planned.memory
    if args.step is not None:
        if not 0 <= args.step < plan.num_steps:
            raise UsageError(f"--step is {args.step}; the run has steps 0 to {plan.num_steps - 1}")
        step = plan.step(args.step)
        print(json.dumps(asdict(step)) if args.json else render_step(step))
        return 0
    model = decision.model or memory_model(config, shape, ANY_DEVICE, planned.spread)
    report = explain(
        plan,
        num_held_out=planned.store.num_samples - plan.num_samples,
        tokens_per_s=args.tokens_per_s,
        memory_of=lambda size: model.estimate(size, decision.recompute, accumulates=decision.accumulates),
    )
    longest = longest_document_tokens(config, shape, device, report.label_share, planned.spread) if device else None
    if args.json:
        on_device = device_values(decision, longest) if device else {}
        print(json.dumps(report_values(report) | {"strategy": planned.spread.reason} | on_device))
        return 0
    print(_note(shape) + render(report))
    if args.ranks > 1:
        print(f"strategy       {planned.spread.reason}")
    if device:
        print(f"on {device.name:<14}{decision.reason}")
        print(f"longest document {longest:,} tokens, alone in a micro-batch")
    return 0


def device_of(name: str | None) -> Device | None:
    """The GPU of this name; None for no name. Raises UsageError for one that is not in the table."""
    from flatout.plan.devices import DEVICES

    if name is not None and name.lower() not in DEVICES:
        raise UsageError(f"--device is {name}; expected one of {', '.join(DEVICES)}")
    return None if name is None else DEVICES[name.lower()]


def device_values(decision: MemoryDecision, longest_document: int | None) -> dict[str, Any]:
    """What was decided for a GPU, as plain values."""
    return {
        "micro_batch_tokens": decision.micro_batch_tokens,
        "recompute": decision.recompute,
        "turned_weights": decision.turned_weights,
        "memory_budget_bytes": decision.budget_bytes,
        "longest_document_tokens": longest_document,
        "decision": decision.reason,
    }


def report_values(report: PlanReport) -> dict[str, Any]:
    """The report as plain values, with the shares and the memory's total that are properties."""
    values = asdict(report) | {"label_share": report.label_share, "padding_avoided": report.padding_avoided}
    if report.memory:
        values["memory"]["total_bytes"] = report.memory.total_bytes
    return values


def _note(shape: ModelShape) -> str:
    if shape.known:
        return ""
    return f"note: model type {shape.model_type} is not in the plan's table; its compute is counted as Llama's\n"
