"""The verb `convert`, as `flatout --help` shows it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from flatout.api import Verb


def _late(name: str) -> Callable[[Any], Any]:
    """Return a function of convert.py that is imported when it is called: `flatout --help` loads every verb."""
    return lambda given: getattr(import_module("flatout_migrate.convert"), name)(given)


VERB = Verb(
    "convert",
    "Start",
    "translate a config or script of Axolotl, TRL, Unsloth and others",
    _late("add_arguments"),
    _late("run"),
    "axolotl.yaml --to run.yaml",
    takes_overrides=True,
    needs_file=True,
)
