"""Finds runs by name, opens those that a report names, and lists those of a folder."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatout.config.folders import how_to_finish, is_run_folder
from flatout.errors import DataError, UsageError
from flatout.io.near_path import other_model
from flatout.io.redact import redacted
from flatout.track.run_log import RunLog, read_run
from flatout.track.summary import summarize

RUNS = Path("runs")
# a name that ends like a file is never that of a model on the hub
_FILE_ENDINGS = (
    ".yaml", ".yml", ".json", ".jsonl", ".csv", ".txt", ".py", ".gguf", ".safetensors", ".bin", ".pt", ".html"
)  # fmt: skip


def find_run(target: str | Path, runs: Path = RUNS, *, needs_results: bool = False) -> Path:
    """Return the folder of a run that is named by its folder, or by its name in `runs`.

    Raises UsageError, with the run whose name is nearest, if there is none; DataError for a file. `needs_results` says
    how to get them.
    """
    path = Path(target)
    try:
        place = next((one for one in (path, runs / path) if one.exists()), None)
    except OSError:  # a name too long for a path, as its reader says
        return path
    known = [str(folder.relative_to(runs)) for folder in run_folders(runs)]
    if place is not None and place.is_file():
        raise DataError(f"{target} is not a run folder but a file; name a run{_one_of(known, runs)}")
    if place is not None and not (place == runs and known):
        return place
    if place is not None:
        raise UsageError(f"{target} is the folder of all runs; name a run{_one_of(known, runs)}")
    if near := difflib.get_close_matches(path.name, known, n=1, cutoff=0.6):
        raise UsageError(f"{target}: no such folder, and no run of that name; did you mean {near[0]}?")
    is_alone = needs_results and len(known) == 1 and not finished_runs(runs)
    end = f"; {how_to_finish(runs / known[0])}" if is_alone else ""
    raise UsageError(f"{target}: no such folder, and no run of that name{_one_of(known, runs)}{end}")


def _one_of(known: Sequence[str], runs: Path = RUNS) -> str:
    """Return the end of an error on a name that is no run's: those that are there."""
    if not known:
        return f"; there are no runs in {runs}/ yet: `flatout train` makes one"
    states = [f"{name}{'' if (runs / name / 'final').is_dir() else ' (not finished)'}" for name in known[:8]]
    return f"; runs here: {', '.join(states)}"


def find_model(target: str) -> str:
    """Return the folder of a run, an adapter or a model, found as `find_run` does, else `target`, for the hub.

    Raises UsageError for a file, and for a name without an owner that is nearly that of a run.
    """

    def here() -> str:
        """Return the end of an error on what is no model: the finished runs, else the models here."""
        return _one_of(finished) if (finished := finished_runs()) else other_model(target)

    path = Path(target)
    what = "the folder of a run, an adapter or a model"
    with suppress(OSError):  # a name too long for a path
        if path.is_file() and path.suffix == ".gguf":
            command = f"`llama-cli -m {shlex.quote(target)}`"
            raise UsageError(f"{target} is a GGUF file, for llama.cpp: {command}; or name what it was made of{here()}")
        if path.is_file():
            end = f"; did you mean {path.parent}?" if len(path.parts) > 1 else here()
            raise UsageError(f"{target} is a file; name {what}{end}")
        if path.is_dir() and path == RUNS:
            raise UsageError(f"{path} is the folder of all runs; name a finished one, or a model{here()}")
        if path.is_dir():
            return target
        if (RUNS / path).is_dir():
            return str(RUNS / path)
    if path.suffix in _FILE_ENDINGS:
        raise UsageError(f"there is no file {target}; name {what}, or a hub id{here()}")
    known = [folder.name for folder in run_folders(RUNS)]
    if "/" not in target and (near := difflib.get_close_matches(target, known, n=1, cutoff=0.7)):
        raise UsageError(f"there is no run {target}; did you mean {near[0]}? (on the hub: OWNER/{target})")
    return target


def finished_runs(runs: Path = RUNS) -> list[str]:
    """Return the names of the runs in a folder that have final weights."""
    return [str(folder.relative_to(runs)) for folder in run_folders(runs) if (folder / "final").is_dir()]


def run_folders(folder: Path) -> list[Path]:
    """Return the run folders in a folder and in those below it, sorted by name; the folder alone if it is a run's."""
    if is_run_folder(folder):
        return [folder]
    folders: list[Path] = []
    for path in _folders(folder):
        folders += [path] if is_run_folder(path) else filter(is_run_folder, _folders(path))
    return folders


def _folders(folder: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(path for path in folder.iterdir() if path.name[0] != "." and path.is_dir())
    return []


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
        problem = f"{log.num_bad_lines} lines could not be read" if log.num_bad_lines else "no step was taken"
        problem = "; ".join(log.problems.values()) or problem
        raise DataError(f"{folder} has nothing to report: {problem}; name another run")
    return log


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run of a list."""

    name: str
    folder: str
    state: str = "damaged"
    model: str | None = None
    data: str | None = None
    steps: int = 0
    planned_steps: int = 0
    loss_before: float | None = None
    """Of the first evaluation, or of the first step if there is none; None for a run of rounds."""
    loss_after: float | None = None
    """Of the last evaluation, or of the last step if there is none."""
    reward_before: float | None = None
    """Of the first evaluation of a run of rounds, or of the first round if there is none."""
    reward_after: float | None = None
    best: float | None = None
    """Of the best evaluation; None without one."""
    stderrs: tuple[float | None, ...] = (None, None, None)
    """Standard errors of the rewards before, after and at best, which those of held-out prompts have."""
    best_step: int | None = None
    time_s: float = 0.0
    """What training took."""
    size_bytes: int = 0
    """That of all files."""
    started_at: float | None = None
    """Unix time."""
    tags: tuple[str, ...] = ()
    note: str = ""
    problems: tuple[str, ...] = ()


def list_runs(folder: Path) -> Iterator[RunRow]:
    """Yield a row for each run below a folder, with what is wrong with its files; `damaged` is a state."""
    for path in run_folders(folder):
        name = str(path.relative_to(folder)) if path != folder else path.name
        row = RunRow(name, str(path), size_bytes=_size_bytes(path))
        try:
            log = read_run(path)
        except (DataError, OSError) as error:
            yield replace(row, problems=(str(error),))
            continue
        summary, start = summarize(log), log.start
        figures, kind = dict[str, Any](), "reward" if log.rounds else "loss"
        if one := summary.evaluation or summary.trained:
            figures = {f"{kind}_before": one.first, f"{kind}_after": one.last}
        if judged := summary.evaluation:
            figures |= {"best": judged.best, "best_step": judged.best_step, "stderrs": judged.stderrs}
        yield replace(
            row,
            **figures,
            state=summary.state,
            model=redacted(start.model) if start else None,
            data=start.data if start else None,
            steps=summary.num_steps,
            planned_steps=summary.num_planned_steps,
            time_s=summary.train_s,
            started_at=start.first_started_at if start else None,
            tags=log.notes.tags,
            note=log.notes.note,
            problems=tuple(log.problems.values()),
        )


def _size_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # a file of a run that still writes may go
                total += os.lstat(os.path.join(parent, name)).st_size  # noqa: PTH118
    return total
