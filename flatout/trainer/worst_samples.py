"""Which evaluation samples, or pairs, have the greatest losses, from the passes that evaluate anyway; their text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.config.objective import UNDESIRABLE
from flatout.data.rows.formats.answers import CLASS
from flatout.data.token_store import TokenStore
from flatout.data.tokenizer import tokenizer_of
from flatout.errors import FlatoutError
from flatout.models.packed import PackedBatch
from flatout.planner.steps.step_plan import MicroBatch
from flatout.track.record import WorstSample
from flatout.trainer.picture_inputs import recorded
from flatout.trainer.state import TrainingRun

# of a long sample this much is recorded: characters before its first label token, and after
MAX_CONTEXT, MAX_TEXT = 400, 800


class WorstSamples:
    """Adds up the losses of one evaluation by sample, or by unit, such as a pair, if the objective compares answers.

    Nothing is recorded if `eval.worst_samples` is 0, or if an objective over whole answers sets no `example_losses`.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._run, self._count, self._scope = run, run.config.eval.worst_samples, run.planned.objective.scope
        eval_sets = run.eval_sets if self._count else ()
        self._ids = [self._firsts(eval_set.store, eval_set.step.sample_ids) for eval_set in eval_sets]
        self._sums = [torch.zeros(len(ids), dtype=torch.float64, device=run.device) for ids in self._ids]

    def _firsts(self, store: TokenStore, sample_ids: Sequence[int]) -> NDArray[np.int64]:
        """Return the first sample of each thing that has a loss, ascending."""
        ids = np.sort(sample_ids)
        if self._scope != "unit" or store.unit_offsets is None:
            return ids
        return store.unit_offsets[np.unique(store.units_of(ids))]

    def start(self, set_index: int) -> None:
        """Start the evaluation set at `set_index`, also once more after its passes ran out of memory."""
        if self._count:
            self._sums[set_index].zero_()

    @contextmanager
    def reading(self, set_index: int, micro_batch: MicroBatch) -> Iterator[None]:
        """Read the losses of the pass within, over a micro-batch of the evaluation set at `set_index`."""
        if self._count:
            self._run.loss_module.on_losses = partial(self._add, set_index, micro_batch)
        try:
            yield
        finally:
            self._run.loss_module.on_losses = None

    def _add(self, set_index: int, micro_batch: MicroBatch, batch: PackedBatch, losses: Tensor) -> None:
        sums, store = self._sums[set_index], self._run.eval_sets[set_index].store
        ids = self._firsts(store, micro_batch.sample_ids) if self._scope == "unit" else np.array(micro_batch.sample_ids)
        indices = torch.from_numpy(np.searchsorted(self._ids[set_index], ids)).to(sums.device)
        sums.index_add_(0, indices[batch.label_samples] if self._scope == "token" else indices, losses.double())

    def greatest(self) -> tuple[WorstSample, ...]:
        """Return what has the greatest losses in all evaluation sets, the greatest first; collective."""
        run, ranked = self._run, list[tuple[float, int, int]]()
        for set_index, (ids, sums) in enumerate(zip(self._ids, self._sums, strict=True)):
            losses = run.strategy.sum_values(sums).cpu().numpy()
            if self._scope == "token":
                losses = losses / np.maximum(1, run.eval_sets[set_index].store.num_label_tokens[ids])
            greatest = np.argsort(-losses, kind="stable")[: self._count if losses.any() else 0]
            ranked += [(float(losses[index]), set_index, int(ids[index])) for index in greatest]
        ranked.sort(key=lambda entry: -entry[0])
        if not ranked or not run.rank.is_first:
            return ()
        return tuple(self._sample(*entry) for entry in ranked[: self._count])

    @cached_property
    def _text_of(self) -> Callable[[Sequence[int]], str]:
        """What turns token ids into text: nothing where the tokenizer is gone, which ends no run."""
        run = self._run
        prompts = run.planned.prompts
        try:
            tokenizer = prompts.tokenizer if prompts else tokenizer_of(run.config.data, run.config.model.name)
        except FlatoutError as error:
            run.reporter.stage("evaluation", f"the highest losses are recorded without their text: {error}")
            return lambda _: ""
        return lambda ids: str(tokenizer.decode(list(ids)))

    def _sample(self, loss: float, set_index: int, first: int) -> WorstSample:
        run, eval_set = self._run, self._run.eval_sets[set_index]
        store, members = eval_set.store, [first]
        if self._scope == "unit" and store.unit_offsets is not None:
            unit = int(store.units_of(np.array([first]))[0])
            members = [*range(first, int(store.unit_offsets[unit + 1]))]
        contexts, texts, names = [], [], self._names(store, members)
        for name, sample_id in zip(names, members, strict=True):
            ids, mask = store.sample(sample_id).pair
            # a text with a label has no answer
            start = 0 if run.planned.objective.reads == "scores" and len(members) == 1 else int(np.argmax(mask))
            context, text = (self._text_of(part.tolist()) for part in (ids[:start], ids[start:]))
            contexts.append(context if len(context) <= MAX_CONTEXT else f"… {context[-MAX_CONTEXT:]}")
            texts.append(name + (text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} …"))
        origin = store.origin(first)
        return WorstSample(
            data=eval_set.name,
            source=origin.source,
            row=origin.row_number,
            loss=round(loss, 6),
            num_label_tokens=int(store.num_label_tokens[members].sum()),
            context=contexts[0],
            text="\n\n".join(texts),
            pictures=recorded(store.pictures(first)) if store.num_pictures else (),
        )

    def _names(self, store: TokenStore, members: Sequence[int]) -> list[str]:
        """Return what the text of each sample begins with: its place in a pair, or its label."""
        columns = self._run.planned.objective.needed_columns
        if len(members) > 1:
            return ["chosen: ", "rejected: "] if len(members) == 2 else [f"{at + 1}: " for at in range(len(members))]
        if CLASS in columns:
            return [f"{(store.meta.labels or ())[int(store.extra[CLASS][members[0]])]}: "]
        if UNDESIRABLE in columns:
            return ["undesirable: " if store.extra[UNDESIRABLE][members[0]] else "desirable: "]
        return [""]
