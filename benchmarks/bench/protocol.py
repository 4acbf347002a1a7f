"""Rows measured beside each other: a fresh process each, A-B-A order, stopped cleanly when the time is up."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.data.registry import built_dir
from flatout.environment import CAPABILITY, allocator_env, environment
from flatout.errors import ResourceError, UsageError

from .cap import ran_out, used_share
from .figures import WARMUP_STEPS
from .inputs import write_samples, write_weightless_model
from .machine import gpu_header, versions
from .rows import Row, mode_of
from .samples import NAME, digest

# on every child's Python path, as it is for the scripts beside this package
BENCHMARKS = Path(__file__).resolve().parents[1]
OURS = ("-m", "bench.ours")
# a first run of a row is started only if this much time is left; later ones by what the first took
FIRST_RUN_S = 60.0
LOG_TAIL, SHOWN = 1500, 300
# in every line that torchrun writes once a rank has failed
LAUNCHER_LINE = "torch/distributed/elastic/multiprocessing/api.py"
# what a run gets to stop by itself once its time is up
STOP_S = 10.0


@dataclass(frozen=True)
class Settings:
    """How to measure. `paths` go before sys.path of peers' programs; `parity` holds the gate's verdict by mode.

    `cap_bytes` are the memory of the GPU that each run is to see, `capability` is what flatout chooses kernels by.
    """

    out: Path
    work: Path
    num_steps: int = 13
    num_repeats: int = 3
    time_limit_s: float | None = None
    data: Path | None = None
    peer_program: Path | None = None
    paths: tuple[str, ...] = ()
    parity: Mapping[str, bool] = field(default_factory=dict)
    cap_bytes: int | None = None
    capability: str | None = None


def run_rows(rows: Sequence[Row], settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure every row `num_repeats` times and return all figures; `out/results.json` is rewritten after each run.

    Raises UsageError for peers without a program, ResourceError when a model cannot be made.
    """
    started = time.monotonic()
    _check(rows, settings)
    results: dict[str, Any] = {
        "header": {
            "gpu": gpu_header(), "versions": versions(), "started": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            "cap_gib": settings.cap_bytes and settings.cap_bytes / 2**30, "capability": settings.capability,
        },
        "protocol": {
            "num_steps": settings.num_steps,
            "left_out_steps": WARMUP_STEPS,
            "order": "A-B-A",
        },
        "rows": [
            {"name": row.name, "system": row.system, "shape": row.shape, "settings": dict(row.settings),
             "family": row.family, "num_gpus": row.num_gpus, "lengths": row.lengths,
             "samples_per_step": row.samples_per_step, "parity": settings.parity.get(mode_of(row))}
            for row in rows
        ],
        "inputs": {},
        "runs": [],
    }  # fmt: skip
    settings.out.mkdir(parents=True, exist_ok=True)
    took_s: dict[str, float] = {}
    for repeat, row in in_turns(rows, settings.num_repeats):
        left_s = _left_s(settings, started)
        if left_s < 1.2 * took_s.get(row.name, FIRST_RUN_S):
            results["stopped"] = f"time limit before repeat {repeat + 1} of {row.name}"
            say(results["stopped"])
            _write(results, settings)
            break
        data = settings.data.name if settings.data else f"random tokens of {row.lengths} lengths"
        inputs = f"{row.shape}, {row.samples_per_step} samples a step, {data}"
        if inputs not in results["inputs"]:
            needs_weights = any(other.shape == row.shape and not other.draws_weights for other in rows)
            results["inputs"][inputs] = _make_inputs(row, settings, say, left_s, needs_weights=needs_weights)
        begun = time.monotonic()
        if (batch := too_large_batch(row, rows, results["runs"])) is not None:
            run = {"row": row.name, "repeat": repeat, "out_of_memory": True}
            run["error"] = f"not run: out of memory with a batch of {batch}"
        else:
            run = _run(row, repeat, settings, results["inputs"][inputs], _left_s(settings, started))
        took_s[row.name] = time.monotonic() - begun
        results["runs"].append(run)
        say(_line(run, took_s[row.name]))
        _write(results, settings)
    return results


