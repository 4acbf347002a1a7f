"""The reference's log-probabilities of every sample that a run needs: one planned pass before step 0, kept for others.

The pass takes the micro-batches of the plan, and the kernels of training where nothing is dropped at random. So the
first step of a model that equals its reference finds log-probabilities that are equal to the bit.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from flatout.config.objective import REFERENCE, REFERENCE_TOKENS
from flatout.data.reference_column import MOST_KEPT, add_kept, keep_on_disk, lacks_reference
from flatout.data.token_store import TokenStore
from flatout.errors import Fix, NumericError, ResourceError, UsageError
from flatout.models.load.source import fingerprint_model
from flatout.models.lora.adapter import load_adapter
from flatout.parallel.shards import local_part
from flatout.planner.steps.step_plan import StepPlan
from flatout.planner.steps.training_plan import PlannedSamples, TrainingPlan
from flatout.trainer.batch_loader import BatchLoader
from flatout.trainer.passes import as_in_training, compute_logprobs, inference
from flatout.trainer.planned_run import EvalSet, reference_identity
from flatout.trainer.state import TrainingRun

# micro-batches of each rank that are computed at a time
EVAL_CHUNK = 8
# keeping what is known takes at most this share of the time
KEEPING_SHARE = 0.05


def compute_reference(run: TrainingRun, *, compares: bool) -> None:
    """Fill the columns REFERENCE and REFERENCE_TOKENS of the run's data sets, if its objective has one; collective.

    The model is the run's at step 0. What an earlier run or attempt has kept under an equal key is not computed again,
    but for its first step if it `compares`: the start then says how far that run's rounding is from this one's.
    Raises UsageError for a reference that this run cannot compute, NumericError for one that is not finite.
    """
    objective, adapter = run.planned.objective, run.config.objective.reference.adapter
    if not objective.reference_columns:
        return
    first_epoch = min(run.plan.num_steps, run.plan.steps_per_epoch)
    with weights_of(run, adapter):
        if (
            REFERENCE_TOKENS in objective.needed_columns
            and run.config.method == "lora"
            and not run.strategy.engine_state
        ):
            run.state.reference_weights = _weights_on_host(run)
        for data_set, loader in zip(run.planned.data_sets, run.loaders, strict=True):
            if isinstance(data_set, EvalSet):
                context, chunks = inference(run), partial(_eval_chunks, data_set.step)
            else:
                context, chunks = as_in_training(run), partial(_first_steps, data_set.plan, first_epoch)
            with context:
                if REFERENCE in objective.columns:
                    _fill_reference(run, loader, data_set.plan, chunks, compares)
                else:
                    _fill_tokens(run, loader, data_set.plan, chunks())
    if run.device.type == "cuda":
        # the reference took an epoch's passes, and the first steps are compared with their own plan
        torch.cuda.reset_peak_memory_stats(run.device)


def compute_round_reference(run: TrainingRun, steps: Iterable[StepPlan]) -> None:
    """Fill the column REFERENCE_TOKENS of a round's answers for these steps, if the objective has it; collective."""
    if run.planned.objective.reference_columns:
        with reference_weights(run), as_in_training(run):
            _fill_tokens(run, run.loader, run.plan, steps)


def compute_step(run: TrainingRun, step: StepPlan) -> None:
    """Compute the reference of one step's samples anew, and keep nothing; collective."""
    adapter = run.config.objective.reference.adapter
    with weights_of(run, adapter), as_in_training(run):
        for data_set, loader in zip(run.planned.data_sets, run.loaders, strict=True):
            if isinstance(data_set, EvalSet):
                continue
            planned_step = step if data_set is run.planned else data_set.plan.step(step.index)
            ids = _ids(planned_step)
            loader.store.extra[REFERENCE][ids] = compute_logprobs(run, loader, data_set.plan, planned_step, ids)


def compute_token_column(
    run: TrainingRun, loader: BatchLoader, plan: PlannedSamples, steps: Iterable[StepPlan], *, temperature: float
) -> NDArray[np.float32]:
    """Return a token column (num_tokens,) of a data set: log-probabilities in softmax(logits / temperature).

    Collective. 0 at tokens without a label and in samples of no step. Call it as `compute_logprobs`; within
    `reference_weights`, and then `as_in_training`, it is of the reference. Raises NumericError for a value that is not
    finite.
    """
    store, offsets = loader.store, loader.store.offsets
    column = np.zeros(int(offsets[-1]), np.float32)
    for step in steps:
        run.watch.alive()
        if not (ids := _ids(step)):
            continue
        values = compute_logprobs(run, loader, plan, step, ids, per="token", temperature=temperature)
        for sample_id, own in zip(ids, np.split(values, np.cumsum(store.lengths[ids])[:-1]), strict=True):
            _require_finite(store, sample_id, own.sum())
            column[offsets[sample_id] : offsets[sample_id + 1]] = own
    return column


