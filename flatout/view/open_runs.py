"""Opens the run folders that a report names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flatout.errors import DataError, UsageError
from flatout.track.run_log import RunLog, read_run


def open_runs(folders: Sequence[Path]) -> dict[str, RunLog]:
    """Return the runs by a name that is theirs alone: the run's own, else its folder.

    Raises UsageError for a path that does not exist or is given twice, DataError for one that is not a run's folder,
    holds nothing that flatout wrote, or cannot be read.
    """
    logs = [_open_run(folder) for folder in folders]
    places = [folder.resolve() for folder in folders]
    if twice := next((folder for folder, place in zip(folders, places, strict=True) if places.count(place) > 1), None):
        raise UsageError(f"{twice} is given twice; name each run once")
    names = [log.start.name if log.start else log.folder.resolve().name for log in logs]
    unique = len(set(names)) == len(names)
    return {name if unique else str(log.folder): log for name, log in zip(names, logs, strict=True)}


def _open_run(folder: Path) -> RunLog:
    try:
        if not folder.exists():
            raise UsageError(f"{folder}: no such folder; name the folder of a run, such as runs/run")
        log = read_run(folder)
        has_settings = (folder / "config.yaml").is_file()
    except OSError as error:
        raise DataError(f"{error.filename or folder}: cannot be read: {error.strerror}") from error
    if not (log.steps or log.evals or log.start or (has_settings and not log.num_bad_lines)):
        found = f"{log.num_bad_lines} lines could not be read" if log.num_bad_lines else "its files are empty"
        raise DataError(f"{folder} holds no record of a run: {found}; name the folder of a run")
    return log
