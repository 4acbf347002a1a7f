"""Runs of the workspace: started as processes of their own, and observed through their folders."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any

from flatout.api import runs
from flatout.api.settings import (
    NAME_PATTERN,
    Config,
    as_yaml,
    flatten,
    make_config,
    read_text,
    render_template,
    with_values,
)
from flatout.errors import DataError, Fix, FlatoutError, ResourceError, UsageError
from flatout.io.durable_io import DurableIO
from flatout.io.file_lock import RunLock, holder_of
from flatout.io.own_files import start_python
from flatout.io.redact import printable, redacted
from flatout.studio.workspace import TRASH, Workspace
from flatout.view.report import run_fragment

CONFIG_FILE, OUTPUT_FILE = "studio.yaml", "logs/studio.log"
# a page shows the end of what a run printed
TAIL_BYTES, TAIL_LINES = 8192, 14
# drawing a run takes at most this share of the time of the process
DRAWING_SHARE = 0.2
# runs that are kept in memory
MAX_DRAWINGS = 8
# the end of metrics.jsonl that shows the speed of a run: some 100 steps
SPEED_BYTES = 1 << 17


@dataclass
class _Drawing:
    """A run as drawn last: `version` counts drawings."""

    follower: runs.RunFollower
    html: str = ""
    version: int = 0
    not_before_s: float = 0.0
    lock: Lock = field(default_factory=Lock)


class Trainings:
    """Starts, stops, resumes and shows the runs of a workspace.

    Each run is `python -m flatout train CONFIG` in its own session, with its output in the run folder, so that it goes
    on when studio ends.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._processes: dict[Path, subprocess.Popen[bytes]] = {}
        self._drawings: dict[Path, _Drawing] = {}
        self._lock = Lock()

    def start(self, config: Config) -> str:
        """Start a new run; return its folder. Raises ResourceError if it is held, UsageError if it has a run.

        So it does for a folder with files that a run would replace.
        """
        folder = self._workspace.contained(str(config.folder))
        shown = self._workspace.relative(folder)
        if not self._workspace.may_be_run(folder):
            raise UsageError(f"run_dir: {shown} is hidden or the workspace itself; choose a folder such as runs/run")
        with self._lock:
            self._require_free(folder)
            if any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints", "final")):
                runs.require_own(folder)
                raise UsageError(f"{shown} already holds a run; resume it, or choose another name")
            runs.run_identity(folder)
            intro = [f"Written by flatout studio. From a terminal: flatout train {shown}/{CONFIG_FILE}"]
            DurableIO().write_bytes(folder / CONFIG_FILE, render_template(config, intro, which="first").encode())
            self._spawn(folder, folder / CONFIG_FILE)
        return shown

    def resume(self, folder: Path) -> str:
        """Continue a stopped run with its own settings; return its folder. Raises as `Workspace.require_inside`."""
        file, shown = _settings_file(folder), self._workspace.relative(folder)
        if file is None:
            raise UsageError(f"{shown} has no {CONFIG_FILE} and no config.yaml; start the run again")
        config = self._workspace.read_config(file)
        self._workspace.require_inside(config)  # the folder may be another person's
        if self._workspace.inside(str(config.folder)) != folder:
            raise UsageError(f"{shown}/{file.name} is for another run folder", [Fix({"run_dir": shown}, "in it")])
        with self._lock:
            self._require_free(folder)
            self._spawn(folder, file)
        return shown

    def delete(self, folder: Path, seen: Sequence[str] | None) -> dict[str, Any]:
        """Move a run that does not train to TRASH; return where, and its `others`: what no run wrote.

        Nothing is moved, and there is no `trash`, if `seen` is None; if it is not `others`, which a person sees first,
        ResourceError is raised.
        """
        shown = self._workspace.relative(folder)
        with self._lock:
            self._require_free(folder)
            others = [f"{one.relative_to(folder)}{'/' * one.is_dir()}" for one in runs.foreign_entries(folder)]
            answer: dict[str, Any] = {"folder": shown, "others": others}
            if seen is None:
                return answer
            if new := sorted({*others} ^ {*seen}):
                raise ResourceError(f"what no run wrote in {shown} is not what was shown: {new[0]}; delete it again")
            trash = runs.free_folder(self._workspace.inside(f"{TRASH}/{shown}"))
            with RunLock(folder, "delete"):
                DurableIO().make_dir(trash.parent)
                self._drawings.pop(folder, None)
                DurableIO().rename(folder, trash)
        return answer | {"trash": self._workspace.relative(trash)}

    def settings(self, folder: Path) -> dict[str, str]:
        """Return a run's settings that differ from their defaults, as YAML by dotted name, but its name and folder."""
        file, shown = _settings_file(folder), self._workspace.relative(folder)
        if file is None:
            raise UsageError(f"{shown} has no {CONFIG_FILE} and no config.yaml, so it has no settings to start from")
        given = dict(flatten(self._workspace.read_config(file).model_dump(mode="json", exclude_unset=True)))
        usual = dict(flatten(make_config({"model": {"name": "-"}}).model_dump(mode="json")))
        return {
            name: as_yaml(value)
            for name, value in given.items()
            if name not in ("name", "run_dir") and usual.get(name) != value
        }

    def rename_run(self, folder: Path, name: str) -> str:
        """Give a run that does not train another name and folder; return it.

        Its settings say the new name, so that it resumes there. Raises UsageError for a name that is taken or wrong.
        """
        if re.fullmatch(NAME_PATTERN, name) is None:
            raise UsageError(f"name {name!r:.80}: use up to 64 letters, digits, dots, dashes and underscores")
        target = folder.with_name(name)
        with self._lock:
            self._require_free(folder)
            if target.exists() or target.is_symlink():
                raise UsageError(f"{self._workspace.relative(target)} exists already; choose another name")
            before, shown = self._workspace.relative(folder), self._workspace.relative(target)
            own = {"name": name, "run_dir": None if shown == f"runs/{name}" else shown}
            files = [folder / file for file in (CONFIG_FILE, "config.yaml") if (folder / file).is_file()]
            changed = {
                file: with_values(read_text(file), own).replace(
                    f"train {before}/{file.name}", f"train {shown}/{file.name}"
                )
                for file in files
                if self._workspace.read_config(file)
            }
            start = runs.read_side_files(folder).start
            with RunLock(folder, "rename"):
                for file, text in changed.items():
                    DurableIO().write_bytes(file, text.encode())
                if start is not None:
                    DurableIO().write_json(folder / "start.json", asdict(replace(start, name=name, folder=shown)))
                self._drawings.pop(folder, None)
                DurableIO().rename(folder, target)
        return shown

    def stop(self, folder: Path) -> str:
        """Ask a run to save and end; return its folder. Raises UsageError, or ResourceError if it is out of reach."""
        process, shown = self._processes.get(folder), self._workspace.relative(folder)
        if process is not None and process.poll() is None:
            process.terminate()  # a launcher passes it on to its ranks
            return shown
        holder = holder_of(folder)
        if holder is None or not holder.trains:
            raise UsageError(f"{shown} is not running" + (f"; it is held by {holder}" if holder else ""))
        if not holder.is_local:
            raise ResourceError(f"{shown} runs on {holder.host}; stop it there")
        # the file is only a note: never signal studio, its process group (0) or init (1), nor a run that just ended
        if holder.pid <= 1 or holder.pid == os.getpid() or holder_of(folder) != holder:
            raise ResourceError(f"{shown} is starting or ending, and its process is not known; try again")
        try:
            os.kill(holder.pid, signal.SIGTERM)
        except (ProcessLookupError, PermissionError) as error:
            raise ResourceError(
                f"{shown} runs as pid {holder.pid}, which cannot be stopped: {error.strerror}"
            ) from error
        return shown

    def state(self, folder: Path) -> str:
        """Return running, complete, stopped, failed, damaged, or interrupted: it wrote no end, as after a power cut."""
        process = self._processes.get(folder)
        code = None if process is None else process.poll()
        holder = holder_of(folder)
        if (process is not None and code is None) or (holder is not None and holder.trains):
            return "running"
        try:
            end = runs.read_end(folder)
        except FlatoutError:
            return "damaged"
        # a process may end before it writes an end, or leave that of an earlier one
        if code is not None and code != (end.exit_code if end else 0):
            return "failed" if code > 0 else "interrupted"
        return end.outcome if end is not None else "interrupted"

    def rows(self, folders: Sequence[str]) -> list[dict[str, Any]]:
        """Return name, state, model, method and start of each run, the one that started last first."""
        rows = []
        for name in folders:
            folder = self._workspace.root / name
            row: dict[str, Any] = {"folder": name, "state": "damaged", "started_at": folder.stat().st_mtime, "tags": ()}
            rows.append(row)
            try:
                self._workspace.run(name)
            except FlatoutError as error:
                row["problem"] = str(error)
                continue
            row["state"] = self.state(folder)
            is_saved = (folder / "final").is_dir() or any((folder / "checkpoints").glob("step-*"))
            row["can_chat"] = row["state"] != "running" and is_saved
            side = runs.read_side_files(folder)
            row |= {"tags": side.notes.tags, "problem": "; ".join(side.problems.values())}
            if start := side.start:
                row |= {"model": start.model, "method": start.method, "data": start.data}
                row["started_at"] = start.first_started_at
        return sorted(rows, key=lambda row: -row["started_at"])

    def live(self, folder: Path, version: str) -> dict[str, Any]:
        """Return the state of a run, the end of its output, and its drawing if that is not `version`."""
        answer: dict[str, Any] = {"state": self.state(folder), "output": self._tail(folder)}
        with self._lock, suppress(DataError):  # the run has written nothing yet
            if folder not in self._drawings:
                self._drawings[folder] = _Drawing(runs.RunFollower(folder))
                for oldest in list(self._drawings)[:-MAX_DRAWINGS]:
                    del self._drawings[oldest]
        drawing = self._drawings.get(folder)
        if drawing is None:
            return answer
        with drawing.lock:
            now_s = time.monotonic()
            # a run that ended is drawn a last time
            if now_s >= drawing.not_before_s or answer["state"] != "running":
                if drawing.follower.poll() or not drawing.html:
                    drawing.html, drawing.version = run_fragment(drawing.follower.log), drawing.version + 1
                took_s = time.monotonic() - now_s
                drawing.not_before_s = now_s + took_s / DRAWING_SHARE
            if steps := drawing.follower.log.steps:
                answer |= {"step": steps[-1].step, "num_steps": steps[-1].num_steps, "eta_s": steps[-1].eta_s}
            if str(drawing.version) != version:
                answer |= {"html": drawing.html, "version": drawing.version}
        return answer

    def measured_speed(self, config: Config) -> tuple[float, str] | None:
        """Return the tokens/s of the newest run of this model and method, and its folder; None if there is none."""
        for row in self.rows(self._workspace.survey().runs):
            if (row.get("model"), row.get("method")) != (config.model.name, config.method):
                continue
            file = self._workspace.root / row["folder"] / "metrics.jsonl"
            size_bytes = file.stat().st_size if file.exists() else 0
            lines = runs.LineFollower(file, max(0, size_bytes - SPEED_BYTES)).new_lines()
            rates = [one.tokens_per_s for one in map(runs.record_of, lines) if isinstance(one, runs.StepRecord)]
            if rates:  # the first half may have warm-up and compilation in it
                return median(rates[len(rates) // 2 :]), row["folder"]
        return None

    def gpus_in_use(self) -> dict[str, list[int]]:
        """Return the GPUs of each run that trains now, by its folder, as `gpus` numbers them; none for a CPU."""
        users = {}
        for row in self.rows(self._workspace.survey().runs):
            if row["state"] == "running":
                config = None
                with suppress(FlatoutError):  # damaged since it started
                    file = _settings_file(self._workspace.root / row["folder"])
                    config = self._workspace.read_config(file) if file else None
                on_cpu = config is not None and config.wanted_device == "cpu"
                users[row["folder"]] = [] if on_cpu else (config and config.gpus) or [0]
        return users

    def running(self) -> dict[str, int]:
        """Return the processes that studio started and that still run: pid by folder."""
        return {
            self._workspace.relative(folder): one.pid for folder, one in self._processes.items() if one.poll() is None
        }

    def _require_free(self, folder: Path) -> None:
        process, shown = self._processes.get(folder), self._workspace.relative(folder)
        if process is not None and process.poll() is None and holder_of(folder) is None:
            raise ResourceError(f"{shown} is being started as pid {process.pid}; wait for it, or stop it")
        # looks only: to take the lock would write the pid of studio into it
        if holder := holder_of(folder):
            raise ResourceError(f"{shown} is locked by {holder}; wait for it, stop it, or choose another name")

    def _spawn(self, folder: Path, config_file: Path) -> None:
        root, env = self._workspace.root, self._workspace.environment
        self._drawings.pop(folder, None)
        DurableIO().make_dir(folder / "logs")
        # -P: a tokenize.py of the workspace is not the one that libraries import
        words = ["-P", "-m", "flatout", "train", str(config_file.relative_to(root))]
        self._processes[folder] = start_python(words, folder / OUTPUT_FILE, append=False, cwd=root, env=env)

    def _tail(self, folder: Path) -> str:
        """Return the last lines of what the run printed; of train.log if studio did not start it."""
        for name in (OUTPUT_FILE, "train.log"):
            try:
                with (folder / name).open("rb") as file:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                    text = file.read().decode(errors="replace")
            except OSError:
                continue
            return printable(redacted("\n".join(text.splitlines()[-TAIL_LINES:])))
        return ""


def _settings_file(folder: Path) -> Path | None:
    """Return the file with the settings of a run; None if it has none yet."""
    return next((file for name in (CONFIG_FILE, "config.yaml") if (file := folder / name).is_file()), None)
