"""Start a run over: its folder is moved aside, never deleted."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from flatout.config.folders import free_folder
from flatout.config.schema import Config
from flatout.errors import UsageError
from flatout.io.durable_io import DurableIO
from flatout.io.file_lock import RunLock
from flatout.track.console import ConsoleCallback

# any of them makes a folder a run's
_FILES_OF_A_RUN = ("metrics.jsonl", "train.log", "checkpoints", "final")
# set by launchers that start a command again by themselves, and their values in a process that they did not start
_LAUNCHERS = {"RANK": "", "PET_NNODES": "", "SLURM_RESTART_COUNT": "0", "SLURM_STEP_NUM_TASKS": "1"}


def move_aside(config: Config, env: Mapping[str, str], settings_file: Path | None = None) -> None:
    """Move the run's folder to NAME.old-1, or the next number that is free, and print where it is now.

    What the new run reads stays: the `settings_file`, and a model that was written there from memory. Raises
    ResourceError while a process holds the folder, UsageError where a launcher may start the command again, and for a
    model, adapter or source in that folder.
    """
    if found := next((name for name, alone in _LAUNCHERS.items() if env.get(name, alone) not in ("", alone)), None):
        raise UsageError(
            f"--restart starts over each time the command runs, and {found} is set by a launcher that runs it more "
            "than once; use another name, or move the run folder away by hand"
        )
    if not any((config.folder / name).exists() for name in _FILES_OF_A_RUN):
        return
    durable_io, folder = DurableIO(), config.folder.resolve()
    model = Path(config.model.name).resolve()
    is_own = model.parent == folder and model.name.startswith("model-")
    inputs = [config.lora.continue_from, config.objective.reference.adapter, None if is_own else config.model.name]
    inputs += [source.path for source in config.data.sources]
    if inside := next((one for one in inputs if one and Path(one).resolve().is_relative_to(folder)), None):
        raise UsageError(
            f"--restart would move {inside} away, which the new run reads: it is in {config.folder}; move it out of "
            "there, or use another name"
        )
    aside = free_folder(folder, ".old-", 1)
    with RunLock(folder, "restart"):
        durable_io.rename(folder, aside)
    durable_io.make_dir(folder)
    if is_own:
        durable_io.rename(aside / model.relative_to(folder), model)
    if settings_file is not None and (file := settings_file.resolve()).is_relative_to(folder):
        durable_io.make_dir(file.parent)
        shutil.copyfile(aside / file.relative_to(folder), file)
    shown = aside if config.folder.is_symlink() else config.folder.with_name(aside.name)
    ConsoleCallback().on_stage("restart", f"the earlier run is now {shown}")
