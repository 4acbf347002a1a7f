"""The console: one line a stage at start-up, then live progress; plain lines when nobody watches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from flatout.track.record import EvalRecord, Record, StepRecord

PLAIN_LINES = 20


class ConsoleTracker:
    """See Tracker for the methods. Without a terminal about PLAIN_LINES lines are printed over the run."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._progress: Progress | None = None
        self._last_shown = 0

    def stage(self, name: str, text: str) -> None:
        self._console.print(f"[bold cyan]{name:<10}[/] {escape(text)}", highlight=False, soft_wrap=True)

    def record(self, record: Record) -> None:
        if isinstance(record, EvalRecord):
            best = " (best)" if record.is_best else ""
            text = f"loss {record.eval_loss:.4f}  accuracy {record.eval_token_accuracy:.1%}"
            self.stage("eval", f"step {record.step}: {text}{best}")
        elif self._console.is_terminal:
            self._show_bar(record)
        elif self._due(record):
            self.stage("step", f"{record.step}/{record.num_steps}  {_figures(record)}")

    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
        text = "  ".join(f"{name} {value}" for name, value in facts.items())
        self._console.print(f"[yellow]{kind:<10}[/] {escape(text)}", highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _due(self, record: StepRecord) -> bool:
        first, last = self._last_shown == 0, record.step == record.num_steps
        if not (first or last or record.step - self._last_shown >= record.num_steps / PLAIN_LINES):
            return False
        self._last_shown = record.step
        return True

    def _show_bar(self, record: StepRecord) -> None:
        if self._progress is None:
            columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console)
            self._progress.start()
            self._progress.add_task("", total=record.num_steps)
        task = self._progress.task_ids[0]
        self._progress.update(task, completed=record.step, description=_figures(record))


def _figures(record: StepRecord) -> str:
    utilisation = "" if record.mfu is None else f"MFU {record.mfu:.1%}  "
    return (
        f"loss {record.loss:.4f}  acc {record.token_accuracy:.1%}  lr {record.lr:.2e}  norm {record.grad_norm:.2f}  "
        f"{record.tokens_per_s:,.0f} tok/s ({record.label_tokens_per_s:,.0f} label)  "
        f"{utilisation}padding avoided {record.padding_avoided:.0%}  {record.peak_memory_bytes / 2**30:.2f} GiB"
    )
