"""Which folder is a run's, what a run writes in it, and which folders a run may have for itself."""

from __future__ import annotations

import os
import re
import secrets
import shlex
from collections.abc import Iterator, Sequence
from glob import iglob
from itertools import chain, count
from pathlib import Path
from typing import Any

from flatout.errors import CheckpointError, Fix, SettingError, UsageError
from flatout.io.durable_io import DurableIO
from flatout.io.file_lock import holder_of, last_holder_of
from flatout.io.json_file import now_utc, read_json
from flatout.io.own_output import is_own_output

RUN_NAME = "run.json"
"""The file that marks a run's folder: it is written before all others, and has the run's identity."""
SETTINGS_FILES = ("config.yaml", "studio.yaml", "python.yaml")
"""The settings that flatout writes into a run's folder."""
_IDENTITY_KEYS = {"run_id", "created", "cwd"}
_HASH = "[0-9a-f]{8,32}"
# of results and of a checkpoint
_MANIFEST = "manifest.json"
# the entries of a run's folder by their relative names: files, and folders of which all content is a run's
_WRITTEN = re.compile(
    r"run\.json|(config|studio|python)\.yaml|(start|end|notes|memory|profile|verify|non_finite)\.json|train\.log|"
    r"(metrics|answers|events|pictures)\.jsonl|trace\.json\.gz|report\.html|trackers|model-[0-9a-f]{16}|eval/.*\.json|"
    r"spikes/step-\d+\.json|rollouts/\.?round-\d{6}(\.json)?|logs/(studio|rewards-\d+)\.log|"
    r"logs/(node-\d+/)?(latest|\.latest|\.lock|attempt-\d+)"
)
# those that stand in nobody's way
_LEFT = re.compile(
    rf"\.lock|\.models\.lock|\.write-probe|\.(verify|replay)-\w+|slurm-\d+\.(log|lost)|\.[\w.-]+\.tmp(-{_HASH})?|"
    rf"checkpoints/step-\d+\.(tmp|gone)-{_HASH}"
)
# folders with a manifest of their files, and folders of the above
_RESULTS = re.compile(rf"(final|best)(\.old-{_HASH})?|checkpoints/step-\d+(\.old-{_HASH})?")
_HOLDERS = re.compile(r"checkpoints|eval|rollouts|spikes|logs(/node-\d+)?")


def is_run_folder(folder: Path) -> bool:
    """Whether a run has this folder, by its run.json; other programs write start.json and the like."""
    try:
        return _run_id(_identity(folder)) is not None
    except (CheckpointError, OSError):
        return False


def run_identity(run_dir: Path, durable_io: DurableIO | None = None) -> str:
    """Return the run's id from `run_dir/run.json`, which is created on first use, as is the folder.

    Raises UsageError for a folder with files that are no run's and would be replaced, CheckpointError when run.json is
    damaged, or missing although there are checkpoints.
    """
    require_own(run_dir)
    if (content := _identity(run_dir)) is None:
        return mark_run(run_dir, secrets.token_hex(8), durable_io)
    if run_id := _run_id(content):
        return run_id
    shown = repr(content.get("run_id"))
    raise CheckpointError(f"{run_dir / RUN_NAME}: run_id: found {shown}, expected 8 to 32 hex digits")


def mark_run(run_dir: Path, run_id: str, durable_io: DurableIO | None = None) -> str:
    """Write run.json, also again where a folder was deleted while its run goes on; return the id."""
    durable_io = durable_io or DurableIO()
    durable_io.make_dir(run_dir)
    durable_io.write_json(run_dir / RUN_NAME, {"run_id": run_id, "created": now_utc(), "cwd": str(Path.cwd())})
    return run_id


def how_to_finish(folder: Path) -> str:
    """Say how a run without results gets them: by waiting for it while it trains, else by training its settings."""
    if (holder := holder_of(folder)) is not None and holder.trains:
        return f"it trains now, as {holder}; wait for it: flatout watch {shlex.quote(str(folder))}"
    if (settings := next((one for name in SETTINGS_FILES if (one := folder / name).is_file()), None)) is None:
        return "it ended before its first step; run the command that started it again"
    return f"resume it: flatout train {shlex.quote(str(settings))}"


def require_own(run_dir: Path) -> None:
    """Raise as `run_identity` does for a folder that a run may not have; nothing is written."""
    with DurableIO().resource_errors("read", run_dir):
        content = _identity(run_dir)
        if _is_ours(content) or not run_dir.is_dir():
            return
        orphans = sorted(run_dir.glob(f"checkpoints/step-*/{_MANIFEST}"))
        names = [path.name for path in sorted(run_dir.iterdir()) if _is_in_the_way(path)]
    # a crash cannot cause this: run.json is written first
    if orphans and content is None:
        raise CheckpointError(
            f'{run_dir / RUN_NAME}: missing, though there are checkpoints; restore it as {{"run_id": the run_id in '
            f"{orphans[-1]}}}, or move the checkpoints folder away to start over"
        )
    if names:
        shown = f"{', '.join(names[:3])}{' ...' * (len(names) > 3)}"
        raise UsageError(
            f"{run_dir} is not the folder of a run, and holds {shown}, which a run would replace; a run has a folder "
            "of its own",
            [Fix({"run_dir": str(free_folder(run_dir))})],
        )


