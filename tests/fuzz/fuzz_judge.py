"""One case of the fuzz, what came of it, and whether that may be."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

# 0 done, 2 usage, 3 data, 4 checkpoint, 5 numeric, 6 resources, 7 peer lost, 8 security, 75 preempted and saved
EXIT_CODES = {0, 2, 3, 4, 5, 6, 7, 8, 75}
LONGEST_LINE = 1000

# what an error of Python or of a library says, and no user can act on
_RAW = re.compile(
    r"Traceback \(most recent|valid dictionary or instance|NoneType|object (is not|has no|does not|cannot)\b"
    r"|\b[A-Z][A-Za-z]*(Error|Exception)\b|\[Errno \d+\]|codec can't|<(class|object|function|module) |pydantic"
    r"|input_value|unhashable type|unsupported operand|not supported between|invalid literal for|could not convert"
    r"|os\.PathLike|list indices must|must be real number|got an unexpected keyword|positional argument"
    r"|not enough values to unpack|too many values to unpack|out of range for|maximum recursion"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Case:
    """A command in a folder of its own, which `make` fills.

    `must` says what the command has to do; a refusal's message has to hold one of the words of `about`. `keeps` are
    paths below the folder whose content may never change. `done` looks at a success and returns a complaint or None.
    `refused` does the same for a refusal, by what was told.
    `disk_bytes` is the longest file that the command may write (a full disk). Cases are `drawn` where they are too many
    to run them all each time. `quotes` lets a refusal name the error of the user's own code.
    """

    name: str
    argv: tuple[str, ...]
    make: Callable[[Path], None]
    must: Literal["refuse", "accept", "either"] = "either"
    about: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    keeps: tuple[str, ...] = ()
    done: Callable[[Path, str], str | None] | None = None
    refused: Callable[[Path, str], str | None] | None = None
    disk_bytes: int | None = None
    drawn: bool = False
    quotes: bool = False


@dataclass(frozen=True)
class Outcome:
    """`code` is the exit code, None when an exception escaped or the process died; `raised` tells which and where."""

    code: int | None
    out: str = ""
    err: str = ""
    raised: str = ""
    complaint: str | None = None
    hung: bool = False


def fault(case: Case, outcome: Outcome) -> str | None:
    """Why this outcome may not be, in one line; None when it may."""
    if outcome.raised:
        return f"escaped: {outcome.raised}"
    if "Traceback (most recent" in outcome.out + outcome.err:
        return "printed a traceback"
    if found := _CONTROL.search(outcome.out + outcome.err):
        return f"control character {found.group()!r} reaches the terminal"
    if outcome.code not in EXIT_CODES:
        return f"exit code {outcome.code}: {_last_line(outcome.err)}"
    if outcome.complaint is not None:
        return outcome.complaint
    if outcome.code == 0:
        return "accepted" if case.must == "refuse" else None
    if case.must == "accept":
        return f"refused: {_message(outcome.err)}"
    return _unclear(case, outcome.err)


def kind_of(why: str) -> str:
    """The column of the summary that a fault counts in."""
    if why == "accepted":
        return "accepted-wrong"
    return "tracebacks" if why.startswith(("escaped", "printed a traceback")) else "unclear"


def _unclear(case: Case, err: str) -> str | None:
    message = _message(err)
    if not message:
        return "no message"
    if len(re.findall(r"^(?:error|flatout[ \w]*: error): ", err, re.MULTILINE)) != 1:
        return f"not exactly one error: {err[-300:]!r}"
    if complaint := unclear(message, quotes=case.quotes):
        return complaint
    if case.about and not any(word in message for word in case.about):
        return f"names none of {', '.join(case.about)}: {message[:300]}"
    return None


def unclear(message: str, *, quotes: bool = False) -> str | None:
    """Return why a message is none that a user can act on; None if it may be one."""
    if not quotes and (found := _RAW.search(message)):
        return f"raw text {found.group()!r}: {message[:300]}"
    if longest := next((line for line in message.splitlines() if len(line) > LONGEST_LINE), None):
        return f"a line of {len(longest):,} characters: {longest[:200]}"
    return None


def _message(err: str) -> str:
    """The error and what follows it."""
    found = re.search(r"^(?:error|flatout[ \w]*: error): (.*)", err, re.MULTILINE | re.DOTALL)
    return found.group(1).strip() if found else ""


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2][:300]
