"""Plan a run's steps: how samples share a micro-batch, the strategy, and the token budget that fits in memory."""

from __future__ import annotations

import socket
from dataclasses import asdict, replace
from typing import NamedTuple

import numpy as np
import torch

from flatout.config.schema import Config
from flatout.data.columns import PREFIX_TOKENS
from flatout.errors import Fix, UsageError
from flatout.models.arch_quirks import LayoutChoice, choose_layout, sharing_problem
from flatout.models.load.model import gpu_features
from flatout.parallel.control_group import ControlGroup
from flatout.parallel.process_group import choose_device
from flatout.parallel.rank import Rank
from flatout.planner.cost import make_cost
from flatout.planner.devices import CONTEXT_BYTES, Device, weakest
from flatout.planner.host_bound import is_host_bound, reachable_flops_per_s
from flatout.planner.memory.budget import (
    MemoryDecision,
    TokenStatistics,
    choose_micro_batch,
    choose_parallel_layout,
    spend_spare_memory,
)
from flatout.planner.parallel_layout import ParallelLayout
from flatout.planner.steps.packing import FEWEST_PASSES, PASS_OVERHEAD_TOKENS, row_length
from flatout.planner.steps.prefixes import MIN_PREFIX_TOKENS, Prefixes, UnitPrefixes, find_prefixes
from flatout.planner.steps.rounds import BoundsPlan
from flatout.planner.steps.step_plan import BatchLayout
from flatout.planner.steps.training_plan import TrainingPlan, make_plan, select_samples
from flatout.track.callback import Reporter
from flatout.trainer.picture_inputs import require_trainable, tower_flops
from flatout.trainer.run_data import RunData

# batch.share_prefix: auto shares from this share of all tokens on, as attention then takes two passes for each layer
MIN_SHARED_SHARE = 0.05


class InexactReasons(NamedTuple):
    """Why a model must not pack samples, and not share prefixes, as its self-test found; None: it may."""

    packing: str | None = None
    sharing: str | None = None


EXACT = InexactReasons()


class Steps(NamedTuple):
    """What was decided of a run's steps."""

    plan: TrainingPlan
    parallel_layout: ParallelLayout
    memory: MemoryDecision
    sharing: str = ""
    """Whether samples share prefixes, and why."""


def plan_training(
    data: RunData, rank: Rank, device: Device | None, reporter: Reporter, inexact_reasons: InexactReasons
) -> Steps:
    """Decide how samples share a micro-batch, the steps, the strategy and the memory.

    Prefixes are shared where that pays.
    """
    reporter.phase("planning")
    is_padded = pads_samples(data, reporter, inexact_reasons.packing)
    reporter.phase("looking for shared prefixes")
    prefixes, sharing = index_prefixes(data, is_padded=is_padded, reason=inexact_reasons.sharing)
    reporter.phase("planning")
    steps = plan_steps(data, rank, device, is_padded=is_padded, prefixes=prefixes)
    if prefixes is not None:
        pays, sharing = sharing_pays(data, steps, device)
        if not pays:
            steps = plan_steps(data, rank, device, is_padded=is_padded, prefixes=None)
    reporter.stage("prefixes", sharing)
    require_trainable(data.settings, data.split.store, steps.parallel_layout)
    return steps._replace(sharing=sharing)


def pads_samples(data: RunData, reporter: Reporter, unpackable: str | None) -> bool:
    """Choose the layout and report it; return whether each sample is a row. Raises UsageError as `choose_layout`."""
    settings, has_pictures = data.settings, bool(data.split.store.num_pictures)
    if unpackable:
        choice = LayoutChoice("rows", unpackable)
    else:
        choice = choose_layout(data.text_config, settings.batch.layout, has_pictures=has_pictures)
    shared = {"experts.parallel": settings.expert_ranks, "context.parallel": settings.context_ranks}
    for name, num_ranks in shared.items():
        if choice.layout == "rows" and num_ranks > 1:
            raise UsageError(
                f"{name}: {num_ranks} needs packed samples, but this model takes rows ({choice.reason}); set {name}: 1"
            )
    reporter.stage("layout", f"{choice.layout}: {choice.reason}")
    return choice.layout == "rows"


