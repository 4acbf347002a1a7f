"""The page of a run, and of several runs beside each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flatout.track.figures import short_count
from flatout.track.record import Answer, describe_event
from flatout.track.run_log import RunLog
from flatout.track.summary import ROUTINE_EVENTS, next_commands, summarize
from flatout.view import facts
from flatout.view.charts import histogram, packing_lanes
from flatout.view.curves import curves
from flatout.view.page import render

# of many answers to a prompt, and of many rounds, this many are shown, and of many events the newest are listed
MAX_ANSWERS, MAX_EVENTS = 6, 1000
MAX_UNIX_S = 253_402_300_800.0  # the end of the year 9999
_BADGES = {"complete": "good", "stopped": "", "failed": "bad", None: "live"}


def run_fragment(log: RunLog) -> str:
    """Return the body of one run's page, for a run of any state."""
    summary, plan, settings = summarize(log), log.start.plan if log.start else None, facts.settings_of(log)
    lengths, packing = None, ""
    if plan:
        unit = f"samples; {plan.num_samples:,} in all"
        lengths = histogram("Sample lengths", unit, plan.length_edges, plan.length_counts, "tokens in a sample")
        packing = packing_lanes(plan.packing, plan.padded)
    folder = log.folder.relative_to(here) if log.folder.is_relative_to(here := Path.cwd()) else log.folder
    changed, answers, started = facts.changed_settings(settings), list(_answers(log)), facts.start_rows(log)
    worst = log.evals[-1].worst if log.evals else ()
    sampled = [*log.held_out[-1:], *facts.spread(log.rounds, MAX_ANSWERS)[::-1]]
    contents = (
        ("curves", "Curves", True), ("answers", "Answers", answers),
        ("rounds", "Sampled answers", sampled), ("worst", "Worst samples", worst),
        ("plan", "Plan", log.start), ("start", "Start-up", started), ("packing", "Packing", packing),
        ("events", "Events", log.events), ("settings", "Settings", settings),
    )  # fmt: skip
    return render(
        "run.html",
        contents=contents,
        log=log,
        summary=summary,
        badge=_BADGES[summary.outcome],
        lead=_lead(log),
        headline=facts.headline(summary),
        commands=next_commands(replace(log, folder=folder)),
        charts=curves({summary.name: log}),
        plan_rows=facts.plan_rows(log, summary),
        start_rows=started,
        lengths=lengths,
        packing=packing,
        answers=answers,
        sampled=sampled,
        worst=worst,
        kinds=Counter(str(event.get("kind")) for event in log.events).most_common(),
        events=[_event(str(event.get("kind")), event) for event in log.events[-MAX_EVENTS:]],
        changed=[(name, facts.show(value), facts.show(default)) for name, (value, default) in changed.items()],
        rest=[(name, facts.show(value)) for name, value in settings.items() if name not in changed],
    )


def runs_fragment(logs: Mapping[str, RunLog]) -> str:
    """Return the body of a page that compares runs, each by its name."""
    runs, summaries = list(logs.values()), [summarize(log) for log in logs.values()]
    figures = facts.results(runs, summaries)
    bests = [facts.best_of(name, summaries) for name, *_ in figures]
    cells = [[(value, value == best) for value in values] for (_, *values), best in zip(figures, bests, strict=True)]
    return render(
        "runs.html",
        names=list(logs),
        header=[name for name, *_ in figures],
        results=zip(logs, zip(*cells, strict=True), strict=True),
        settings=facts.different_settings(runs),
        charts=curves(logs),
        warnings=[(name, one) for name, summary in zip(logs, summaries, strict=True) for one in summary.warnings],
    )


def _lead(log: RunLog) -> str:
    """Return what a run trains, and where."""
    if (start := log.start) is None:
        return f"{log.folder}: no start.json, so this page has no plan and little about the run"
    gpus = Counter(gpu.name for gpu in start.gpus)
    device = ", ".join(f"{count} × {name}" for name, count in gpus.items()) or f"{start.num_ranks} × {start.device}"
    resumed = f"resumed at step {start.resumed_step:,}" if start.resumed_step else ""
    sizes = f"{short_count(start.num_trained_parameters)} of {short_count(start.num_parameters)} parameters"
    started = ""
    if 0 < start.first_started_at < MAX_UNIX_S:
        started = datetime.fromtimestamp(start.first_started_at, UTC).strftime("started %Y-%m-%d %H:%M UTC")
    where = f"{device}, {start.dtype}, {start.strategy}"
    parts = (start.model, f"{start.method}, {sizes}", start.data, where, resumed, started)
    return " · ".join(part for part in parts if part)


def _answers(log: RunLog) -> Iterator[tuple[Answer, list[tuple[int, str]], list[tuple[int, str]]]]:
    """Yield an answer to each prompt, some of its answers over the steps as (step, answer), and all of them."""
    answers: dict[tuple[str, tuple[str, ...]], list[tuple[int, str]]] = {}
    prompts = {(one.prompt, one.pictures): one for record in log.answers for one in record.answers}
    for record in log.answers:
        for one in record.answers:
            answers.setdefault((one.prompt, one.pictures), []).append((record.step, one.answer))
    for prompt, every in answers.items():
        yield prompts[prompt], facts.spread(every, MAX_ANSWERS), every


def _event(kind: str, event: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event as the page lists it; `routine`: every healthy run has it."""
    time = str(event.get("time", ""))[:19].replace("T", " ")
    return {"time": time, "kind": kind, "facts": describe_event(kind, event), "routine": kind in ROUTINE_EVENTS}
