"""Run one training step and compare it with the reference, for each row of `flatout verify`."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from flatout.checkpoint.write import Checkpoints
from flatout.config.schema import Config
from flatout.parallel.control_group import ControlGroup
from flatout.parallel.rank import Rank
from flatout.plan.schedule.steps import StepPlan
from flatout.track.tracker import TrackerGroup
from flatout.train.build import build_run
from flatout.train.planning import PlannedRun, plan_run
from flatout.train.rank_consistency import weakest_gpu
from flatout.train.state import Run
from flatout.train.step import accumulate_gradients
from flatout.verify.compare import Reference, Row


def plan_quietly(config: Config, rank: Rank) -> PlannedRun:
    """Plan the run without logging."""
    return plan_run(config, TrackerGroup(), rank, lambda: weakest_gpu(config, rank, lambda: ControlGroup(rank)))


@contextmanager
def set_up_quietly(config: Config, planned: PlannedRun, rank: Rank, folder: Path) -> Iterator[Run]:
    """Set up the run as `flatout train` does, but without its checkpoints; its memory is freed on exit."""
    checkpoints = Checkpoints(folder, keep=1, on_event=lambda kind, facts: None)
    run = build_run(config, planned, checkpoints, None, TrackerGroup(), rank)
    # the reference has no dropout; everything else stays in training mode, which recomputation needs
    for module in run.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()
    try:
        yield run
    finally:
        for feed in filter(None, (run.feed, run.eval_feed)):
            feed.close()
        del run
        free_memory()


def free_memory() -> None:
    """Free the GPU memory of models that are no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(run: Run, step: StepPlan, reference: Reference, case: str) -> Row:
    """Compare one step's loss, gradients and norm over all ranks with the reference; only rank 0's row is filled."""
    run.optimizer.zero_grad(set_to_none=True)
    loss_sum, num_correct = accumulate_gradients(run, step)
    run.strategy.sum_gradients(run.parameters)
    totals = run.strategy.sum_values(torch.stack([loss_sum, num_correct]))
    run.scaler.unscale_(run.optimizer)
    norm = run.strategy.grad_norm(run.parameters).item()
    run.scaler.update()
    # a generator, so that only one sharded gradient at a time is gathered
    grads = ((name, parameter.grad) for name, parameter in run.named_parameters.items())
    gradients = ((name, grad.full_tensor() if isinstance(grad, DTensor) else grad) for name, grad in grads)
    if run.rank.is_first:
        row = reference.compare(case, totals[0].item() / step.num_label_tokens, norm, gradients)
    else:
        # gathering a sharded gradient is collective
        deque(gradients, maxlen=0)
        row = Row(case)
    return replace(row, num_ranks=run.rank.world, num_micro_batches=max(map(len, step.ranks)))
