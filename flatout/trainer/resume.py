"""A run's resumable state: take it, check it, find it again and restore it; detect finished runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict, with_config
from torch import Tensor, nn
from transformers import PreTrainedModel

from flatout.checkpoint.manifest import verify_final
from flatout.checkpoint.optimizer_state import load_optimizer_state, optimizer_state
from flatout.checkpoint.read import SavedCheckpoint
from flatout.checkpoint.replicas import refuse_drift
from flatout.checkpoint.resume_check import (
    Change,
    OtherRunError,
    config_changes,
    fingerprint_changes,
    refuse_changes,
    refuse_without_effect,
)
from flatout.checkpoint.write import Checkpoints, Snapshot
from flatout.config.folders import free_folder, how_to_finish
from flatout.config.read import load_config, make_config, paths_in_place
from flatout.config.schema import Config
from flatout.data import registry
from flatout.data.token_store import TokenStore
from flatout.data.tokenizer import tokenizer_of
from flatout.errors import CheckpointError, Fix, NumericError, UsageError
from flatout.io.json_file import validated
from flatout.io.redact import redacted
from flatout.models.load.inference import NOT_WRITING, load_for_inference
from flatout.models.lora.layer import add_lora
from flatout.models.scoring import SCORE
from flatout.models.stops import give_template, set_stops, stop_token_ids
from flatout.parallel.shards import as_global, global_tensors, local_state
from flatout.track.callback import Reporter
from flatout.trainer.planned_run import PlannedRun
from flatout.trainer.state import LossHistory, Progress, TrainingRun

# the state of torch.amp.GradScaler; empty if the run has no loss scale
_SCALER_KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


@with_config(ConfigDict(strict=True, extra="forbid"))
@dataclass(frozen=True, slots=True)
class Fingerprints:
    """What identifies the base model, the data, the plan, an objective that is not cross-entropy, and own code."""

    model: dict[str, str]
    data: Any
    plan: Any
    eval_data: Any = None
    objective: Any = None
    optim: Any = None
    """Hash of the file of `optim.path`."""
    rewards: Any = None
    """Hashes of the files of reward functions."""


@with_config(ConfigDict(strict=True, extra="forbid"))
@dataclass(frozen=True, slots=True)
class SavedFacts:
    """The facts of a checkpoint, as `take_snapshot` writes them."""

    config: dict[str, Any]
    fingerprints: Fingerprints
    progress: Progress
    scaler: dict[str, float]
    micro_batch_caps: list[int | None]
    """Per rank: the cap that was set after running out of memory."""
    micro_batch_tokens: int | None = None
    loss_history: LossHistory = field(default_factory=LossHistory)


def check_facts(facts: Mapping[str, Any], step: int) -> None:
    """Raise CheckpointError, naming the field, if no run could have saved these facts after `step` steps."""
    saved = validated(SavedFacts, facts, "facts")
    if saved.scaler and (odd := _SCALER_KEYS ^ saved.scaler.keys()):
        raise CheckpointError(f"facts: scaler: {min(odd)} is missing or unknown")
    if any(not math.isfinite(value) or value < 0 for value in saved.scaler.values()):
        raise CheckpointError(f"facts: scaler: found {saved.scaler}, expected finite numbers of at least 0")
    # these are newer than the format
    names = {progress_field.name for progress_field in fields(Progress)} - {"best_figure", "round_store"}
    if absent := names - facts["progress"].keys():
        raise CheckpointError(f"facts: progress.{min(absent)} is missing")
    history = asdict(saved.loss_history)
    if not all(math.isfinite(value) for value in history.values()) or history["variance"] < 0:
        raise CheckpointError(f"facts: loss_history: found {history}, expected finite numbers")
    saved_step = saved.progress.step
    if saved_step != step:
        raise CheckpointError(f"facts: progress.step: found {saved_step}, but this is the checkpoint of step {step}")
    for name, value in asdict(saved.progress).items():
        least = -math.inf if name.endswith(("_loss", "_figure")) else 0
        if isinstance(value, int | float) and not (math.isfinite(value) and value >= least):
            expected = "a finite number" + (" of at least 0" if not least else "")
            raise CheckpointError(f"facts: progress.{name}: found {value}, expected {expected}")
        if name in ("num_updates", "last_eval_step", "best_step") and value is not None and value > step:
            raise CheckpointError(f"facts: progress.{name}: found {value} after {step} steps")
    try:
        make_config(saved.config, origin="facts: config")
    except UsageError as error:
        raise CheckpointError(error.text) from error


def take_snapshot(run: TrainingRun) -> Snapshot:
    """Collect everything the next step depends on; tensors are not copied, so write them before the next update.

    Collective. Raises NumericError on every rank if a tensor is not finite, as it could not be resumed from, and
    CheckpointError if replicas differ.
    """
    engine = run.strategy.engine_state
    weights = (
        global_tensors(run.named_parameters, keep=run.rank.is_first, gather=engine.weight)
        if engine
        else {name: as_global(parameter).detach() for name, parameter in run.named_parameters.items()}
    )
    state = {
        "model": {**weights, **run.aux_loss.buffers},
        "optimizer": optimizer_state(run.optimizer, run.named_parameters, engine=engine, keep=run.rank.is_first),
    }
    run.saver.wait()  # its thread communicates over the same group
    if engine is None:
        refuse_drift(state, run.checkpoints.group)
    tensors, places = local_state(state, run.rank.index)
    _require_finite(run, {name: tensor for kind in tensors.values() for name, tensor in kind.items()})
    return Snapshot(
        step=run.progress.step,
        tensors=tensors,
        facts={
            "config": redacted(run.config.model_dump(mode="json")),
            "fingerprints": dict(run.planned.fingerprints),
            "progress": asdict(run.progress),
            "scaler": run.scaler.state_dict(),
            "micro_batch_caps": run.checkpoints.group.all_gather(run.state.micro_batch_cap),
            "micro_batch_tokens": run.plan.batch_layout.micro_batch_tokens,
            "loss_history": asdict(run.state.loss_history),
        },
        places=places,
    )


@torch.no_grad()
def _require_finite(run: TrainingRun, tensors: Mapping[str, Tensor]) -> None:
    """Check the state, as an update can overflow even with a finite gradient (say, with a learning rate of 1e308)."""
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()}
    # the infinity norm is not finite if any value is not, and allocates no tensor-sized temporary
    largest = torch._foreach_norm(list(floats.values()), torch.inf) if floats else ()
    values = torch.stack([value.to(run.device, torch.float64) for value in (*largest, torch.zeros(()))])
    is_bad = ~values.isfinite()
    num_bad = int(run.strategy.sum_values(is_bad.sum(dtype=torch.float64)[None]).item())
    if num_bad:
        names = [name for name, bad in zip(floats, is_bad.tolist(), strict=False) if bad]
        where = f"{names[0]} ({num_bad} tensors)" if names else f"{num_bad} tensors of other ranks"
        raise NumericError(
            f"after step {run.progress.step}: {where} is not finite, so this state was not saved; earlier checkpoints "
            "are intact; lower optim.lr, or resume from one of them"
        )


def find_checkpoint(
    config: Config, planned: PlannedRun, checkpoints: Checkpoints, reporter: Reporter
) -> tuple[SavedCheckpoint | None, Progress | None]:
    """Do as `_find_checkpoint` does; a folder with another run is refused with the ways to go on."""
    try:
        return _find_checkpoint(config, planned, checkpoints, reporter)
    except OtherRunError as error:
        free = free_folder(config.folder)
        own = {"name": free.name} if config.run_dir is None else {"run_dir": str(free)}
        own |= {"checkpoint.mirror": f"{config.checkpoint.mirror}-2"} if config.checkpoint.mirror else {}
        fixes = [Fix(own, "a run of its own"), Fix({"--restart": True}, "start over; the old folder is moved aside")]
        raise CheckpointError(error.text, [*fixes, *error.fixes]) from error


def _find_checkpoint(
    config: Config, planned: PlannedRun, checkpoints: Checkpoints, reporter: Reporter
) -> tuple[SavedCheckpoint | None, Progress | None]:
    """Find the checkpoint to resume from (None: step 0), and the final progress if the run is already complete.

    Collective. Raises CheckpointError if none of the folder's checkpoints is valid, if the data, the base model or
    settings that affect the numerics differ from the checkpoint's, if results without a checkpoint would be
    overwritten, or if changed settings would have no effect on a complete run.
    """
    checkpoint = checkpoints.newest()
    final_dir, best_dir = config.folder / "final", config.folder / "best"
    if checkpoint is None:
        if checkpoints.group.run_on_first_rank(lambda: final_dir.exists() and any(final_dir.iterdir())):
            raise OtherRunError(
                f"{final_dir} holds results, but there is no checkpoint to resume from: training again would overwrite "
                "them"
            )
        reporter.stage("resume", "no checkpoint: start at step 0")
        return None, None
    if config.checkpoint.resume == "never":
        raise OtherRunError(
            f"{checkpoints.folder} holds a checkpoint of step {checkpoint.step}, but checkpoint.resume is never",
            [Fix({"checkpoint.resume": "auto"}, "go on from it")],
        )
    changes = _accepted_changes(config, planned, checkpoint, reporter)
    reporter.stage("resume", f"from step {checkpoint.step}")

    def progress_of_results() -> Mapping[str, Any] | None:
        if not final_dir.exists():
            return None
        try:
            if best_dir.exists():
                verify_final(best_dir)
            final_progress = verify_final(final_dir).progress
        except CheckpointError as error:
            reporter.event("damaged", {"why": str(error), "next": "exported again from the newest checkpoint"})
            return None
        # a run whose last save failed exported its last weights only
        best_step = final_progress.get("best_step")
        is_whole = best_step in (None, final_progress.get("step")) or best_dir.exists()
        return final_progress if is_whole or not (checkpoints.folder / f"step-{best_step}").exists() else None

    if (final_progress := checkpoints.group.run_on_first_rank(progress_of_results)) is None:
        return checkpoint, None
    progress = validated(Progress, final_progress, str(final_dir))
    if not progress.stopped_early and progress.step < planned.plan.num_steps:
        return checkpoint, None
    refuse_without_effect(changes, config.folder)
    return checkpoint, progress


def _accepted_changes(
    config: Config, planned: PlannedRun, checkpoint: SavedCheckpoint, reporter: Reporter
) -> list[Change]:
    """Return the settings that differ from the checkpoint's. Raises CheckpointError as `find_checkpoint` does."""
    # settings added after the checkpoint was made get their defaults
    old_config = make_config(checkpoint.facts["config"], origin=f"the config of step {checkpoint.step}")
    old_config = paths_in_place(old_config, config.folder, old_config.folder)
    changes = config_changes(old_config.model_dump(mode="json"), redacted(config.model_dump(mode="json")))
    saved, now = dict(checkpoint.facts["fingerprints"]), dict(planned.fingerprints)
    # the same base model or rows, read from another place
    places = [*("model.name", "model.revision") * (saved["model"] == now["model"])]
    places += ["data.sources"] * (saved["data"] == now["data"])
    why = "the content is the same"
    changes = [replace(one, effect="harmless", why=why) if one.key in places else one for one in changes]
    refuse_changes([*changes, *fingerprint_changes(saved, now, changes)], config.checkpoint.allow_change)
    before, after = checkpoint.facts.get("micro_batch_tokens"), planned.plan.batch_layout.micro_batch_tokens
    if before not in (None, after) and not any(change.key == "batch.micro_batch_tokens" for change in changes):
        why = "the memory of this machine allows other micro-batches, which changes rounding and dropout masks"
        planned_change = Change("micro-batch tokens", before, after, "rounding", why)
        reporter.event("changed", {"setting": str(planned_change)})
    for change in changes:
        reporter.event("changed", {"setting": str(change)})
    return changes


