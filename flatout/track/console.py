"""The console: one line per stage at start-up, then live progress, or plain lines without a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TextIO, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from flatout.track.callback import Callback
from flatout.track.record import EvalRecord, RunEnd, StepRecord, describe_event, describe_record
from flatout.track.tolerant_stream import TolerantStream

PLAIN_LINES = 20


class ConsoleCallback(Callback):
    """See Callback for the methods. Without a terminal about PLAIN_LINES steps of a run are printed, or with
    `every_record` each step that is recorded."""

    def __init__(self, console: Console | None = None, *, every_record: bool = False) -> None:
        self._every_record = every_record
        # TolerantStream, because a run continues when nobody reads what it prints
        self._console = console or Console(file=cast(TextIO, TolerantStream(sys.stdout)) if sys.stdout else None)
        self._progress: Progress | None = None
        self._last_shown = 0

    def on_stage(self, name: str, text: str) -> None:
        self._console.print(f"[bold cyan]{name:<10}[/] {escape(text)}", highlight=False, soft_wrap=True)

    def on_eval(self, record: EvalRecord) -> None:
        self.on_stage(*describe_record(record))

    def on_step(self, record: StepRecord) -> None:
        # what fits a terminal of 80 columns; the rest is in train.log and metrics.jsonl
        mfu = "" if record.mfu is None else f"MFU {record.mfu:.0%}  "
        memory = f"{record.peak_memory_bytes / 2**30:.0f} GiB"
        figures = f"loss {record.loss:.4f}  {record.tokens_per_s:,.0f} tok/s  {mfu}{memory}"
        if self._console.is_terminal:
            if self._progress is None:
                columns = (BarColumn(bar_width=8), MofNCompleteColumn(), TextColumn("{task.description}"))
                self._progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console)
                self._progress.start()
                self._progress.add_task("", total=record.num_steps)
            task = self._progress.task_ids[0]
            self._progress.update(task, completed=record.step, description=figures)
        elif (
            self._every_record
            or self._last_shown == 0
            or record.step == record.num_steps
            or record.step - self._last_shown >= record.num_steps / PLAIN_LINES
        ):
            self._last_shown = record.step
            left = timedelta(seconds=round(record.elapsed_s / record.step * (record.num_steps - record.step)))
            self.on_stage("step", f"{record.step}/{record.num_steps}  {figures}  {left} left")

    def on_event(self, kind: str, facts: Mapping[str, Any]) -> None:
        if kind == "stopped":
            return  # the error itself is shown by whoever started the run
        text = escape(describe_event(kind, facts))
        self._console.print(f"[yellow]{kind:<10}[/] {text}", highlight=False, soft_wrap=True)

    def on_end(self, end: RunEnd) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
