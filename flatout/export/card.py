"""The model card of a pushed run: what it is, how to load it, results, data, plan, settings and versions."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from flatout.errors import CheckpointError
from flatout.io.json_file import read_json
from flatout.io.redact import printable
from flatout.io.text_template import render
from flatout.models.load.inference import ModelPaths
from flatout.track.run_log import RunLog
from flatout.track.summary import JUDGED, JUDGED_ROWS, judged_values, summarize
from flatout.view.charts import moving_average, thinned
from flatout.view.facts import NONE, changed_settings, headline, plan_rows, settings_of, show, table

_log = logging.getLogger(__name__)
_ASSETS = Path(__file__).with_name("assets")
# of assets/loss.svg
_WIDTH, _HEIGHT, _LEFT = 720, 240, 60
_OWN_NAMES = ("name", "run_dir", "data.root", "data.name")


def model_card(log: RunLog, repo: str, base: str, trained: ModelPaths, *, stops: Sequence[int] | None = None) -> str:
    """Return README.md. It names files of this machine without their folders, and has no prompts and no answers.

    `stops` are the tokens that end an answer of an adapter; None for a whole model, whose files name them.
    """
    settings, is_lora, is_adapter = settings_of(log), trained.adapter is not None, stops is not None
    summary = summarize(log)
    sources = [str(source["path"]) for source in settings.get("data.sources") or []]
    facts = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["flatout", "sft", *(["lora"] if is_lora else [])],
        "base_model": None if Path(base).exists() else base,
        "base_model_relation": "adapter" if is_adapter else "finetune",
        "datasets": [name for name in sources if name.count("/") == 1 and not Path(name).exists()],
    }
    has_tokens = settings.get("data.new_tokens") or settings.get("data.new_special_tokens")
    changed = {name: value for name, (value, _) in changed_settings(settings).items() if name not in _OWN_NAMES}
    scores = list(_scores(log.folder / "eval"))
    sections = {
        "Results": table(["", "", ""], headline(summary)),
        "Evaluation": table(["task", "metric", "value"], scores) if scores else "",
    }
    if (start := log.start) is not None:
        versions = ", ".join(f"{name} {version}" for name, version in start.versions.items())
        device = start.gpus[0].name if start.gpus else start.device
        counts = f"{start.plan.num_samples:,} samples for training, {start.plan.num_eval_samples:,} for evaluation"
        sections |= {
            "Data": f"{', '.join(map(_public, sources)) or start.data}: {counts}",
            "Plan": table(["", "planned", "actual"], plan_rows(log, summary)),
            "Versions": f"{versions}; {start.num_ranks} × {device}",
        }
    rows = [(name, show(_public(value))) for name, value in changed.items()]
    base_name = _public(base)
    return render(
        _ASSETS / "card.md",
        facts=yaml.safe_dump({key: value for key, value in facts.items() if value}, sort_keys=False),
        title=repo.rpartition("/")[2],
        what="A LoRA adapter of" if is_adapter else "LoRA, merged into" if is_lora else "Full fine-tuning of",
        base_name=" ".join(base_name.split()),
        # names stand in code as strings
        repo=json.dumps(repo),
        base=json.dumps(base_name),
        base_word=shlex.quote(base_name),
        stops=list(stops or ()),
        has_rows=bool(is_adapter and has_tokens),
        has_curve=bool(log.steps),
        sections=[*sections.items(), ("Settings", table(["setting", "value"], rows))],
    )


def _public(value: Any) -> Any:
    """Return a value with the names of files in place of their paths, and without what is empty."""
    if isinstance(value, dict):
        return {key: _public(item) for key, item in value.items() if item not in (None, {}, [])}
    if isinstance(value, list):
        return [_public(item) for item in value]
    is_local = isinstance(value, str) and "/" in value and (value[0] in "/.~" or Path(value).exists())
    return Path(value).name if is_local else printable(value) if isinstance(value, str) else value


def _scores(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield task, metric and value of what `flatout eval` has written."""
    for file in sorted(folder.glob("*.json")):
        try:
            content = read_json(file)
            rows = [(str(row["task"]), str(row["metric"]), row["value"]) for row in content.get("tasks", [])]
            rows += [(file.stem, "exact match", content["exact_match"])] if "exact_match" in content else []
            yield from [(task, name, NONE if value is None else f"{value:.4f}") for task, name, value in rows]
        except (CheckpointError, AttributeError, KeyError, TypeError, ValueError):
            _log.warning(f"{file} is no result of `flatout eval`; the card is written without it")


def loss_svg(log: RunLog) -> str:
    """Return the loss or reward by step as an image: training, smoothed, and evaluations as dots. Nothing without any.

    It is a file of its own, as a card runs no script; the axes name their ends.
    """
    kind, kind_of_evals = ("round", "held_out") if log.rounds else ("step", "eval")
    xs, ys, at, judged = (
        np.array(part, dtype=np.float64)
        for values in (judged_values(log, kind), judged_values(log, kind_of_evals))
        for part in ([*values], [*values.values()])
    )
    if not len(xs):
        return ""
    (first, last), every = (float(xs[0]), float(xs[-1])), np.concatenate([ys, judged])
    low, high = float(every.min()), float(every.max())

    def places(x: Any, y: Any) -> list[tuple[float, float]]:
        across, up = (x - first) / (last - first or 1.0), (y - low) / (high - low or 1.0)
        return list(zip((across * _WIDTH + _LEFT).tolist(), ((1.0 - up) * _HEIGHT + 8).tolist(), strict=True))

    kept, write = thinned(xs, ys), JUDGED_ROWS[kind].write
    lines = [(opacity, places(xs[kept], line[kept])) for line, opacity in ((ys, 0.35), (moving_average(ys), 1))]
    ends: dict[str, Any] = {"low": write(low), "high": write(high), "first": first, "last": last}
    return render(_ASSETS / "loss.svg", figure=JUDGED[kind], lines=lines, dots=places(at, judged), **ends)
