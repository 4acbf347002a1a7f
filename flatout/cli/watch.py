"""`flatout watch RUN`: shows a running or finished run from its files alone."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flatout.errors import DataError, counted, reason_of
from flatout.io.redact import printable
from flatout.track.callback import deliver
from flatout.track.console import ConsoleCallback
from flatout.track.figures import Figure, named, short_time
from flatout.track.record import STEP, STEP_PARTS, describe_event
from flatout.track.run_log import RunFollower, RunLog
from flatout.track.summary import JUDGED_ROWS, judged_values, next_commands, summarize, summary_lines
from flatout.view.open_runs import find_run

POLL_S = 1.0
# the exit code that shells give to a program ended by Ctrl-C
INTERRUPTED = 130
# no news for so many steps, and for so long, is worth a line
QUIET_STEPS, QUIET_S = 10, 60.0
NUM_EVENTS, TAIL_BYTES = 5, 4096
SPARKS = "▁▂▃▄▅▆▇█"
COLORS = ("red", "green", "blue", "magenta", "cyan", "yellow")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("run", type=find_run, metavar="RUN", help="a run, running or finished")


def run(args: argparse.Namespace) -> int | None:
    """Watch until the run ends. Raises DataError for a folder that is not a run's, or is deleted."""
    console = Console(file=cast(TextIO, sys.stdout), force_terminal=sys.stdout.isatty())
    try:
        follower = RunFollower(args.run)
        log = follower.log
        if console.is_terminal and not console.is_dumb_terminal:
            with Live(console=console, auto_refresh=False) as live:
                for _ in _polls(follower):
                    live.update(view(log, console.width), refresh=True)
        else:
            _print_lines(follower)
    except KeyboardInterrupt:
        print(f"left {args.run}, which continues")
        return INTERRUPTED
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {reason_of(error)}; name the folder of a run") from error
    print("\n".join(summary_lines(summarize(log), next_commands(log))))
    return None


def _polls(follower: RunFollower) -> Iterator[bool]:
    """Read the run again and again until it has ended; yield whether there was anything new."""
    folder = follower.log.folder
    while True:
        if not folder.is_dir():
            raise DataError(f"{folder} was deleted while it was watched")
        yield follower.poll()
        # a run of another host has ended if it is silent for long
        log, quiet_s = follower.log, max(QUIET_S, *(QUIET_STEPS * step.step_s for step in follower.log.steps[-1:]))
        has_ended = log.state != "running" and (log.state != "not ended" or _news_age_s(log) > quiet_s)
        if has_ended or getattr(sys.stdout, "is_unread", False):
            return
        time.sleep(POLL_S)


def _news_age_s(log: RunLog) -> float:
    """Return the seconds since a run wrote anything, by the clock of whoever keeps its files."""
    paths = [path for name in ("train.log", "metrics.jsonl") if (path := log.folder / name).exists()]
    return time.time() - max((path.stat().st_mtime for path in paths), default=0.0)


def _print_lines(follower: RunFollower) -> None:
    """Print what is new, as the run itself does in a pipe."""
    log = follower.log
    with ConsoleCallback() as console:
        for _ in _polls(follower):
            for one in follower.newest:
                if isinstance(one, Mapping):
                    console.on_event(str(one.get("kind")), one)
                else:
                    deliver(console, one)
            console.on_phase("nothing new after step", log.steps[-1].step if log.steps else 0)
        for name, text in _state(log):
            # the summary says how a run ended
            if log.end is None or name == "held":
                console.on_stage(name, text)


def view(log: RunLog, width: int) -> RenderableType:
    """Draw a run for a terminal of at least 60 columns."""
    table = Table.grid(padding=(0, 1))
    table.add_column(width=8, style="bold cyan", no_wrap=True)
    table.add_column(width=width - 9)
    for name, text in (*_head(log), *_figures(log, width), *_ranks(log), *_tail(log)):
        shown = Text(printable(text), no_wrap=name != "state", overflow="ellipsis") if isinstance(text, str) else text
        table.add_row(name, shown)
    return table


def _head(log: RunLog) -> Iterator[tuple[str, RenderableType]]:
    start, last = log.start, log.steps[-1] if log.steps else None
    if start is None:
        yield "run", str(log.folder)
    else:
        device = start.gpus[0].name if start.gpus else start.device
        yield "run", f"{start.name}  {start.method}  {counted(start.num_ranks, 'rank')} on {device}  {start.model}"
    if last is not None:
        left = "" if log.end else f"  {short_time(last.eta_s)} left"
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(last.num_steps, last.step, width=20), f"{last.step:,}/{last.num_steps:,}{left}")
        yield "steps", bar


