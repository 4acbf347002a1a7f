"""The console: one line per stage, then a bar on a terminal, or plain lines in a pipe or a log."""

from __future__ import annotations

import re
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, RLock, Thread
from typing import Any, Self, TextIO, cast

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flatout.io.redact import WIDTH, printable
from flatout.track.callback import Callback
from flatout.track.figures import console_figures, short_time
from flatout.track.record import (
    ROUND,
    STEP,
    EvalRecord,
    RewardsRecord,
    RoundRecord,
    RunEnd,
    StepRecord,
    describe_event,
    describe_record,
)
from flatout.track.run_log import LineFollower, record_of
from flatout.track.tolerant_stream import TolerantStream

# without a terminal, at least this many steps of a run are printed, and the next step after so many seconds
PLAIN_LINES, STEP_LINE_S = 20, 20.0
# after so many seconds without a line, one says what the run does; the longer time is for pipes and logs of a run that
# has taken a step. There, the next line about a phase comes after twice the time, at the latest after the longer one.
SILENT_S, SILENT_STEPS_S = 3.0, 59.0
TICK_S = 0.5
# columns of a line's name with a space, and of the bar
INDENT, BAR_WIDTH = 11, 8
# events that a stage has told already, or that whoever started the run tells
TOLD_EVENTS = {"stopped", "resumed", "restarted"}
# stages of a start that a terminal leaves to train.log unless it is to show all: what went as planned
_ROUTINE_STAGES = {
    "checks", "checkpoint", "compile", "fused", "graphs", "held out", "kernels", "layout", "masters", "mfu",
    "optimizer", "prefixes", "self-test", "strategy",
}  # fmt: skip
# of what a build tells, the sizes of the data set
_SIZES = re.compile(r"[\d,]+ samples, ")
# what RankOutput recognizes in rank 0's log: how far the run is, which the bar shows
_STEP_LINE = re.compile(r"step {7}\d+/")
_WAITING_LINE = re.compile(r"\.{3} {8}(.+) (\d+) s")


