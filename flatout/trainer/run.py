"""A whole run: lock the folder, set up, train, export, return the result."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from flatout.checkpoint.manifest import publish
from flatout.checkpoint.mirror import Mirror
from flatout.checkpoint.write import Checkpoints
from flatout.config.folders import free_folder, run_identity
from flatout.config.read import dump_config, is_as_dumped, load_config
from flatout.config.schema import Config
from flatout.data.tokenizer import tokenizer_of
from flatout.environment import home_folder
from flatout.errors import (
    OF_OWN_CODE,
    Fix,
    FlatoutError,
    PreemptedError,
    ResourceError,
    UsageError,
    exit_refused,
    exits_refused,
    reason_of,
)
from flatout.io.bounded_wait import to_stderr
from flatout.io.durable_io import DurableIO
from flatout.io.file_lock import RunLock
from flatout.io.host_memory import host_memory_error
from flatout.io.own_output import require_folders
from flatout.io.redact import redacted
from flatout.io.stop_signals import announcing_stop
from flatout.models.export import copy_processor, save_model
from flatout.models.load.source import fingerprint_model
from flatout.models.lora.adapter import adapter_parameters, save_adapter
from flatout.models.lora.read_back import read_back
from flatout.models.stops import GENERATION_CONFIG, give_template, set_stops, stop_token_ids
from flatout.parallel.fault_tolerance.peer_watch import OnPeerLost, PeerWatch
from flatout.parallel.process_group import choose_device, leave_group
from flatout.parallel.rank import Rank
from flatout.parallel.shards import global_tensors, is_sharded
from flatout.track.callback import Callback, Reporter
from flatout.track.console import ConsoleCallback
from flatout.track.forward import TrackerProcess
from flatout.track.notebook import open_console
from flatout.track.record import RunEnd
from flatout.track.run_folder import RunFolderWriter
from flatout.track.start_up import StartUpClock
from flatout.track.trackers import require_installed
from flatout.trainer.build import build_run
from flatout.trainer.evaluate import evaluate_now
from flatout.trainer.loop import run_steps, save
from flatout.trainer.memory_check import MemoryCheck
from flatout.trainer.metrics import gather_gpus, run_start
from flatout.trainer.passes import PassesStopped
from flatout.trainer.planned_run import plan_run, require_same_run
from flatout.trainer.resume import check_facts, find_checkpoint, restore_weights
from flatout.trainer.rounds import read_rewards
from flatout.trainer.run_data import open_data
from flatout.trainer.state import Progress, Setup, TrainingRun
from flatout.trainer.steps_and_memory import weakest_gpu


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a finished run. `final_dir` holds the adapter or model with its tokenizer."""

    folder: Path
    final_dir: Path
    progress: Progress


# how the console names the phases of a loop
PHASES = {"step": "step", "sample": "sampling", "save": "saving", "evaluate": "evaluating", "finish": "finishing"}


def train(
    config: Config,
    *,
    callbacks: Sequence[Callback] = (),
    console: ConsoleCallback | None = None,
    on_peer_lost: OnPeerLost | None = None,
    start_up: StartUpClock | None = None,
    reuse_measured: bool = False,
    replays: bool = False,
) -> Result:
    """Train a configuration to the end; `callbacks` are called on the first rank, after the console and run folder.

    `console` is one that the caller has entered; by default, a new one prints to standard output. `start_up` counts the
    seconds since the launch; by default, this call. `reuse_measured`: as in `MemoryCheck`; `replays`: as in LoopState.

    Raises a FlatoutError; PreemptedError means saved and resumable. `on_peer_lost` is called in a thread of its own
    as soon as a rank is lost. The error is then raised, unless this rank is blocked in a collective: then end.json is
    written, and this process exits with code 7.
    """
    rank, start_up = Rank.from_env(), start_up or StartUpClock()
    if rank == Rank() and len(config.gpus or ()) > 1:
        text = f"gpus: {config.gpus} needs one process per GPU, which `flatout train` starts, not train()"
        raise UsageError(text, [Fix({"gpus": 1})])
    start_up.begin("opening the run folder")
    require_installed(config.track.to, strategy=config.strategy if rank.world > 1 else "auto")
    # taking the lock also detects a folder that is not writable, before anything slow happens
    with ExitStack() as stack:
        reporter, mirror, peer_lost_calls = Reporter(), Mirror(config), [on_peer_lost] if on_peer_lost else []
        if rank.is_first:
            reporter, on_lost = open_run(config, stack, console, [mirror, *callbacks], start_up)
            peer_lost_calls += on_lost
        watch = PeerWatch(
            config.faults,
            reporter.post,
            peer_lost_calls,
            on_phase=lambda phase, step: reporter.phase(PHASES.get(phase, phase), step + 1 if phase == "step" else 0),
        )
        try:
            with watch.guard(), torch_settings_kept():
                if rank.is_first:
                    mirror.open(reporter)
                result = set_up_and_train(config, reporter, rank, watch, mirror, reuse_measured, replays)
            leave_group()
        except BaseException as raised:
            error = host_memory_error(raised) or exit_refused(raised) or raised
            # after any other error the group is not destroyed: a clean shutdown would wait for the lost rank
            end = ended_by(error)
            with errors_printed():
                if isinstance(error, PreemptedError):
                    leave_group()
                if isinstance(error, FlatoutError):
                    reporter.event("stopped", {"exit_code": end.exit_code, "why": end.why})
            with errors_printed():
                reporter.end(end)
            if error is raised:
                raise
            raise error from raised
        with exits_refused():
            reporter.end(RunEnd("complete", 0, time.time(), final_dir=str(result.final_dir)))
        return result


