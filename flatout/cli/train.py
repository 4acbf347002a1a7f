"""`flatout train run.yaml [section.name=value ...]`."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from flatout.api.restart import move_aside
from flatout.api.start import start_ranks
from flatout.cli.parser import COUNT, add_settings
from flatout.cli.screen import import_without_gc, quiet_transformers, with_columns
from flatout.config.read import load_with_files
from flatout.config.schema import Config, DataConfig
from flatout.data.build import refuse_early
from flatout.environment import LAUNCHED, LOGS, PARENT, environment, prepare_torch, whole_number
from flatout.errors import Fix, FlatoutError, ResourceError, UsageError
from flatout.io.gpu_driver import open_gpu, require_gpu_driver
from flatout.io.stop_signals import SIGNAL_EXIT_CODE
from flatout.launch import tmux
from flatout.launch.attempt import UNCAUGHT_EXIT_CODE, RankReport
from flatout.launch.launch_mode import LaunchMode, RunHere, SpawnRanks, choose_launch_mode, parse_nodes
from flatout.launch.ranks import MODULE, end_with_parent
from flatout.parallel.rank import Rank
from flatout.track.console import ConsoleCallback
from flatout.track.run_log import read_run
from flatout.track.start_up import StartUpClock, bytecode_problem, process_launch
from flatout.track.summary import next_commands, summarize, summary_lines

# modules that take long to import
HEAVY_IMPORTS = ("torch", "transformers.modeling_utils", "flatout.trainer.run")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    add = parser.add_argument
    add_settings(parser, "lora.rank=32 optim.lr=1e-4")
    profile = "profile N steps (default 3) after warm-up; prints time and energy, and writes profile.json and a trace"
    add("--profile", nargs="?", type=COUNT, const=3, metavar="N", help=profile)
    add("--restart", action="store_true", help="start over: move the folder of an earlier run aside, and say where")
    add("-v", "--verbose", action="store_true", help="on a terminal, show every start-up stage, as train.log does")
    add("--yes", action="store_true", help="accept the proposed columns if the rows fit no format")
    add("--nnodes", default=None, metavar="N", help="number of nodes, or MIN:MAX; needs --rdzv")
    add("--node-rank", type=int, default=0, metavar="R", help="index of this node, from 0")
    add("--rdzv", metavar="HOST:PORT", help="address of node 0, the same on every node")
    add("--tmux", metavar="NAME", help="run in a new tmux session NAME, with a window NAME_gpu_N per GPU")
    add("--dry-run", action="store_true", help="with --tmux: print the commands without running them")


def run(args: argparse.Namespace) -> int:
    """Train. Returns 0 if the run is complete, 75 if it was stopped and saved, else the failing rank's exit code."""
    own_launch = first_launch = process_launch()
    if PARENT in environment():
        # before torch is imported, which is slow, so that a killed launcher leaves no rank behind
        end_with_parent(whole_number(environment(), PARENT))
        first_launch = float(environment().get(LAUNCHED, own_launch))
    start_up = StartUpClock(first_launch, "starting Python" if first_launch == own_launch else "starting the launcher")
    start_up.begin("starting Python", at=own_launch)
    start_up.begin("reading the settings")
    if args.nnodes is None and (args.rdzv is not None or args.node_rank):
        text = "--rdzv and --node-rank need --nnodes, the number of nodes"
        raise UsageError(text, [Fix({"--nnodes": 2}, "for example")])
    config, files = load_with_files(args.config, args.overrides)
    nodes = parse_nodes(args.nnodes, args.node_rank, args.rdzv) if args.nnodes else None
    if args.dry_run and args.tmux is None:
        raise UsageError("--dry-run needs --tmux; `flatout plan` shows what a run will do")
    mode = choose_launch_mode(environment(), gpus=config.gpus, on_cpu=config.device == "cpu", nodes=nodes)
    profile = [] if args.profile is None else [f"--profile={args.profile}"]
    argv = ["train", str(args.config), *args.overrides, *profile, *(["--yes"] if args.yes else [])]
    if args.tmux is not None:
        if nodes is not None:
            argv += [f"--nnodes={args.nnodes}", f"--node-rank={args.node_rank}", f"--rdzv={args.rdzv}"]
        argv += [*(["--restart"] if args.restart else []), *(["-v"] if args.verbose else [])]
        _start_in_tmux(config, mode, args.tmux, argv, dry_run=args.dry_run)
        return 0
    if args.restart and (nodes is None or nodes.index == 0):
        config = _moved_aside(config, mode, files, argv, takes=args.yes)
    started_at = time.time()
    try:
        if isinstance(mode, SpawnRanks):
            return start_ranks(config, mode, argv, launched_at=own_launch, shows_all=args.verbose)[0]
        prepare_torch(mode.environment)

        def train(data: DataConfig) -> None:
            _train_here(config.model_copy(update={"data": data}), args, start_up)

        with_columns(train, config.data, takes=args.yes)
        return 0
    finally:
        # whoever started the ranks prints it once, after the last restart
        if PARENT not in environment() and Rank.from_env().is_first and (nodes is None or nodes.index == 0):
            _print_summary(config.folder, started_at)


