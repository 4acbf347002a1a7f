"""One step of the run as it trains, measured against the reference: what each row of `flatout verify` computes."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flatout.config.schema import Config
from flatout.parallel.rank import Rank
from flatout.plan.types import StepPlan
from flatout.track.record import Trackers
from flatout.train.alike import weakest_gpu
from flatout.train.checkpoint import Checkpoints
from flatout.train.planning import Planned, plan_run
from flatout.train.setup import set_up
from flatout.train.state import Run
from flatout.train.step import accumulate_gradients
from flatout.train.verify_compare import Reference, Row


def plan_quietly(config: Config, rank: Rank) -> Planned:
    """The plan of the run, told to nobody."""
    return plan_run(config, Trackers(), rank, lambda: weakest_gpu(config, rank))


@contextmanager
def set_up_quietly(config: Config, planned: Planned, rank: Rank, folder: Path) -> Iterator[Run]:
    """The run as `flatout train` sets it up, without its checkpoints; afterwards its memory is free again."""
    checkpoints = Checkpoints(folder, keep=1, on_event=lambda kind, facts: None)
    run = set_up(config, planned, checkpoints, None, Trackers(), rank)
    # dropout is random, and the reference has none; recomputation still needs the model in training mode
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
    """Give back what a model that is not needed any more held on the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(run: Run, step: StepPlan, reference: Reference, case: str) -> Row:
    """Loss, gradients and norm of one step, over all ranks, beside the reference; only the first rank's row counts."""
    run.optimizer.zero_grad(set_to_none=True)
    loss_sum, num_correct = accumulate_gradients(run, step)
    run.strategy.sum_gradients(run.parameters)
    totals = run.strategy.sum_values(torch.stack([loss_sum, num_correct]))
    run.scaler.unscale_(run.optimizer)
    norm = run.strategy.grad_norm(run.parameters).item()
    run.scaler.update()
    gradients = named_gradients(run)
    if run.rank.is_first:
        row = reference.compare(case, totals[0].item() / step.num_label_tokens, norm, gradients)
    else:
        # gathering a sharded gradient takes all ranks
        deque(gradients, maxlen=0)
        row = Row(case)
    return replace(row, num_ranks=run.rank.world, num_micro_batches=max(map(len, step.ranks)))


def named_gradients(run: Run) -> Iterator[tuple[str, Tensor | None]]:
    """Every trained parameter's name and whole gradient, gathered from all ranks where it is sharded."""
    for name, parameter in run.named_parameters.items():
        gradient = parameter.grad
        yield name, gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
