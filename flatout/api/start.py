"""Start a run from Python: in this process, or as ranks that this process supervises."""

from __future__ import annotations

import secrets
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, RLock, Thread
from traceback import extract_tb
from types import TracebackType
from typing import Any, Self, TextIO, cast

from pydantic import BaseModel

from flatout.api.inputs import SPLITS, data_file, kind_of, listed_paths, model_source, refuse_rows, tokenizer_folder
from flatout.api.restart import move_aside, require_machine
from flatout.api.run import Run
from flatout.config.folders import run_identity
from flatout.config.own_code import refuse_start_by_import
from flatout.config.read import dump_config, load_values, make_config
from flatout.config.schema import Config, DataConfig, ModelConfig
from flatout.config.shortcuts import expand, long_forms
from flatout.config.spelling import in_python, spelled_for
from flatout.environment import LAUNCHED, SECRET, environment, prepare_torch, secret_of_nodes
from flatout.errors import (
    OF_OWN_CODE,
    Fix,
    FlatoutError,
    PreemptedError,
    ResourceError,
    UsageError,
    exit_refused,
    of_kind,
)
from flatout.io.bounded_wait import to_stderr
from flatout.io.durable_io import DurableIO, remove_unfinished
from flatout.io.file_lock import RunLock, launcher_folder
from flatout.io.redact import redacted
from flatout.io.stop_signals import SIGNAL_EXIT_CODE
from flatout.launch.launch_mode import LaunchMode, Nodes, SpawnRanks, choose_launch_mode, visible_devices
from flatout.launch.rendezvous import ClientRendezvous, HostRendezvous, Rendezvous
from flatout.launch.supervise import Supervisor
from flatout.track.callback import Callback, Reporter
from flatout.track.console import RankOutput
from flatout.track.notebook import open_console
from flatout.track.run_log import RunFollower, read_side_files

ConfigLike = Config | Mapping[str, Any] | str | Path | None
# what stands for a section of the configuration; anything else is an object in memory
_SETTINGS = (str, Path, Mapping, DataConfig, ModelConfig)
# how often callbacks of a run in other processes get what is new
POLL_S = 0.2
# torch's seeds, types and modes are those of a process: its threads train one after another
_TRAINS = RLock()


class Interrupted(KeyboardInterrupt):
    """Ctrl-C ended a run at once, without a save."""

    exit_code = SIGNAL_EXIT_CODE + signal.SIGINT

    def _render_traceback_(self) -> list[str]:
        # IPython prints these lines in place of its traceback
        return [str(self)]


class StoppedError(PreemptedError, Interrupted):
    """Ctrl-C asked a run to stop, and it saved."""


@contextmanager
def ctrl_c_told() -> Iterator[None]:
    """Raise what a Ctrl-C in the block came to as an Interrupted; also a decorator of functions.

    A script that does not catch it, or a FlatoutError, ends with its sentence and exit code, without a traceback.
    """
    try:
        yield
    except PreemptedError as error:
        _print_plainly()
        if error.signal != signal.SIGINT:
            raise
        raise StoppedError(str(error), error.signal) from error
    except FlatoutError:
        _print_plainly()
        raise
    except KeyboardInterrupt as error:
        _print_plainly()
        again = "the same call goes on from the last checkpoint, or begins anew if there is none"
        raise Interrupted(f"interrupted without a save; {again}") from error


@dataclass(frozen=True, slots=True)
class _PlainHook:
    """Python's hook for uncaught exceptions: prints our errors and stops as a sentence, all others as `before` does."""

    before: Any

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, FlatoutError | Interrupted):
            self.before(kind, error, trace)
            return
        frame, is_stop = extract_tb(trace)[0], isinstance(error, PreemptedError | Interrupted)
        to_stderr(str(error) if is_stop else f"{frame.filename}:{frame.lineno}: {error}")
        if not hasattr(sys, "ps1"):  # an interactive session goes on
            raise SystemExit(error.exit_code)


def _print_plainly() -> None:
    if not isinstance(sys.excepthook, _PlainHook):
        sys.excepthook = _PlainHook(sys.excepthook)


def refuse_unnamed(verb: str, config: ConfigLike, unnamed: Sequence[object]) -> None:
    """Raise UsageError for arguments without a name beside the configuration."""
    if unnamed:
        pairs = zip(("model", "data"), (config, *unnamed), strict=False)
        call = f"flatout.{verb}({', '.join(f'{name}={one!r:.60}' for name, one in pairs)})"
        text = "takes one value without a name, the configuration; name the others"
        raise UsageError(f"flatout.{verb} {text}: {call}")


