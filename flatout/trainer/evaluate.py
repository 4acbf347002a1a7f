"""Evaluate the current weights on every evaluation data set, and have them answer the run's prompts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from flatout.errors import Fix, FlatoutError, NumericError
from flatout.models.packed import PackedBatch
from flatout.planner.steps.step_plan import MicroBatch
from flatout.track.record import EvalFigures, EvalRecord, WorstSample
from flatout.trainer.answers import answer_prompts
from flatout.trainer.metrics import finite_metrics
from flatout.trainer.passes import (
    add_values,
    autocast,
    compute_eval_estimates,
    inference,
    no_values,
    run_with_oom_retry,
    sum_unless_stopped,
    until_stopped,
)
from flatout.trainer.picture_inputs import recorded
from flatout.trainer.rank_meter import scatter_maxima
from flatout.trainer.round_answers import held_out_reward
from flatout.trainer.state import TrainingRun
from flatout.trainer.step_guards import not_finite


def evaluate_now(run: TrainingRun) -> bool:
    """Evaluate, record it, answer the prompts, and decide on early stopping; collective.

    Returns True for a new best, False without evaluation data. Raises PassesStopped before `run.progress` changes: a
    resumed run evaluates this step again.
    """
    if not run.eval_sets:
        return evaluate_rewards(run)
    started = time.perf_counter()
    progress = run.progress
    run.watch.set_phase("evaluate", progress.step)
    worst = WorstSamples(run)
    total, by_data = evaluate(run, worst)
    loss = total.loss
    if not math.isfinite(loss):
        which = next(name for name, figures in by_data.items() if not math.isfinite(figures.loss))
        what = f"step {progress.step}: the evaluation loss on {which} is {loss}; earlier checkpoints are kept"
        raise not_finite(run, what)
    judged = total.of(best := run.config.eval.best)
    if judged is None:
        text = f"step {progress.step}: eval.best: {best} is no finite number, so none is best; checkpoints are kept"
        raise NumericError(text, [Fix({"eval.best": "loss"})])
    is_best = _is_better(run, judged)
    worst_samples = worst.greatest()
    eval_s = time.perf_counter() - started
    run.reporter.record(
        EvalRecord(
            step=progress.step,
            eval_loss=loss,
            eval_token_accuracy=total.token_accuracy,
            num_label_tokens=total.num_label_tokens,
            is_best=is_best,
            eval_s=eval_s,
            eval_tokens_per_s=sum(eval_set.step.num_tokens for eval_set in run.eval_sets) / eval_s,
            by_data=by_data if len(by_data) > 1 else {},
            metrics=total.metrics,
            worst=worst_samples,
        )
    )
    if progress.step == 0 and run.device.type == "cpu" and run.config.eval.prompts is None:
        # on a CPU they take longer than the evaluation, and nobody has asked for these
        run.reporter.stage("answers", "those before step 1 are left out on a CPU; set eval.prompts to have them")
    else:
        answer_prompts(run)
    if progress.first_eval_loss is None:
        progress.first_eval_loss = loss
    if is_best:
        progress.best_eval_loss = loss
    progress.last_eval_loss = loss
    return _counted(run, judged, is_best)


def evaluate_rewards(run: TrainingRun) -> bool:
    """Do as `evaluate_now` by the reward of answers to held-out prompts, the more the better; False without any."""
    rollouts, progress = run.planned.data.rollouts, run.progress
    if rollouts is None or not len(rollouts.held_out_ids):
        return False
    run.watch.set_phase("evaluate", progress.step)
    reward = held_out_reward(run, rollouts)
    is_best = reward is not None and (progress.best_figure is None or reward > progress.best_figure)
    return _counted(run, reward, is_best)


def _counted(run: TrainingRun, judged: float | None, is_best: bool) -> bool:
    """Note an evaluation in the run's progress, and decide on early stopping; return `is_best`."""
    progress = run.progress
    if is_best:
        progress.best_figure, progress.best_step = judged, progress.step
    progress.last_eval_step = progress.step
    progress.num_evals_without_best = 0 if is_best else progress.num_evals_without_best + 1
    patience = run.config.eval.patience
    if patience is not None and progress.num_evals_without_best >= patience:
        progress.stopped_early = True
        run.reporter.event("early_stop", {"step": progress.step, "best_step": progress.best_step})
    return is_best