def _moved_aside(config: Config, mode: LaunchMode, files: list[Path], argv: list[str], *, takes: bool) -> Config:
    """Move the earlier run aside, but the `files` of the settings, which ranks read again.

    Return the settings with columns that were agreed to, which `argv` tells ranks.
    """
    if isinstance(mode, RunHere):
        prepare_torch(mode.environment)  # the checks import torch

    def move(data: DataConfig) -> Config:
        with_data = config.model_copy(update={"data": data})
        move_aside(with_data, environment(), mode, files)
        return with_data

    moved = with_columns(move, config.data, takes=takes)
    argv += ["--yes"] if moved.data is not config.data and not takes else []
    return moved


def _open_device(config: Config) -> None:
    """Start the GPU, if there may be one, while torch is imported. Raises ResourceError if none can be."""
    if config.wanted_device == "cuda":
        require_gpu_driver("device: cuda")
    if config.wanted_device != "cpu":
        open_gpu(Rank.from_env().local_index)


def _print_summary(folder: Path, started_at: float) -> None:
    """Print what a run came to, unless it has no step or another process wrote its end."""
    with suppress(FlatoutError, OSError):
        log = read_run(folder)
        if log.steps and log.end is not None and log.end.ended_at >= started_at:
            is_short = log.end.outcome != "complete"
            print("\n".join(summary_lines(summarize(log), next_commands(log), is_short=is_short)))


def _start_in_tmux(config: Config, mode: LaunchMode, name: str, argv: list[str], *, dry_run: bool) -> None:
    """Run the same command in a tmux session; with `dry_run`, only print the tmux commands."""
    folder = config.folder.absolute()
    logs = [folder / "train.log"]
    if isinstance(mode, SpawnRanks):
        latest = folder / "logs" / (f"node-{mode.nodes.index}/latest" if mode.nodes.num_max > 1 else "latest")
        num_windows = 1 if mode.num_procs == "gpu" else mode.num_procs
        logs = [latest / f"rank-{rank}.log" for rank in range(num_windows)]
    made = tmux.commands(name, [sys.executable, *MODULE, *argv], logs, environment())
    if dry_run:
        # tmux starts the run where it is called
        print("\n".join(map(shlex.join, [["cd", str(Path.cwd())], *made])))
        return
    tmux.start(made, name, Path.cwd())
    print(f"started; watch it with `tmux attach -t {name}` or `tmux attach -t {name}_gpu_0`")


def _train_here(config: Config, args: argparse.Namespace, start_up: StartUpClock) -> None:
    """Train in this process, alone or as one rank."""
    folder, is_first = environment().get(LOGS), Rank.from_env().is_first
    report = RankReport(Rank.from_env().index, os.getpid(), time.time())

    def end(exit_code: int, error: BaseException | None = None) -> None:
        # a lost peer is reported by the watch's thread and again by this one; the last report counts
        if folder:
            # a full disk must not hide the error: the launcher still has the exit code
            with suppress(ResourceError):
                report.ended(exit_code, error).write(Path(folder))

    if folder:
        report.write(Path(folder))
    try:
        with ConsoleCallback(every_record=config.log_every_steps != 1, shows_all=args.verbose) as console:
            if is_first and not config.learns_from_answers:
                console.on_phase("reading the first rows")
                refuse_early(config.data, config.model.name)
            _open_device(config)
            # import torch only after the configuration is checked, and what takes long one by one, to time it
            for module in HEAVY_IMPORTS:
                start_up.begin(phase := f"importing {module.partition('.')[0]}")
                if is_first:
                    console.on_phase(phase)
                import_without_gc(module)
            if is_first and (problem := bytecode_problem(("torch", "transformers"))):
                console.on_stage("imports", problem, "yellow")
            from flatout.profile.profiler import Profiler
            from flatout.trainer.run import train

            quiet_transformers()
            profilers = []
            if args.profile is not None:
                profilers.append(Profiler(config.folder, args.profile, partial(console.on_stage, "profile")))
            train(
                config,
                callbacks=profilers,
                console=console,
                on_peer_lost=lambda error: end(error.exit_code, error),
                start_up=start_up,
                # a .py configuration may change anything in this process
                reuse_measured=args.config.suffix != ".py",
            )
    except BaseException as error:
        unnamed = SIGNAL_EXIT_CODE + signal.SIGINT if isinstance(error, KeyboardInterrupt) else UNCAUGHT_EXIT_CODE
        end(getattr(error, "exit_code", unnamed), error)
        raise
    end(0)
