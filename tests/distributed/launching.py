"""Starting `flatout train` and waiting for it."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from flatout.config.read import dump_config, flatten

# a bound on a hang, not a wait: each test waits for what happened
DEADLINE_S = 600
# those of the running test, for conftest.py, which ends what a failed test leaves
STARTED: list[subprocess.Popen[str]] = []


def launch(
    config: Any, folder: Path, options: Sequence[str] = (), *, in_words: bool = False, **popen: Any
) -> subprocess.Popen[str]:
    """Start a run of the settings in a file, or `in_words` of the command line alone."""
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(dump_config(config))
    settings = flatten(yaml.safe_load(dump_config(config)))
    words = [f"{name}={json.dumps(value)}" for name, value in settings] if in_words else [str(folder / "run.yaml")]
    command = [sys.executable, *options, "-m", "flatout", "train", *words]
    process = subprocess.Popen(
        command,
        stderr=subprocess.STDOUT,
        text=True,
        # a suite that runs in the background of a shell has this signal ignored, and children would inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **{"stdout": subprocess.PIPE, **popen},
    )
    STARTED.append(process)
    return process


def settings(tiny: Any, **more: Any) -> dict[str, Any]:
    return {
        "gpus": [0, 1],
        "model": {"name": str(tiny.model_dir), "precision": "fp64"},
        "batch": {"samples_per_step": 7, "micro_batch_tokens": 600, "max_steps": 12},
        **more,
    }


def num_steps_told(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_text().count('"kind": "step"') if metrics.exists() else 0


def wait_for_steps(run_dir: Path, num_steps: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if num_steps_told(run_dir) >= num_steps:
            return
        time.sleep(0.02)
    raise TimeoutError(f"{run_dir} made no {num_steps} steps in {DEADLINE_S} s")
