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
# each holds its share of the graph's memory and takes 0.3 s to record, measured on an H200
MIN_RECORDINGS, MAX_RECORDINGS, RECORD_S = 16, 40, 0.3
NUM_STEPS_SEEN = 400
NOT_COMPILED = "layers are not compiled"


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
        return NOT_COMPILED
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
    """The token counts, ascending, that the micro-batches of a run of about `run_s` go up to: as many as cost the run
    least, where more of them fill up less and take longer to record.
    """
    weights: Counter[int] = Counter()
    for size, count in counts.items():
        weights[size.num_tokens] += count
    sizes = np.array(sorted(weights))
    times = np.array([weights[size] for size in sizes])
    ladders = best_ladders(sizes, times, MAX_RECORDINGS)

    def cost_s(ladder: NDArray[np.int64]) -> float:
        filled = ladder[np.searchsorted(ladder, sizes)]
        return len(ladder) * RECORD_S + run_s * float(filled @ times / (sizes @ times) - 1)

    return tuple(min(ladders[min(MIN_RECORDINGS, len(sizes)) - 1 :], key=cost_s).tolist())


def best_ladders(sizes: NDArray[np.int64], weights: NDArray[np.int64], most: int) -> list[NDArray[np.int64]]:
    """For each number of rungs up to `most`, those of the ascending `sizes` that fill up least: every size goes up to
    the next rung, `weights` times. Dynamic programming over the sizes, each rung added to the best ladder below it.

    Chat lengths, 32 samples on two ranks: 16 rungs add 1.3 % of tokens, 40 add 0.1 % (quantiles: 1.8 and 0.5 %).
    """
    num_sizes = len(sizes)
    below = np.concatenate([[0], np.cumsum(weights)])
    # [i, j]: tokens of the sizes i to j, all filled up to size j
    filled = np.where(np.tri(num_sizes, k=-1, dtype=bool), np.inf, (below[1:] - below[:-1, None]) * sizes)
    # the fewest tokens of the first sizes, by their number, with as many rungs as there were rounds
    tokens = np.concatenate([[0.0], np.full(num_sizes, np.inf)])
    starts: list[NDArray[np.int64]] = []
    ladders = []
    for _ in range(min(most, num_sizes)):
        total = tokens[:-1, None] + filled
        starts.append(total.argmin(axis=0))
        tokens = np.concatenate([[np.inf], total.min(axis=0)])
        rungs, end = [], num_sizes - 1
        for start in reversed(starts):
            rungs.append(sizes[end])
            end = start[end] - 1
        ladders.append(np.array(rungs[::-1]))
    return ladders


def record_graphs(run: Run, why_not: str | None) -> str:
    """Record the run's most frequent sizes, once gradients have their place, unless there is a reason against it; a
    line for the console.

    Out of memory ends the recording: sizes left over run as before.
    """
    if why_not:
        return f"off: {why_not}"
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
