"""Errors a user can act on: one sentence with place, what was found and what to do; one exit code a class."""

from __future__ import annotations


class FlatoutError(Exception):
    """Base of all errors told to the user without a traceback. `exit_code` is the process's exit status."""

    exit_code = 1


class UsageError(FlatoutError):
    """A wrong command line or configuration."""

    exit_code = 2


class DataError(FlatoutError):
    """Bad or missing training data."""

    exit_code = 3


class CheckpointError(FlatoutError):
    """A checkpoint that is missing, damaged or does not belong to this run."""

    exit_code = 4


class NumericError(FlatoutError):
    """A loss or gradient that is not finite."""

    exit_code = 5


class ResourceError(FlatoutError):
    """No GPU, not enough memory or disk, or a folder that another process holds."""

    exit_code = 6


class PeerLostError(FlatoutError):
    """Another rank of this run died or stopped answering; `rank` is its number, None where nobody knows it."""

    exit_code = 7

    def __init__(self, message: str, rank: int | None = None) -> None:
        self.rank = rank
        super().__init__(message)


class SecurityError(FlatoutError):
    """Input that would run code or escape its folder."""

    exit_code = 8


class PreemptedError(FlatoutError):
    """The run was asked to stop, saved a checkpoint and can be resumed."""

    exit_code = 75


class ProblemsError(UsageError):
    """Several problems told at once, one a line."""

    def __init__(self, what: str, problems: list[str]) -> None:
        self.problems = problems
        lines = "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(f"{what}: {len(problems)} problem{'s' if len(problems) != 1 else ''}{lines}")
