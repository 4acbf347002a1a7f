"""Verbs of the command line, and what other programs with one need: exit codes of errors, rows, and new files."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flatout.config.spelling import spelled
from flatout.errors import Fix, FlatoutError, ResourceError, UsageError, path_error
from flatout.io.host_memory import host_memory_error
from flatout.io.redact import printable, redacted
from flatout.io.redact import rows as rows
from flatout.io.redact import wrapped as wrapped

LONGEST_LINE = 700


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
    run: Callable[[Namespace], int | None]
    """Does it and returns the exit code, if it is not 0. Imports what is slow: `flatout --help` loads every verb."""
    example: str = ""
    """What follows the name in the example of its help and errors."""
    takes_overrides: bool = False
    """Whether words such as `lora.rank=8` may stand anywhere among its options."""
    needs_file: bool = False
    """With `takes_overrides`: whether settings alone, without a file, are an error."""
    spell: Callable[[Fix], str] = str
    """Writes what mends a mistake as words of this verb."""


def exit_code_of(run: Callable[[], int], spell: Callable[[Fix], str] | None = None) -> int:
    """Return what `run` returns, or the exit code of its FlatoutError, which is printed.

    `spell` writes what mends it as words of the command line; None: as the error has it.
    """
    try:
        try:
            return run()
        except Exception as error:
            refused = None if isinstance(error, FlatoutError) else host_memory_error(error) or path_error(error)
            if refused is None:
                raise
            raise refused from error
    except FlatoutError as error:
        # without control characters, which files can contain, or endless lines
        shown = [
            line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} ... ({len(line):,} characters)"
            for line in printable(redacted(spelled(error, spell or error.spell))).split("\n")
        ]
        print(wrapped("error: " + "\n".join(shown), sys.stderr), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def end_with_parent(parent_pid: int) -> None:
    """End this process when its parent ends, whose pid it was given."""
    from flatout.launch import ranks

    ranks.end_with_parent(parent_pid)


def require_yaml(path: Path) -> None:
    """Raise UsageError for a new configuration that another command would read as Python, rows or a script."""
    from flatout.config.yaml_file import YAML_TYPES

    if path.suffix not in YAML_TYPES:
        named = path.with_suffix(".yaml")
        raise UsageError(f"{path}: a configuration is YAML; name it {named}")


def write_new(path: Path, text: str) -> None:
    """Write a new file. Raises UsageError if it exists or has no folder."""
    from flatout.io.durable_io import DurableIO

    content = memoryview(text.encode())
    try:
        DurableIO().create(path, [content], len(content))
    except ResourceError as error:
        if path.is_dir():
            raise UsageError(f"{path}: is a folder; name a file in it, such as {path / 'run.yaml'}") from None
        if isinstance(error.__cause__, FileExistsError):
            free = next(name for k in range(2, 10**6) if not (name := path.with_stem(f"{path.stem}-{k}")).exists())
            text = f"{path}: already exists; choose a different file, such as {free}, or remove it"
            raise UsageError(text) from None
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise UsageError(f"{path}: there is no folder {path.parent}; create it: mkdir -p {path.parent}") from None
        raise
