"""What a plan is made of, opened once and checked: the loss, the model's sizes and the data."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.cuda import device_count

from flatout.checkpoint.write import data_of
from flatout.config.objective import ADVANTAGE, REWARD, UNDESIRABLE, ObjectiveConfig, ReferenceConfig
from flatout.config.optim import lr_of
from flatout.config.schema import Config, DataConfig
from flatout.data.build import open_or_build
from flatout.data.columns import Column
from flatout.data.counts import UNITS
from flatout.data.preference_columns import alike_labels, in_order_of, with_undesirable
from flatout.data.reference_column import with_reference
from flatout.data.rollout_columns import with_rollout_columns
from flatout.data.row_keys import prompt_keys
from flatout.data.rows.formats.answers import CLASS
from flatout.data.token_store import TokenStore
from flatout.data.tokenizer import new_token_ids, tokenizer_of
from flatout.environment import studio_folders
from flatout.errors import DataError, Fix, UsageError
from flatout.models.arch_quirks import whole_document_problem
from flatout.models.load.inference import saved_scoring
from flatout.models.scoring import ONE_SCORE, SCORE, Scoring, check_labels
from flatout.objectives.load import load_objective
from flatout.objectives.policy import Policy
from flatout.objectives.preference import Preference
from flatout.objectives.protocol import Objective
from flatout.parallel.rank import Rank
from flatout.planner.settings import PlanSettings
from flatout.planner.shape import ModelShape, check_expert_ranks, check_positions
from flatout.planner.steps.training_plan import split_held_out
from flatout.rollout.advantages import make_advantages
from flatout.rollout.rewards.model import RewardModel
from flatout.rollout.rewards.pool import Rewards
from flatout.track.callback import Reporter
from flatout.trainer.model_shape import read_shape, read_text_config
from flatout.trainer.picture_inputs import with_pictures
from flatout.trainer.rollout_prompts import RolloutPrompts, open_prompts
from flatout.trainer.trainable import check_start, require_disk

# a learning rate above so many times the usual one is told; cross-entropy trains at a wider range of them
UNUSUAL_LR, UNUSUAL_LR_OF_CROSS_ENTROPY = 5.0, 50.0
# usual rates are those of models of this many parameters. With AdamW, smaller ones take rates as 1 / width (Yang et al.
# 2022, arXiv:2203.03466, table 3), which is 1 / the root of their size; but none takes more than the largest.
USUAL_NUM_PARAMS, LARGEST_LR = 1e10, 1e-2
# counts of rows that a build dropped, shortened or split; a run on such data reports them
LOST_OR_CUT = ("bad", "too_long", "no_labels", "lost_labels", "truncated", "split", "equal_rows")
# settings of the training data's rows, which a data set for evaluation was built without
CHOOSES_ROWS = {"sources", "on_bad_row", "dedupe", "num_samples", "shuffle", "seed"}


class SplitStore(NamedTuple):
    """A token store, and the samples of it to train on (None: all) and to evaluate on (None: of other data sets)."""

    store: TokenStore
    train_ids: NDArray[np.int64] | None
    eval_ids: NDArray[np.int64] | None


class RunData(NamedTuple):
    """What a plan is made of."""

    settings: PlanSettings
    objective: Objective
    shape: ModelShape
    text_config: Any
    """The configuration of the model's decoder."""
    split: SplitStore
    eval_stores: Mapping[str, TokenStore]
    """The data sets to evaluate on, by name."""
    scoring: Scoring | None
    """The scores that the run trains, if any."""
    new_token_ids: Sequence[int]
    """The tokens of `data.new_tokens`."""
    num_rows: int
    """The rows that embedding and head have to have for them; 0 without."""
    rollouts: RolloutPrompts | None = None
    """The prompts of a run of rounds, whose store is then the bounds of a round, or the answers of one."""
    reward_models: Sequence[RewardModel] = ()
    """Those of `rollout.rewards`, not loaded."""


