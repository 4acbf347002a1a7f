"""Ctrl-C in a call from Python: an exception that a script may catch, and that ends it with one sentence."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from flatout.errors import PreemptedError
from flatout.io.bounded_wait import to_stderr
from flatout.io.stop_signals import SIGNAL_EXIT_CODE


class Interrupted(KeyboardInterrupt):
    """Ctrl-C ended a run at once, without a save."""

    exit_code = SIGNAL_EXIT_CODE + signal.SIGINT

    def _render_traceback_(self) -> list[str]:
        # IPython prints these lines in place of its traceback
        return [str(self)]


class StoppedError(PreemptedError, Interrupted):
    """Ctrl-C asked a run to stop, and it saved."""


@contextmanager
def ctrl_c_told() -> Iterator[None]:
    """Raise what a Ctrl-C in the block came to as an Interrupted; also a decorator of functions.

    A script that does not catch it, or a PreemptedError, ends with its sentence and exit code, without a traceback.
    """
    try:
        yield
    except PreemptedError as error:
        _print_plainly()
        if error.signal != signal.SIGINT:
            raise
        raise StoppedError(str(error), error.signal) from error
    except KeyboardInterrupt as error:
        _print_plainly()
        again = "the same call goes on from the last checkpoint, or begins anew if there is none"
        raise Interrupted(f"interrupted without a save; {again}") from error


@dataclass(frozen=True, slots=True)
class _PlainHook:
    """Python's hook for uncaught exceptions: stops are printed without a traceback, all others as `before` does."""

    before: Any

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, PreemptedError | Interrupted):
            self.before(kind, error, trace)
            return
        to_stderr(str(error))
        if not hasattr(sys, "ps1"):  # an interactive session goes on
            raise SystemExit(error.exit_code)


def _print_plainly() -> None:
    if not isinstance(sys.excepthook, _PlainHook):
        sys.excepthook = _PlainHook(sys.excepthook)
