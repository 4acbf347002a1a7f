"""A verb of the command line, which another distribution may add."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

from flatout.errors import Fix


@dataclass(frozen=True, slots=True)
class Verb:
    """What `flatout NAME` is; a distribution adds one by an entry point `NAME = "module:VERB"` of `flatout.verbs`."""

    name: str
    """The word after `flatout`."""
    group: str
    """Its heading in `flatout --help`: Start, Before a run, Train, See, Use; another one comes last."""
    help: str
    """What it does, in a few words."""
    arguments: Callable[[ArgumentParser], None]
    """Adds its arguments to a parser."""
    run: Callable[[Namespace], int]
    """Does it and returns the exit code. It imports what takes long, since `flatout --help` loads every verb."""
    example: str = ""
    """What follows the name in the example of its help and errors."""
    takes_overrides: bool = False
    """Whether words such as `lora.rank=8` may stand anywhere among its options."""
    needs_file: bool = False
    """With `takes_overrides`: whether settings alone, without a file, are an error."""
    spell: Callable[[Fix], str] = str
    """Writes what mends a mistake as words of this verb."""