class ConsoleCallback(Callback):
    """See Callback for the methods. Use it as a context manager, so that a long phase never passes in silence.

    Without a terminal about PLAIN_LINES steps of a run are printed, or with `every_record` each step that is recorded;
    in any case a line every minute. A terminal leaves routine stages to train.log, unless it `shows_all`.
    `step_line_s` prints a step at least that often instead. `clock` is in seconds.
    """

    # whether it shows evaluations in a table, and not as lines
    tabulates = False

    def __init__(
        self,
        console: Console | None = None,
        *,
        every_record: bool = False,
        shows_all: bool = True,
        step_line_s: float = STEP_LINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if console is None and sys.stdout is not None:
            # TolerantStream, because a run continues when nobody reads what it prints; whether this is a terminal is
            # not left to rich, as FORCE_COLOR would put a bar into logs
            is_terminal = sys.stdout.isatty()
            out = cast(TextIO, TolerantStream(sys.stdout))
            console = Console(file=out, force_terminal=is_terminal, width=None if is_terminal else WIDTH)
        self._console = console or Console(quiet=True)
        self.is_terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        self._every_record, self._clock = every_record, clock
        self._is_brief = self.is_terminal and not shows_all
        self._lock, self._closing, self._thread = RLock(), Event(), Thread(target=self._keep_ticking, daemon=True)
        self._live: Live | None = None
        self._record: StepRecord | None = None
        self.round: RoundRecord | None = None  # whose steps follow
        self._shown_step, self._shown_at_s, self._step_line_s = 0, -step_line_s, step_line_s
        self._phase, self._done, self._total = "", 0, 0
        self._phase_began_s = self._recorded_s = clock()
        self._due_s = self._phase_began_s + SILENT_S

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        self._thread.join(4 * TICK_S)

    def close(self) -> None:
        """Close the bar for good; lines can still be printed."""
        self._closing.set()
        self._close_live()

    def on_stage(self, name: str, text: str, style: str = "bold cyan") -> None:
        if not self.leaves_out(name, text):
            self.print_line(f"{name:<{INDENT - 1}} {text}", style, len(name))

    def leaves_out(self, name: str, text: str) -> bool:
        """Whether a stage is left to train.log."""
        is_detail = (name == "tokens" and not _SIZES.match(text)) or (name == "model" and text.startswith("attention "))
        return self._is_brief and (is_detail or name in _ROUTINE_STAGES)

    def on_eval(self, record: EvalRecord) -> None:
        self.on_stage(*describe_record(record))

    def on_round(self, record: RewardsRecord) -> None:
        self.round = record if isinstance(record, RoundRecord) else self.round
        self.on_stage(*describe_record(record))

    def on_event(self, kind: str, facts: Mapping[str, Any]) -> None:
        if kind not in TOLD_EVENTS:
            self.on_stage(kind, describe_event(kind, facts), "yellow")

    def on_phase(self, name: str, done: int = 0, total: int = 0, *, seconds: float = 0.0) -> None:
        """Set what the run does now, and for how many `seconds` already; "" for nothing to show."""
        with self._lock:
            if name != self._phase:
                self._phase, self._phase_began_s = name, self._clock() - seconds
                if name != "step":
                    self._due_s = min(self._due_s, self._clock() + self._silent_s)
            self._done, self._total = done, total

    def on_step(self, record: StepRecord) -> None:
        with self._lock:
            self._record = record
            self._recorded_s = self._phase_began_s = self._clock()
            self.on_phase("step", record.step + 1)
            is_last = record.step == record.num_steps
            if self.is_terminal:
                if self._live is None or is_last:
                    self._refresh()
            elif (
                self._every_record
                or is_last
                or self._shown_step == 0
                or record.step - self._shown_step >= record.num_steps / PLAIN_LINES
                or self._recorded_s - self._shown_at_s >= self._step_line_s
            ):
                self._shown_step, self._shown_at_s = record.step, self._recorded_s
                self.on_stage("step", fit(self._step_parts(record), self._console.width - INDENT))

    def on_end(self, end: RunEnd) -> None:
        with self._lock:
            self._close_live()
            self._record = None
            self.on_phase("closing")

    def print_line(self, line: str, style: str = "", styled: int = 0) -> None:
        """Print a line, its first characters in a style; it wraps between words, so that paths stay whole."""
        wrapper = textwrap.TextWrapper(
            self._console.width, subsequent_indent=" " * INDENT, break_long_words=False, break_on_hyphens=False
        )
        text = Text(wrapper.fill(printable(line)))
        text.stylize(style, 0, styled)
        with self._lock:
            self._console.print(text, soft_wrap=True)
            self._due_s = self._clock() + self._silent_s

    @property
    def _silent_s(self) -> float:
        return SILENT_S if self._record is None or self.is_terminal else SILENT_STEPS_S

    def tick(self) -> None:
        """Move what a terminal shows; elsewhere, say what the run does after a long silence. Called twice a second."""
        with self._lock:
            is_due = bool(self._phase) and self._clock() >= self._due_s
            if self.is_terminal:
                if self._record is None and not self._phase:
                    self._close_live()
                elif is_due or self._live is not None:
                    self._refresh()
            elif is_due:
                phase_s = self._clock() - self._phase_began_s
                self.on_stage("...", f"{self._phase_text()} {phase_s:.0f} s", "dim")
                self._due_s = max(self._due_s, self._clock() + min(phase_s, SILENT_STEPS_S))

    def _keep_ticking(self) -> None:
        while not self._closing.wait(TICK_S):
            self.tick()

    def _refresh(self) -> None:
        if self._closing.is_set():
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._render)
            self._live.start()
        self._live.refresh()

    def _close_live(self) -> None:
        with self._lock:
            if self._live is not None:
                # the last state of a bar stays on the screen, that of a phase does not
                self._live.transient = self._record is None
                self._live.stop()
                self._live = None

    def _step_parts(self, record: StepRecord) -> list[str]:
        """Return the parts of a step's line, the most important ones first; train.log and metrics.jsonl have all."""
        reward = self.round.reward if self.round else None
        shown = [] if reward is None else [ROUND["reward"].text(reward)]
        # a policy's loss is near 0, whatever it learns
        figures = console_figures(record, STEP, without="loss" if self.round else "")
        return [f"{record.step}/{record.num_steps}", *shown, *figures]

    def _phase_text(self) -> str:
        of_total = f" of {self._total:,}" if self._total else ""
        return f"{self._phase} {self._done:,}{of_total}" if self._done else self._phase

    def _render(self) -> RenderableType:
        record, now_s = self._record, self._clock()
        done, total, phase_s = self._done, self._total, round(now_s - self._phase_began_s)
        parts = [f"{self._phase_text()} {short_time(phase_s)}"]
        if done and total:
            parts.append(f"{short_time(round(phase_s / done * (total - done)))} left")
        if record is not None:
            done, total = record.step, record.num_steps
            waited_s = now_s - self._recorded_s if self._phase in ("", "step") else 0.0
            figures = self._step_parts(replace(record, eta_s=max(0.0, record.eta_s - waited_s)))
            parts = figures if self._phase in ("", "step") else [figures[0], *parts, *figures[1:]]
        line = Table.grid(padding=(0, 1))
        bar: list[RenderableType] = [ProgressBar(total, done, width=BAR_WIDTH)] if total else []
        line.add_row(*bar, Text(fit(parts, self._console.width - BAR_WIDTH - 2), no_wrap=True, overflow="ellipsis"))
        return line