def _is_better(run: TrainingRun, judged: float) -> bool:
    """Whether this value of the metric that `eval.best` names is a new best."""
    progress, name = run.progress, run.config.eval.best
    # a checkpoint of an earlier version has the best loss only
    best = progress.best_eval_loss if progress.best_figure is None and name == "loss" else progress.best_figure
    if best is None:
        return True
    is_higher_better = name != "loss" and run.planned.objective.metrics[name].better == "higher"
    return (judged - best if is_higher_better else best - judged) > run.config.eval.min_delta


def evaluate(run: TrainingRun, worst: WorstSamples) -> tuple[EvalFigures, dict[str, EvalFigures]]:
    """Return figures over all evaluation data sets and of each, without dropout; collective. Raises PassesStopped.

    `worst` reads the losses of their tokens.
    """
    set_values = []
    with inference(run):
        for set_index, eval_set in enumerate(run.eval_sets):
            run_passes = partial(_sum_passes, run, worst, set_index, compute_eval_estimates(run, eval_set))
            loader = run.loader_of(eval_set)
            set_values.append(run_with_oom_retry(run, eval_set.plan, eval_set.step, loader, "evaluation", run_passes))
    set_sums, set_maxima = _over_ranks(run, torch.stack(set_values))
    values_by_set = torch.cat([set_sums, set_maxima], dim=1).tolist()
    counts_by_set = [eval_set.normalizers.step_normalizers(eval_set.step) for eval_set in run.eval_sets]
    label_tokens = [eval_set.step.num_label_tokens for eval_set in run.eval_sets]
    by_data = {
        eval_set.name: _figures(run, *figures)
        for eval_set, *figures in zip(run.eval_sets, values_by_set, counts_by_set, label_tokens, strict=True)
    }
    sums, counts = (
        [sum(column) for column in zip(*by_set, strict=True)] for by_set in (set_sums.tolist(), counts_by_set)
    )
    return _figures(run, [*sums, *set_maxima.amax(0).tolist()], counts, sum(label_tokens)), by_data


def _over_ranks(run: TrainingRun, set_values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums and the maxima over ranks of values (sets, num_values); collective. Raises PassesStopped."""
    sums, maxima = set_values.tensor_split([len(run.planned.objective.sum_names)], dim=1)
    rows = scatter_maxima(maxima.flatten(), run.rank)
    totals = sum_unless_stopped(run, torch.cat([sums.flatten(), rows]))
    maxima_by_rank = totals[sums.numel() :].view(run.rank.world, *maxima.shape)
    return totals[: sums.numel()].view(sums.shape), maxima_by_rank.amax(0)


def _sum_passes(
    run: TrainingRun,
    worst: WorstSamples,
    set_index: int,
    estimates: Mapping[str, Tensor],
    passes: Sequence[MicroBatch],
    batches: Iterator[PackedBatch],
) -> Tensor:
    totals = no_values(run)
    worst.start(set_index)
    for micro_batch, batch in zip(passes, until_stopped(run, batches), strict=False):
        with autocast(run), worst.reading(set_index, micro_batch):
            values = run.loss_module(batch, None, estimates)
        add_values(run, totals, values)
    return totals


def _figures(run: TrainingRun, values: Sequence[float], counts: Sequence[float], num_label_tokens: int) -> EvalFigures:
    metrics = run.planned.objective.means(values, counts)
    loss = metrics.pop("loss", 0.0)
    return EvalFigures(loss, metrics.get("token_accuracy"), num_label_tokens, finite_metrics(run, metrics))


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
