"""Scores a model on lm-eval's tasks (https://github.com/EleutherAI/lm-evaluation-harness)."""

from __future__ import annotations

import difflib
import io
import logging
import math
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from flatout.errors import UsageError, needs_extra
from flatout.models.load.model import library_errors

# name, done, total
OnPhase = Callable[..., None]
_BAR = re.compile(r"\r(?:([^\r]*?): )? *\d+%\|.*?\| (\d+)/(\d+) \[")
_LINE_UP = "\x1b[A"


class Tasks(NamedTuple):
    """Names of lm-eval's tasks, and its TaskManager that knows them."""

    names: Sequence[str]
    manager: Any


def open_tasks(names: Sequence[str], folder: Path | None) -> Tasks:
    """Find lm-eval's tasks by name; `folder` holds further task files, which can run code.

    Raises UsageError if lm-eval is not installed, the folder is missing, or a task is unknown.
    """
    with needs_extra("--tasks", "eval"):
        from lm_eval.tasks import TaskManager
    if folder is not None and not folder.is_dir():
        raise UsageError(f"--include-path: {folder} is not a folder; give the folder of the tasks' YAML files")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with library_errors("--tasks: lm-eval cannot read its tasks"):
        manager = TaskManager(include_path=None if folder is None else str(folder))
        known = list(manager.all_tasks)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"--tasks: lm-eval has no task {name[:80]!r}; {hint}`lm-eval ls tasks` lists all")
    return Tasks(names, manager)


class BarReader(io.TextIOBase):
    """A stream for the bars of tqdm, which are wider than a screen; tells `on_phase` their names and counts.

    Everything else goes to `other`.
    """

    def __init__(self, on_phase: OnPhase, other: TextIO) -> None:
        self._on_phase, self._other = on_phase, other

    def write(self, text: str) -> int:
        if bar := _BAR.search(text):
            self._on_phase(f"scoring tasks: {(bar[1] or 'lm-eval').strip()}"[:60], int(bar[2]), int(bar[3]))
        elif text.strip() and "\r" not in text and text != _LINE_UP:
            self._other.write(text)
        return len(text)


def score_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Tasks,
    *,
    limit: int | None,
    batch_size: int,
    chat: bool,
    on_phase: OnPhase,
) -> list[dict[str, Any]]:
    """Run tasks and return their metrics: task, metric, value, stderr (None if unknown) and num_samples.

    `limit` is the most samples of each task; `chat` puts questions into the chat template; `on_phase` takes the place
    of lm-eval's bars. Raises UsageError for tasks whose files or data cannot be read.
    """
    on_phase("scoring tasks")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    with (
        library_errors(f"--tasks: lm-eval cannot run {', '.join(tasks.names)}", "; its data may need a download"),
        redirect_stderr(BarReader(on_phase, sys.stderr)),
    ):
        results = simple_evaluate(
            HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
            tasks=list(tasks.names),
            limit=limit,
            apply_chat_template=chat,
            task_manager=tasks.manager,
            log_samples=False,
        )
    rows = []
    for task, figures in results["results"].items():
        num_samples = results["n-samples"].get(task, {}).get("effective")
        for key, value in figures.items():
            # a metric is `name,filter`; other keys are the task's alias and sizes
            name, comma, filtered = key.partition(",")
            if not comma or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = figures.get(f"{name}_stderr,{filtered}")
            row = {"task": task, "metric": name if filtered == "none" else key, "value": _finite(value)}
            rows.append({**row, "stderr": _finite(error), "num_samples": num_samples})
    return rows


def _finite(value: Any) -> float | None:
    # lm-eval writes "N/A" for an unknown error; JSON has no NaN
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
