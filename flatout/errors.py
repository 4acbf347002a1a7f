"""Errors a user can act on: each says where, what was found and what to do; each class has its exit code."""

from __future__ import annotations

import errno
import json
import re
import shlex
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

# removed from library messages: exception class names, the repr of types, pydantic's link
_CLASS_NAME = re.compile(r"\b(?:[\w.]*\.)?[A-Z]\w*(?:Error|Exception): ")
_TYPE = re.compile(r"<class '([\w.]+)'>")
_LINK = re.compile(r" For further information visit \S+")
PLAIN_TYPES = (bool, int, float, str, list, dict, type(None))
_PLAIN = re.compile(r"[^\W\d][\w./+-]*(?: [\w./+-]+)*|(?:\.{0,2}|~)/[\w./+-]*")
_YAML_WORDS = {"true", "false", "yes", "no", "on", "off", "null"}


# what a person's own code may raise; a KeyboardInterrupt is of the keyboard
OF_OWN_CODE = (Exception, SystemExit, GeneratorExit)
# modules that run collectives
_COLLECTIVES = ("torch.distributed", "flatout.parallel.control_group", "flatout.parallel.strategies.buckets")


@dataclass(frozen=True, slots=True)
class Fix:
    """What mends a mistake. The door through which it came spells it: see config/spelling.py."""

    settings: Mapping[str, Any]
    """What to set, together: dotted names or a verb's options such as `--out`, with plain values. Empty for a way out
    that is no setting, such as another model."""
    why: str = ""
    """What that does, in a few words; "for example" where the person has to choose the value. Without settings, what to
    do."""

    def __str__(self) -> str:
        return shlex.join(words_of(self.settings)) or self.why


def words_of(settings: Mapping[str, Any]) -> list[str]:
    """Return settings and options as words of a command: `lora.rank=8 --restart`."""
    return [word for name, value in settings.items() for word in _words(name, value)]


def _words(name: str, value: Any) -> Iterator[str]:
    if name[:2] != "--":
        yield f"{name}={as_yaml_word(value)}"
    elif isinstance(value, list | dict):  # such as --special-token, once for each
        parts = value if isinstance(value, list) else [f"{key}={as_text(part)}" for key, part in value.items()]
        for part in parts:
            yield from (name.removesuffix("s"), as_text(part))
    else:
        yield from [name] if value is True else (name, as_text(value))


class FlatoutError(Exception):
    """Base of all errors that are shown without a traceback: what is wrong, in one sentence, and each way out."""

    exit_code = 1
    """The process's exit status."""
    spell: Callable[[Fix], str] = staticmethod(str)
    """Writes a fix as the door does through which the mistake came (config/spelling.py); else as words of a command."""

    def __init__(self, text: str = "", fixes: Sequence[Fix] = ()) -> None:
        super().__init__(text)
        self.text, self.fixes = text, tuple(fixes)

    def __str__(self) -> str:
        said, others = self.text, "; "
        for fix in self.fixes:
            if not fix.settings:
                said += others + fix.why
            elif step := self.spell(fix):
                said, others = f"{said}\n  try {step}" + (f"  # {fix.why}" if fix.why else ""), "\n  or "
        return said

    def at(self, place: object) -> Self:
        """Return the same error with the name of a file or a field before its text."""
        error = type(self).__new__(type(self), f"{place}: {self.text}")
        error.__dict__.update(self.__dict__, text=f"{place}: {self.text}")
        return error

    @property
    def kind(self) -> str:
        """The name of its class, or of the one of this file that it is derived from, for `of_kind`."""
        return next(one.__name__ for one in type(self).__mro__ if one.__module__ == __name__)


class SettingError(ValueError):
    """What a validator of the schema raises: pydantic adds the setting's name; `fixes` are as those of FlatoutError."""

    def __init__(self, text: str, *fixes: Fix) -> None:
        super().__init__(text)
        self.fixes = fixes