@contextmanager
def torch_settings_kept() -> Iterator[None]:
    """Restore the settings of torch that loading a model changes: the process may be a notebook's."""
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    is_deterministic, cudnn_sdp = torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.cudnn_sdp_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warn_only)
        torch.backends.cuda.enable_cudnn_sdp(cudnn_sdp)


def open_run(
    config: Config,
    stack: ExitStack,
    console: ConsoleCallback | None,
    callbacks: Sequence[Callback],
    start_up: StartUpClock,
) -> tuple[Reporter, list[OnPeerLost]]:
    """Lock the run folder within `stack`; return the first rank's reporter, and what to call once a peer is lost."""
    require_folders(config.folder)
    run_identity(config.folder)
    lock = stack.enter_context(RunLock(config.folder))
    shown = console or stack.enter_context(open_console(every_record=config.log_every_steps != 1))
    folder = RunFolderWriter(config.folder, lambda text: shown.on_event("log", {"why": text}), lock.keep)
    # after the run folder, whose files its process reads
    trackers = TrackerProcess(config.folder, config.track.to, partial(shown.on_stage, "track"))
    reporter = Reporter(shown, folder, *([trackers] if config.track.to else ()), *callbacks, start_up=start_up)
    stack.enter_context(reporter.telling_slow_callbacks())
    # a collective may hold the main thread until the watch ends this process
    return reporter, [lambda error: folder.write_end(ended_by(error)), lambda error: shown.close()]


def set_up_and_train(
    config: Config, reporter: Reporter, rank: Rank, watch: PeerWatch, mirror: Mirror, reuse_measured: bool,
    replays: bool,
) -> Result:  # fmt: skip
    """Open the data, join the ranks, plan the run, find its checkpoint, build it, and take the steps; one call a stage.

    A run that is complete already is returned as it is.
    """
    method = f"{config.method} at lr {config.optim.lr:g}"
    reporter.stage("config", f"{config.name}: {method} on {config.model.name}, folder {config.folder}")
    # tokenizing may take long, so it comes before ranks connect, which has a timeout
    data = open_data(config, reporter, rank, starts=True)
    if rank.world > 1:
        reporter.phase("waiting for all ranks")
    group = watch.join(rank, choose_device(config.wanted_device, rank))
    reporter.phase("opening the device")
    memory_check = MemoryCheck(config, group, reporter, reuse_measured=reuse_measured)
    gpu = weakest_gpu(config, group)
    planned = plan_run(config, data, reporter, rank, gpu and memory_check.corrected(gpu))
    reporter.phase("reading the model's fingerprint")
    fingerprints = {**planned.fingerprints, "model": fingerprint_model(config.model)}
    rewards = read_rewards(config, data.reward_models, reporter, group)
    if config.rollout.rounds is not None:
        fingerprints["rewards"] = rewards.digests
    planned = replace(planned, fingerprints=fingerprints)
    require_same_run(config, planned, group)
    reporter.phase("verifying checkpoints")
    checkpoints = Checkpoints(
        config.folder, keep=config.checkpoint.keep, on_event=reporter.event, group=group, check_facts=check_facts,
        fetch=mirror.fetch,
    )  # fmt: skip
    checkpoint, progress = find_checkpoint(config, planned, checkpoints, reporter)
    final_dir = config.folder / "final"
    if progress is not None:
        reporter.stage("done", f"already complete after {progress.step} steps; see {final_dir}")
        group.run_on_first_rank(mirror.finish)
        return Result(config.folder, final_dir, progress)
    if rank.is_first:
        write_settings(config, reporter)
    if checkpoint is not None:
        reporter.event("resumed", {"step": checkpoint.step})
    elif (config.folder / "start.json").exists():
        reporter.event("restarted", {"step": 0})
    setup = Setup(config, planned, checkpoints, reporter, rank, watch)
    with ExitStack() as stack:
        # their processes start on all ranks, before the model is loaded, or on none
        group.run_on_all_ranks(lambda: stack.enter_context(rewards) and None)
        run = build_run(setup, checkpoint, memory_check)
        run.state.rewards, run.state.replays = rewards, replays
        rewards.load_models(run.device)
        if replays:
            run.progress.last_eval_step = run.progress.step
        del checkpoint  # its open files would keep deleted checkpoints on disk
        reporter.phase("starting the loop")
        gpus = gather_gpus(run)
        if rank.is_first:
            reporter.start(run_start(run, gpus))
        run_to_end(run, final_dir, mirror)
    return Result(config.folder, final_dir, run.progress)