def index_prefixes(data: RunData, *, is_padded: bool, reason: str | None) -> tuple[Prefixes | None, str]:
    """Return where samples share prefixes; None, and why, if they do not or must not.

    `is_padded` is the layout, `reason` what an earlier self-test found. Raises UsageError if batch.share_prefix: on
    cannot be exact.
    """
    settings, store, train_ids = data.settings, data.split.store, data.split.train_ids
    setting = settings.batch.share_prefix
    if setting == "off":
        return None, "not shared: as configured"
    lengths = store.lengths if train_ids is None else store.lengths[train_ids]
    problem = reason or ("each sample is a row of its own" if is_padded else None)
    problem = problem or ("samples hold pictures" if store.num_pictures else None)
    if settings.context_ranks > 1:
        problem = problem or "with context.parallel, ranks share each sample's tokens"
    if settings.lora.dropout:
        problem = problem or "with lora.dropout, samples must have masks of their own"
    if settings.has_embedding_noise:
        problem = problem or "with model.neftune_alpha, samples must have noise of their own"
    problem = problem or sharing_problem(data.text_config, int(lengths.max()))
    if problem:
        if setting == "on":
            raise UsageError(f"batch.share_prefix: on fails here: {problem}", [Fix({"batch.share_prefix": "auto"})])
        return None, f"not shared: {problem}"
    units, declared = store.unit_offsets, store.extra.get(PREFIX_TOKENS)
    prefixes: Prefixes
    if units is not None and declared is not None:
        prefixes = UnitPrefixes.of(units, declared, None)
        has_any = bool(prefixes.tokens.any())
    else:
        index = find_prefixes(store.token_ids, store.loss_mask, store.offsets, train_ids)
        prefixes, has_any = index if units is None else UnitPrefixes.of(units, None, index), len(index.shared) > 0
    if not has_any:
        return None, f"not shared: no samples begin with the same {MIN_PREFIX_TOKENS} unlabelled tokens"
    return prefixes, ""


def plan_steps(
    data: RunData, rank: Rank, device: Device | None, *, is_padded: bool, prefixes: Prefixes | None
) -> Steps:
    """Plan within the token budget that fits in memory; the budget does not change which samples a step holds."""
    settings, shape, (store, train_ids, _) = data.settings, data.shape, data.split
    # an update in the backward pass needs a step in one pass
    pass_overhead_tokens = FEWEST_PASSES if settings.full.update == "backward" else PASS_OVERHEAD_TOKENS
    largest_unit = 1 if store.unit_offsets is None else int(np.diff(store.unit_offsets).max())
    layout = BatchLayout(
        rank.world // settings.context_ranks,
        row_length(int(store.lengths.max())) * settings.batch.samples_per_step * largest_unit,
        make_cost(settings, shape),
        pass_overhead_tokens=pass_overhead_tokens if is_padded else None,
        prefixes=prefixes,
    )
    parts_units, arrays = data.objective.scope != "unit", (store.lengths, store.num_label_tokens)
    samples = select_samples(*arrays, train_ids, layout, store.unit_offsets, parts_units=parts_units)
    # questions of a conversation share what precedes them (data.lost_reasoning: split), so an epoch takes them one
    # after the other, but not the windows of a long document
    draws_rows_whole = store.meta.counts.get("split_by_question") and not store.meta.counts.get("split")
    row_keys = store.row_keys if draws_rows_whole else None
    whole_steps = make_plan(samples, layout, settings.batch, settings.seed, row_keys)
    if data.rollouts is not None:
        whole_steps = BoundsPlan.of(whole_steps, data.rollouts.rounds)
    flops = tower_flops(shape, store)
    if flops is not None and train_ids is not None:
        flops = flops[np.asarray(train_ids)]
    whole_steps = replace(whole_steps, samples=replace(whole_steps.samples, tower_flops=flops))
    return fit_plan(data, whole_steps, rank, device)


