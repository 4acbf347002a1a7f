"""The console of a notebook: one bar and one table that grow in place, and what a start says folded away."""

from __future__ import annotations

import sys
from html import escape
from typing import Any

from rich.console import Console

from flatout.io.redact import printable
from flatout.track.console import INDENT, PLAIN_LINES, ConsoleCallback
from flatout.track.figures import short_time
from flatout.track.record import EVAL, STEP, EvalRecord, RunEnd, StepRecord

_HEAD = ("step", "loss", "evaluation", "tokens/s", "left")


def open_console(**options: Any) -> ConsoleCallback:
    """Return the console of this process, which may be the kernel of a notebook; `options` as of ConsoleCallback."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return ConsoleCallback(**options) if getattr(shell, "kernel", None) is None else NotebookConsole()


class NotebookConsole(ConsoleCallback):
    """Shows a run as one output of a cell. Its lines, and those of rank 0 of several, are folded up to the first step.

    The table has about PLAIN_LINES steps and every evaluation; train.log and metrics.jsonl have all.
    """

    tabulates = True

    def __init__(self) -> None:
        super().__init__(Console(quiet=True))
        # a launcher then passes the lines of rank 0 on, and its steps as records
        self.is_terminal = True
        self._start: list[str] = []
        self._later: list[str] = []
        self._steps: dict[int, StepRecord] = {}
        self._evals: dict[int, EvalRecord] = {}
        self._output: Any = None
        self._drawn = ""

    def print_line(self, line: str, style: str = "", styled: int = 0) -> None:
        if line.startswith(f"{'eval':<{INDENT - 1}} step "):  # of rank 0 of several: the table has it
            return
        with self._lock:
            (self._later if self._steps or self._evals else self._start).append(printable(line))
            self.tick()

    def on_step(self, record: StepRecord) -> None:
        with self._lock:
            # the newest step is shown until the next one, and stays if it is due
            if (last := self._record) is not None and last.step not in self._evals:
                kept = [step for step in (*self._steps, *self._evals) if step < last.step]
                if last.step - max(kept, default=-record.num_steps) < record.num_steps / PLAIN_LINES:
                    del self._steps[last.step]
            self._steps[record.step] = record
            self._evals.pop(record.step, None)
            super().on_step(record)

    def on_eval(self, record: EvalRecord) -> None:
        with self._lock:
            self._evals[record.step] = record
            self.tick()

    def on_end(self, end: RunEnd) -> None:
        self._close_live()

    def _close_live(self) -> None:
        with self._lock:
            self._phase = ""
            self.tick()

    def tick(self) -> None:
        from IPython.display import HTML, display

        with self._lock:
            html = self._html()
            if html == self._drawn:
                return
            self._drawn = html
            if self._output is None:
                self._output = display(HTML(html), display_id=True)
            else:
                self._output.update(HTML(html))

    _refresh = tick

    def _html(self) -> str:
        record, parts = self._record, []
        if record is not None:
            parts.append(f'<progress max="{record.num_steps}" value="{record.step}"></progress>')
            parts.append(f"step {record.step:,} of {record.num_steps:,}")
        if self._phase and self._phase != "step":
            waited_s = round(self._clock() - self._phase_began_s)
            parts.append(escape(f"{self._phase_text()} {short_time(waited_s)}"))
        elif self._phase and record is not None:
            parts.append(f"{short_time(record.eta_s)} left")
        head = f"<div>{' &middot; '.join(parts)}</div>" if parts else ""
        start = escape("\n".join(self._start))
        folded = f"<details><summary>start</summary><pre>{start}</pre></details>" if start else ""
        later = f"<pre>{escape(chr(10).join(self._later))}</pre>" if self._later else ""
        return head + folded + self._table() + later

    def _table(self) -> str:
        steps = sorted({*self._steps, *self._evals})
        if not steps or self.round is not None:  # rounds have lines, and a policy's loss is near 0
            return ""
        cells = "".join(f"<th>{name}</th>" for name in _HEAD)
        lines = []
        for step in steps:
            record, evaluation = self._steps.get(step), self._evals.get(step)
            of_step = ("loss", "tokens_per_s", "eta_s")
            values = {name: getattr(record, name, None) for name in of_step}
            loss, *others = ("" if value is None else STEP[name].write(value) for name, value in values.items())
            best = " (best)" if evaluation and evaluation.is_best else ""
            evaluated = f"{EVAL['eval_loss'].write(evaluation.eval_loss)}{best}" if evaluation else ""
            row = [f"{step:,}", loss, evaluated, *others]
            lines.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>")
        return f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
