"""Start a run over: its folder is moved aside, never deleted."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from glob import glob
from pathlib import Path

from flatout.config.folders import foreign_entries, free_folder, is_run_folder, run_identity
from flatout.config.schema import Config
from flatout.config.section import paths_of
from flatout.errors import Fix, UsageError
from flatout.io.durable_io import DurableIO
from flatout.io.file_lock import RunLock
from flatout.io.gpu_driver import require_gpu_driver
from flatout.io.near_path import expand_home
from flatout.launch.launch_mode import LaunchMode, SpawnRanks
from flatout.parallel.rank import Rank
from flatout.planner.devices import DEVICES
from flatout.track.callback import Reporter
from flatout.track.console import ConsoleCallback, PhaseCallback
from flatout.track.trackers import require_installed

# set by launchers that start a command again by themselves, and their values in a process that they did not start
_LAUNCHERS = {"RANK": "", "PET_NNODES": "", "SLURM_RESTART_COUNT": "0", "SLURM_STEP_NUM_TASKS": "1"}


def move_aside(config: Config, env: Mapping[str, str], mode: LaunchMode, settings: Sequence[Path] = ()) -> None:
    """Move the run's folder to NAME.old-1, or the next number that is free, and print where it is now.

    What the new run reads stays: the files of `settings`, and a model that was written there from memory; so do files
    that no run wrote, which are named. Nothing is moved unless `mode` would pass every check that needs no GPU. Raises
    ResourceError while a process holds the folder, UsageError where a launcher may start the command again, and for a
    model, adapter or source in that folder.
    """
    if launcher := next((name for name, alone in _LAUNCHERS.items() if env.get(name, alone) not in ("", alone)), None):
        raise UsageError(
            f"--restart starts over each time the command runs, and {launcher} is set by a launcher that runs it more "
            "than once; use another name, or move the run folder away by hand"
        )
    if address := config.checkpoint.mirror:
        from flatout.checkpoint.mirror import Mirror  # lazy: it imports torch

        if Mirror(config).look():
            raise UsageError(f"--restart would go on from {address}", [Fix({"checkpoint.mirror": f"{address}-2"})])
    if not is_run_folder(config.folder):
        return  # a start refuses what it may not replace
    durable_io, folder = DurableIO(), config.folder.resolve()
    model = Path(config.model.name).resolve()
    is_own = model.parent == folder and model.name.startswith("model-")
    if inside := next(_inputs_in(folder, config, model if is_own else None), None):
        raise UsageError(
            f"--restart would move {inside} away, which the new run reads: it is in {config.folder}; move it out of "
            "there, or use another name"
        )
    aside = free_folder(folder, ".old-", 1)
    with RunLock(folder, "restart"):
        # the folder of the run to come is empty
        _check(config.model_copy(update={"run_dir": aside}), mode)
        own_model = [model] if is_own else []
        data = config.data.root.resolve()  # is built again
        staying = [path for path in foreign_entries(folder) if path.parent == folder and not data.is_relative_to(path)]
        durable_io.rename(folder, aside)
    run_identity(folder)
    for path in (*own_model, *staying):
        durable_io.rename(aside / path.name, path)
    for file in (path.resolve() for path in settings):
        if file.is_relative_to(folder) and (aside / file.relative_to(folder)).is_file():
            durable_io.make_dir(file.parent)
            shutil.copyfile(aside / file.relative_to(folder), file)
    shown = aside if config.folder.is_symlink() else config.folder.with_name(aside.name)
    kept = f"; {', '.join(path.name for path in staying)}, which no run wrote, stays in {config.folder}"
    ConsoleCallback().on_stage("restart", f"the earlier run is now {shown}{kept if staying else ''}")


def _inputs_in(folder: Path, config: Config, own_model: Path | None) -> Iterator[str]:
    """Yield the paths in a run's folder that the run reads, besides a model that stays there."""
    builds_all = bool(config.data.sources) and not config.eval.data_names
    data = config.data.model_copy(update={"root": Path()}) if builds_all else config.data
    for path in paths_of(config.model_copy(update={"run_dir": None, "data": data})):
        whole = str(expand_home(path))
        paths = [Path(one).resolve() for one in (whole, *glob(whole, recursive=True))]  # noqa: PTH207
        if any(one.is_relative_to(folder) and not (own_model and one.is_relative_to(own_model)) for one in paths):
            yield path


def require_machine(config: Config, *, has_ranks: bool) -> None:
    """Raise UsageError for packages that a run lacks, ResourceError for a GPU without a driver."""
    require_installed(config.track.to, strategy=config.strategy if has_ranks else "auto")
    if config.wanted_device == "cuda":
        require_gpu_driver("gpus" if config.gpus else "device: cuda")


def _check(config: Config, mode: LaunchMode) -> None:
    """Raise what a start raises before it needs a GPU: for packages, the model's files, data, settings and the plan."""
    require_machine(config, has_ranks=isinstance(mode, SpawnRanks))
    with ConsoleCallback() as console:
        console.on_phase("checking before anything is moved")
        import torch

        from flatout.models.load.source import fingerprint_model
        from flatout.trainer.planned_run import plan_run
        from flatout.trainer.run_data import open_data

        num_gpus, num_ranks = torch.cuda.device_count(), 1
        if isinstance(mode, SpawnRanks):
            num_ranks = mode.nodes.num_max * (max(num_gpus, 1) if mode.num_procs == "gpu" else mode.num_procs)
        fingerprint_model(config.model)
        # only a plan for a GPU can need one pass for a step
        device = max(DEVICES.values(), key=lambda one: one.memory_bytes)
        needs_device = config.full.update == "backward" and num_gpus > 0 and config.wanted_device != "cpu"
        reporter, rank = Reporter(PhaseCallback(console)), Rank(0, num_ranks)
        data = open_data(config, reporter, rank, starts=True)
        plan_run(config, data, reporter, rank, device if needs_device else None)
