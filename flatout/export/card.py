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
from flatout.models.load.inference import ModelPaths
from flatout.track.run_log import RunLog
from flatout.track.summary import JUDGED, JUDGED_ROWS, judged_values, summarize
from flatout.view.charts import moving_average, thinned
from flatout.view.facts import NONE, changed_settings, headline, plan_rows, settings_of, show, table

_log = logging.getLogger(__name__)
_WIDTH, _HEIGHT, _LEFT = 720, 240, 60
_OWN_NAMES = ("name", "run_dir", "data.root", "data.name")
_LOAD = """
```python
from transformers import AutoModelForCausalLM, AutoTokenizer{more}

tokenizer = AutoTokenizer.from_pretrained({repo})
model = AutoModelForCausalLM.from_pretrained({repo}, dtype="auto", device_map="auto"){ends}
messages = [{{"role": "user", "content": "Hello"}}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = model.generate(**inputs.to(model.device), max_new_tokens=256)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```
"""
_PEFT = """
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer{more}

tokenizer = AutoTokenizer.from_pretrained({repo})
model = AutoModelForCausalLM.from_pretrained({base}, dtype="auto", device_map="auto")
# the adapter has the rows of new tokens
if len(tokenizer) > model.get_input_embeddings().num_embeddings:
    model.resize_token_embeddings(len(tokenizer))
model = PeftModel.from_pretrained(model, {repo}){ends}
```
"""
_ENDS = """
# the tokens that end an answer: the base model may have others
model.generation_config = GenerationConfig.from_pretrained({repo})"""
_SERVE = """
An answer ends with a token of {ids}, as `generation_config.json` says. Unless told otherwise, a server takes
these and the tokenizer, with its chat template, from the base model. With vLLM and a copy of this in `FOLDER`:

```bash
vllm serve {base} --enable-lora --lora-modules NAME=FOLDER --tokenizer FOLDER --generation-config FOLDER
```

For other servers, send `"stop_token_ids": {ids}` with each request.
"""


def model_card(log: RunLog, repo: str, base: str, trained: ModelPaths, *, stops: Sequence[int] | None = None) -> str:
    """Return README.md. It names files of this machine without their folders, and has no prompts and no answers.

    `stops` are the tokens that end an answer of an adapter; None for a whole model, whose files name them.
    """
    settings, is_lora, is_adapter = settings_of(log), trained.adapter is not None, stops is not None
    sources = [str(source["path"]) for source in settings.get("data.sources") or []]
    facts = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["flatout", "sft", *(["lora"] if is_lora else [])],
        "base_model": None if Path(base).exists() else base,
        "base_model_relation": "adapter" if is_adapter else "finetune",
        "datasets": [name for name in sources if name.count("/") == 1 and not Path(name).exists()],
    }
    what = "A LoRA adapter of" if is_adapter else "LoRA, merged into" if is_lora else "Full fine-tuning of"
    has_tokens = settings.get("data.new_tokens") or settings.get("data.new_special_tokens")
    changed = {name: value for name, (value, _) in changed_settings(settings).items() if name not in _OWN_NAMES}
    parts = [
        f"---\n{yaml.safe_dump({key: value for key, value in facts.items() if value}, sort_keys=False)}---",
        f"# {repo.rpartition('/')[2]}\n\n{what} {' '.join(_public(base).split())}, trained by flatout.",
        f"## Load\n{_how_to_load(repo, _public(base), list(stops or ()), has_rows=bool(is_adapter and has_tokens))}",
        f"## Results\n\n{table(['', '', ''], headline(summarize(log)))}",
        "![loss by step](loss.svg)" if log.steps else "",
    ]
    if scores := list(_scores(log.folder / "eval")):
        parts.append(f"## Evaluation\n\n{table(['task', 'metric', 'value'], scores)}")
    if (start := log.start) is not None:
        versions = ", ".join(f"{name} {version}" for name, version in start.versions.items())
        device = start.gpus[0].name if start.gpus else start.device
        parts += [
            f"## Data\n\n{', '.join(map(_public, sources)) or start.data}: {start.plan.num_samples:,} samples for "
            f"training, {start.plan.num_eval_samples:,} for evaluation",
            f"## Plan\n\n{table(['', 'planned', 'actual'], plan_rows(log))}",
            f"## Versions\n\n{versions}; {start.num_ranks} × {device}",
        ]
    rows = [(name, show(_public(value))) for name, value in changed.items()]
    parts.append(f"## Settings\n\n{table(['setting', 'value'], rows)}")
    return "\n\n".join(part for part in parts if part) + "\n"


def _how_to_load(repo: str, base: str, stops: list[int], *, has_rows: bool) -> str:
    """Return the code that loads a model, and how an adapter is served; names stand in them as strings."""
    quoted = {"repo": json.dumps(repo), "base": json.dumps(base)}
    ends, more = (_ENDS.format(**quoted), ", GenerationConfig") if stops else ("", "")
    code = (_PEFT if has_rows else _LOAD).format(**quoted, ends=ends, more=more)
    return code + (_SERVE.format(ids=stops, base=shlex.quote(base)) if stops else "")


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

    kept, marks = thinned(xs, ys), []
    for line, opacity in ((ys, 0.35), (moving_average(ys), 1)):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places(xs[kept], line[kept]))
        marks.append(f'<polyline points="{points}" stroke-opacity="{opacity}"/>')
    marks += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in places(at, judged)]
    write, right, bottom = JUDGED_ROWS[kind].write, _WIDTH + _LEFT, _HEIGHT + 24
    texts = [(_LEFT - 8, _HEIGHT + 8, "end", write(low)), (_LEFT - 8, 16, "end", write(high))]
    texts += [(_LEFT, bottom, "start", f"step {first:,.0f}"), (right, bottom, "end", f"{last:,.0f}")]
    marks += [f'<text x="{x}" y="{y}" text-anchor="{anchor}">{label}</text>' for x, y, anchor, label in texts]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH + _LEFT + 24} {_HEIGHT + 40}">'
        f"<title>{JUDGED[kind]} by step; dots: evaluation</title>"
        "<style>polyline{fill:none;stroke:#0072b2;stroke-width:1.6}circle{fill:#d55e00}"
        f"text{{font:12px sans-serif;fill:#808080}}</style>{''.join(marks)}</svg>\n"
    )