def open_data(config: Config, reporter: Reporter, rank: Rank, *, starts: bool) -> RunData:
    """Read the loss and the model's sizes, open the data or build it, and check that they fit.

    First raises what a start on these settings would (`check_start`). A run that `starts` does so on this machine;
    others may be planned for another.
    """
    objective = checked_objective(config, reporter)
    check_context(config, rank, objective)
    reporter.phase("reading the model's configuration")
    model, scores = config.model, objective.reads == "scores"
    shape = read_shape(model.name, model.revision, scores=scores, trained=model.trained_parts)
    if note := lr_note(config, objective, shape.num_params):
        reporter.event("learning_rate", {"why": note})
    on_cpu = config.wanted_device == "cpu" or (starts and config.wanted_device == "auto" and not device_count())
    trained = check_start(config, objective, on_cpu=on_cpu, reads_peft=not starts)
    if starts and rank.is_first:
        require_disk(config, trained, on_cpu=on_cpu)
    check_expert_ranks(shape, config.experts.parallel, rank.world)
    rollouts = None
    if config.rollout.rounds is not None:
        rollouts, store = open_prompts(config, shape.max_positions, reporter)
        for name in objective.reference_columns:
            store = with_reference(store, name)
            store.extra[name][:] = 0.0  # bounds have no answers
    else:
        store = with_used_labels(open_tokens(config.data, config, reporter, objective), objective, reporter)
        _report_tokens(store, reporter)
    scoring = scoring_of(config, objective, store)
    shape = shape.with_scores(len(scoring.labels)) if scoring else shape
    shape = with_pictures(shape, store, config, reporter)
    shape = shape.with_rows(store.meta.vocabulary_size) if config.data.added_tokens else shape
    _check_token_ids(shape, store, has_new_tokens=bool(config.data.added_tokens))
    if beyond := check_positions(shape, int(store.lengths.max()), origin=f"{config.model.name}/config.json"):
        reporter.event("positions", beyond)
    split = SplitStore(store, None, None) if rollouts else hold_out_samples(store, config, reporter)
    models = [RewardModel(reward) for reward in config.rollout.rewards if reward.kind == "model"]
    if not (starts or studio_folders()):  # no page may run code; a start loads them once its ranks are there
        log_file = Path(tempfile.gettempdir(), f"flatout-rewards-{os.getpid()}.log")  # stays if an error names it
        with Rewards(config.rollout.rewards, log_file, models=models, num_procs=1, log=lambda line: None):
            log_file.unlink(missing_ok=True)
    eval_stores = {} if rollouts else open_eval_stores(config, store, objective, reporter)
    text_config = read_text_config(model.name, model.revision)
    settings, new_tokens = PlanSettings.of(config), new_token_ids(config.data, model.name)
    if rollouts:
        batch = config.batch.model_copy(update={"samples_per_step": rollouts.rounds.units_per_step})
        num_bytes = sum(model.num_bytes for model in models)
        settings = replace(settings, batch=batch, records_graphs=False, reward_models_bytes=num_bytes)
    return RunData(settings, objective, shape, text_config, split, eval_stores, scoring, *new_tokens, rollouts, models)


def checked_objective(config: Config, reporter: Reporter) -> Objective:
    """Return the objective, and report one that was asked for. Raises UsageError for settings that it cannot have."""
    objective, rollout = load_objective(config.objective), config.rollout
    if isinstance(objective, Policy):
        objective = objective.for_run(rollout)
    elif rollout.rounds is not None:
        text = f"rollout.rounds: objective {objective.name} does not learn from sampled answers with rewards"
        raise UsageError(text, [Fix({"objective": "grpo"})])
    if rollout.rounds is not None and objective.reference_columns and config.method == "full":
        text = "objective.kl: a run that trains all weights keeps no copy of its first ones, the reference of a round"
        raise UsageError(text, [Fix({"method": "lora"}), Fix({"objective.kl": 0})])
    check_scoring(config, objective)
    if config.eval.best not in (metrics := ("loss", *objective.metrics)):
        raise UsageError(
            f"eval.best: {config.eval.best!r} is not a metric of {objective.name}; it has {', '.join(metrics)}"
        )
    if config.objective.reference != ReferenceConfig():
        why = f"objective {objective.name}, which has no reference" if not objective.reference_columns else ""
        why = why or ("method: full" if config.method == "full" else "")
        if why:
            raise UsageError(f"objective.reference.adapter has no effect with {why}; remove it")
    if config.objective != ObjectiveConfig():
        ran = f"; {config.objective.path} runs as code" if config.objective.path else ""
        reporter.stage("objective", f"{objective.line}{ran}")
    if config.method == "lora" and config.model.init == "random":
        why = "an adapter of random weights, which no file keeps, measures speed only; to use it, set method=full"
        reporter.event("random_base", {"why": why})
    return objective


