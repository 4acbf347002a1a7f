"""`flatout train run.yaml [section.name=value ...]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.config.schema import Config
    from flatout.errors import PeerLostError
    from flatout.launch.place import Here, Start
    from flatout.launch.reports import RankLog


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("config", type=Path, help="a YAML file, or a .py file that sets `config` (which runs as code)")
    parser.add_argument(
        "--profile", nargs="?", type=int, const=3, metavar="N",
        help="profile N steps (default 3) after the warm-up: a table of where time went, profile.json and a trace",
    )  # fmt: skip
    parser.add_argument("--nnodes", default=None, metavar="N", help="nodes of the run, or fewest:most; needs --rdzv")
    parser.add_argument("--node-rank", type=int, default=0, metavar="R", help="number of this node, from 0")
    parser.add_argument("--rdzv", metavar="HOST:PORT", help="where node 0 is reached by all, the same on every node")
    parser.add_argument("--tmux", metavar="NAME", help="in a tmux session NAME, with a window NAME_gpu_N for each GPU")
    parser.add_argument("--dry-run", action="store_true", help="with --tmux: print the commands, run none")
    parser.add_argument("--device-map", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="section.name=value", help="such as lora.rank=32 optim.lr=1e-4")


def run(args: argparse.Namespace) -> int:
    """Train; 0 when the run is complete, 75 when it was asked to stop and saved, else the failing rank's own code."""
    from flatout.config.read import load_config
    from flatout.errors import UsageError
    from flatout.launch.nodes import parse_nodes
    from flatout.launch.place import Start, decide
    from flatout.parallel.rank import adopt, environment, growing_segments

    if args.profile is not None and args.profile < 1:
        raise UsageError(f"--profile is {args.profile}; expected at least 1 step")
    if args.device_map is not None:
        raise UsageError(
            "--device-map splits a model for answers (`flatout chat --device-map auto`); in training all but one GPU "
            "would wait at any time: set strategy=fsdp, which cuts the model over gpus=[0,1,...] and uses them all"
        )
    if args.nnodes is None and (args.rdzv is not None or args.node_rank):
        raise UsageError("--rdzv and --node-rank need --nnodes, the number of nodes")

    config = load_config(args.config, args.overrides)
    nodes = parse_nodes(args.nnodes, args.node_rank, args.rdzv) if args.nnodes else None
    if args.dry_run and args.tmux is None:
        raise UsageError("--dry-run is only for --tmux; `flatout plan` shows what a run will do")
    place = decide(environment(), gpus=config.gpus, on_cpu=config.device == "cpu", nodes=nodes)
    profile = [] if args.profile is None else [f"--profile={args.profile}"]
    words = ["train", str(args.config), *args.overrides, *profile]
    if args.tmux is not None:
        if nodes is not None:
            words += [f"--nnodes={args.nnodes}", f"--node-rank={args.node_rank}", f"--rdzv={args.rdzv}"]
        return start_in_tmux(config, place, args.tmux, words, dry_run=args.dry_run)
    if isinstance(place, Start):
        return start_ranks(config, place, words)
    adopt({**growing_segments(environment()), **place.environment})
    return train_here(config, args.profile)


def start_ranks(config: Config, start: Start, words: list[str]) -> int:
    """Start the ranks of this node and watch over them until the run ends."""
    from flatout.launch.command import Attempt
    from flatout.launch.here import address_towards, interface_of
    from flatout.launch.supervise import Policy, Supervisor
    from flatout.parallel.rank import environment

    logs = config.folder / "logs"
    attempt = Attempt(start, words, run_id=config.name)
    if start.nodes.num_max > 1:
        logs = logs / f"node-{start.nodes.index}"
        address = address_towards(start.nodes)
        attempt = Attempt(start, words, config.name, address, interface_of(address))
    policy = Policy(config.faults.max_restarts, config.faults.min_ranks)
    return Supervisor(logs, policy, environment(), lambda line: print(line, file=sys.stderr), sys.stdout).run(attempt)


def start_in_tmux(config: Config, place: Here | Start, name: str, words: list[str], *, dry_run: bool) -> int:
    """The same command in a tmux session, or on the console what would make it."""
    from flatout.launch.place import Start
    from flatout.launch.tmux import commands, shown, start
    from flatout.parallel.rank import environment

    folder = config.folder.absolute()
    logs = [folder / "train.log"]
    if isinstance(place, Start):
        latest = folder / "logs" / (f"node-{place.nodes.index}/latest" if place.nodes.num_max > 1 else "latest")
        num_windows = int(place.num_procs) if place.num_procs.isdigit() else 1
        logs = [latest / f"rank-{rank}.log" for rank in range(num_windows)]
    made = commands(name, [sys.executable, "-m", "flatout", *words], logs, Path.cwd(), environment())
    if dry_run:
        print(shown(made))
        return 0
    start(made, name)
    print(f"started; watch it with `tmux attach -t {name}` or `tmux attach -t {name}_gpu_0`")
    return 0


def train_here(config: Config, profile_steps: int | None) -> int:
    """Train in this process, alone or as one rank."""
    from flatout.launch.command import LOGS_VARIABLE
    from flatout.launch.reports import RankLog
    from flatout.parallel.rank import Rank, environment

    log = None
    if folder := environment().get(LOGS_VARIABLE):
        log = RankLog(Path(folder), Rank.from_env().index)
        log.begin()
    try:
        _train(config, profile_steps, log)
    except BaseException as error:
        if log is not None:
            interrupted = 130 if isinstance(error, KeyboardInterrupt) else 1
            log.end(getattr(error, "exit_code", interrupted), error)
        raise
    if log is not None:
        log.end(0)
    return 0


def _train(config: Config, profile_steps: int | None, log: RankLog | None) -> None:
    # torch is imported only once the configuration is known to be right
    from flatout.cli.quiet import quiet_transformers
    from flatout.train.run import train

    def on_loss(error: PeerLostError) -> None:
        if log is not None:
            log.end(error.exit_code, error)

    quiet_transformers()
    train(config, profile_steps=profile_steps, on_loss=on_loss)
