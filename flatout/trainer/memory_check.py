"""Measure the peak memory of small passes before step 0, and correct the memory model's constants on this GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatout.config.parallel import STRATEGIES
from flatout.config.schema import Config
from flatout.environment import checks_again
from flatout.errors import CheckpointError, FlatoutError
from flatout.io.durable_io import DurableIO
from flatout.io.json_file import read_as
from flatout.io.kept_facts import find_facts, keep_facts
from flatout.models.process_key import process_key
from flatout.parallel.control_group import ControlGroup
from flatout.parallel.process_group import choose_device
from flatout.parallel.shards import local_part
from flatout.planner.devices import Device
from flatout.planner.memory.sizes import LEAST_SCALE, MOST_SCALE, Correction, MeasuredPass, fit_correction
from flatout.planner.parallel_layout import ParallelLayout
from flatout.planner.steps.step_plan import StepPlan
from flatout.track.callback import Reporter
from flatout.trainer.model_shape import read_text_config
from flatout.trainer.planned_run import PlannedRun
from flatout.trainer.rank_meter import RankMeter
from flatout.trainer.state import TrainingRun
from flatout.trainer.step import accumulate_gradients

# the settings that the memory of passes depends on, as pydantic's `include`
SETTINGS: dict[str, Any] = {
    **dict.fromkeys(
        (
            "method", "device", "deterministic", "freeze", "compile", "recompute", "strategy", "deepspeed", "model",
            "lora", "base", "full", "experts", "sharding", "comm",
        ),
        True,
    ),
    "batch": {"layout", "share_prefix"},
}  # fmt: skip
# file of the run folder with the device that its plan is for
RECORD = "memory.json"
KIND = "memory"
# shares of the plan's largest micro-batch that are measured: they fit even if it needs twice its estimate. The first
# allocates gradients and workspaces, and does not count; the second and the last lie far apart, as a line through them
# is read at the whole, and the one between must lie on it
SHARES = (0.15, 0.15, 0.3, 0.5)
# a longer sample, as a share of the largest micro-batch, makes every measured pass nearly as long as the largest
MAX_SAMPLE_SHARE = 0.9

# returns the peak bytes of each step on this rank, without the optimizer's state
Measure = Callable[[TrainingRun, Sequence[StepPlan], int], list[int]]


def measure_passes(run: TrainingRun, steps: Sequence[StepPlan], bytes_before_model: int) -> list[int]:
    """Run the forward and backward passes of each step, without an update; return each one's peak on this rank.

    Gradients stay allocated from one step to the next if steps have several micro-batches. `bytes_before_model` were
    allocated before the run's model. What the optimizer holds already is not counted. Clears torch's peaks.
    """
    # the plan counts tokens before they are padded to the sizes of recorded graphs
    size_buckets, run.loader.size_buckets = run.loader.size_buckets, ()
    # a meter of its own: these passes belong to no step, and no step has to be estimated
    planned = replace(run.planned, kl_pairs=None)
    run, peaks = replace(run, rank_meter=RankMeter(run.device), planned=planned), []
    states = (value for state in run.optimizer.state.values() for value in state.values())
    state_bytes = sum(local_part(value).nbytes for value in states if isinstance(value, Tensor) and value.is_cuda)
    for step in steps:
        if not run.memory.accumulates:
            run.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize(run.device)
        torch.cuda.reset_peak_memory_stats(run.device)
        accumulate_gradients(run, step)
        run.strategy.sum_gradients(run.parameters)
        torch.cuda.synchronize(run.device)
        peaks.append(torch.cuda.max_memory_allocated(run.device) - bytes_before_model - state_bytes)
    run.optimizer.zero_grad(set_to_none=True)
    torch.cuda.reset_peak_memory_stats(run.device)
    run.loader.size_buckets = size_buckets
    run.aux_loss.forget_step()
    return peaks


class MemoryCheck:
    """Finds what passes have measured, measures new ones, and keeps the result; all methods are collective.

    A run that has checkpoints keeps its plan: only what its folder recorded corrects it. With `reuse_measured`, any
    other start takes what an equal start has kept, and measures what that one has not: the same code, packages, model,
    settings, ranks, device and environment. Only a process that runs nothing but flatout's own code may, as code of
    others may have changed something that no key holds.
    """

    def __init__(
        self,
        config: Config,
        group: ControlGroup,
        reporter: Reporter,
        *,
        reuse_measured: bool = False,
        measure: Measure = measure_passes,
    ) -> None:
        self._config, self._group, self._reporter, self._measure = config, group, reporter, measure
        self._reuse_measured = reuse_measured and not checks_again()
        self._tell = partial(reporter.stage, "memory")
        self._key: dict[str, Any] | None = None

    def corrected(self, gpu: Device) -> Device:
        """Return the GPU with the corrections that are known. Raises CheckpointError for a damaged record."""
        correction = self._group.run_on_first_rank(lambda: self._known(gpu))
        return replace(gpu, corrections={kind: Correction(**values) for kind, values in correction.items()})

    def _known(self, gpu: Device) -> dict[str, Any]:
        folder = self._config.folder
        if fixed_plan(self._config):
            return {}
        if any((folder / "checkpoints").glob("step-*")):
            record = folder / RECORD
            if not record.exists():
                return {}
            recorded = read_record(record)
            if recorded.name == gpu.name:
                return dict(asdict(recorded)["corrections"])
            line = f"{record.name} was measured on {recorded.name} and is not used on {gpu.name}"
            self._reporter.stage("memory", line)
            return {}
        if not self._reuse_measured:
            return {}
        self._key = _key(self._config, self._group)
        match = find_facts(KIND, self._key, self._tell)
        return {} if match is None else dict(match.facts)

    def check(self, run: TrainingRun, bytes_before_model: int) -> tuple[Device | None, bool]:
        """Measure passes of a run before its first step; return its device as now known, and whether to plan again.

        A line says what was found, or why nothing was measured. `bytes_before_model` as in `measure_passes`.
        """
        # layers may recompute at another level than planned
        planned = replace(run.planned, memory=run.memory)
        if (device := planned.device) is None:
            return None, False
        if why_not := reason_not_to_measure(self._config, planned):
            self._reporter.stage("memory", f"not measured: {why_not}")
            return device, False
        self._reporter.phase("measuring memory")
        steps = choose_passes(planned)
        peaks = self._measure(run, steps, bytes_before_model)
        peaks_of_ranks = self._group.all_gather(None if run.state.micro_batch_cap is not None else peaks)
        if None in peaks_of_ranks:
            line = f"not measured: out of memory on rank {peaks_of_ranks.index(None)}; its micro-batches stay smaller"
            self._reporter.stage("memory", line)
            return device, False
        # all ranks correct by the one that took most
        most = max(peaks_of_ranks, key=lambda peaks: int(peaks[-1]))
        large, correction = correction_of(planned, list(zip(steps, most, strict=True)))
        if isinstance(correction, str):
            self._reporter.stage("memory", f"{large}; not used, because {correction}")
            return device, False
        line, needs_replan = str(large), correction != Correction()
        self._reporter.stage("memory", f"{line}; planned again with {correction}" if needs_replan else line)
        assert planned.memory.model is not None
        kind = planned.memory.model.kind_of_pass(planned.memory.recompute)
        device = replace(device, corrections={**device.corrections, kind: correction})
        if self._key is not None:
            keep_facts(KIND, self._key, asdict(device)["corrections"], self._tell)
        return device, needs_replan

    def record(self, device: Device | None) -> None:
        """Write the device that a run is planned for to its folder, for a resumed run and for `flatout plan`."""

        def write() -> None:
            if device is not None:
                DurableIO().write_json(self._config.folder / RECORD, asdict(device))

        self._group.run_on_first_rank(write)


def read_record(path: Path, error: type[FlatoutError] = CheckpointError) -> Device:
    """Read the device and its corrections that a run has recorded. Raises `error` for a missing or damaged file."""
    device = read_as(Device, path, error)
    size = device.memory_bytes
    bounds: dict[str, tuple[float, float, float]] = {"memory_bytes": (size, 1, MAX_BYTES)}
    for kind, correction in device.corrections.items():
        bounds[f"corrections.{kind}.scale"] = (correction.scale, LEAST_SCALE, MOST_SCALE)
        bounds[f"corrections.{kind}.offset_bytes"] = (correction.offset_bytes, -size, size)
    for name, (value, least, most) in bounds.items():
        if not least <= value <= most:
            raise error(f"{path}: {name} is {value!s:.40}, which no GPU has; name a memory.json that a run has written")
    return device


# a record with a greater number is damaged or forged
MAX_BYTES = 2**50


def fixed_plan(config: Config) -> str | None:
    """Return why the plan of this configuration must not depend on measurements; None if it may."""
    if config.batch.micro_batch_tokens:
        return "batch.micro_batch_tokens is set"
    return "the plan of a deterministic run does not depend on measurements" if config.deterministic else None


def reason_not_to_measure(config: Config, planned: PlannedRun) -> str | None:
    """Return why no pass of this plan is measured; None if passes are."""
    memory, model = planned.memory, planned.memory.model
    if model is None or memory.budget_bytes is None:
        return "there is no GPU"
    if why := fixed_plan(config):
        return why
    if why := _reason_of_layout(planned.parallel_layout):
        return why
    if config.full.update == "backward":
        return "the backward pass updates the weights"
    if model.kind_of_pass(memory.recompute) in model.corrections:
        return "these passes were measured on this GPU before"
    if (largest_of_plan := planned.plan.largest_pass) is None:
        return "no step has labels"
    step, rank, largest = largest_of_plan
    longest, num_tokens = planned.plan.largest_unit(step.by_rank[rank]), largest.num_padded_tokens
    if longest > MAX_SAMPLE_SHARE * num_tokens:
        return f"samples are not split, and the longest has {longest:,} tokens; the largest micro-batch {num_tokens:,}"
    return None


def _reason_of_layout(layout: ParallelLayout) -> str | None:
    """Return why a pass alone takes other memory than in a step; None if it takes the same."""
    if package := STRATEGIES[layout.strategy].package:
        return f"{package} holds state of its own"
    if layout.context_ranks > 1 or layout.expert_ranks > 1:
        return "several ranks share each micro-batch, or experts"
    return "state is sharded: a pass alone has other gradients in memory than a step" if layout.shards_state else None


def choose_passes(planned: PlannedRun) -> list[StepPlan]:
    """Return steps of one micro-batch of `SHARES` of the largest one, the same on every rank.

    They are larger where a sample is, as samples stay whole.
    """
    largest_of_plan = planned.plan.largest_pass
    assert largest_of_plan is not None
    step, rank, batch = largest_of_plan
    longest, steps = planned.plan.largest_unit(step.by_rank[rank]), []
    for token_share in SHARES:
        cut = planned.plan.resplit(step, rank, max(longest, int(token_share * batch.num_padded_tokens)))
        largest = max(cut, key=lambda batch: batch.num_padded_tokens)
        steps.append(replace(step, by_rank=((largest,),) * len(step.by_rank)))
    return steps


def correction_of(planned: PlannedRun, passes: Sequence[tuple[StepPlan, int]]) -> tuple[MeasuredPass, Correction | str]:
    """Return the last pass, and `fit_correction` of all but the first; peaks are as `measure_passes` returns them.

    Passes whose gradients outgrow their activations, which they replace one by one, do not tell what these take.
    """
    memory, model, measured, telling = planned.memory, planned.memory.model, [], []
    assert model is not None
    for step, peak_bytes in passes[1:]:
        batch = step.by_rank[0][0]
        fitted = model.fitted_estimate(batch.size, memory.recompute, memory.accumulates)
        sizes = (fitted.total_bytes, fitted.activations_bytes + fitted.working_bytes)
        measured.append(MeasuredPass(batch.num_padded_tokens, *sizes, peak_bytes + fitted.optimizer_bytes))
        if not fitted.in_turn or fitted.activations_bytes > fitted.gradients_bytes:
            telling.append(measured[-1])
    largest = planned.plan.largest_pass
    assert largest is not None
    most = model.fitted_estimate(largest[2].size, memory.recompute, memory.accumulates)
    pass_bytes = most.activations_bytes + most.working_bytes
    if len(telling) < 2:
        return measured[-1], "gradients hide what activations take"
    return measured[-1], fit_correction(telling, most_bytes=most.total_bytes, most_pass_bytes=pass_bytes)


def _key(config: Config, group: ControlGroup) -> dict[str, Any]:
    """Return what corrections depend on, apart from the kind of a pass."""
    text = read_text_config(config.model.name, config.model.revision)
    return {
        **process_key(choose_device(config.wanted_device, group.rank)),
        "settings": json.dumps(config.model_dump(mode="json", include=SETTINGS | {"optim": True})),
        "model": json.dumps(text.to_dict(), default=str, sort_keys=True),
        "new_tokens": list(config.data.added_tokens),
        "ranks": [group.rank.world, group.rank.num_nodes],
    }