@dataclass
class PhaseCallback(Callback):
    """Shows on a console only what a run does while it is silent, for a verb that prints its results itself."""

    console: ConsoleCallback

    def on_phase(self, name: str, done: int = 0, total: int = 0) -> None:
        self.console.on_phase(name, done, total)


class RankOutput:
    """Where a launcher copies the lines of rank 0's log: unchanged in a pipe, above a bar on a terminal.

    The bar follows the metrics.jsonl of `folder`, so that logs hold lines only.
    """

    def __init__(self, console: ConsoleCallback, stream: TextIO, folder: Path) -> None:
        self._console, self._stream, self._is_left_out = console, stream, False
        path = folder / "metrics.jsonl"
        self._metrics = LineFollower(path, offset=path.stat().st_size if path.exists() else 0)

    def write(self, text: str) -> None:
        is_terminal = self._console.is_terminal
        if not is_terminal:
            self._stream.write(text)
        for line in text.splitlines():
            # in a pipe, rank 0's own console says what it waits for
            waiting = _WAITING_LINE.fullmatch(line) if is_terminal else None
            self._console.on_phase(waiting[1] if waiting else "", seconds=float(waiting[2]) if waiting else 0.0)
            if not is_terminal or waiting or _STEP_LINE.match(line):
                continue
            if line[:INDENT].strip():  # other lines go on with the one before
                self._is_left_out = self._console.leaves_out(line[: INDENT - 1].strip(), line[INDENT:])
            if not self._is_left_out:
                self._console.print_line(line, "bold cyan", INDENT - 1)

    def flush(self) -> None:
        """Show the steps since the last call; the launcher calls this all the time."""
        for line in self._metrics.new_lines() if self._console.is_terminal else ():
            record = record_of(line)
            if isinstance(record, StepRecord):
                self._console.on_step(record)
            elif isinstance(record, RoundRecord):
                self._console.round = record
            elif isinstance(record, EvalRecord) and self._console.tabulates:
                self._console.on_eval(record)
        self._stream.flush()


def fit(parts: Sequence[str], width: int) -> str:
    """Join parts of a line, without the last ones if they do not fit in `width` columns."""
    for num in range(len(parts), 1, -1):
        if len(text := "  ".join(parts[:num])) <= width:
            return text
    return parts[0]
