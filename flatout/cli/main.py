"""`flatout VERB`: finds the verb's file, runs it, turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Sequence

from flatout import __version__
from flatout.errors import FlatoutError

# verb -> what it does; flatout/cli/<verb>.py has add_arguments(parser) and run(args) -> exit code
VERBS = {
    "demo": "make a data set and a tiny model, train, evaluate, answer: the whole road in minutes",
    "init": "write a commented configuration that runs unmodified",
    "data": "build, show or list tokenised data sets",
    "plan": "print what a run will do, step by step, before any GPU is held",
    "verify": "prove that packing, accumulation, ranks and strategies leave this run's step as it is",
    "doctor": "look at the machine, the run folder and the disks before anything is held",
    "train": "fine-tune",
    "launch": "write an sbatch script or a Kubernetes manifest for a run, to read and submit",
    "bench": "measure useful tokens a second and memory on this machine, beside other trainers where wanted",
    "chat": "talk to a run, an adapter or a model",
    "merge": "fold an adapter into its base model's weights",
}
WITH_OVERRIDES = ("plan", "verify", "doctor", "train", "launch")
OVERRIDE = re.compile(r"[a-z_]+(\.[a-z0-9_]+)*=")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the process's exit code (0 done, 2 usage, 3 data, ... see flatout/errors.py)."""
    argv = overrides_first(list(sys.argv[1:] if argv is None else argv))
    parser = argparse.ArgumentParser(prog="flatout", description="Exact, planned, flat-out fine-tuning.")
    parser.add_argument("--version", action="version", version=f"flatout {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    wanted = argv[0] if argv and argv[0] in VERBS else None
    for verb, what in VERBS.items():
        subparser = verbs.add_parser(verb, help=what, description=what[:1].upper() + what[1:] + ".")
        # only the asked verb's file is imported, so that --help stays instant
        if verb == wanted:
            importlib.import_module(f"flatout.cli.{verb}").add_arguments(subparser)
    args = parser.parse_args(argv)
    try:
        code: int = importlib.import_module(f"flatout.cli.{args.verb}").run(args)
    except FlatoutError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return code


def overrides_first(argv: list[str]) -> list[str]:
    """Put `section.name=value` words right behind the configuration, wherever they stand among the options.

    argparse takes positional words only in one piece: `plan run.yaml --ranks 2 lora.rank=8` would be an error.
    """
    if not argv or argv[0] not in WITH_OVERRIDES:
        return argv
    overrides = [word for word in argv if OVERRIDE.match(word)]
    rest = [word for word in argv if not OVERRIDE.match(word)]
    return [*rest[:2], *overrides, *rest[2:]] if rest[1:] and not rest[1].startswith("-") else argv


if __name__ == "__main__":
    sys.exit(main())
