"""Reports as Markdown, to paste, and as JSON, for programs."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from pydantic import TypeAdapter

from flatout.io.json_file import encode_json
from flatout.io.redact import printable
from flatout.track.figures import named
from flatout.track.record import EVAL, EvalRecord
from flatout.track.run_log import RunLog
from flatout.track.summary import summarize
from flatout.view.facts import (
    changed_settings,
    different_settings,
    headline,
    notes_rows,
    plan_rows,
    results,
    settings_of,
    show,
    start_rows,
)

_RUN = TypeAdapter(RunLog)


def markdown_report(logs: Mapping[str, RunLog]) -> str:
    """Return the report of one run, or a comparison of several, as Markdown."""
    if len(logs) > 1:
        names, summaries = list(logs), [summarize(log) for log in logs.values()]
        figures = [*results(summaries), *notes_rows(list(logs.values()))]
        parts = [f"# {len(logs)} runs", table(["", *names], figures)]
        if rows := different_settings(list(logs.values())):
            parts += ["## Settings that differ", table(["", *names], rows)]
        return "\n\n".join(parts) + "\n"
    log = next(iter(logs.values()))
    summary = summarize(log)
    parts = [f"# {text_of(summary.name)}: {summary.state}", table(["", "", ""], headline(summary))]
    parts += [f"**{name}** {text_of(value)}" for name, value in notes_rows([log])]
    parts += [f"> {text_of(note)}" for note in (summary.why, *summary.warnings) if note]
    if planned := plan_rows(log):
        parts += ["## Plan and run", table(["", "planned", "actual"], planned)]
    if started := start_rows(log):
        parts += ["## Start-up", table(["stage", "s"], started)]
    if log.evals:
        losses = [
            (f"{e.step:,}", EVAL["eval_loss"].write(e.eval_loss), *figures_of(e).values(), "best" if e.is_best else "")
            for e in log.evals
        ]
        parts += ["## Evaluations", table(["step", "loss", *figures_of(log.evals[-1]), ""], losses)]
    if log.evals and (worst := log.evals[-1].worst):
        rows = [(f"{one.loss:.4f}", f"{one.source} row {one.row:,}", one.context, one.text) for one in worst]
        parts += ["## Worst samples", table(["loss", "from", "context", "trained text"], rows)]
    if kinds := Counter(str(event.get("kind")) for event in log.events):
        parts += ["## Events", table(["kind", "count"], ((kind, str(count)) for kind, count in kinds.most_common()))]
    if changed := changed_settings(settings_of(log)):
        settings = [(name, show(value), show(default)) for name, (value, default) in changed.items()]
        parts += ["## Settings that differ from their defaults", table(["", "value", "default"], settings)]
    return "\n\n".join(parts) + "\n"


def figures_of(record: EvalRecord) -> dict[str, str]:
    """Return what an evaluation measured besides the loss, by name."""
    accuracy = record.eval_token_accuracy
    shown = {} if accuracy is None else {"token accuracy": EVAL["eval_token_accuracy"].write(accuracy)}
    return shown | {text_of(name): named(name).write(value) for name, value in record.metrics.items()}


def json_report(logs: Mapping[str, RunLog]) -> str:
    """Return the summaries, plans, evaluations, answers, events and settings of runs as JSON."""
    runs = []
    for name, log in logs.items():
        last = asdict(log.steps[-1]) if log.steps else None
        more = {"name": name, "summary": asdict(summarize(log)), "last_step": last, "settings": dict(settings_of(log))}
        runs.append(more | _RUN.dump_python(log, mode="json", exclude={"steps"}))
    return encode_json({"runs": runs}).decode()


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    cells = [[text_of(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def text_of(value: str) -> str:
    """Return a text that Markdown shows as it is: no HTML, link or picture of it counts."""
    return html.escape(printable(value), quote=False).replace("](", "]\\(")