def lr_note(config: Config, objective: Objective, num_params: int) -> str:
    """Return what is odd about a learning rate far above the usual for a model of this size; empty for others.

    The usual rates are AdamW's, or a share of them, for pretrained weights.
    """
    usual, lr = lr_of(config.method, config.objective.kind, config.optim.name), config.optim.lr
    if not usual or not config.optim.traits.usual_lr or config.model.init == "random":
        return ""
    room, pairs_lr = UNUSUAL_LR * max(1.0, (USUAL_NUM_PARAMS / num_params) ** 0.5), Preference.usual_lr[config.method]
    if config.objective.path and isinstance(objective, Preference) and room * pairs_lr < lr <= room * usual:
        return f"losses over pairs usually take optim.lr={pairs_lr:g}, not {lr:g}"
    is_plain = config.objective.path is None and config.objective.kind == ObjectiveConfig().kind
    room *= UNUSUAL_LR_OF_CROSS_ENTROPY / UNUSUAL_LR if is_plain else 1.0
    if lr <= (most := min(LARGEST_LR, room * usual)):
        return ""
    rare = f"models of this size rarely take more than {most:.1g}"
    return f"optim.lr {lr:g} is {lr / usual:,.0f} times the usual {usual:g}, which optim.lr=auto takes; {rare}"


def check_context(config: Config, rank: Rank, objective: Objective) -> None:
    """Raise UsageError unless the run's ranks can share micro-batches as `context.parallel` says."""
    if (num_ranks := config.context.parallel) == 1:
        return
    why: str | None
    if rank.world % num_ranks:
        why = f"it must divide the number of ranks, which is {rank.world} (gpus, or --ranks of flatout plan)"
    elif objective.scope != "token":
        why = f"objective {objective.name} reads all tokens of a {objective.scope}, of which a rank has a shard"
    else:
        why = whole_document_problem(read_text_config(config.model.name, config.model.revision))
    if why is not None:
        raise UsageError(f"context.parallel: {num_ranks}: {why}", [Fix({"context.parallel": 1})])


def check_scoring(config: Config, objective: Objective) -> None:
    """Raise UsageError for settings that a run cannot have whose objective reads scores."""
    if objective.reads != "scores":
        return
    if config.eval.prompts:
        raise UsageError(
            f"eval.prompts: objective {objective.name} trains a model that scores texts and does not write, so it "
            "answers no prompt; remove them"
        )
    if config.method == "lora" and not config.lora.saves(SCORE):
        raise UsageError(
            f"objective {objective.name} trains a new `score`, which lora.modules_to_save lacks",
            [Fix({"lora.modules_to_save": [*config.lora.modules_to_save, SCORE]}, "as PEFT does")],
        )
    shared = {
        "context.parallel": (config.context.parallel, "scores the last token of a text, of which a rank has a shard"),
        "experts.parallel": (config.experts.parallel, "is not proved with shared experts"),
    }
    for setting, (num_ranks, why) in shared.items():
        if num_ranks > 1:
            raise UsageError(f"{setting}: {num_ranks}: objective {objective.name} {why}", [Fix({setting: 1})])