def write_settings(config: Config, reporter: Reporter) -> None:
    """Write config.yaml, unless it has these settings; an earlier one that a person has edited is kept beside it."""
    file, text = config.folder / "config.yaml", redacted(dump_config(config))
    with suppress(FlatoutError):
        if redacted(dump_config(load_config(file))) == text:
            return
    if file.exists() and not is_as_dumped(file.read_text(encoding="utf-8", errors="replace")):
        aside = free_folder(file, ".old-", 1)
        DurableIO().rename(file, aside)
        reporter.event("kept", {"path": str(aside), "why": "settings with comments, which this run does not have"})
    DurableIO().write_bytes(file, text.encode())


def run_to_end(run: TrainingRun, final_dir: Path, mirror: Mirror) -> None:
    """Take the remaining steps and finish. Raises PreemptedError after saving when a stop was requested."""
    stopping = {"after": "this pass, then saves; a second Ctrl-C or signal ends it at once, without saving"}
    try:
        stop_told = announcing_stop(lambda: run.reporter.post("stopping", stopping), run.stop.numbers)
        with run.stop, stop_told:
            try:
                run_steps(run)
                finish(run, final_dir)
                run.checkpoints.group.run_on_first_rank(mirror.finish)
            except PassesStopped:
                save(run, required=True)
                with suppress(ResourceError):  # of the mirror; the next start sends the checkpoint
                    run.checkpoints.group.run_on_first_rank(mirror.finish)
                why = f"stop requested: saved at step {run.progress.step}; run the same command to resume"
                raise PreemptedError(why, run.stop.number) from None
    finally:
        run.close()


def finish(run: TrainingRun, final_dir: Path) -> None:
    """Evaluate, save, export the last weights to final/ and, if an earlier step was better, its weights to best/."""
    run.watch.set_phase("finish", run.progress.step)
    is_best = run.progress.last_eval_step != run.progress.step and evaluate_now(run)
    try:
        save(run, best=is_best, required=True)
    except ResourceError as error:
        # no checkpoint has these weights: export them to the first folder with enough space
        group, reasons = run.checkpoints.group, []
        places = (Path(tempfile.gettempdir()), home_folder(), Path.cwd())
        name = f"flatout-{run.config.name}-{secrets.token_hex(4)}"
        others = group.run_on_first_rank(lambda: [str(place.absolute() / name) for place in places])
        for folder in (final_dir, *map(Path, others)):
            try:
                export(run, folder)
            except ResourceError as too_small:
                reasons.append(too_small.text)
            else:
                again = "; the same command finishes the run" if folder == final_dir else ""
                raise ResourceError(f"{error.text}; the final weights are kept in {folder}{again}") from error
        where = f"the final weights could not be saved anywhere: {'; '.join(reasons)}"
        raise ResourceError(f"{error.text}; {where}") from error
    run.reporter.phase("exporting")
    export(run, final_dir)
    run.reporter.stage("final", f"{run.config.method} weights of step {run.progress.step} in {final_dir}")
    best_step = run.progress.best_step
    if best_step is None or best_step == run.progress.step:
        return
    best = run.checkpoints.folder / f"step-{best_step}"
    if run.checkpoints.group.run_on_first_rank(best.exists):
        restore_weights(run, run.checkpoints.load(best))
        export(run, run.config.folder / "best")
        loss, reward = run.progress.best_eval_loss, run.progress.best_figure
        figure = f"held-out reward {reward:.4f}" if loss is None else f"loss {loss:.4f}"
        run.reporter.stage("best", f"weights of step {best_step}, {figure}, in best/")