@contextmanager
def reference_weights(run: TrainingRun) -> Iterator[None]:
    """Put the reference's weights in the model: those of step 0, or those of `objective.reference.adapter`.

    For a run whose objective needs REFERENCE_TOKENS. Raises UsageError if it has trained and kept no copy of them: all
    weights of a model would be too many.
    """
    kept = run.state.reference_weights
    if not kept:
        if run.progress.num_updates:
            raise UsageError(
                f"the reference is the model at step 0, of which a run with method {run.config.method} and strategy "
                f"{run.planned.parallel_layout.strategy} keeps no copy; train adapters, or without kl",
                [Fix({"method": "lora"})],
            )
        yield
        return
    trained = _weights_on_host(run)
    _set_weights(run, kept)
    try:
        yield
    finally:
        _set_weights(run, trained)


def _weights_on_host(run: TrainingRun) -> dict[str, Tensor]:
    return {name: local_part(weight).detach().to("cpu", copy=True) for name, weight in run.named_parameters.items()}


@torch.no_grad()
def _set_weights(run: TrainingRun, weights: Mapping[str, Tensor]) -> None:
    for name, weight in run.named_parameters.items():
        local_part(weight).copy_(weights[name])


@contextmanager
def weights_of(run: TrainingRun, adapter: Path | None) -> Iterator[None]:
    """Put the weights of another adapter (None: no other) in the model. Raises UsageError where they are sharded."""
    if adapter is None:
        yield
        return
    if run.planned.parallel_layout.shards_state or run.strategy.engine_state:
        raise UsageError(
            f"objective.reference.adapter needs whole weights; {run.planned.parallel_layout.strategy} shards them",
            [Fix({"strategy": "ddp"})],
        )
    trained = _weights_on_host(run)
    load_adapter(run.model, adapter)
    run.reporter.stage("reference", f"the adapter in {adapter}")
    try:
        yield
    finally:
        _set_weights(run, trained)


def _first_steps(plan: TrainingPlan, count: int) -> Iterator[StepPlan]:
    return islice(plan.steps(), count)


def _eval_chunks(evaluation: StepPlan) -> Iterator[StepPlan]:
    for first in range(0, max(map(len, evaluation.by_rank)), EVAL_CHUNK):
        part = replace(evaluation, by_rank=tuple(rank[first : first + EVAL_CHUNK] for rank in evaluation.by_rank))
        yield replace(part, sample_ids=tuple(sorted(_ids(part))))


def _fill_reference(
    run: TrainingRun,
    loader: BatchLoader,
    plan: PlannedSamples,
    chunks: Callable[[], Iterable[StepPlan]],
    compares: bool,
) -> None:
    """Fill one data set's column and keep it; a chunk of which all is known is left out, by all ranks.

    A chunk is a step, or a part of an evaluation.
    """
    # a plan that was made again may have opened another
    store = loader.store
    values, name = store.extra[REFERENCE], store.meta.name
    run.reporter.phase("looking for the reference")
    if not np.isnan(values).any():
        return
    key = reference_key(run, store)
    known = values.copy()
    add_kept(values, store, key)
    if len(set(run.checkpoints.group.all_gather(xxh3_128_hexdigest(values.tobytes())))) > 1:
        values[:] = known  # nodes with copies of the data set, of which one has more; all ranks know the same before
    num_needed = sum(len(_ids(chunk)) for chunk in chunks())
    total = sum(len(_unknown(values, chunk)) for chunk in chunks())
    rounding = _rounding_of_known(run, loader, plan, next(iter(chunks()))) if compares and total < num_needed else ""
    earlier = f"known from an earlier run{rounding}"
    if not total:
        run.reporter.stage("reference", f"{name}: {num_needed:,} log-probabilities are {earlier}")
        return
    started, done, keeping_s, kept_at = time.perf_counter(), 0, 0.0, -math.inf
    meaning = f"log-probability by {run.config.model.name}, {str(run.dtype).removeprefix('torch.')}"
    for chunk in chunks():
        if not (unknown := _unknown(values, chunk)):
            continue
        run.reporter.phase("computing the reference", done, total)
        run.watch.alive()
        computed, ids = compute_logprobs(run, loader, plan, chunk, _ids(chunk)), np.array(_ids(chunk))
        # what is known stays as it is: it may be of another packing
        is_unknown = np.isnan(values[ids])
        values[ids[is_unknown]] = computed[is_unknown]
        for sample_id in unknown:
            _require_finite(store, sample_id, values[sample_id])
        done += len(unknown)
        before = time.perf_counter()
        if done == total or (before - kept_at) * KEEPING_SHARE >= keeping_s:
            _persist(run, store, key, meaning)
            kept_at = time.perf_counter()
            keeping_s = kept_at - before
    line = f"{name}: {total:,} log-probabilities in {time.perf_counter() - started:.1f} s, cached for other runs"
    were_known = f"; {num_needed - total:,} were {earlier}"
    run.reporter.stage("reference", line + (were_known if num_needed > total else ""))