def as_text(value: Any) -> str:
    """Return a plain value as YAML on one line."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_inner_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_inner_text(key)}: {_inner_text(inner)}' for key, inner in value.items())}}}"
    return str(value)


def as_yaml_word(value: Any) -> str:
    """Return a value as YAML on one line: a text in quotes if YAML would take it for something else."""
    import yaml  # lazy: only errors need it

    try:
        is_plain = not isinstance(value, str) or yaml.safe_load(value) == value
    except yaml.YAMLError:
        is_plain = False
    return as_text(value) if is_plain else json.dumps(value)


def _inner_text(value: Any) -> str:
    """Return a part of a list or mapping as YAML: a text in quotes if it would be read as something else."""
    is_plain = not isinstance(value, str) or (_PLAIN.fullmatch(value) and value.lower() not in _YAML_WORDS)
    return as_text(value) if is_plain else json.dumps(value, ensure_ascii=False)


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
    """Another rank of this run died or stopped answering."""

    exit_code = 7
    """That of the lost rank if it failed with its own error, so that all ranks exit with the same code."""
    rank: int | None = None
    """The number of the lost rank; None if unknown."""
    step: int | None = None
    """Its last reported number of completed steps; None if unknown."""

    def __init__(
        self, text: str, rank: int | None = None, *, step: int | None = None, exit_code: int = exit_code
    ) -> None:
        self.rank, self.step, self.exit_code = rank, step, exit_code
        super().__init__(text)


class SecurityError(FlatoutError):
    """Input that would run code or escape its folder."""

    exit_code = 8


class PreemptedError(FlatoutError):
    """The run was asked to stop, saved a checkpoint and can be resumed."""

    exit_code = 75
    signal: int | None = None
    """The signal that asked for it, if it is known."""

    def __init__(self, message: str, signal: int | None = None) -> None:
        self.signal = signal
        super().__init__(message)


class ProblemsError(UsageError):
    """Several problems of `what`, reported at once, one per line."""

    problems: Sequence[str] = ()

    def __init__(self, what: str, problems: Sequence[str], fixes: Sequence[Fix] = ()) -> None:
        self.problems = problems
        lines = "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(f"{what}: {counted(len(problems), 'problem')}{lines}", fixes)


_KINDS = [kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, FlatoutError)]


def of_kind(kind: str | int, text: str, fixes: Sequence[Fix] = ()) -> FlatoutError:
    """Make an error again that another process had, by its `kind` or its exit code; what only it knew is None."""
    error_class = next((one for one in _KINDS if kind in (one.__name__, one.exit_code)), FlatoutError)
    error = error_class.__new__(error_class, text)
    FlatoutError.__init__(error, text, fixes)
    return error


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


def is_of_a_collective(error: BaseException) -> bool:
    """Whether an error came of a collective, and so of another rank; decided without torch.

    gloo and process groups raise RuntimeErrors for a lost peer. A collective of an autograd function or a compiled
    layer has no frame of its own in the backward pass, but gloo names the place in its source.
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}
    modules = (str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__))
    is_inside = "gloo/transport/" in str(error) or any(module.startswith(_COLLECTIVES) for module in modules)
    return bool(kinds & {"PeerLostError", "DistError"}) or ("RuntimeError" in kinds and is_inside)


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


@contextmanager
def needs_extra(what: str, extras: str, *fixes: Fix) -> Iterator[None]:
    """Raise UsageError with the command that installs what `what` needs, for an import in the block that fails."""
    try:
        yield
    except ImportError as error:
        raise UsageError(f"{what} needs the package {error.name}: {install(extras)}", fixes) from error


def install_beside(folder: str) -> str:
    """Return the command that installs a distribution which is a folder of flatout's clone, such as `migrate`."""
    path = Path(__file__).parents[1] / folder
    is_clone = (path / "pyproject.toml").is_file()
    return f"pip install -e '{path}'" if is_clone else f"pip install ./{folder}, in a clone of flatout"


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