def export(run: TrainingRun, folder: Path) -> None:
    """Write the adapter (PEFT format) or the model (transformers format) with its tokenizer, atomically.

    Collective: sharded tensors are gathered one by one to the first rank's host memory, in the dtype of the files.
    """
    group = run.checkpoints.group
    is_lora = run.config.method == "lora"
    state: dict[str, Tensor] | None = None
    gather = run.strategy.engine_state.weight if run.strategy.engine_state else None
    # a model's state has shards, though its modules may still hold what the last pass gathered
    parameters = adapter_parameters(run.model) if is_lora else run.model.state_dict(keep_vars=True)
    if gather or any(is_sharded(parameter) for parameter in (*parameters.values(), *run.model.parameters())):
        group.all_gather(None)  # so that no rank waits in a GPU collective for one that is still writing
        state = global_tensors(parameters, keep=run.rank.is_first, dtype=None if is_lora else run.dtype, gather=gather)

    def write(half_done: Path) -> None:
        tokenizer = tokenizer_of(run.config.data, run.config.model.name)
        meta = run.loader.store.meta
        if meta.template_text:
            # export the template that was trained with, even if the tokenizer has another
            give_template(tokenizer, meta.template_text, meta.stop_tokens)
        scoring = run.planned.scoring
        if scoring is None:
            set_stops(run.model, stop_token_ids(run.model, tokenizer, meta.stop_tokens))
        elif tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(scoring.padding_id)
        if is_lora:
            base_name, lora = run.config.model.name, run.config.lora
            save_adapter(run.model, half_done, base_name=base_name, config=lora, live=state)
            if scoring is None:
                # servers of adapters take the tokens that end an answer from there
                run.model.generation_config.to_json_file(half_done / GENERATION_CONFIG)
            else:
                # PEFT's own file has no place for the names of scores and the padding token
                run.model.config.save_pretrained(half_done)
            tokenizer.save_pretrained(half_done)
        else:
            # checkpoints keep fp32 master weights; the exported model has the precision used in training
            save_model(run.model, tokenizer, half_done, dtype=run.dtype, state=state, keep=run.aux_loss.buffers)

        if meta.processor:
            copy_processor(meta.tokenizer, half_done)

    group.run_on_first_rank(lambda: publish(folder, write, asdict(run.progress), run.reporter.event))
    if is_lora:
        run.reporter.phase("comparing with PEFT")
        group.run_on_first_rank(lambda: report_reading(run, folder, state))


def report_reading(run: TrainingRun, folder: Path, live: Mapping[str, Tensor] | None) -> None:
    """Tell whether PEFT reads an exported adapter as trained; the result stands, whatever comes of it."""
    try:
        text, is_same = read_back(run.model, folder, live=live, has_diverged=run.state.has_diverged)
    except Exception as error:  # noqa: BLE001  (PEFT may raise anything, and memory may be short)
        text, is_same = f"could not be compared with what PEFT reads: {reason_of(error)}", False
    if is_same:
        run.reporter.stage(folder.name, text)
    else:
        run.reporter.event("adapter_differs", {"folder": str(folder), "why": f"{folder}: {text}"})


@contextmanager
def errors_printed() -> Iterator[None]:
    """Print an error and go on: the one that ended the run must stay the one that is raised."""
    try:
        yield
    except OF_OWN_CODE as error:  # a callback may raise anything
        to_stderr(f"at the end of the run: {type(error).__name__}: {redacted(str(error))}")


def ended_by(error: BaseException) -> RunEnd:
    """Return the end of a run that this error ended."""
    if isinstance(error, FlatoutError):
        outcome: Literal["stopped", "failed"] = "stopped" if isinstance(error, PreemptedError) else "failed"
        fixes = tuple(Fix(redacted(fix.settings), fix.why) for fix in error.fixes)
        return RunEnd(outcome, error.exit_code, time.time(), redacted(error.text), fixes=fixes)
    if isinstance(error, KeyboardInterrupt):
        return RunEnd("stopped", 130, time.time(), "interrupted; steps since the last checkpoint are lost")
    return RunEnd("failed", 1, time.time(), redacted(f"{type(error).__name__}: {error}"))
