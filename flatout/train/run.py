"""A whole run: lock the folder, set up, train, export, tell the result."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from flatout.config.read import dump_config
from flatout.config.schema import Config
from flatout.data.tokenizer import load_tokenizer
from flatout.errors import FlatoutError, PreemptedError
from flatout.models.export import adapter_parameters, save_adapter, save_model
from flatout.parallel.connect import choose_device
from flatout.parallel.group import join_group, leave_group
from flatout.parallel.messages import Messages
from flatout.parallel.rank import Rank
from flatout.parallel.shards import is_sharded, whole_tensors
from flatout.parallel.strategy import KeepsState
from flatout.parallel.watch import OnLoss, Watch
from flatout.track.console import ConsoleTracker
from flatout.track.jsonl import RunFolderTracker
from flatout.track.record import Tracker, Trackers
from flatout.train.alike import refuse_unlike, weakest_gpu
from flatout.train.checkpoint import Checkpoints
from flatout.train.lock import RunLock
from flatout.train.loop import evaluate_now, run_steps, save
from flatout.train.planning import Planned, plan_run
from flatout.train.position import find_checkpoint
from flatout.train.profile import Profiler
from flatout.train.resume import is_complete
from flatout.train.setup import restore_weights, set_up
from flatout.train.state import Progress, Run
from flatout.train.storage import Storage


@dataclass(frozen=True, slots=True)
class Result:
    """What a finished run came to. `final_dir` holds the adapter or model with its tokenizer."""

    folder: Path
    final_dir: Path
    num_steps: int
    progress: Progress

    @property
    def tokens_per_s(self) -> float:
        """Real tokens a second over all training steps."""
        return self.progress.num_tokens / self.progress.elapsed_s

    @property
    def padding_avoided(self) -> float:
        """Share of a naive loader's tokens that would have been padding."""
        return 1.0 - self.progress.num_tokens / self.progress.num_naive_tokens


def train(config: Config, *, profile_steps: int | None = None, on_loss: OnLoss | None = None) -> Result:
    """Run a configuration to its end; `profile_steps` steps after the warm-up are profiled on the first rank.

    Raises a FlatoutError; PreemptedError means saved and resumable. `on_loss` hears at once, in a thread, of
    a lost rank; the error is raised afterwards, unless a collective holds this rank, which then ends with code 7.
    """
    rank = Rank.from_env()
    # the lock also finds a folder that cannot be written, before anything slow happens
    with RunLock(config.folder) if rank.is_first else nullcontext():
        trackers: list[Tracker] = [ConsoleTracker(), RunFolderTracker(config.folder)] if rank.is_first else []
        if profile_steps is not None and rank.is_first:
            trackers.append(Profiler(config.folder, profile_steps, partial(trackers[0].stage, "profile")))
        tracker = Trackers(*trackers)
        try:
            return _train(config, tracker, rank, Watch(config.faults, tracker.event, on_loss))
        except FlatoutError as error:
            tracker.event("stopped", {"exit_code": error.exit_code, "why": str(error)})
            raise
        finally:
            tracker.close()


def _train(config: Config, tracker: Tracker, rank: Rank, watch: Watch) -> Result:
    tracker.stage("config", f"{config.name}: {config.method} on {config.model.name}, folder {config.folder}")
    # tokenising may take long: it comes before ranks join, or their group would time out
    planned = plan_run(config, tracker, rank, lambda: weakest_gpu(config, rank))
    join_group(rank, choose_device(config.wanted_device, rank))
    messages = Messages(rank)
    watch.start(messages)
    try:
        with watch.guard():
            result = _train_together(config, planned, tracker, messages, watch)
    except PreemptedError:
        leave_group()
        raise
    # after any other error the group is left as it is: leaving it in order would wait for the lost
    leave_group()
    return result


def _train_together(config: Config, planned: Planned, tracker: Tracker, messages: Messages, watch: Watch) -> Result:
    rank = messages.rank
    refuse_unlike(config, planned, messages)
    checkpoints = Checkpoints(config.folder, keep=config.checkpoint.keep, on_event=tracker.event, messages=messages)
    snapshot = find_checkpoint(config, planned, checkpoints, tracker)
    final_dir = config.folder / "final"
    if snapshot is not None and final_dir.exists():
        progress = Progress(**snapshot.facts["progress"])
        if progress.stopped_early or is_complete(progress.step, planned.plan.num_steps):
            tracker.stage("done", f"already complete after {progress.step} steps; see {final_dir}")
            return Result(config.folder, final_dir, planned.plan.num_steps, progress)
    if rank.is_first:
        Storage().write_bytes(config.folder / "config.yaml", dump_config(config).encode())
    run = set_up(config, planned, checkpoints, snapshot, tracker, rank, watch)
    del snapshot  # it holds the files, whose space is free only once rotation removed and all closed them
    try:
        with run.stop:
            run_steps(run)
            finish(run, final_dir)
    finally:
        run.saver.close()
        for feed in filter(None, (run.feed, run.eval_feed)):
            feed.close()
    return Result(config.folder, final_dir, run.plan.num_steps, run.progress)


def finish(run: Run, final_dir: Path) -> None:
    """Evaluate, save, export the last weights to final/ and, where earlier ones were better, those to best/."""
    run.watch.at("finish", run.progress.step)
    is_best = run.progress.last_eval_step != run.progress.step and evaluate_now(run)
    save(run, best=is_best, required=True)
    export(run, final_dir)
    run.tracker.stage("final", f"{run.config.method} weights of step {run.progress.step} in {final_dir}")
    best_step = run.progress.best_step
    if best_step is None or best_step == run.progress.step:
        return
    best = run.checkpoints.folder / f"step-{best_step}"
    if run.checkpoints.messages.first(best.exists):
        restore_weights(run, run.checkpoints.load(best))
        export(run, run.folder / "best")
        run.tracker.stage("best", f"weights of step {best_step}, loss {run.progress.best_eval_loss:.4f}, in best/")


def export(run: Run, folder: Path) -> None:
    """Write the adapter (PEFT format) or the model (transformers format) with its tokenizer; whole or not at all.

    Collective: sharded tensors come to the first rank's host memory one by one, in the precision they are written in.
    """
    messages = run.checkpoints.messages
    is_lora = run.config.method == "lora"
    state: dict[str, Tensor] | None = None
    gather = run.optimizer.weight if isinstance(run.optimizer, KeepsState) else None
    if gather or any(is_sharded(parameter) for parameter in run.model.parameters()):
        held = adapter_parameters(run.model) if is_lora else run.model.state_dict(keep_vars=True)
        messages.exchange(None)  # no rank may wait on the GPU for one that still writes
        state = whole_tensors(held, keep=run.rank.is_first, dtype=None if is_lora else run.dtype, gather=gather)

    def write() -> None:
        storage, tokenizer = Storage(), load_tokenizer(run.tokenizer_name)
        half_done = folder.with_name(f".{folder.name}.tmp")
        storage.remove_tree(half_done)
        half_done.mkdir(mode=0o700)
        if is_lora:
            base_name, lora = run.config.model.name, run.config.lora
            save_adapter(run.model, half_done, base_name=base_name, config=lora, state=state)
            tokenizer.save_pretrained(half_done)
        else:
            # the checkpoint keeps the fp32 masters; what is used afterwards has the precision it was trained at
            save_model(run.model, tokenizer, half_done, dtype=run.dtype, state=state)
        storage.remove_tree(folder)
        storage.rename(half_done, folder)

    messages.first(write)
