"""The page of a run, and of several runs beside each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from flatout.track.record import RunStart, describe_event
from flatout.track.run_log import RunLog
from flatout.track.summary import RunSummary, short_count, summarize
from flatout.view.charts import bar_plot, figure
from flatout.view.curves import curves
from flatout.view.facts import changed_settings, different_settings, headline, plan_rows, results, settings_of, show
from flatout.view.packing import draw_packing
from flatout.view.page import cards, section, table, text, visible

# of many answers to a prompt this many are side by side, and of many events the newest are listed
MAX_ANSWERS, MAX_EVENTS = 6, 1000
MAX_UNIX_S = 253_402_300_800.0  # the end of the year 9999
_BADGES = {"complete": "good", "stopped": "", "failed": "bad", None: "live"}


def run_fragment(log: RunLog) -> str:
    """Return the body of one run's page, for a run of any state."""
    summary, plan = summarize(log), log.start.plan if log.start else None
    lengths = packing = promised = ""
    if plan:
        actual = "so far" if log.end is None else "actual"
        promised = table(["", "planned", actual], plan_rows(log), style="figures")
        bars = bar_plot("samples", plan.length_edges, plan.length_counts, "tokens in a sample")
        unit = f"samples; {plan.num_samples:,} in all"
        lengths = figure("Sample lengths", [bars], unit=unit, is_wide=True)
        packing = draw_packing(plan.packing, plan.padded)
    note = (
        "The first steps, to scale. Above: the tokens that each rank computed, one block a sample. Below: what a "
        "loader that pads each batch to its longest sample would have computed. Right: tokens of both."
    )
    return "".join(
        (
            _title(log, summary),
            cards(headline(summary)),
            "".join(f'<p class="warning">{text(warning)}</p>' for warning in summary.warnings),
            _curves({summary.name: log}),
            section("plan", "Plan and run", promised),
            section("packing", "Packing", packing and lengths + f'<p class="note">{note}</p>' + packing),
            section("answers", "Answers while training", _answers(log)),
            section("events", "Events", _events(log)),
            section("settings", "Settings", _settings(log)),
        )
    )


def runs_fragment(logs: Mapping[str, RunLog]) -> str:
    """Return the body of a page that compares runs, each by its name."""
    summaries, names = [summarize(log) for log in logs.values()], list(logs)
    settings = different_settings(list(logs.values()))
    differences = table(["", *names], settings, style="settings") if settings else '<p class="note">None.</p>'
    warnings = "".join(
        f'<p class="warning"><b>{text(name)}</b> {text(warning)}</p>'
        for name, summary in zip(names, summaries, strict=True)
        for warning in summary.warnings
    )
    return (
        f'<h1>{len(logs)} runs</h1><p class="lead">{text(", ".join(names))}</p>'
        + section("results", "Results", table(["", *names], results(summaries), style="figures"))
        + section("differences", "Settings that differ", differences)
        + _curves(logs)
        + section("warnings", "Warnings", warnings)
    )


def _title(log: RunLog, summary: RunSummary) -> str:
    why = f'<p class="warning">{text(summary.why)}</p>' if summary.why else ""
    note = ""
    if summary.state == "not ended":
        note = '<p class="note">This run has not recorded an end: it is still running or was killed.</p>'
    if log.start is None:
        lead = f"{log.folder}: no start.json, so this page has no plan and little about the run"
    else:
        lead = _lead(log.start)
    badge = f'<span class="badge {_BADGES[summary.outcome]}">{summary.state}</span>'
    return f'<h1>{text(summary.name)}{badge}</h1><p class="lead">{text(lead)}</p>{note}{why}'


def _lead(start: RunStart) -> str:
    """Return what a run trains, and where."""
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


def _curves(logs: Mapping[str, RunLog]) -> str:
    """Return the charts with the switches of their axes, which the page's script sets."""
    drawn = curves(logs) or '<p class="empty">No steps yet.</p>'
    switches = ""
    for name, choices in (("axis", ("step", "tokens", "time")), ("scale", ("linear", "log"))):
        buttons = "".join(
            f'<button type="button" data-switch="{name}" data-value="{choice}">{choice}</button>' for choice in choices
        )
        switches += f'<span class="switch" role="group" aria-label="{name}">{buttons}</span>'
    return f'<section id="curves"><div class="bar-of-switches"><h2>Curves</h2>{switches}</div>{drawn}</section>'


