"""`flatout train run.yaml [section.name=value ...]`."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("config", type=Path, help="a YAML file, or a .py file that sets `config` (which runs as code)")
    parser.add_argument(
        "--profile", nargs="?", type=int, const=3, metavar="N",
        help="profile N steps (default 3) after the warm-up: a table of where time went, profile.json and a trace",
    )  # fmt: skip
    parser.add_argument("overrides", nargs="*", metavar="section.name=value", help="such as lora.rank=32 optim.lr=1e-4")


def run(args: argparse.Namespace) -> int:
    """Train; 0 when the run is complete, 75 when it was asked to stop and saved."""
    from flatout.config.read import load_config
    from flatout.errors import UsageError

    if args.profile is not None and args.profile < 1:
        raise UsageError(f"--profile is {args.profile}; expected at least 1 step")

    config = load_config(args.config, args.overrides)
    # torch is imported only once the configuration is known to be right
    from flatout.cli.quiet import quiet_transformers
    from flatout.train.run import train

    quiet_transformers()
    train(config, profile_steps=args.profile)
    return 0
