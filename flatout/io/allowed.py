"""Paths that only files name, in a process of `flatout studio`: they stay in its workspace."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from flatout.environment import studio_folders
from flatout.errors import SecurityError, reason_of


def require_below(path: Path, folders: Sequence[Path], where: str = "") -> Path:
    """Return a path with its links resolved; `where` begins the errors.

    Raises SecurityError if it is not below one of `folders`.
    """
    try:
        resolved = path.resolve()
        with suppress(FileNotFoundError, NotADirectoryError):  # it may be made
            resolved.stat()
    except (OSError, ValueError, RuntimeError) as error:
        raise SecurityError(f"{where}{str(path)!r:.200} is no path in the workspace: {reason_of(error)}") from error
    if not any(map(resolved.is_relative_to, folders)):
        raise SecurityError(
            f"{where}{str(path)!r:.200} is outside the workspace {folders[0]}; choose something inside it"
        )
    return resolved


def require_contained(folder: Path, folders: Sequence[Path], where: str = "", *, skips_hidden: bool = False) -> None:
    """Raise SecurityError for a link in a folder that leads out of all `folders`, and for a pipe or device."""
    for parent, names, files in os.walk(folder):
        names[:] = [name for name in names if not (skips_hidden and name.startswith("."))]
        for path in (Path(parent, name) for name in (*names, *files)):
            with suppress(FileNotFoundError):  # a run removes files meanwhile
                mode = path.lstat().st_mode
                if stat.S_ISLNK(mode):
                    require_below(path, folders, f"{where}{path} is a link, and ")
                elif not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    raise SecurityError(f"{where}{path} is a pipe, socket or device; remove it")


def require_allowed(path: str | Path, *, is_model: bool = False, where: str = "") -> None:
    """Raise SecurityError in a process of `flatout studio` for a path or folder that these refuse.

    A model may be in the folders of `--models` too, whose links are those of the person who named them.
    """
    folders = studio_folders()
    if folders and not (is_model and any(map(Path(path).resolve().is_relative_to, folders[1:]))):
        require_contained(require_below(Path(path), folders[:1], where), folders[:1], where)
