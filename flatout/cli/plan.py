"""`flatout plan run.yaml [section.name=value ...]`: shows what a run will do before it takes any GPU."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.cli.parser import Number, add_settings
from flatout.cli.screen import WIDTH, import_transformers, progress_console, rows, with_columns
from flatout.config.read import load_config
from flatout.config.schema import Config, DataConfig
from flatout.data.build import refuse_early
from flatout.errors import Fix, UsageError
from flatout.parallel.rank import Rank
from flatout.planner.devices import DEVICES, Device, find_device, near_device
from flatout.planner.steps.rounds import BoundsPlan
from flatout.planner.steps.step_plan import StepPlan
from flatout.planner.steps.training_plan import TrainingPlan
from flatout.track.callback import MemoryCallback, Reporter
from flatout.track.console import PhaseCallback

if TYPE_CHECKING:
    from flatout.trainer.planned_run import PlannedRun
    from flatout.trainer.preview import PlanSummary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    add_settings(parser, "batch.samples_per_step=64")
    add, gpu = parser.add_argument, parser.add_mutually_exclusive_group()
    ranks = "plan for N GPUs (default: the number of `gpus`, or 1)"
    add("--ranks", type=Number(int, 1, 100_000), metavar="N", help=ranks)
    speed = "tokens/s over all ranks; adds a time estimate"
    add("--tokens-per-s", type=Number(float, 0.001), metavar="X", help=speed)
    device = "plan memory for this GPU: h200, 4090, 12GB ...; all: for each; cpu: for the CPU (this machine)"
    gpu.add_argument("--device", metavar="GPU", help=device)
    gpu.add_argument("--measured", type=Path, metavar="FILE", help="memory.json of a run: plan for its GPU as measured")
    add("--step", type=int, metavar="I", help="print the ranks and micro-batches of step I (from 0)")
    add("--yes", action="store_true", help="accept the proposed columns if the rows fit no format")
    add("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> None:
    """Plan and print. Raises FlatoutError for a configuration or data that cannot be planned."""
    name = (args.device or "").lower()
    # these are the setting, which people name here, too
    setting = [f"device={name}"] if name in ("auto", "cpu") else []
    name = "" if setting else name
    if name not in ("", "all"):
        near, number = near_device(name)
        if number:
            fix = Fix({"--device": near, "--ranks": int(number)})
            raise UsageError(f"--device {args.device}: the number of GPUs is an option of its own", [fix])
        find_device(args.device)
    if name == "all" and args.step is not None:
        raise UsageError("--step prints the micro-batches for one GPU; name it with --device")
    config, recorder = load_config(args.config, [*args.overrides, *setting]), MemoryCallback()
    num_ranks = args.ranks or len(config.gpus or [0])
    if config.gpus is not None and len(config.gpus) != num_ranks:
        raise UsageError(f"--ranks is {num_ranks}, but gpus names {len(config.gpus)}; leave one of them out")
    rank = Rank(0, num_ranks)

    def plan_with(data: DataConfig) -> tuple[Config, PlannedRun, str | None]:
        changed = config.model_copy(update={"data": data})
        if not config.learns_from_answers:
            refuse_early(data, config.model.name)
        import_transformers()
        with progress_console() as console:
            from flatout.trainer.planned_run import open_and_plan
            from flatout.trainer.preview import plan_at_hand

            reporter = Reporter(recorder, PhaseCallback(console))
            if not name and args.measured is None:
                return changed, *plan_at_hand(changed, reporter, rank)
            device = _device(changed, name, args.measured)
            # `memory` is each GPU's, and not that of the CPU that makes the plan
            own = changed.model_copy(update={"memory": "auto"}) if name == "all" else changed
            return changed, open_and_plan(own, reporter, rank, device), None

    config, planned, why_not = with_columns(plan_with, config.data, takes=args.yes)
    from flatout.trainer.preview import fit_devices, summarize_plan

    values: Mapping[str, Any]
    if name == "all":
        values = fit_devices(config, planned, rank)
        text = rows(values.items())
    elif args.step is not None:
        values, text = _of_step(planned.plan, _step(planned.plan, args.step))
    else:
        summary = summarize_plan(config, planned, args.tokens_per_s, why_not)
        values, text = _plain_values(summary), rows(summary.rows(recorder.events))
    print(json.dumps(values) if args.json else text)


def _step(plan: TrainingPlan, index: int) -> StepPlan:
    if not 0 <= index < plan.num_steps:
        last = plan.num_steps - 1
        known = f"0 to {last}, the last step of the run" if last else "0, as this run has one step only"
        raise UsageError(f"--step is {index}; expected {known}")
    return plan.step(index)


def _of_step(plan: TrainingPlan, step: StepPlan) -> tuple[Mapping[str, Any], str]:
    """Return a step as values and as text; of rounds, what is known of it before its answers are sampled."""
    if not isinstance(plan, BoundsPlan):
        facts = asdict(step)
        return facts | {"ranks": facts.pop("by_rank")}, "\n".join(step_lines(step))  # the name that programs read
    values = {"step": step.index, "round": step.index // plan.rounds.steps + 1}
    values |= {"most_prompts": plan.rounds.units_per_step, "most_answers": len(step.sample_ids)}
    values |= {"most_tokens_with_prompt": int(plan.samples.lengths.max()), "most_tokens": step.num_tokens}
    said = (
        "step {}, round {}: at most {:,} prompts with {:,} answers in all, which the round samples; "
        "an answer with its prompt has at most {:,} tokens, the step {:,}"
    )
    return values, textwrap.fill(said.format(*values.values()), WIDTH)


def _device(config: Config, name: str, measured: Path | None) -> Device | None:
    """Return the GPU to plan for; None for the CPU, and for every GPU."""
    from flatout.trainer.memory_check import fixed_plan, read_record

    if measured is not None:
        device = read_record(measured, UsageError)
        return replace(device, corrections={}) if fixed_plan(config) else device
    if name == "all" and config.full.update == "backward":
        # its steps must fit in one pass, which no plan without a GPU has
        return max(DEVICES.values(), key=lambda one: one.memory_bytes)
    return None if name == "all" else find_device(name)


def _plain_values(summary: PlanSummary) -> dict[str, Any]:
    """Return the totals with the memory's total, and for a GPU what was decided for it."""
    values, decision = asdict(summary.totals), summary.planned.memory
    values["strategy"] = summary.planned.parallel_layout.reason
    if summary.totals.memory:
        values["memory"]["total_bytes"] = summary.totals.memory.total_bytes
    if summary.planned.device is not None:
        values |= {
            "micro_batch_tokens": decision.micro_batch_tokens,
            "recompute": decision.recompute,
            "memory_budget_bytes": decision.budget_bytes,
            "longest_document_tokens": summary.longest_document_tokens,
            "decision": decision.reason,
        }
    return values


def step_lines(step: StepPlan) -> Iterator[str]:
    """Yield the lines of one step: each rank's micro-batches, with the ids of their samples."""
    yield f"step {step.index}, epoch {step.epoch}: {len(step.sample_ids)} samples, balance {step.balance:.3f}"
    yield f"{step.num_tokens:,} tokens, {step.num_label_tokens:,} label tokens"
    for index, rank in enumerate(step.by_rank):
        tokens = sum(micro_batch.num_tokens for micro_batch in rank)
        yield f"  rank {index}: {tokens:,} tokens in {len(rank):,} micro-batch{'' if len(rank) == 1 else 'es'}"
        for micro_batch in rank:
            note = ", a filler" if micro_batch.is_filler else ""
            if micro_batch.shared:
                note += f", {micro_batch.num_shared_tokens:,} tokens in shared prefixes not computed again"
            yield f"    {micro_batch.num_tokens:,} tokens, {micro_batch.num_label_tokens:,} labels{note}"
            ids = " ".join(map(str, micro_batch.sample_ids))
            yield from textwrap.wrap(ids, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
