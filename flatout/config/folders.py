"""Which folders a run may have for itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path


def free_folder(folder: Path, ending: str = "-", first: int = 2) -> Path:
    """Return the first of NAME-2, NAME-3 ... beside a folder that does not exist, with this ending and first number."""
    return next(one for n in count(first) if not (one := folder.with_name(f"{folder.name}{ending}{n}")).exists())


def folder_problem(run_dir: Path, data_root: Path, model: str, sources: Sequence[str | Path]) -> str | None:
    """Return why these folders do not go together: a run writes, renames and removes files in its own; else None."""
    # abspath, because resolve() would access the disk
    paths: list[str | Path] = [".", run_dir, data_root, model, *sources]
    here, folder, *taken = (Path(os.path.abspath(path)) for path in paths)  # noqa: PTH100
    other = Path("runs/run")
    other = free_folder(other) if other.exists() else other
    if folder in (here, *here.parents):
        return f"run_dir: {run_dir} is the current folder, or holds it; set run_dir: {other}, or another folder"
    if taken[0] == taken[1]:
        return f"data.root: {data_root} is the model's folder; set data.root: data, or another folder"
    if folder in taken or folder.is_relative_to(taken[0] / "built_dataset"):
        return f"run_dir: {run_dir} holds the run's model or data; set run_dir: {other}, or another folder"
    return None
