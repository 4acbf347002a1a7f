"""Files that a verb writes where the user says: an earlier one of the same kind is replaced, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from flatout.errors import UsageError, reason_of
from flatout.io.durable_io import DurableIO, FileFacts

# how the files of each kind begin
_STATES = rb"complete|stopped|failed|running|killed|not ended"
BEGINNINGS = {
    "html": re.compile(rb"<!doctype html>.{0,12000}flatout</title>", re.DOTALL),
    "md": re.compile(rb"# (?:\d+ runs|[^\n]*: (?:" + _STATES + rb"))\n"),
    "json": re.compile(rb'\{\s*"runs": \['),
    "eval": re.compile(rb'\{\s*"written_at": "'),
}
_HEAD_BYTES = 1 << 14


def write_output(path: Path, content: bytes, kind: str) -> FileFacts:
    """Write a file of `kind`, one of BEGINNINGS; return its size and hash.

    Raises UsageError for a folder, a link, and a file that is not of this kind: it would be lost.
    """
    if problem := _problem(path, BEGINNINGS[kind]):
        raise UsageError(f"{str(path)!r} {problem}")
    return DurableIO().write_bytes(path, content)


def is_own_output(path: Path, kind: str) -> bool:
    """Whether a file begins as those of `kind` do."""
    return path.is_file() and _problem(path, BEGINNINGS[kind]) is None


def require_folders(run_dir: Path) -> None:
    """Raise UsageError for a file or link where a run writes a folder of results, before anything slow happens."""
    for name in ("checkpoints", "eval", "logs", "trackers", "final", "best"):
        path = run_dir / name
        is_renamed = name in ("final", "best")  # a link would be renamed, and its target lost from sight
        if (path.is_symlink() and (is_renamed or not path.is_dir())) or (path.exists() and not path.is_dir()):
            raise UsageError(f"{path} is a file or a link, but the run writes a folder there; move it away")


def _problem(path: Path, beginning: re.Pattern[bytes]) -> str | None:
    try:
        if path.is_dir():
            return "is a folder; name a file in it"
        if path.is_symlink() or (path.exists() and not path.is_file()):
            return "is a link or no regular file; name another file"
        if not path.exists():
            return None
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except (OSError, ValueError) as error:
        return f"cannot be used: {reason_of(error)}; name another file"
    return (
        None if beginning.match(head) else "exists and was not written by this command; name another file, or remove it"
    )
