"""Errors a user can act on: each says where, what was found and what to do; each class has its exit code."""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# removed from library messages: exception class names, the repr of types, pydantic's link
_CLASS_NAME = re.compile(r"\b(?:[\w.]*\.)?[A-Z]\w*(?:Error|Exception): ")
_TYPE = re.compile(r"<class '([\w.]+)'>")
_LINK = re.compile(r" For further information visit \S+")
PLAIN_TYPES = (bool, int, float, str, list, dict, type(None))
# begins a line of an error that says how to go on; config/spelling.py spells it for the reader
STEP = "  > "


# what a person's own code may raise; a KeyboardInterrupt is of the keyboard
OF_OWN_CODE = (Exception, SystemExit, GeneratorExit)


class FlatoutError(Exception):
    """Base of all errors that are shown without a traceback. `exit_code` is the process's exit status."""

    exit_code = 1


class UsageError(FlatoutError):
    """A wrong command line or configuration."""

    exit_code = 2


class PackingError(UsageError):
    """Packing is not exact for a model, which only its start-up can find out; batch.layout: auto then takes rows."""


class SharedPrefixError(PackingError):
    """Shared prefixes are not exact for a model; batch.share_prefix: auto then shares none."""


class DataError(FlatoutError):
    """Bad or missing training data."""

    exit_code = 3


class CheckpointError(FlatoutError):
    """A checkpoint is missing, damaged or does not belong to this run."""

    exit_code = 4


class NumericError(FlatoutError):
    """A loss or gradient is not finite."""

    exit_code = 5


class ResourceError(FlatoutError):
    """No GPU, not enough memory or disk, or a folder that another process holds."""

    exit_code = 6


class PeerLostError(FlatoutError):
    """Another rank of this run died or stopped answering.

    `rank` is its number and `step` its last reported number of completed steps; None if unknown. If the lost rank
    failed with its own error, that exit code is passed on, so that all ranks exit with the same code.
    """

    exit_code = 7

    def __init__(
        self, message: str, rank: int | None = None, *, step: int | None = None, exit_code: int = exit_code
    ) -> None:
        self.rank, self.step, self.exit_code = rank, step, exit_code
        super().__init__(message)


class SecurityError(FlatoutError):
    """Input that would run code or escape its folder."""

    exit_code = 8


class PreemptedError(FlatoutError):
    """The run was asked to stop, by this `signal` if it is known, saved a checkpoint and can be resumed."""

    exit_code = 75

    def __init__(self, message: str, signal: int | None = None) -> None:
        self.signal = signal
        super().__init__(message)


class ProblemsError(UsageError):
    """Several problems reported at once, one per line, then `steps` as of `next_steps`."""

    def __init__(self, what: str, problems: list[str], steps: str = "") -> None:
        self.problems = problems
        lines = "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(f"{what}: {len(problems)} problem{'s' if len(problems) != 1 else ''}{lines}{steps}")


def next_steps(*steps: tuple[str, str]) -> str:
    """Return lines that end an error: changed settings, such as `name=run-2`, or `--restart`, and what each does."""
    return "".join(f"\n{STEP}{words}  {why}" for words, why in steps)


def exit_refused(error: BaseException) -> UsageError | None:
    """Return the error for a sys.exit of a person's own code, which would end the process as if all were done."""
    if not isinstance(error, SystemExit | GeneratorExit):
        return None
    last = traceback.extract_tb(error.__traceback__)[-1]
    if Path(last.filename).is_relative_to(Path(__file__).parent):
        return None  # of a signal's handler
    called = f"sys.exit({error.code!r:.40})" if isinstance(error, SystemExit) else type(error).__name__
    return UsageError(f"{last.filename}:{last.lineno}: {called} does not end a run; raise an error there, or return")


@contextmanager
def exits_refused() -> Iterator[None]:
    """Raise UsageError for a sys.exit of a person's own code in the block."""
    try:
        yield
    except BaseException as error:
        if (refused := exit_refused(error)) is None:
            raise
        raise refused from error


def counted(number: float, noun: str, form: str = ",") -> str:
    """Return a number with its noun: 1 step, 2 steps."""
    return f"{number:{form}} {noun}{'' if number == 1 else 's'}"


def install(extras: str) -> str:
    """Return the command that adds packages of flatout's extras, such as `images`, to this installation.

    flatout is on no package index: from a clone, pip installs its folder; otherwise the packages themselves.
    """
    folder = Path(__file__).parents[1]
    if (folder / "pyproject.toml").is_file():
        return f"pip install -e '{folder}[{extras}]'"
    from importlib import metadata  # lazy: only this error needs them

    from packaging.requirements import Requirement

    try:
        every = [Requirement(text) for text in metadata.requires("flatout") or ()]
    except metadata.PackageNotFoundError:
        every = []
    needed = [
        f"'{each.name}{each.specifier}'" for each in every
        if each.marker and not each.marker.evaluate({"extra": ""})
        and any(each.marker.evaluate({"extra": extra}) for extra in extras.split(","))
    ]  # fmt: skip
    return f"pip install {' '.join(needed)}" if needed else f"install flatout with its extra {extras}"


_REFUSED_PATHS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR}


def path_error(error: BaseException) -> ResourceError | None:
    """Return a ResourceError in place of one with which the system refuses a path, else None."""
    if not isinstance(error, OSError) or error.errno not in _REFUSED_PATHS or not isinstance(error.filename, str):
        return None
    return ResourceError(f"{error.filename}: {error.strerror}; check its permissions, or name a different path")


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, or its class name if the text is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def reason_of(error: BaseException) -> str:
    """Say why a library failed on a user's file: one line, at most 300 characters, without Python class names."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeError):
        return "it is not valid UTF-8"
    if isinstance(error, MemoryError | OverflowError):
        return "a number or string in it is far too large"
    if isinstance(error, KeyError) and error.args:
        return f"{error.args[0]!r:.200} is unknown or missing"
    if isinstance(error, AttributeError) and error.name and not isinstance(error.obj, PLAIN_TYPES):
        return f"{error.name!r:.200} is unknown or missing"
    if isinstance(error, AttributeError | IndexError | TypeError):
        return "a value has an unexpected type or number of parts"
    text = _TYPE.sub(r"\1", _CLASS_NAME.sub("", _LINK.sub("", " ".join(str(error).split()))))
    text = text.replace("NoneType", "null")
    return text[:300] or "no reason was given"
