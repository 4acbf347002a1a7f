"""Start a run over: its folder is moved aside, never deleted."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from itertools import count
from pathlib import Path

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
    ResourceError while a process holds the folder, UsageError where a launcher may start the command again.
    """
    if found := next((name for name, alone in _LAUNCHERS.items() if env.get(name, alone) not in ("", alone)), None):
        raise UsageError(
            f"--restart starts over each time the command runs, and {found} is set by a launcher that runs it more "
            "than once; use another name, or move the run folder away by hand"
        )
    if not any((config.folder / name).exists() for name in _FILES_OF_A_RUN):
        return
    durable_io, folder = DurableIO(), config.folder.resolve()
    aside = next(one for n in count(1) if not (one := folder.with_name(f"{folder.name}.old-{n}")).exists())
    with RunLock(folder, "restart"):
        durable_io.rename(folder, aside)
    durable_io.make_dir(folder)
    model = Path(config.model.name).absolute()
    if model.is_relative_to(folder):
        durable_io.make_dir(model.parent)
        durable_io.rename(aside / model.relative_to(folder), model)
    if settings_file is not None and (file := settings_file.resolve()).is_relative_to(folder):
        durable_io.make_dir(file.parent)
        shutil.copyfile(aside / file.relative_to(folder), file)
    ConsoleCallback().on_stage("restart", f"the earlier run is now {config.folder.with_name(aside.name)}")
