"""The verb `convert`, as `flatout --help` shows it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from flatout.api import Verb


def _arguments(parser: ArgumentParser) -> None:
    from flatout_migrate.convert import add_arguments  # lazy: `flatout --help` loads every verb

    add_arguments(parser)


def _run(args: Namespace) -> int:
    from flatout_migrate.convert import run

    return run(args)


VERB = Verb(
    "convert",
    "Start",
    "translate a config or script from Axolotl, LLaMA-Factory, ms-swift, TRL or Unsloth",
    _arguments,
    _run,
    "axolotl.yaml --to run.yaml",
    takes_overrides=True,
    needs_file=True,
)
