"""What a report says in words and figures, for HTML, Markdown and JSON alike, and the last two of them."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
import yaml
from pydantic import TypeAdapter

from flatout.config.read import flatten, make_config
from flatout.errors import FlatoutError
from flatout.io.json_file import encode_json
from flatout.io.redact import printable, redacted
from flatout.track.figures import Figure, gib, named, short_count, short_time
from flatout.track.record import EVAL, ROUND, STEP, EvalRecord, HeldOutRecord, RoundRecord
from flatout.track.run_log import RunLog
from flatout.track.start_up import EVENT as START_UP
from flatout.track.start_up import stages_of
from flatout.track.summary import JUDGED, JUDGED_ROWS, RunSummary, judged_texts, judged_values, seconds_of, summarize
from flatout.view.charts import bucket_means

NONE = "–"
# points of the small curve in a list of runs
NUM_SPARK = 60
MAX_ROUNDS = 20  # rows of a table of rounds in Markdown
T = TypeVar("T")
# what the headline calls what a run is judged by
_TITLES = {"step": "Training loss", "eval": "Evaluation loss", "round": "Round reward", "held_out": "Held-out reward"}
_RUN = TypeAdapter(RunLog)
# settings that differ between any two runs and say nothing about a result
_OWN_NAMES = ("name", "run_dir")


def judged(summary: RunSummary) -> dict[str, tuple[Figure, float, str, str]]:
    """Return the figures by which one run is the best, by title: (row, value, its text, note)."""
    figures = {}
    if one := summary.evaluation:
        title, row, (first, last, best) = _TITLES[one.kind], JUDGED_ROWS[one.kind], one.texts
        figures[title] = (row, one.last, last, f"{first} at the first evaluation")
        figures[f"Best {title.lower()}"] = (row, one.best, best, f"after step {one.best_step:,}")
    if one := summary.trained:
        first, last, _ = one.texts
        figures[_TITLES[one.kind]] = (JUDGED_ROWS[one.kind], one.last, last, f"{first} at the start")
    warm = f" after {summary.num_warm_up_records} warm-up records" if summary.num_warm_up_records else ""
    for title, name, note in (("Throughput", "tokens_per_s", f"tokens/s{warm}"), ("MFU", "mfu", "of the nominal peak")):
        if (value := getattr(summary, name)) is not None:
            figures[title] = (STEP[name], value, STEP[name].write(value), note)
    return figures


def headline(summary: RunSummary) -> list[tuple[str, str, str]]:
    """Return the figures that a run is judged by: (name, value, note)."""
    facts = [(title, text, note) for title, (_, _, text, note) in judged(summary).items()]
    facts.append(("Steps", f"{summary.num_steps:,}", f"of {summary.num_planned_steps:,} planned"))
    if summary.num_steps:
        label = f"{short_count(summary.num_label_tokens)} label tokens"
        facts.append(("Tokens", short_count(summary.num_tokens), label))
        facts.append(("Training time", short_time(summary.train_s), "without evaluations and saves"))
    if summary.peak_memory_bytes:
        write, bytes_planned = STEP["peak_memory_bytes"].write, summary.planned_memory_bytes
        planned = f"{gib(bytes_planned)} planned; " if bytes_planned else ""
        facts.append(("Peak memory", write(summary.peak_memory_bytes), f"{planned}highest of all ranks"))
    parts = {name.removesuffix("_s").replace("_", " "): lost_s for name, lost_s in asdict(summary.lost).items()}
    greatest = sorted(parts, key=lambda name: -parts[name])[:2]
    if summary.num_steps and parts[greatest[0]]:
        note = ", ".join(f"{name} {short_time(parts[name])}" for name in greatest if parts[name])
        facts.append(("Lost time", short_time(sum(parts.values())), note))
    return facts


def row_figures(log: RunLog) -> dict[str, Any]:
    """Return what a list of runs shows of one: its loss or reward with its curve, its steps and its time."""
    summary = summarize(log)
    one, curve = summary.evaluation or summary.trained, np.empty((1, 0))
    if summary.trained:
        # the loss of every step has more points than that of the evaluations; rewards of rounds are no held-out ones
        kind = "step" if summary.trained.kind == "step" or one is None else one.kind
        values = judged_values(log, kind)
        curve = bucket_means({"step": np.array([*values], float)}, np.array([[*values.values()]]), NUM_SPARK)[1]
    planned = summary.num_planned_steps
    return {
        "name": _TITLES[one.kind].lower() if one else "",
        "first": one.texts[0] if one else "",
        "last": one.texts[1] if one else "",
        "curve": curve[0].tolist(),
        "steps": f"{summary.num_steps:,}" + (f" of {planned:,}" if planned != summary.num_steps else ""),
        "time": short_time(summary.train_s) if summary.num_steps else "",
    }


def best_of(name: str, summaries: Sequence[RunSummary]) -> str | None:
    """Return the best of what runs show for a figure of the headline; None if there is no best."""
    known = [figures[name] for figures in map(judged, summaries) if name in figures]
    if len(known) < 2:
        return None
    return (min if known[0][0].better == "less" else max)(known, key=lambda one: one[1])[2]


def plan_rows(log: RunLog, summary: RunSummary) -> list[tuple[str, str, str]]:
    """Return the plan's promises beside what happened: (what, planned, actual); none without a plan."""
    if log.start is None:
        return []
    plan, steps = log.start.plan, log.steps
    tokens, labels = summary.num_tokens, summary.num_label_tokens
    # the padding loader's tokens of each step, from the share of them that was avoided
    counts = [(one.tokens_per_s * seconds_of(one), one) for one in steps]
    naive = sum(count / max(1e-9, 1.0 - one.padding_avoided) for count, one in counts)
    padded = sum(count / (1.0 - one.padding_share) for count, one in counts)
    padding = 1.0 - tokens / padded if padded else 0.0
    shared = sum(count * one.shared_share for count, one in counts) / max(1, tokens)
    balance = sum(record.balance for record in steps) / len(steps) if steps else 0.0
    balances = [one for record in steps if (one := record.measured_balance) is not None]
    measured = f", {sum(balances) / len(balances):.1%} measured" if balances else ""
    # before they are sampled, answers of rounds have bounds only
    rounds = log.start.settings.get("rollout.rounds")
    bound, padded_and_balanced = ("", ()) if rounds is None else ("at most ", ("padding avoided", "balance of ranks"))
    rows = [
        *(() if rounds is None else [("rounds", f"{rounds:,}", f"{len(log.rounds):,}")]),
        ("steps", f"{plan.num_steps:,}", f"{summary.num_steps:,}"),
        ("epochs", f"{plan.epochs:.3g}", f"{steps[-1].epoch:.3g}" if steps else "0"),
        ("tokens", f"{bound}{short_count(plan.num_tokens)}", short_count(tokens)),
        ("label tokens", f"{bound}{short_count(plan.num_label_tokens)}", short_count(labels)),
        ("padding avoided", f"{plan.padding_avoided:.1%}", f"{1.0 - tokens / naive:.1%}" if naive else NONE),
        *([("padding", f"{plan.padding_share:.1%}", f"{padding:.1%}")] if plan.layout == "rows" else ()),
        *([("shared prefixes", f"{plan.shared_share:.1%}", f"{shared:.1%}")] if plan.shared_share else ()),
        ("balance of ranks", f"{plan.balance:.1%}", f"{balance:.1%}{measured}" if steps else NONE),
        ("memory of a rank", *(gib(one) if one else NONE for one in (plan.memory_bytes, summary.peak_memory_bytes))),
    ]
    return [row for row in rows if row[0] not in padded_and_balanced]