def _answers(log: RunLog) -> str:
    """Return each prompt with its reference and its answers over the steps, side by side."""
    by_prompt: dict[str, list[tuple[int, str]]] = {}
    references: dict[str, str | None] = {}
    for record in log.answers:
        for one in record.answers:
            by_prompt.setdefault(one.prompt, []).append((record.step, one.answer))
            references[one.prompt] = one.reference
    return "".join(_answer(prompt, found, references[prompt]) for prompt, found in by_prompt.items())


def _answer(prompt: str, found: Sequence[tuple[int, str]], reference: str | None) -> str:
    last = len(found) - 1
    count = min(MAX_ANSWERS, len(found))
    shown = sorted({index * last // max(1, count - 1) for index in range(count)})
    beside = [f"<div><h3>step {found[index][0]:,}</h3>{_said(found[index][1])}</div>" for index in shown]
    if reference is not None:
        beside.append(f'<div class="reference"><h3>reference</h3>{_said(reference)}</div>')
    others = ""
    if len(shown) < len(found):
        every = "".join(f"<h3>step {step:,}</h3>{_said(answer)}" for step, answer in found)
        others = f"<details><summary>All {len(found)} answers</summary>{every}</details>"
    return f'<div class="answer"><h3>prompt</h3>{_said(prompt)}<div class="steps">{"".join(beside)}</div>{others}</div>'


def _said(words: str) -> str:
    return f'<p class="said">{visible(words) or "(nothing)"}</p>'


def _events(log: RunLog) -> str:
    """Return all events with buttons that show one kind."""
    kinds = Counter(str(event.get("kind")) for event in log.events)
    if not kinds:
        return ""
    chips = "".join(
        f'<button type="button" data-kind="{text(kind)}" aria-pressed="false">{text(kind)} {count:,}</button>'
        for kind, count in kinds.most_common()
    )
    every = f'<button type="button" data-kind="" aria-pressed="true">all {len(log.events):,}</button>'
    rows = []
    for event in log.events[-MAX_EVENTS:]:
        kind = str(event.get("kind"))
        facts = describe_event(kind, {name: fact for name, fact in event.items() if name not in ("time", "kind")})
        time = str(event.get("time", ""))[:19].replace("T", " ")
        cells = f'<th scope="row">{text(time)}</th><td>{text(kind)}</td><td>{text(facts)}</td>'
        rows.append(f'<tr data-kind="{text(kind)}">{cells}</tr>')
    left = f'<p class="note">The newest {MAX_EVENTS:,}; events.jsonl has all.</p>' if kinds.total() > len(rows) else ""
    head = '<thead><tr><th scope="col">time (UTC)</th><th scope="col">kind</th><th scope="col">facts</th></tr></thead>'
    body = f'<div class="scroll"><table class="events stacks">{head}<tbody>{"".join(rows)}</tbody></table></div>'
    return f'<div class="chips">{every}{chips}</div>{left}{body}'


def _settings(log: RunLog) -> str:
    """Return the settings, those that differ from their defaults first; the rest on a click."""
    settings = settings_of(log)
    if not settings:
        return ""
    changed = changed_settings(settings)
    rows = [(name, show(value), show(default)) for name, (value, default) in changed.items()]
    rest = [(name, show(value)) for name, value in settings.items() if name not in changed]
    parts = table(["differs from its default", "value", "default"], rows, style="settings") if rows else ""
    folded = {f"{len(rest)} settings at their defaults": table(["setting", "value"], rest, style="settings")}
    if log.start:
        folded["Versions"] = table(["package", "version"], log.start.versions.items(), style="settings")
        folded["Model"] = f"<pre>{text(log.start.model_text)}</pre>"
    return parts + "".join(f"<details><summary>{name}</summary>{body}</details>" for name, body in folded.items())
