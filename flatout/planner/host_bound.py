"""Whether a GPU waits for the host, which launches its kernels: decided from the plan and the GPU's name."""

from __future__ import annotations

from flatout.planner.devices import nominal_peak
from flatout.planner.shape import ModelShape
from flatout.planner.steps.training_plan import TrainingPlan

# host time to launch one compiled layer, forward and backward: 5.5 ms measured on an H200's host
HOST_S_PER_LAYER = 5e-3
# the share of a GPU's nominal bf16 peak that matrix products reach at most, and float8's speed-up of a whole step
REACHED_SHARE = 0.7
FP8_SPEEDUP = 1.5
# assumed for a GPU whose peak is unknown
UNKNOWN_PEAK_FLOPS_PER_S = 400e12


def reachable_flops_per_s(device_name: str, *, fp8: bool) -> float:
    """Return the FLOPs per second that a step reaches at most on a GPU of this name, with products in `fp8` or not."""
    peak = nominal_peak(device_name, "bf16")
    flops_per_s = REACHED_SHARE * (peak.flops_per_s if peak else UNKNOWN_PEAK_FLOPS_PER_S)
    return flops_per_s * (FP8_SPEEDUP if fp8 else 1.0)


def is_host_bound(plan: TrainingPlan, shape: ModelShape, flops_per_s: float) -> bool:
    """Whether the host needs longer to launch a micro-batch's kernels than a GPU of that speed to run them."""
    steps = list(plan.sampled_steps(32))
    num_micro_batches = sum(len(rank) for step in steps for rank in step.by_rank)
    gpu_s = sum(plan.flops(step) for step in steps) / num_micro_batches / flops_per_s
    return gpu_s < shape.num_layers * HOST_S_PER_LAYER