def start_rows(log: RunLog) -> list[tuple[str, str]]:
    """Return the seconds of each stage of the last start, and their sum; none before its first step."""
    starts = [event for event in log.events if event.get("kind") == START_UP]
    stages = stages_of(starts[-1]) if starts else {}
    rows = [(name, f"{seconds:.2f}") for name, seconds in stages.items()]
    return [*rows, ("launch to the end of the first step", f"{sum(stages.values()):.2f}")] if rows else []


def settings_of(log: RunLog) -> Mapping[str, Any]:
    """Return a run's settings by dotted name: from start.json, else from config.yaml; empty if neither can be read."""
    if log.start is not None:
        return log.start.settings
    try:
        values = yaml.safe_load((log.folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return dict(flatten(redacted(values))) if isinstance(values, dict) else {}


def changed_settings(settings: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ from their defaults, as (value, default); a required one has no default."""
    try:
        method, model = settings.get("method", "lora"), settings.get("model.name", NONE)
        config = make_config({"method": method, "model": {"name": model}})
    except FlatoutError:  # settings of another version
        return {}
    defaults = dict(flatten(config.model_dump(mode="json"))) | {"model.name": NONE, "method": "lora"}
    return {
        name: (value, defaults.get(name, NONE))
        for name, value in settings.items()
        # an empty section is no setting; an empty list may replace a default, as in eval.prompts: []
        if defaults.get(name, NONE) != value and (name in defaults or value not in ({}, []))
    }


def different_settings(logs: Sequence[RunLog]) -> list[tuple[str, ...]]:
    """Return the settings in which runs differ: (name, value of each run)."""
    settings_of_runs = [settings_of(log) for log in logs]
    names = dict.fromkeys(name for settings in settings_of_runs for name in settings if name not in _OWN_NAMES)
    rows = [
        (name, *(show(settings[name]) if name in settings else NONE for settings in settings_of_runs)) for name in names
    ]
    return [row for row in rows if len(set(row[1:])) > 1]


def results(logs: Sequence[RunLog], summaries: Sequence[RunSummary]) -> list[tuple[str, ...]]:
    """Return the headline figures, tags and notes of several runs: (name, value of each run)."""
    headlines = [{name: value for name, value, _ in headline(summary)} for summary in summaries]
    names = dict.fromkeys(name for figures in headlines for name in figures)
    figures = [(name, *(figures.get(name, NONE) for figures in headlines)) for name in names]
    return [("Outcome", *(summary.state for summary in summaries)), *figures, *notes_rows(logs)]


def notes_rows(logs: Sequence[RunLog]) -> list[tuple[str, ...]]:
    """Return the tags and the notes of runs as rows of `results`; none if no run has any."""
    rows = (
        ("Tags", *(", ".join(log.notes.tags) or NONE for log in logs)),
        ("Note", *(log.notes.note or NONE for log in logs)),
    )
    return [row for row in rows if set(row[1:]) != {NONE}]


def show(value: Any) -> str:
    """Return the value of a setting as YAML writes it."""
    is_plain = isinstance(value, str) and value
    return value if is_plain else yaml.safe_dump(value, default_flow_style=True, width=10_000).split("\n...")[0].strip()


def round_rows(log: RunLog, none: str = NONE) -> list[tuple[str, ...]]:
    """Return the rounds of a run as a table, its head first; evaluations between rounds have rows of their own."""
    held_out = judged_texts(log, "held_out")
    shown = ("reward", "mean_answer_tokens", "cut_share", "no_signal_share", "new_tokens_per_s")

    def figure(one: RoundRecord, name: str) -> str:
        return none if (value := getattr(one, name)) is None else ROUND[name].write(value)

    rounds = {one.step: (f"{one.round:,}", *(figure(one, name) for name in shown)) for one in log.rounds}
    rows = list[tuple[str, ...]]([("round", "step", "reward", "held out", "tokens", "cut", "no signal", "new tok/s")])
    for step in sorted({*rounds, *held_out}):
        number, reward, *figures = rounds.get(step, (none,) * (1 + len(shown)))
        rows.append((number, f"{step:,}", reward, held_out.get(step, none), *figures))
    return rows


def spread(items: Sequence[T], count: int) -> list[T]:
    """Return at most so many of the items, evenly spaced, the first and the last too."""
    count = min(count, len(items))
    return [items[index * (len(items) - 1) // max(1, count - 1)] for index in range(count)]


def markdown_report(logs: Mapping[str, RunLog]) -> str:
    """Return the report of one run, or a comparison of several, as Markdown."""
    runs = list(logs.values())
    if len(runs) > 1:
        header = ["", *logs]
        parts = [f"# {len(runs)} runs", table(header, results(runs, [summarize(log) for log in runs]))]
        if rows := different_settings(runs):
            parts += ["## Settings that differ", table(header, rows)]
        return "\n\n".join(parts) + "\n"
    (log,) = runs
    summary = summarize(log)
    parts = [f"# {text_of(summary.name)}: {summary.state}", table(["", "", ""], headline(summary))]
    parts += [f"**{name}** {text_of(value)}" for name, value in notes_rows([log])]
    parts += [f"> {text_of(note)}" for note in (summary.why, *summary.warnings) if note]
    if started := start_rows(log):
        parts += [f"**Start-up** {started[-1][1]} s to the end of the first step"]
    if planned := plan_rows(log, summary):
        parts += ["## Plan and run", table(["", "planned", "actual"], planned)]
    if log.rounds:
        head, *rounds = round_rows(log)
        parts += ["## Rounds", table(head, spread(rounds, MAX_ROUNDS))]
        parts += ["`flatout rollouts` lists every round."] * (len(rounds) > MAX_ROUNDS)
    if (one := summary.evaluation) and (evals := log.evals or log.held_out):
        texts = judged_texts(log, one.kind)
        bests = [e.step for e in log.evals if e.is_best] or [one.best_step]
        rows = [
            (f"{e.step:,}", texts[e.step], *figures_of(e).values(), "best" if e.step in bests else "")
            for e in evals if e.step in texts
        ]  # fmt: skip
        name = JUDGED[one.kind].removeprefix("eval_")
        parts += ["## Evaluations", table(["step", name, *figures_of(evals[-1]), ""], rows)]
    if log.evals and (worst := log.evals[-1].worst):
        rows = [(f"{one.loss:.4f}", f"{one.source} row {one.row:,}", one.context, one.text) for one in worst]
        parts += ["## Worst samples", table(["loss", "from", "context", "trained text"], rows)]
    if kinds := Counter(str(event.get("kind")) for event in log.events):
        parts += ["## Events", text_of(", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common()))]
    if changed := changed_settings(settings_of(log)):
        settings = [(name, show(value), show(default)) for name, (value, default) in changed.items()]
        parts += ["## Settings that differ from their defaults", table(["", "value", "default"], settings)]
    return "\n\n".join(parts) + "\n"


def figures_of(record: EvalRecord | HeldOutRecord) -> dict[str, str]:
    """Return what an evaluation measured besides the loss or the reward, by name."""
    accuracy = record.eval_token_accuracy if isinstance(record, EvalRecord) else None
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
