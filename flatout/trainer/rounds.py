"""Rounds of rollouts: sample answers, score them, and train on them; what an earlier start did is not repeated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from flatout.config.folders import round_folder
from flatout.config.schema import Config
from flatout.data.columns import PREFIX_TOKENS
from flatout.data.reference_column import with_reference
from flatout.data.rollout_columns import with_rollout_columns
from flatout.data.token_store import TokenStore
from flatout.data.workers import usable_procs
from flatout.errors import CheckpointError, DataError
from flatout.io.durable_io import DurableIO
from flatout.io.json_file import read_as
from flatout.parallel.control_group import ControlGroup
from flatout.planner.steps.prefixes import UnitPrefixes
from flatout.planner.steps.rounds import BoundsPlan
from flatout.planner.steps.training_plan import select_samples
from flatout.planner.steps.units import Samples
from flatout.rollout.collect import journal_folder, what_differs
from flatout.rollout.rewards.model import RewardModel
from flatout.rollout.rewards.pool import Rewards
from flatout.track.callback import Reporter
from flatout.trainer.normalizers import make_normalizers
from flatout.trainer.reference_logprobs import compute_round_reference
from flatout.trainer.rollout_prompts import RolloutPrompts
from flatout.trainer.round_answers import RoundFile, collect_round, digest_of, identity_of
from flatout.trainer.state import TrainingRun


def rounds_of(run: TrainingRun) -> Iterator[TrainingRun]:
    """Yield the run with the steps of each round that is not complete; a run on a data set once, as it is.

    Raises PassesStopped if a stop is requested while a round is sampled or scored, and CheckpointError if the answers
    are gone that the next step of a checkpoint needs.
    """
    prompts = run.planned.data.rollouts
    if prompts is None:
        yield run
        return
    rounds, lengths = prompts.rounds, dict[int, float]()
    for index in range(run.progress.step // rounds.steps, rounds.num_rounds):
        if run.progress.stopped_early:
            return
        run.watch.set_phase("sample", run.progress.step)
        store, why_none = open_round(run, prompts, index, lengths)
        if store is not None:
            counts = np.diff(store.offsets)
            lengths |= {int(row) - 1: float(counts[store.rows == row].mean()) for row in np.unique(store.rows)}
        run.progress.round_store = None if store is None else digest_of(store)
        yield with_round(run, index, store, why_none)


def with_round(run: TrainingRun, index: int, store: TokenStore | None, why_none: str) -> TrainingRun:
    """Return the run with the steps of a round, whose loader reads its answers; None, and why: none is trained."""
    planned, plan = run.planned, run.plan
    assert isinstance(plan, BoundsPlan)
    if store is None:
        none, normalizers = Samples(np.zeros(0, np.int64), np.zeros(0, np.int64)), planned.normalizers
        normalizers = replace(normalizers, values=dict.fromkeys(normalizers.values, np.zeros(0)))
        steps = plan.of_round(index, none, why_none)
        return replace(run, planned=replace(planned, plan=steps, normalizers=normalizers))
    store = with_rollout_columns(store)
    for name in planned.objective.reference_columns:
        store = with_reference(store, name)
    layout, units = plan.batch_layout, store.unit_offsets
    if layout.prefixes is not None:
        offsets = np.arange(store.num_samples + 1) if units is None else units
        layout = replace(layout, prefixes=UnitPrefixes.of(offsets, store.extra[PREFIX_TOKENS], None))
    samples = select_samples(store.lengths, store.num_label_tokens, None, layout, units, parts_units=True)
    steps = replace(plan, batch_layout=layout).of_round(index, samples)
    run.loader.read_from(store)
    data = planned.data._replace(split=planned.data.split._replace(store=store))
    normalizers = make_normalizers(planned.objective, store)
    of_round = replace(run, planned=replace(planned, data=data, plan=steps, normalizers=normalizers))
    compute_round_reference(of_round, steps.steps(run.progress.step))
    return of_round


def open_round(
    run: TrainingRun, prompts: RolloutPrompts, index: int, lengths: Mapping[int, float]
) -> tuple[TokenStore | None, str]:
    """Return the answers of a round to train, of an earlier start or sampled now, or None and why. Collective.

    Raises as `collect_round`, and CheckpointError if a step is complete, or a replay takes it, and its answers are
    missing or other ones.
    """
    folder, is_begun = round_folder(run.config.folder, index + 1), run.progress.step > index * prompts.rounds.steps
    file, replays = folder.with_suffix(".json"), run.state.replays

    def look() -> tuple[str | None, str] | None:
        """Return what `collect_round` does; None for a round that is still to be sampled."""
        if not (is_begun or replays or file.exists()):
            return None
        try:
            complete = _read_round(file)
            if is_begun and complete.digest != run.progress.round_store:
                raise DataError(f"{file}: its answers are not those that the checkpoint was trained on")
            if not is_begun and (differs := what_differs(complete.identity, identity_of(run, prompts, index))):
                raise DataError(f"{file}: its answers were sampled with another value of: {differs}")
        except DataError as error:
            if is_begun or replays:
                why = "a replay samples none" if replays else f"step {run.progress.step} is in it"
                checkpoint = run.checkpoints.folder / f"step-{run.progress.step}"
                way = "" if replays else f", or remove {checkpoint}, so that an earlier one goes on"
                said = f"round {index + 1} needs its answers, as {why}: {error.text}; restore them{way}"
                raise CheckpointError(said) from error
            run.reporter.event("round_again", {"round": index + 1, "why": error.text})
            return None
        # the start before may have ended between the round and these
        run.reporter.record(complete.record)
        DurableIO().remove_tree(journal_folder(folder))
        return complete.digest, complete.record.why_untrained

    digest, why_none = run.checkpoints.group.run_on_first_rank(look) or collect_round(run, prompts, index, lengths)
    return TokenStore.open(folder) if digest is not None else None, why_none


def _read_round(file: Path) -> RoundFile:
    """Return what the file of a round says. Raises DataError if it or its answers are missing or damaged."""
    said = read_as(RoundFile, file, DataError)
    if said.digest is not None:
        store = TokenStore.open(file.with_suffix(""))
        for sample in range(store.num_samples):
            store.sample(sample)  # raises if it is damaged, before a step reads it
        if digest_of(store) != said.digest:
            raise DataError(f"{store.folder}: its answers are not those that {file} names")
    return said


def read_rewards(config: Config, models: Sequence[RewardModel], reporter: Reporter, group: ControlGroup) -> Rewards:
    """Read the files of a run's reward functions without running them; a data set has none. Collective.

    Raises UsageError on every rank for a file that one cannot read.
    """
    rank, rewards = group.rank, list[Rewards]()
    log_file = config.folder / "logs" / f"rewards-{rank.index}.log"
    if not config.rollout.rewards:
        return Rewards((), log_file)
    # ranks of one host share its cores
    num_procs = max(1, usable_procs(None) // (rank.local_world or rank.world))

    def read() -> None:
        DurableIO().make_dir(log_file.parent)
        log = partial(reporter.stage, "rewards")
        rewards.append(Rewards(config.rollout.rewards, log_file, models=models, num_procs=num_procs, log=log))

    group.run_on_all_ranks(read)
    return rewards[0]
