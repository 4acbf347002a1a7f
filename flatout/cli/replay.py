"""`flatout replay`: takes steps of a run again and compares every bit."""

from __future__ import annotations

import argparse

from flatout.cli.parser import COUNT
from flatout.cli.screen import import_transformers, progress_console, show_gpus
from flatout.config.read import load_config
from flatout.errors import NumericError, counted
from flatout.view.open_runs import find_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("run", type=find_run, metavar="RUN", help="a run, whose checkpoints and rounds are read")
    what = "take the steps up to this one again, from the checkpoint before it"
    parser.add_argument("--step", type=COUNT, required=True, metavar="N", help=what)


def run(args: argparse.Namespace) -> None:
    """Print each step and whether it is equal. Raises NumericError (exit code 5) if any bit differs."""
    show_gpus(load_config(args.run / "config.yaml"))
    import_transformers()
    from flatout.trainer.replay import replay

    with progress_console() as console:
        outcome = replay(args.run, args.step, console)
    for step, differs in outcome.differences.items():
        said = "; ".join(f"{name} was {then}, is {now}" for name, (then, now) in differs.items())
        print(f"step {step:,}: {said or 'equal'}")
    if outcome.checkpoint is not None:
        count = len(outcome.differing_tensors)
        said = f"{counted(count, 'tensor')} differ, such as {outcome.differing_tensors[0]}" if count else "equal"
        print(f"weights and optimizer after step {outcome.checkpoint:,}: {said}")
    if not outcome.is_equal:
        raise NumericError("a step is not the same again; a GPU has the same bits with deterministic=true")
    print(f"{counted(len(outcome.differences), 'step')} from step {outcome.start:,} on, the same to the bit")
