"""Which evaluation samples have the greatest losses, from the passes that evaluate anyway, and their text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from flatout.data.tokenizer import tokenizer_of
from flatout.models.packed import PackedBatch
from flatout.planner.steps.step_plan import MicroBatch
from flatout.track.record import WorstSample
from flatout.trainer.state import Run

# of a long sample this much is recorded: characters before its first label token, and after
MAX_CONTEXT, MAX_TEXT = 400, 800


class WorstSamples:
    """Adds up the losses of label tokens by sample over one evaluation, if `eval.worst_samples` asks for any.

    An objective whose loss is no sum over tokens has no loss of one sample; nothing is recorded for it.
    """

    def __init__(self, run: Run) -> None:
        objective = run.planned.objective
        self._run = run
        self._count = run.config.eval.worst_samples if (objective.reads, objective.scope) == ("labels", "token") else 0
        self._ids = [np.sort(each.plan.sample_ids) for each in run.eval_sets] if self._count else []
        self._sums = [torch.zeros(len(ids), dtype=torch.float64, device=run.device) for ids in self._ids]

    def start(self, place: int) -> None:
        """Start the evaluation set at `place`, also once more after its passes ran out of memory."""
        if self._count:
            self._sums[place].zero_()

    @contextmanager
    def reading(self, place: int, micro_batch: MicroBatch) -> Iterator[None]:
        """Read the losses of the pass within, over a micro-batch of the evaluation set at `place`."""
        if self._count:
            self._run.loss.on_token_losses = partial(self._add, place, micro_batch)
        try:
            yield
        finally:
            self._run.loss.on_token_losses = None

    def _add(self, place: int, micro_batch: MicroBatch, batch: PackedBatch, losses: Tensor) -> None:
        sums = self._sums[place]
        own = torch.from_numpy(np.searchsorted(self._ids[place], micro_batch.sample_ids)).to(sums.device)
        sums.index_add_(0, own[batch.label_samples], losses.double())

    def found(self) -> tuple[WorstSample, ...]:
        """Return the samples of all evaluation sets with the greatest mean losses, the greatest first; collective."""
        run, ranked = self._run, list[tuple[float, int, int]]()
        for place, (ids, sums) in enumerate(zip(self._ids, self._sums, strict=True)):
            num_labels = run.eval_sets[place].store.num_labels[ids]
            means = run.strategy.sum_values(sums).cpu().numpy() / np.maximum(1, num_labels)
            greatest = np.argsort(-means, kind="stable")[: self._count]
            ranked += [(float(means[one]), place, int(ids[one])) for one in greatest]
        ranked.sort(key=lambda one: -one[0])
        if not ranked or not run.rank.is_first:
            return ()
        return tuple(self._sample(*one) for one in ranked[: self._count])

    def _sample(self, loss: float, place: int, sample_id: int) -> WorstSample:
        run, each = self._run, self._run.eval_sets[place]
        prompts = run.planned.prompts
        tokenizer = prompts.tokenizer if prompts else tokenizer_of(run.config.data, run.config.model.name)
        (ids, mask), origin = each.store.sample(sample_id).pair, each.store.origin(sample_id)
        first = int(np.argmax(mask))
        context, text = (str(tokenizer.decode(part.tolist())) for part in (ids[:first], ids[first:]))
        return WorstSample(
            data=each.name,
            source=origin.source,
            row=origin.row_number,
            loss=round(loss, 6),
            num_label_tokens=int(each.store.num_labels[sample_id]),
            context=context if len(context) <= MAX_CONTEXT else f"… {context[-MAX_CONTEXT:]}",
            text=text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} …",
        )