def _fill_tokens(run: TrainingRun, loader: BatchLoader, plan: PlannedSamples, chunks: Iterable[StepPlan]) -> None:
    """Fill one data set's token column of the reference, unless it came with one."""
    store, started = loader.store, time.perf_counter()
    if not lacks_reference(store, [REFERENCE_TOKENS]):
        return
    run.reporter.phase("computing the reference")
    temperature = getattr(run.planned.objective, "temperature", 1.0)
    store.extra[REFERENCE_TOKENS][:] = compute_token_column(run, loader, plan, chunks, temperature=temperature)
    run.reporter.stage("reference", f"{store.meta.name}: {time.perf_counter() - started:.1f} s")


def _rounding_of_known(run: TrainingRun, loader: BatchLoader, plan: PlannedSamples, chunk: StepPlan) -> str:
    """Say how far known values of a chunk are from what this run computes: other batches or devices round otherwise."""
    kept = loader.store.extra[REFERENCE][ids := _ids(chunk)]
    own = compute_logprobs(run, loader, plan, chunk, ids)
    if not (most := np.abs(own - kept, where=~np.isnan(kept), out=np.zeros(len(ids))).max(initial=0.0)):
        return ""
    return f", which batched otherwise: they differ by up to {most:.1g}, so the rewards of step 1 are rounding"


def _ids(chunk: StepPlan) -> list[int]:
    return [i for batch in chunk.micro_batches if not batch.is_filler for i in batch.sample_ids]


def _unknown(values: NDArray[np.float64], chunk: StepPlan) -> list[int]:
    ids = np.array(_ids(chunk), np.int64)
    return list(ids[np.isnan(values[ids])].tolist())


def _require_finite(store: TokenStore, sample_id: int, logprob: float) -> None:
    if not math.isfinite(logprob):
        raise NumericError(
            f"{store.origin(sample_id)}: the log-probability is {logprob}; check the row",
            [Fix({"model.precision": "fp32"})],
        )


def _persist(run: TrainingRun, store: TokenStore, key: str, meaning: str) -> None:
    if not run.rank.is_first:
        return
    try:
        for gone in keep_on_disk(store, key, meaning):
            run.reporter.stage(
                "reference", f"{store.meta.name}: an older one was removed ({gone}); {MOST_KEPT} are cached"
            )
    except ResourceError as error:
        run.reporter.stage("reference", f"{error}; this run continues, but the next one computes the reference again")


def reference_key(run: TrainingRun, store: TokenStore) -> str:
    """Return what decides the reference's log-probabilities of a data set, as 32 hexadecimal digits.

    Tokens, the weights and how they are stored and computed with, and the adapter; not the learning rate, beta, the
    seed, or how samples are packed, which changes rounding only.
    """
    config = run.config
    is_drawn = config.model.init == "random" or bool(config.data.added_tokens)
    facts = {
        "tokens": {name: store.columns[name].fingerprint for name in ("token_ids", "loss_mask", "offsets")},
        "model": fingerprint_model(config.model),
        "compute": [config.method, str(run.dtype), run.autocast, config.base.storage, config.base.compute],
        "full": [config.full.weights, config.full.compute, config.full.hidden_states],
        **reference_identity(config, run.planned.objective),
        "seed": config.seed if is_drawn else None,
    }
    return xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())
