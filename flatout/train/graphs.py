"""Whether a run's decoder passes become CUDA graphs, and for which sizes: decided from the plan before step 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

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
MIN_RECORDINGS, MAX_RECORDINGS, RECORD_S = 16, 40, 1.0
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
    if not is_host_bound(planned.plan, planned.shape, _reached_flops_per_s(config, device)):
        return "the GPU is slower than the host"
    return None


def _reached_flops_per_s(config: Config, device: torch.device) -> float:
    """FLOPs a second that a step of this run reaches at most."""
    peak = nominal_peak(torch.cuda.get_device_name(device), "bf16")
    reached = REACHED_SHARE * (peak.flops_per_s if peak else UNKNOWN_PEAK_FLOPS_PER_S)
    return reached * (FP8_SPEEDUP if config.base.computes_in_fp8 else 1.0)


def is_host_bound(plan: RunPlan, shape: ModelShape, flops_per_s: float) -> bool:
    """Whether launching a micro-batch's kernels takes the host longer than a GPU of that speed computes them."""
    steps = list(plan.sampled_steps(32))
    num_micro_batches = sum(len(rank) for step in steps for rank in step.ranks)
    gpu_s = sum(plan.flops(step) for step in steps) / num_micro_batches / flops_per_s
    return gpu_s < shape.num_layers * HOST_S_PER_LAYER


def count_sizes(plan: RunPlan, rank: int, *, ladder: Sequence[int] = ()) -> Counter[StreamSize]:
    """How often each size is among one rank's micro-batches, in steps spread over the run."""
    counts: Counter[StreamSize] = Counter()
    for step in plan.sampled_steps(NUM_STEPS_SEEN):
        for batch in step.ranks[rank]:
            lengths = plan.samples.lengths[plan.samples.places_of(batch.sample_ids)]
            counts[stream_size(lengths.tolist(), ladder=ladder)] += 1
    return counts


def planned_ladder(config: Config, planned: Planned, device: torch.device, rank: int) -> tuple[int, ...]:
    """The ladder of a rank of a run that records graphs."""
    plan, reached = planned.plan, _reached_flops_per_s(config, device)
    steps = list(plan.sampled_steps(32))
    step_s = sum(plan.flops(step) for step in steps) / len(steps) / plan.layout.num_ranks / reached
    return make_ladder(count_sizes(plan, rank), plan.num_steps * step_s)


def make_ladder(counts: Counter[StreamSize], run_s: float) -> tuple[int, ...]:
    """The token counts, ascending, that the micro-batches of a run of about `run_s` go up to.

    They are quantiles of the sizes in the plan. More of them fill up less (16 cost chat lengths 2.3 % more tokens, 40
    cost 0.9 %; sixteen fixed ones from each power of two to the next 2.5 %) and take longer to record: as many as cost
    the run least.
    """
    found = np.sort(np.repeat([size.num_tokens for size in counts], list(counts.values())))

    def cost_s(rungs: NDArray[np.int64]) -> float:
        filled = rungs[np.searchsorted(rungs, found)]
        return len(rungs) * RECORD_S + run_s * float(filled.sum() / found.sum() - 1)

    tried = [_quantiles(found, count) for count in range(MIN_RECORDINGS, MAX_RECORDINGS + 1, 4)]
    return tuple(min(tried, key=cost_s).tolist())


def _quantiles(ascending: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """At most so many of the values, the largest among them; equally many lie between one and the next."""
    places = np.ceil(np.arange(1, count + 1) * len(ascending) / count).astype(np.int64) - 1
    return np.unique(ascending[places])


def record_graphs(run: Run) -> str:
    """Record the run's most frequent sizes, once gradients have their place; a line for the console.

    Out of memory ends the recording: sizes left over run as before.
    """
    assert run.feed.num_borders is not None
    places = [(parameter, parameter.grad) for parameter in run.named_parameters.values() if parameter.grad is not None]
    decoder = GraphedDecoder(run.model, *zip(*places, strict=True))
    counts = count_sizes(run.plan, run.rank.index, ladder=run.feed.ladder)
    sizes, num_recorded = sorted((size for size, _ in counts.most_common(MAX_RECORDINGS)), reverse=True), 0
    try:
        for size in sizes:
            decoder.record(size, run.feed.num_borders)
            num_recorded += 1
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    run.loss.decoder = decoder
    return f"{num_recorded} of {len(sizes)} sizes recorded, {sizes[-1].num_tokens:,} to {sizes[0].num_tokens:,} tokens"