def _write(results: Mapping[str, Any], settings: Settings) -> None:
    (settings.out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")


def in_turns(rows: Sequence[Row], num_repeats: int) -> Iterator[tuple[int, Row]]:
    """(repeat, row) in A-B-A order: every second pass goes backwards, so a drift hits all rows alike."""
    for repeat in range(num_repeats):
        for row in rows if repeat % 2 == 0 else reversed(rows):
            yield repeat, row


def too_large_batch(row: Row, rows: Sequence[Row], runs: Sequence[Mapping[str, Any]]) -> int | None:
    """A smaller batch with which this row's family already ran out of memory, so that this one would too."""
    own = row.settings.get("batch", 0)
    smaller = {
        other.name: other.settings["batch"]
        for other in rows
        if other.family == row.family and other.settings.get("batch", own) < own
    }
    failed = [smaller[run["row"]] for run in runs if run["row"] in smaller and "out_of_memory" in run]
    return min(failed, default=None) if row.family else None


def _check(rows: Sequence[Row], settings: Settings) -> None:
    if settings.num_steps <= WARMUP_STEPS:
        raise UsageError(f"--steps is {settings.num_steps}; the first {WARMUP_STEPS} are left out, take more")
    if settings.peer_program is None and (peers := [row.name for row in rows if row.system != "flatout"]):
        raise UsageError(f"row {peers[0]} needs --peers")


def _left_s(settings: Settings, started: float) -> float:
    return float("inf") if settings.time_limit_s is None else settings.time_limit_s - (time.monotonic() - started)


def _data_root(row: Row, settings: Settings) -> Path:
    return settings.work / row.shape / f"data-{row.lengths}-{row.samples_per_step}"


def _timeout_s(left_s: float) -> float | None:
    return None if left_s == float("inf") else max(left_s, 1.0)


def _make_inputs(
    row: Row, settings: Settings, say: Callable[[str], None], left_s: float, *, needs_weights: bool
) -> dict[str, Any]:
    """Model folder and token store of a row's shape; a model made by an earlier call is taken again."""
    shape, model_dir = row.shape, settings.work / row.shape / "model"
    begun = time.monotonic()
    has_weights = any(model_dir.glob("*.safetensors"))
    if not has_weights and not needs_weights:
        write_weightless_model(shape, model_dir)
    elif not has_weights:
        log = settings.work / shape / "model.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "bench.inputs", shape, str(model_dir)]
        if _run_process(command, log, _timeout_s(left_s), {}) != 0:
            raise ResourceError(f"the {shape} model could not be made: {log.read_text(encoding='utf-8')[-LOG_TAIL:]}")
        say(f"{shape}: model folder made in {time.monotonic() - begun:.0f} s")
    store = write_samples(_data_root(row, settings), row, model_dir, settings.num_steps, settings.data)
    return {
        "model_s": round(time.monotonic() - begun, 1),
        "digest": digest(store.token_ids, store.loss_mask),
        "num_samples": store.num_samples,
        "num_tokens": int(store.lengths.sum()),
        "num_label_tokens": int(store.num_label_tokens.sum()),
    }


def _run(row: Row, repeat: int, settings: Settings, inputs: Mapping[str, Any], left_s: float) -> dict[str, Any]:
    """One run in a fresh process; its figures, or the end of its log as `error`."""
    stem = f"{re.sub(r'[^a-zA-Z0-9_.@-]+', '_', row.name)}-{repeat}"
    job_path, result, log = (settings.work / f"{stem}.{end}" for end in ("job.json", "result.json", "log"))
    result.unlink(missing_ok=True)
    shutil.rmtree(settings.work / f"{stem}.run", ignore_errors=True)
    data_root = _data_root(row, settings)
    job = {
        **row.settings,
        "system": row.system,
        "model_dir": str(settings.work / row.shape / "model"),
        "data_root": str(data_root),
        "store": str(built_dir(data_root, NAME)),
        "run_dir": str(settings.work / f"{stem}.run"),
        "num_steps": settings.num_steps,
        "samples_per_step": row.samples_per_step,
        "paths": list(settings.paths),
        "cap_bytes": settings.cap_bytes,
        "result": str(result),
        "launched_s": time.time(),
    }
    job_path.write_text(json.dumps(job), encoding="utf-8")
    program = OURS if row.system == "flatout" else (str(settings.peer_program),)
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={row.num_gpus}")
    command = [sys.executable, *(launcher if row.num_gpus > 1 else ()), *program, str(job_path)]
    # as `flatout train` does for itself
    more = allocator_env(environment()) if row.system == "flatout" else {}
    if settings.capability and row.system == "flatout":
        more[CAPABILITY] = settings.capability
    code = _run_process(command, log, _timeout_s(left_s), more)
    shutil.rmtree(settings.work / f"{stem}.run", ignore_errors=True)
    run: dict[str, Any] = {"row": row.name, "repeat": repeat}
    if code != 0 or not result.exists():
        words = last_words(log.read_text(encoding="utf-8", errors="replace"))
        # one that was killed may have run out of memory before, and gone on
        if code > 0 and ran_out(words):
            return {**run, "error": f"out of memory: {words}", "out_of_memory": True}
        end = "time limit" if time.time() - job["launched_s"] >= left_s else f"exit {code}"
        return {**run, "error": f"{end}: {words}"}
    run.update(json.loads(result.read_text(encoding="utf-8")))
    if settings.cap_bytes:
        run["cap_share"] = used_share(run, settings.cap_bytes)
    if run["digest"] != inputs["digest"]:
        run["error"] = f"trained on other tokens: digest {run['digest']}, expected {inputs['digest']}"
    return run


def last_words(log: str) -> str:
    """What a failed process said last: the end of its log and, at the very end, the errors that its ranks named.

    What torchrun says of its ranks comes after what they said themselves, and is left out.
    """
    said, _, _ = log.partition(LAUNCHER_LINE)
    said = said[: said.rfind("\n") + 1] if said != log else log
    errors, tail = [line for line in said.splitlines() if line.startswith("error: ")], said[-LOG_TAIL:].rstrip()
    return "\n".join([tail, *(line for line in dict.fromkeys(errors) if line not in tail[-SHOWN:])])


def _run_process(command: Sequence[str], log: Path, timeout_s: float | None, more: Mapping[str, str]) -> int:
    """Exit code of a child in a session of its own, with `more` in its environment and its output in `log`.

    Past the timeout its group is stopped (-9).
    """
    env = {**environment(), **more}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(BENCHMARKS), env.get("PYTHONPATH"))))
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=env) as process,
    ):
        try:
            return process.wait(timeout_s)
        except BaseException as error:
            # a launcher of several processes ends them when asked, and could not once it is killed
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return -signal.SIGKILL
            raise


def _line(run: Mapping[str, Any], took_s: float) -> str:
    if "tokens_per_s" not in run:
        end = "out of memory" if "out_of_memory" in run else "failed"
        return f"{run['row']} #{run['repeat'] + 1}: {end} after {took_s:.0f} s: {run['error'][-SHOWN:]}"
    note = f"  {run['error']}" if "error" in run else ""
    peak = f", peak {run['peak_allocated_gib']:.1f} GiB" if "peak_allocated_gib" in run else ""
    return f"{run['row']} #{run['repeat'] + 1}: {run['tokens_per_s']:,.0f} tokens/s{peak}, {took_s:.0f} s{note}"