def restore(run: TrainingRun, saved: SavedCheckpoint) -> None:
    """Load a checkpoint's whole state into the run. Raises CheckpointError if it has other parameters."""
    run.reporter.phase("reading the checkpoint")
    restore_weights(run, saved)
    run.state.loss_history = LossHistory(**saved.facts.get("loss_history", {}))
    caps = saved.facts["micro_batch_caps"]
    if len(caps) == run.rank.world:
        run.state.micro_batch_cap = caps[run.rank.index]
    else:
        # with another number of ranks the caps cannot be matched, so all ranks take the smallest
        run.state.micro_batch_cap = min((cap for cap in caps if cap is not None), default=None)
    for name, value in saved.facts["progress"].items():
        setattr(run.progress, name, value)
    if run.progress.num_updates and not saved.tensors["optimizer"]:
        raise CheckpointError(f"the checkpoint of step {saved.step} has no optimizer state; it cannot be resumed")
    state, traits = saved.tensors["optimizer"], run.config.optim.traits
    load_optimizer_state(run.optimizer, run.named_parameters, state, traits, run.strategy)
    try:
        run.scaler.load_state_dict(saved.facts["scaler"])
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint of step {saved.step} has no loss scale; use its settings") from error


def restore_weights(run: TrainingRun, saved: SavedCheckpoint) -> None:
    """Load a checkpoint's weights into the model. Raises CheckpointError if names or shapes differ."""
    weights, trained = saved.tensors["model"], {**run.named_parameters, **run.aux_loss.buffers}
    if odd := sorted(set(weights) ^ set(trained)):
        raise CheckpointError(
            f"the checkpoint of step {saved.step} trains different parameters from this run, such as {odd[0]} "
            f"({len(odd)} differ); use the checkpoint's settings, or a different run_dir"
        )
    for name, parameter in trained.items():
        shape = run.strategy.whole_shape(parameter)
        if weights.shapes[name] != shape:
            raise CheckpointError(
                f"{name} has shape {weights.shapes[name]} in the checkpoint of step {saved.step}, "
                f"{shape} in this run; use the checkpoint's settings, or a different run_dir"
            )
        if (kind := weights.dtype(name)).is_floating_point != parameter.is_floating_point():
            raise CheckpointError(
                f"{saved.path}: {name} is {kind}, but {parameter.dtype} in this run; restore it from a backup"
            )
        if run.strategy.engine_state and isinstance(parameter, nn.Parameter):
            run.strategy.engine_state.set_weight(parameter, weights[name])
        else:
            weights.copy_into(name, parameter)