def resolve_config(
    config: ConfigLike, settings: Mapping[str, Any], *, model: Any = None, tokenizer: Any = None, data: Any = None
) -> Config:
    """Return the configuration of a call: `settings` (sections or keywords such as lr) replace those of `config`.

    `model` and `data` may be a section, its short form, or an object in memory, which is written to files first (see
    inputs.py), as is a `tokenizer`. Raises UsageError with every problem, and as `inputs` does.
    """
    origin = str(config) if isinstance(config, str | Path) else "config"
    if isinstance(config, str | Path):
        values = long_forms(load_values(Path(config), settings))
    elif isinstance(config, Config):
        values = config.model_dump(mode="json", exclude_unset=True)
    else:
        values = expand(config or {})
    refuse_rows(data)
    named = {"model": model, "data": data}
    sections = {
        name: value for name, value in named.items() if isinstance(value, _SETTINGS) and kind_of(value) not in SPLITS
    }
    for changes in (expand(settings), expand(sections)):
        values = {**values, **{name: _merged(values.get(name), value) for name, value in changes.items()}}
    run_dir = Path(str(values.get("run_dir") or f"runs/{values.get('name', 'run')}"))
    given = values.get("data")
    root = Path(str(given.get("root", "data") if isinstance(given, Mapping) else "data"))
    by_section: dict[str, dict[str, Any]] = {"model": {}, "data": {}}
    if model is not None and "model" not in sections:
        by_section["model"]["name"] = name = model_source(model, run_dir)
        if name != model.name_or_path and tokenizer is None:
            tokenizer = model.name_or_path or None
    if data is not None and "data" not in sections:
        paths = listed_paths(data) or [data_file(data, root / "in_memory")]
        by_section["data"]["sources"] = [{"path": path} for path in paths]
    if tokenizer is not None:
        by_section["data"]["tokenizer"] = tokenizer_folder(tokenizer, root / "in_memory")
    values = {**values, **{name: _merged(values.get(name), section) for name, section in by_section.items() if section}}
    return make_config(values, origin=origin, folder=Path(origin).parent)


def _merged(old: Any, new: Any) -> Any:
    new = new.model_dump(mode="json", exclude_unset=True) if isinstance(new, BaseModel) else new
    return {**old, **new} if isinstance(old, Mapping) and isinstance(new, Mapping) else new


@spelled_for(in_python)
@ctrl_c_told()
def train(
    config: ConfigLike = None,
    *unnamed: Any,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    callbacks: Sequence[Callback] = (),
    restart: bool = False,
    **settings: Any,
) -> Run:
    """Train, or resume an interrupted run, as `flatout train` does; return the finished run.

    `config` is a Config, a mapping, or the path of a YAML file. `model` is a name or a transformers model, `data` a
    path, a datasets.Dataset, a table of pandas, pyarrow or polars, or rows; both are copied to files when they are
    objects, and the object is not changed. Further `settings` are sections or keywords: `lr=1e-4`, `lora={"rank": 8}`.
    `restart` starts over: the folder of an earlier run is moved aside, and where it is now is printed.

    With several `gpus`, one process per GPU is started. `callbacks` stay in this process: they get records as the run
    writes them, but no `on_stage` and `on_phase`.

    Raises a FlatoutError; PreemptedError means stopped, saved and resumable. After Ctrl-C, a KeyboardInterrupt.
    """
    refuse_start_by_import()
    refuse_unnamed("train", config, unnamed)
    callbacks = list(callbacks) if isinstance(callbacks, Iterable) else callbacks
    listed: Sequence[object] = callbacks if isinstance(callbacks, list) else [callbacks]
    if odd := [one for one in listed if listed is not callbacks or not isinstance(one, Callback)]:
        shown = getattr(odd[0], "__name__", type(odd[0]).__name__)
        how = "write class My(flatout.Callback): ... and pass callbacks=[My()]"
        raise UsageError(f"callbacks must be flatout.Callback objects, got {shown:.60}; {how}")
    resolved = resolve_config(config, settings, model=model, tokenizer=tokenizer, data=data)
    mode = _launch_mode(resolved)
    if not isinstance(mode, SpawnRanks):
        prepare_torch(mode.environment)  # the checks of a restart import torch
    if restart:
        move_aside(resolved, environment(), mode)
    if not isinstance(mode, SpawnRanks):
        from flatout.trainer.run import train as train_here

        with _TRAINS, _without_bars():
            return Run(train_here(resolved, callbacks=callbacks).folder)
    run_identity(resolved.folder)
    file, text = resolved.folder / "python.yaml", dump_config(resolved, only_given=True)
    if redacted(text) != text:
        raise UsageError("config: an address contains a password, which would be written to disk; remove it")
    DurableIO().write_bytes(file, text.encode())
    with _Following(resolved.folder, callbacks) as following:
        exit_code, stopped_by = start_ranks(resolved, mode, ["train", str(file)])
    if following.error is not None:
        raise following.error
    if exit_code != 0:
        end = read_side_files(resolved.folder).end
        why = (end and end.why) or f"see the logs in {resolved.folder / 'logs'}"
        raise _error_of(exit_code, why, end.fixes if end else (), stopped_by)
    return Run(resolved.folder)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep transformers' own progress bars out of what a run shows."""
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _launch_mode(config: Config) -> LaunchMode:
    """Decide where to train. A process that has used CUDA already cannot choose its GPUs any more."""
    on_cpu, env = config.device == "cpu", environment()
    mode = choose_launch_mode(env, gpus=config.gpus, on_cpu=on_cpu, nodes=None)
    torch = sys.modules.get("torch")
    if isinstance(mode, SpawnRanks) or not mode.environment or torch is None or not torch.cuda.is_initialized():
        return mode
    return SpawnRanks(1, Nodes(), visible_devices(env, gpus=config.gpus, on_cpu=on_cpu))


