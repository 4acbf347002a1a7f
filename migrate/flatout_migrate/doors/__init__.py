"""Commands of other trainers, on flatout; `names/` has the packages that their scripts import."""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from flatout_migrate.translation import read_table

_TYPES = {"int": int, "float": float, "path": Path}


def run_command() -> int:
    """Run the command that this process was started as, unless another installed package has one of that name."""
    name = Path(sys.argv[0]).stem
    for one in entry_points(group="console_scripts", name=name):
        if one.dist is not None and one.dist.name != "flatout-migrate":
            print(
                f"error: {name} is also a command of {one.dist.name} {one.dist.version}, which is installed here; keep "
                f"one: pip uninstall {one.dist.name}, or pip uninstall flatout-migrate and reinstall the other",
                file=sys.stderr,
            )
            return 2
    module = import_module("flatout_migrate.doors.hypersloth_commands")
    return int(getattr(module, name.removeprefix("hypersloth-").replace("-", "_"))())


def parser_of(script: str, *more: str, **options: Any) -> ArgumentParser:
    """Return the parser of a script in tables/flags.yaml, with the options of `more`; `options` are argparse's."""
    parser, flags = ArgumentParser(prog=script, **options), read_table("flags")
    for group, rows in (each for name in (script, *more) for each in flags.get(name, {}).items()):
        to: Any = parser if group in ("options", "positional arguments") else parser.add_argument_group(group)
        to = parser.add_mutually_exclusive_group(required=True) if group == "one of" else to
        for names, words in rows.items():
            kind = {"type": _TYPES[words["type"]]} if "type" in words else {}
            to.add_argument(*names.split(), **{**words, **kind})
    return parser


def flatout_command(words: Sequence[str]) -> int:
    """Run `flatout WORDS` in this process; return its exit code."""
    [command] = entry_points(group="console_scripts", name="flatout")
    return int(command.load()(words))