def foreign_entries(folder: Path) -> list[Path]:
    """Return what is in a run's folder and no run of flatout wrote; a folder of such files stands for all of them.

    Files of final/, best/ and checkpoints/ are a run's if their manifest names them, pages and results of `flatout
    eval` if they begin as flatout's do.
    """
    return [*_foreign(folder, "")]


def _foreign(folder: Path, place: str) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        name, is_folder = f"{place}{path.name}", path.is_dir() and not path.is_symlink()
        if is_folder and _HOLDERS.fullmatch(name):
            yield from _foreign(path, f"{name}/")
        elif is_folder and _RESULTS.fullmatch(name) and (files := _files_of(path)):
            every = (one for one in sorted(path.rglob("*")) if one.is_symlink() or not one.is_dir())
            yield from (one for one in every if one.relative_to(path).as_posix() not in files)
        elif not (_WRITTEN.fullmatch(name) or _LEFT.fullmatch(name)) or not _is_as_written(path, place):
            yield path


def _files_of(folder: Path) -> set[str]:
    """Return the files that a folder's manifest names, and the manifest; none without a manifest."""
    try:
        return {_MANIFEST, *map(str, read_json(folder / _MANIFEST)["files"])}
    except (CheckpointError, KeyError, TypeError):
        return set()


def _is_as_written(path: Path, place: str) -> bool:
    """Whether an entry with the name of a run's is of the same kind, as far as others may have one of that name."""
    if path.is_symlink():
        return path.name in ("latest", ".latest")
    kind = {"eval/": "eval"}.get(place, "html" if path.name == "report.html" else "")
    return not kind or is_own_output(path, kind)


def _is_in_the_way(path: Path) -> bool:
    """Whether a run would replace this entry of a folder, or write into it."""
    if path.is_symlink() or not path.is_dir():
        is_foreign_lock = path.name == ".lock" and path.stat().st_size > 0 and last_holder_of(path.parent) is None
        return is_foreign_lock or _WRITTEN.fullmatch(path.name) is not None
    patterns = (_WRITTEN, _RESULTS, _HOLDERS)
    return any(pattern.fullmatch(path.name) for pattern in patterns) and any(path.iterdir())


def _identity(folder: Path) -> Any:
    """Return what run.json holds; None without the file."""
    path = folder / RUN_NAME
    return read_json(path) if path.is_file() else None


def _is_ours(content: Any) -> bool:
    return isinstance(content, dict) and content.keys() <= _IDENTITY_KEYS


def _run_id(content: Any) -> str | None:
    run_id = content.get("run_id") if _is_ours(content) else None
    return run_id if isinstance(run_id, str) and re.fullmatch(_HASH, run_id) else None


def path_of_run(path: str, folder: Path, old: Path) -> str:
    """Return where a path of a run's settings is, which name the run's folder `old`: in `folder`, where the run is now,
    or as seen from where it started.
    """
    if not path:
        return path
    try:
        content = _identity(folder)
        start = Path(str(content.get("cwd", "")) if _is_ours(content) else "")
        whole, before, after = (os.path.abspath(start / one) for one in (path, old, folder.absolute()))  # noqa: PTH100
        is_inside = before != after and Path(whole).is_relative_to(before)
        if not is_inside and next(iglob(path), None):  # noqa: PTH207
            return path
        new = str(folder / Path(whole).relative_to(before)) if Path(whole).is_relative_to(before) else whole
        return new if next(iglob(new), None) else path  # noqa: PTH207
    except (CheckpointError, OSError, ValueError):
        return path


def round_folder(run_folder: Path, number: int) -> Path:
    """Return where the answers of a round, counted from 1, lie in a run folder, as a token store."""
    return run_folder / "rollouts" / f"round-{number:06d}"


def free_folder(folder: Path, ending: str = "-", first: int = 2) -> Path:
    """Return the first of NAME, NAME-2, NAME-3 ... that does not exist, with this ending and first number."""
    folder = folder if folder.name not in ("", "..") else folder.resolve()
    others = (folder.with_name(f"{folder.name}{ending}{number}") for number in count(first))
    return next(one for one in chain([folder], others) if not one.exists())


def folder_problem(run_dir: Path, data_root: Path, model: str, sources: Sequence[str | Path]) -> SettingError | None:
    """Return why these folders do not go together: a run writes, renames and removes files in its own; else None."""
    # abspath, because resolve() would access the disk
    paths: list[str | Path] = [".", run_dir, data_root, model, *sources]
    here, folder, *taken = (Path(os.path.abspath(path)) for path in paths)  # noqa: PTH100
    other = free_folder(Path("runs/run"))
    if folder in (here, *here.parents) and not is_run_folder(folder):
        return SettingError(f"run_dir: {run_dir} is the current folder, or holds it", Fix({"run_dir": str(other)}))
    if taken[0] == taken[1]:
        return SettingError(f"data.root: {data_root} is the model's folder", Fix({"data.root": "data"}))
    if folder in taken or folder.is_relative_to(taken[0] / "built_dataset"):
        return SettingError(f"run_dir: {run_dir} holds the run's model or data", Fix({"run_dir": str(other)}))
    return None