def _error_of(exit_code: int, why: str, fixes: Sequence[Fix], stopped_by: int | None) -> BaseException:
    """Return the error that a run in other processes ended with, by its exit code."""
    if exit_code == SIGNAL_EXIT_CODE + signal.SIGINT:
        return KeyboardInterrupt()
    if exit_code > SIGNAL_EXIT_CODE:
        return ResourceError(f"a rank was ended by signal {exit_code - SIGNAL_EXIT_CODE}: {why}", fixes)
    error = of_kind(exit_code, why, fixes)
    if isinstance(error, PreemptedError):
        error.signal = stopped_by
    return error


def start_ranks(
    config: Config, mode: SpawnRanks, argv: list[str], *, launched_at: float | None = None, shows_all: bool = True
) -> tuple[int, int | None]:
    """Start the ranks of this node and supervise them until the run ends; `argv` follows `flatout`.

    The run's start counts from the Unix time `launched_at`; by default, from this call. `shows_all` is the console's.
    Return the exit code, and the signal that asked for a stop.
    """
    nodes, faults = mode.nodes, config.faults
    # one error, instead of one for each rank
    require_machine(config, has_ranks=True)
    env = environment() | {LAUNCHED: str(launched_at or time.time())}
    logs = launcher_folder(config.folder)
    rendezvous: Rendezvous
    with ExitStack() as stack:
        if nodes.index == 0:
            # refuse another program's folder and a second run here, before the logs of the first are touched
            run_identity(config.folder)
            with RunLock(config.folder):
                pass
            # the run lives on between two attempts
            stack.enter_context(RunLock(logs))
        if nodes.num_max == 1:
            secret, rendezvous = secrets.token_hex(32), Rendezvous()
        else:
            logs = logs / f"node-{nodes.index}"
            secret = secret_of_nodes(env)
            kind = HostRendezvous if nodes.index == 0 else ClientRendezvous
            rendezvous = kind(nodes, secret, join_s=faults.join_s, log=to_stderr)
        console = stack.enter_context(open_console(shows_all=shows_all))
        console.on_phase("starting ranks")
        out = cast(TextIO, RankOutput(console, sys.stdout, config.folder))
        try:
            supervisor = Supervisor(logs, argv, faults, rendezvous, env | {SECRET: secret}, to_stderr, out)
            return supervisor.run(mode), supervisor.signal
        finally:
            if nodes.index == 0:
                remove_unfinished(config.folder)


class _Following(Thread):
    """Calls callbacks with what a run in other processes writes to its folder, until the `with` block ends.

    The first exception of a callback is kept in `error`, and asks the run to save and stop.
    """

    def __init__(self, folder: Path, callbacks: Sequence[Callback]) -> None:
        super().__init__(daemon=True)
        self.error: BaseException | None = None
        self._folder, self._is_over = folder, Event()
        self._has_callbacks, self._reporter = bool(callbacks), Reporter(*callbacks)
        self._started_at, self._follower = time.time(), RunFollower(folder, from_end=True)

    def __enter__(self) -> Self:
        if self._has_callbacks:
            self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        if self._has_callbacks:
            self.join()

    def run(self) -> None:
        """Deliver records until the run is over, then its end."""
        try:
            while not self._is_over.wait(POLL_S):
                self._deliver()
            self._deliver()
            if (end := read_side_files(self._folder).end) is not None and end.ended_at >= self._started_at:
                self._reporter.end(end)
        except OF_OWN_CODE as error:  # a user's callback may raise anything; train() raises it
            self.error = exit_refused(error) or error
            # the supervisor handles it: the ranks save and stop
            if not self._is_over.is_set() and signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
                signal.raise_signal(signal.SIGTERM)

    def _deliver(self) -> None:
        start = read_side_files(self._folder).start
        if start is not None and start.started_at > self._started_at:
            self._started_at = start.started_at
            self._reporter.start(start)
        for one in self._follower.news():
            if not isinstance(one, Mapping):
                self._reporter.record(one)
            elif "time" in one:
                facts = {name: one[name] for name in one.keys() - {"time", "kind"}}
                if one["kind"] == "saved":
                    self._reporter.saved(int(facts.pop("step")), Path(facts.pop("path")), facts)
                else:
                    self._reporter.event(str(one["kind"]), facts)