def scoring_of(config: Config, objective: Objective, store: TokenStore) -> Scoring | None:
    """Return what the run's model scores; None for a model that writes.

    Batches are padded by the tokenizer's own padding token, or if it has none by its end token. Raises DataError for a
    tokenizer that has neither, and UsageError if `lora.continue_from` scores others.
    """
    if objective.reads != "scores":
        return None
    tokenizer = tokenizer_of(config.data, config.model.name)
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad_token_id is None:
        raise DataError(
            f"tokenizer {config.data.tokenizer or config.model.name!r} has no pad_token and no eos_token, so "
            "batches of texts could not be padded; set one in tokenizer_config.json"
        )
    labels, adapter = store.meta.labels or ONE_SCORE, config.lora.continue_from
    if adapter is not None and (saved := saved_scoring(adapter)) is not None:
        instead = "remove lora.continue_from, or train on the same labels"
        check_labels(saved.labels, labels, f"lora.continue_from: {adapter}", instead)
    return Scoring(labels, int(pad_token_id))


def with_used_labels(store: TokenStore, objective: Objective, reporter: Reporter) -> TokenStore:
    """Number the labels that samples have, and report the others, whose rows were left out.

    Raises DataError unless samples have two.
    """
    labels = store.meta.labels
    if not labels or objective.reads != "scores":
        return store
    counts = np.bincount(np.asarray(store.extra[CLASS]), minlength=len(labels))
    used = [label for label, count in zip(labels, counts, strict=True) if count]
    unused = [label for label in labels if label not in used]
    note = f"; no sample has {', '.join(map(repr, unused))[:200]}, whose rows were left out" if unused else ""
    if len(used) < 2:
        raise DataError(f"{store.folder}: every row has the label {used[0]!r:.60}: there is nothing to classify{note}")
    if alike := alike_labels(used):
        reporter.event("labels", {"notes": alike})
    if note:
        reporter.stage("labels", f"{len(used)} of {len(labels)} are trained{note}")
    return in_order_of(store, used)


def open_tokens(data: DataConfig, config: Config, reporter: Reporter, objective: Objective) -> TokenStore:
    """Open a data set or build it, and report how far that is. Raises DataError without a column of the objective."""
    reporter.phase("opening the tokens")
    try:
        store = open_or_build(
            data.with_format(objective.row_format),
            config.model.name,
            trained_on=data_of(config.folder),
            progress=lambda done, total: reporter.phase("tokenizing row", done, total or 0),
            log=lambda text: reporter.stage("tokens", text),
        )
        for name in objective.reference_columns:
            store = with_reference(store, name)
        store = with_undesirable(store) if UNDESIRABLE in objective.columns else store
        store = with_advantages(store, objective, reporter)
        store.require_columns(objective.columns, who := f"objective {objective.name}")
    except DataError as error:
        if not isinstance(objective, Policy) or any(source.format == "rollouts" for source in data.sources):
            raise
        rounds = {"rollout.rounds": 100, "rollout.rewards": ["rewards.py:correct"]}
        # those that read rows with answers lead no further
        others = [fix for fix in error.fixes if not {"objective", "data.sources"} & fix.settings.keys()]
        raise DataError(error.text, [Fix(rounds, "if rows are prompts: samples answers"), *others]) from error
    store = with_rollout_columns(store) if ADVANTAGE in objective.columns else store
    store.require_columns(objective.needed_columns, who)
    return store


def with_advantages(store: TokenStore, objective: Objective, reporter: Reporter) -> TokenStore:
    """Return a store of rewards without advantages with those that a policy loss makes of them, in memory."""
    if not isinstance(objective, Policy) or ADVANTAGE in store.extra or REWARD not in store.extra:
        return store
    units = np.arange(store.num_samples + 1) if store.unit_offsets is None else store.unit_offsets
    made = make_advantages(np.asarray(store.extra[REWARD], np.float64), np.diff(units), objective.advantage)
    said = f"{len(units) - 1:,} groups, compared as objective.advantage={objective.advantage}"
    reporter.stage("advantages", f"{said}; {made.num_dropped:,} have no signal, as rewards are equal or missing")
    column = Column("float32", "token", f"{objective.advantage} of {REWARD}", store.columns[REWARD].fingerprint)
    values = np.repeat(made.values.astype(np.float32), store.lengths)
    return replace(store, columns={**store.columns, ADVANTAGE: column}, extra={**store.extra, ADVANTAGE: values})


