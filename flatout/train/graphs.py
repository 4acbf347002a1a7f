"""Whether a run's decoder passes become CUDA graphs, and for which sizes: decided from the plan before step 0."""

from __future__ import annotations

from collections import Counter

import torch

from flatout.config.schema import Config
from flatout.models.graphs import GraphedDecoder
from flatout.models.packed import StreamSize, stream_size
from flatout.plan.peak import nominal_peak
from flatout.plan.shape import ModelShape
from flatout.plan.steps import RunPlan
from flatout.train.planning import Planned
from flatout.train.state import Run

# what a host needs to launch one compiled layer, forward and backward: 5.5 ms on an H200's host, measured
HOST_S_PER_LAYER = 5e-3
# the share of a GPU's nominal bf16 peak that products reach at most, and how much faster float8 makes a whole step
REACHED_SHARE = 0.7
FP8_SPEEDUP = 1.5
# of a GPU whose peak is not known
UNKNOWN_PEAK_FLOPS_PER_S = 400e12
# each holds its share of the graph's memory and takes about a second to record
MAX_RECORDINGS = 40
NUM_STEPS_SEEN = 400


def reason_against(config: Config, planned: Planned, device: torch.device) -> str | None:
    """Why this run records no graphs, or None."""
    if config.cuda_graphs == "off":
        return "as asked"
    if device.type != "cuda":
        return "only on CUDA"
    if config.method != "lora" or config.optim.name == "adamw8bit" or planned.spread.lockstep:
        return "gradients have no fixed place"
    if config.lora.dropout or planned.memory.recompute not in ("none", "lean"):
        return "dropout and recompute need the host"
    if config.compile == "off" or config.deterministic:
        return "layers are not compiled"
    peak = nominal_peak(torch.cuda.get_device_name(device), "bf16")
    reached = REACHED_SHARE * (peak.flops_per_s if peak else UNKNOWN_PEAK_FLOPS_PER_S)
    if not is_host_bound(planned.plan, planned.shape, reached * (FP8_SPEEDUP if config.base.computes_in_fp8 else 1.0)):
        return "the GPU is slower than the host"
    return None


def is_host_bound(plan: RunPlan, shape: ModelShape, flops_per_s: float) -> bool:
    """Whether launching a micro-batch's kernels takes the host longer than a GPU of that speed computes them."""
    steps = list(plan.sampled_steps(32))
    num_micro_batches = sum(len(rank) for step in steps for rank in step.ranks)
    gpu_s = sum(plan.flops(step) for step in steps) / num_micro_batches / flops_per_s
    return gpu_s < shape.num_layers * HOST_S_PER_LAYER


def count_sizes(plan: RunPlan, rank: int, *, coarse: bool) -> Counter[StreamSize]:
    """How often each size is among one rank's micro-batches, in steps spread over the run."""
    counts: Counter[StreamSize] = Counter()
    for step in plan.sampled_steps(NUM_STEPS_SEEN):
        for batch in step.ranks[rank]:
            lengths = plan.samples.lengths[plan.samples.places_of(batch.sample_ids)]
            counts[stream_size(lengths.tolist(), coarse=coarse)] += 1
    return counts


def sizes_of(plan: RunPlan, rank: int) -> list[StreamSize]:
    """The sizes that one rank's micro-batches have most often, the largest first."""
    counts = count_sizes(plan, rank, coarse=True)
    return sorted((size for size, _ in counts.most_common(MAX_RECORDINGS)), reverse=True)


def record_graphs(run: Run) -> str:
    """Record the run's most frequent sizes, once gradients have their place; a line for the console.

    Out of memory ends the recording: sizes left over run as before.
    """
    assert run.feed.num_borders is not None
    places = [(parameter, parameter.grad) for parameter in run.named_parameters.values() if parameter.grad is not None]
    decoder = GraphedDecoder(run.model, *zip(*places, strict=True))
    sizes, num_recorded = sizes_of(run.plan, run.rank.index), 0
    try:
        for size in sizes:
            decoder.record(size, run.feed.num_borders)
            num_recorded += 1
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    run.loss.decoder = decoder
    return f"{num_recorded} of {len(sizes)} sizes recorded, {sizes[-1].num_tokens:,} to {sizes[0].num_tokens:,} tokens"
