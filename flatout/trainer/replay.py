"""Take steps of a run again, from a checkpoint and the answers on disk, and compare them bit by bit."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from flatout.checkpoint.tensor_file import TENSOR_SUFFIX, open_tensor_file
from flatout.checkpoint.write import saved_steps
from flatout.config.folders import RUN_NAME
from flatout.config.read import load_config, paths_in_place
from flatout.config.schema import Config
from flatout.config.track import TrackConfig
from flatout.errors import FlatoutError, UsageError
from flatout.track.callback import Callback
from flatout.track.console import ConsoleCallback
from flatout.track.record import StepRecord
from flatout.track.run_log import read_run
from flatout.trainer.run import train

# what a step computes, of which every bit is compared
COMPARED = ("loss", "grad_norm", "lr", "token_accuracy", "metrics")


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay found."""

    start: int
    """The complete steps that it began from."""
    differences: Mapping[int, Mapping[str, tuple[object, object]]]
    """Of each step that was taken again, the figures that differ, with their values then and now."""
    checkpoint: int | None
    """The checkpoint whose weights and optimizer were compared; None: the run has none between."""
    differing_tensors: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        return not self.differing_tensors and not any(self.differences.values())


class _Replayed(Exception):  # noqa: N818  (the end, not an error)
    """All steps were taken again."""


class _Compare(Callback):
    def __init__(self, records: Mapping[int, StepRecord], last: int, saved: int | None) -> None:
        self._records, self._last, self._saved = records, last, saved
        self.differences: dict[int, Mapping[str, tuple[object, object]]] = {}

    def on_step(self, record: StepRecord) -> None:
        if (before := self._records.get(record.step)) is not None:
            pairs = {name: (getattr(before, name), getattr(record, name)) for name in COMPARED}
            self.differences[record.step] = {name: two for name, two in pairs.items() if repr(two[0]) != repr(two[1])}
        # a save of the last step follows its record
        if record.step == self._last != self._saved:
            raise _Replayed

    def on_save(self, step: int, folder: Path) -> None:
        if step == self._last:
            raise _Replayed


def replay(folder: Path, step: int, console: ConsoleCallback) -> Replay:
    """Take the steps up to `step` (from 1) again, from the newest checkpoint before it, in a folder of its own.

    On a CPU, and on a GPU with `deterministic`, a run has the same bits again. Raises UsageError for a step that it
    has not taken or recorded, CheckpointError for a round whose answers are gone, damaged or of another identity, and
    what `train` raises.
    """
    log, config = read_run(folder), load_config(folder / "config.yaml")
    records = {record.step: record for record in log.steps}
    if step not in records:
        known = f"; it has {min(records):,} to {max(records):,}" if records else ", which has none"
        raise UsageError(f"step {step} is not recorded in {folder}{known}")
    if log.start is not None and log.start.num_ranks > 1:
        ranks = f"{log.start.num_ranks} ranks, whose sums have other bits in one process"
        raise UsageError(f"{folder} was trained by {ranks}; a replay takes runs of one")
    saved = saved_steps(folder / "checkpoints")
    start = max((one for one in saved if one < step), default=0)
    compared = max((one for one in saved if start < one <= step), default=None)
    with _prepared(config, folder, start, compared) as (again, copy):
        watcher = _Compare(records, step, compared)
        with suppress(_Replayed):
            try:
                train(again, callbacks=[watcher], console=console, replays=True)
            except FlatoutError as error:  # what it names is linked to the run's own files
                error.text = error.text.replace(str(copy), str(folder))
                raise
        tensors: tuple[str, ...] = ()
        if compared is not None:
            name = f"checkpoints/step-{compared}"
            tensors = tuple(_differing(folder / name, copy / name))
    return Replay(start, watcher.differences, compared, tensors)


@contextmanager
def _prepared(config: Config, folder: Path, start: int, compared: int | None) -> Iterator[tuple[Config, Path]]:
    """Yield the settings of a run in a temporary folder that resumes after `start` steps, and the folder.

    It lies in the run's, where there is room for a checkpoint; what it shares with the run is linked file by file, so
    that the replay would replace a link, and never what it leads to.
    """
    with tempfile.TemporaryDirectory(prefix=".replay-", dir=folder) as at:
        copy, shared = Path(at) / folder.name, ["rollouts", f"checkpoints/step-{start}"]
        copy.mkdir()
        shutil.copy(folder / RUN_NAME, copy)
        for name in [name for name in shared if (folder / name).is_dir()]:
            shutil.copytree(folder.absolute() / name, copy / name, copy_function=os.symlink)
        here = paths_in_place(config, folder, config.folder)
        checkpoint = here.checkpoint.model_copy(update={"every_steps": compared, "asynchronous": False, "mirror": None})
        yield here.model_copy(
            update={
                "run_dir": copy, "log_every_steps": 1, "checkpoint": checkpoint, "track": TrackConfig(),
                "eval": here.eval.model_copy(update={"every_steps": None, "prompts": []}),
            }
        ), copy  # fmt: skip


def _differing(then: Path, now: Path) -> Iterator[str]:
    """Yield the tensors of a checkpoint that a replay has written otherwise, with their files."""
    for file in sorted(then.glob(f"*{TENSOR_SUFFIX}")):
        with open_tensor_file(file) as before, open_tensor_file(now / file.name) as after:
            for name in before.keys():  # noqa: SIM118  (no mapping)
                one, other = (tensors.get_tensor(name).reshape(-1).view(torch.uint8) for tensors in (before, after))
                if not torch.equal(one, other):
                    yield f"{file.name}: {name}"