def open_eval_stores(
    config: Config, store: TokenStore, objective: Objective, reporter: Reporter
) -> dict[str, TokenStore]:
    """Return the data sets to evaluate on by name: the training data with a share held out, or those of `eval.data`."""
    stores = {config.data.name: store} if config.eval.fraction else {}
    for name in config.eval.data_names:
        eval_config = config.data.model_dump(exclude=CHOOSES_ROWS, exclude_unset=True) | {"name": name}
        opened = open_tokens(DataConfig.model_validate(eval_config), config, reporter, objective)
        stores[name] = in_order_of(opened, store.meta.labels)
    return stores


def hold_out_samples(store: TokenStore, config: Config, reporter: Reporter) -> SplitStore:
    """Return a data set with the share that `eval.fraction` holds out of it, and say if that was not by chance."""
    if not config.eval.fraction:
        return SplitStore(store, None, None)
    facts = store.row_keys, config.eval.fraction, config.seed, store.hashes, store.unit_offsets
    reporter.phase("looking for equal prompts")
    prompts, is_judged = prompt_keys(store), any(map(store.meta.counts.get, UNITS))
    by_prompt = config.eval.split_by == "prompt" or (config.eval.split_by == "auto" and is_judged)
    train_ids, eval_ids = split_held_out(*facts, prompts if by_prompt else None)
    if by_prompt:
        line = f"{len(eval_ids):,} samples: rows with one prompt stay on one side (eval.split_by)"
        reporter.stage("held out", line)
    elif num_seen := int(np.isin(prompts[eval_ids], prompts[train_ids]).sum()):
        line = f"{num_seen:,} of {len(eval_ids):,} samples begin with a question that is trained on, too"
        reporter.stage("held out", f"{line}; eval.split_by=prompt keeps such rows together")
    if num_copies := store.num_samples - len(np.unique(store.hashes)):
        line = f"split by content: {num_copies:,} of {store.num_samples:,} samples are copies"
        reporter.stage("held out", f"{len(eval_ids):,} samples, {line}, which stay on the side of the first")
    return SplitStore(store, train_ids, eval_ids)


def _report_tokens(store: TokenStore, reporter: Reporter) -> None:
    num_tokens, label_share = int(store.lengths.sum()), int(store.num_label_tokens.sum()) / int(store.lengths.sum())
    reporter.stage("tokens", f"{store.num_samples:,} samples, {num_tokens:,} tokens, {label_share:.0%} label")
    if lost := {name: count for name in LOST_OR_CUT if (count := store.meta.counts.get(name, 0))}:
        lost |= {"of": store.meta.counts["rows"]}
        reporter.event("rows", {**lost, "listed_in": str(store.folder / "report.json")})


def _check_token_ids(shape: ModelShape, store: TokenStore, *, has_new_tokens: bool) -> None:
    """Raise DataError if the data has token ids that the model has no embedding or no logit for."""
    num_rows, max_id = shape.vocab_size, store.meta.max_token_id
    if max_id >= num_rows:
        raise DataError(
            f"the data has token ids {num_rows}..{max_id}, but the model has {num_rows} embedding rows "
            f"(0..{num_rows - 1}); rebuild the data with this model's tokenizer, or resize the model"
        )
    last_id = max(max_id, store.meta.vocabulary_size - 1 if has_new_tokens else 0)
    if shape.num_logits is not None and last_id >= shape.num_logits:
        raise DataError(
            f"the data or its new tokens have token ids {shape.num_logits}..{last_id}, but the model has logits for "
            f"0..{shape.num_logits - 1} only (unpadded_vocab_size in its config.json); use its own tokenizer without "
            "data.new_tokens"
        )