def fit_plan(data: RunData, plan: TrainingPlan, rank: Rank, device: Device | None) -> Steps:
    """Choose strategy, recompute level and token budget for the same steps, and lay the steps out by them."""
    settings, shape = data.settings, data.shape
    whole_tokens = row_length(int(plan.samples.lengths.max())) * max(
        plan.batch.samples_per_step, plan.most_samples_per_step
    )
    whole_steps = plan.with_layout(whole_tokens, make_cost(settings, shape))
    tokens = TokenStatistics.of(whole_steps)
    parallel_layout = choose_parallel_layout(
        settings, shape, tokens, device, num_ranks=rank.world, num_nodes=rank.num_nodes
    )
    memory = choose_micro_batch(settings, shape, tokens, device, parallel_layout)
    cost = make_cost(settings, shape, memory.recompute)
    lockstep, expert_ranks = parallel_layout.lockstep, parallel_layout.expert_ranks
    plan = whole_steps.with_layout(memory.micro_batch_tokens, cost, lockstep=lockstep, expert_ranks=expert_ranks)
    memory = spend_spare_memory(memory, settings, tokens, device, plan)
    parallel_layout = memory.model.parallel_layout if memory.model else parallel_layout
    plan = plan.with_layout(memory.micro_batch_tokens, cost, lockstep=lockstep, expert_ranks=expert_ranks)
    return Steps(plan, parallel_layout, memory)


def sharing_pays(data: RunData, steps: Steps, device: Device | None) -> tuple[bool, str]:
    """Decide whether the steps of a plan that shares prefixes pay off, and say why."""
    settings, plan = data.settings, steps.plan
    saved_share, is_auto = plan.shared_share, settings.batch.share_prefix == "auto"
    if not saved_share:
        return False, "not shared: no samples of one micro-batch begin with the same tokens"
    if is_auto and saved_share < MIN_SHARED_SHARE:
        return False, f"not shared: this would save {saved_share:.1%} of the tokens, less than {MIN_SHARED_SHARE:.0%}"
    # recorded graphs need the number of prefixes before a pass
    records = settings.may_record_graphs and not steps.parallel_layout.lockstep
    device = device if is_auto and records else None
    flops_per_s = reachable_flops_per_s(device.name, fp8=settings.computes_in_fp8) if device else 0.0
    if device is not None and is_host_bound(plan, data.shape, flops_per_s):
        return False, "not shared: steps are limited by kernel launches, so CUDA graphs help more"
    return True, f"shared: {saved_share:.1%} of the tokens are not computed again"


def gpu_of(config: Config, rank: Rank) -> Device | None:
    """Return the GPU that this process will train on and the bytes it may use; None on the CPU.

    A single process gets the free memory. Several ranks get the total (less the context), as all must plan the same
    micro-batches; so do deterministic runs, whose plan must not depend on other processes. Raises ResourceError as
    `choose_device` does.
    """
    device = choose_device(config.wanted_device, rank)
    if device.type != "cuda":
        return None
    num_bytes, total_bytes = torch.cuda.mem_get_info(device)
    if rank.world > 1 or config.deterministic:
        num_bytes = total_bytes - CONTEXT_BYTES
    return Device(torch.cuda.get_device_name(device), num_bytes, *gpu_features(device))


def weakest_gpu(config: Config, group: ControlGroup) -> Device | None:
    """Return the GPU that all ranks plan for: the one with the least memory. None on the CPU.

    Collective. Raises ResourceError as `gpu_of` does, and UsageError if `model.precision: auto` would resolve
    differently on some.
    """
    gpu = gpu_of(config, group.rank)
    if gpu is None or group.rank.world == 1:
        return gpu
    gathered = group.all_gather((socket.gethostname(), asdict(gpu)))
    gpus = [Device(**values) for _, values in gathered]
    without = [index for index, other in enumerate(gpus) if not other.has_bf16]
    if config.model.precision == "auto" and 0 < len(without) < len(gpus):
        index = without[0]
        raise UsageError(
            f"rank {index} on {gathered[index][0]}: its {gpus[index].name} has no bf16, the others have",
            [*(Fix({"model.precision": one}) for one in ("fp16", "fp32")), Fix({}, "exclude this GPU")],
        )
    return weakest(gpus)
