"""Plans for streams and for data sets beyond memory: window by window, in constant memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import ArrayLike

from flatout.config.schema import BatchConfig
from flatout.errors import UsageError
from flatout.plan.assemble import Layout, Samples, assemble, check_fits, joined
from flatout.plan.cost import COST_BY_TOKENS, CostModel
from flatout.plan.order import permute
from flatout.plan.types import StepPlan


def plan_stream(
    windows: Iterable[tuple[ArrayLike, ArrayLike]],
    batch: BatchConfig,
    *,
    micro_batch_tokens: int,
    seed: int,
    num_ranks: int,
    cost: CostModel = COST_BY_TOKENS,
) -> Iterator[StepPlan]:
    """Steps of one pass over windows of (tokens, label tokens), integer arrays (n,) of consecutive samples.

    Sample ids count from 0 through all windows. With `batch.shuffle` each window is shuffled in itself, by
    (seed, number of the window); what does not fill a step waits, in front, for the next window. The steps are the
    same for any number of ranks. A pass ends with its ragged last step, or at `batch.max_steps`.
    Raises UsageError for `batch.epochs` other than 1 (a stream has no second pass) and for a sample longer than
    `micro_batch_tokens`.
    """
    if batch.epochs != 1 and batch.max_steps is None:
        raise UsageError(f"batch.epochs is {batch.epochs:g}, but a stream is read once; set batch.max_steps instead")
    layout = Layout(num_ranks, micro_batch_tokens, cost)
    for index, step in enumerate(_all_steps(windows, batch, seed, layout)):
        if index == batch.max_steps:
            return
        yield step


def _all_steps(
    windows: Iterable[tuple[ArrayLike, ArrayLike]], batch: BatchConfig, seed: int, layout: Layout
) -> Iterator[StepPlan]:
    waiting: Samples | None = None
    num_read = num_steps = 0
    for number, (lengths, num_labels) in enumerate(windows):
        samples = Samples(np.asarray(lengths), np.asarray(num_labels), num_read + np.arange(np.size(lengths)))
        if not len(samples):
            continue
        num_read += len(samples)
        check_fits(samples, layout.micro_batch_tokens)
        if batch.shuffle:
            order = permute(np.arange(len(samples)), len(samples), seed=seed, epoch=number, purpose="window")
            samples = samples.take(order)
        samples = joined(waiting, samples) if waiting else samples
        num_full = len(samples) // batch.samples_per_step
        end = num_full * batch.samples_per_step
        full, waiting = samples.take(np.arange(end)), samples.take(np.arange(end, len(samples)))
        yield from assemble(full, batch.samples_per_step, layout, epoch=0, first_index=num_steps)
        num_steps += num_full
    if waiting:
        yield from assemble(waiting, batch.samples_per_step, layout, epoch=0, first_index=num_steps)