def _figures(log: RunLog, width: int) -> Iterator[tuple[str, RenderableType]]:
    room = max(10, width - 45)

    def drawn(values: Iterable[float | None], row: Figure, text: str = "") -> str:
        known = [value for value in values if value is not None]
        return f"{text or row.write(known[-1]):<8} {sparkline(known, room)}" if known else ""

    if log.rounds:  # a policy's loss is near 0, whatever it learns
        yield "reward", drawn(judged_values(log, "round").values(), JUDGED_ROWS["round"])
    elif log.steps:
        yield "loss", drawn((step.loss for step in log.steps), STEP["loss"])
    for name in next((step.metrics for step in reversed(log.steps) if step.metrics), ()):
        yield "", f"{drawn((step.metrics.get(name) for step in log.steps), named(name))}  {name}"
    # by eval.best, which need not be the loss
    if (one := summarize(log).evaluation) and (evals := log.evals or log.held_out):
        line = drawn(judged_values(log, one.kind).values(), row := JUDGED_ROWS[one.kind], one.texts[1])
        yield one.kind, f"{line}  best {row.write(one.best)}, step {one.best_step:,}"
        for name, value in evals[-1].metrics.items():
            yield "", f"{named(name).write(value):<8} {name}"
    if log.steps:
        last = log.steps[-1]
        shown = [STEP[name].text(value) for name in ("tokens_per_s", "mfu") if (value := getattr(last, name))]
        now, peak = (STEP[name].write(getattr(last, name)) for name in ("memory_bytes", "peak_memory_bytes"))
        yield "speed", "  ".join((*shown, f"memory {now.removesuffix(' GiB')}, peak {peak}"))
        parts = Text(f"{last.step_s:.3g} s ")
        for color, (name, row) in zip(cycle(COLORS), STEP_PARTS.items(), strict=False):
            # no clock has measured a part of 0 s
            if share := round(getattr(last, name) / (last.step_s or 1.0), 2):
                parts.append(f" {row.label} {share:.0%}", style=color)
        yield "step", parts


def _ranks(log: RunLog) -> Iterator[tuple[str, RenderableType]]:
    """Yield for each rank its busy seconds and the last line of its log, as far as there are any."""
    busy_s = log.steps[-1].rank_busy_s if log.steps else ()
    tails = {}
    for path in (*log.folder.glob("logs/latest/rank-*.log"), *log.folder.glob("logs/node-*/latest/rank-*.log")):
        number = path.stem.removeprefix("rank-")
        if number.isdigit():
            tails[int(number)] = last_line(path)
    for rank in sorted({*range(len(busy_s)), *tails}):
        bar = ""
        if rank < len(busy_s):
            bar = f"{busy_s[rank]:.3g} s {SPARKS[-1] * round(10 * busy_s[rank] / (max(busy_s) or 1.0)):<10}  "
        yield f"rank {rank}", bar + tails.get(rank, "")


def last_line(path: Path) -> str:
    """Return the last line of a log that has text, without control characters."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = [line for line in file.read().decode("utf-8", errors="replace").splitlines() if line.strip()]
    return printable(lines[-1]) if lines else ""


def _tail(log: RunLog) -> Iterator[tuple[str, RenderableType]]:
    """Yield the last events and the state of the run."""
    for event in log.events[-NUM_EVENTS:]:
        kind, clock = str(event.get("kind")), str(event.get("time"))[11:19]
        yield "event", f"{clock} {kind}  {describe_event(kind, event)}"
    yield from _state(log)


def _state(log: RunLog) -> Iterator[tuple[str, str]]:
    """Yield whether the run lives, how it ended, and which other verb holds its folder."""
    age = f"last news {short_time(max(0, round(_news_age_s(log))))} ago"
    if log.state == "running":
        said = "" if log.steps else f": {last_line(log.folder / 'train.log').partition(' ')[2]}"
        yield "state", f"running, {age}{said}"
    elif log.state == "killed":
        yield "state", f"killed, {age}; the same command resumes it"
    elif log.end is None:
        host = log.last_holder.host if log.last_holder else "a host without a name"
        yield "state", f"cannot see the lock of the run on {host}, {age}; if it was killed, the same command resumes it"
    else:
        yield "state", f"{log.end.outcome}{f': {log.end.why}' if log.end.why else ''}"
    if log.holder is not None and not log.holder.trains:
        yield "held", f"by {log.holder}"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as at most `width` characters, each the mean of its share of them."""
    num = min(width, len(values))
    edges = [len(values) * index // num for index in range(num + 1)]
    means = [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(edges)]
    low, high = min(means), max(means)
    return "".join(SPARKS[round((value - low) / (high - low) * 7) if high > low else 3] for value in means)