def load_stopped(folder: Path, device: torch.device) -> tuple[PreTrainedModel, Any, int]:
    """Return the model as `load_trained` does, its tokenizer, and the step of the checkpoint.

    Raises UsageError for a run whose weights cannot be told without its end: one without a checkpoint, from random
    weights or with new tokens, or that scores texts; CheckpointError for a damaged one.
    """
    config = load_config(folder / "config.yaml")
    resume = how_to_finish(folder)
    saved = Checkpoints(folder, keep=1, on_event=lambda kind, facts: None).newest()
    if saved is None:
        raise UsageError(f"{folder} has no final/ and no checkpoint yet; {resume}")
    if config.model.init != "pretrained" or config.data.added_tokens:
        what = "new tokens" if config.data.added_tokens else "random weights"
        raise UsageError(f"{folder} is not finished, and a run with {what} answers only once it is; {resume}")
    weights = saved.tensors["model"]
    if any(SCORE in name.split(".") for name in weights):
        raise UsageError(NOT_WRITING.format(folder))
    model = load_for_inference(config.model.name, revision=config.model.revision, device=device)
    if config.method == "lora":
        # the checkpoint has the values, so code that only starts them is not run
        lora = config.lora.model_copy(update={"init_path": None})
        add_lora(model, lora, seed=config.seed, parts=config.model.trained_parts)
    tensors = dict(model.state_dict(keep_vars=True))
    if odd := next(
        (name for name in weights if name not in tensors or tensors[name].shape != weights.shapes[name]), None
    ):
        raise CheckpointError(f"{saved.path} trains {odd}, which {config.model.name} does not have; {resume}")
    for name in weights:
        weights.copy_into(name, tensors[name])
    tokenizer = tokenizer_of(config.data, config.model.name)
    root = config.data.root
    meta = TokenStore.open(registry.entry_dir(root, registry.find(root, config.data.name)), verify=False).meta
    if meta.template_text:
        give_template(tokenizer, meta.template_text, meta.stop_tokens)
    set_stops(model, stop_token_ids(model, tokenizer, meta.stop_tokens))
    return model.requires_grad_(False).eval(), tokenizer, saved.step
