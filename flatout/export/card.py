"""The model card of a pushed run: what it is, how to load it, results, data, plan, settings and versions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from flatout.io.redact import printable
from flatout.models.load.inference import ModelPaths
from flatout.track.run_log import RunLog
from flatout.track.summary import summarize
from flatout.view.charts import downsampled, moving_average
from flatout.view.facts import changed_settings, headline, plan_rows, settings_of, show
from flatout.view.plain import table
from flatout.view.scales import x_scale, y_scale

WIDTH, HEIGHT, LEFT, BELOW = 720, 240, 52, 24
_OWN_NAMES = ("name", "run_dir", "data.root", "data.name")
_LOAD = """
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{repo}")
model = AutoModelForCausalLM.from_pretrained("{repo}", dtype="auto", device_map="auto")
messages = [{{"role": "user", "content": "Hello"}}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = model.generate(**inputs.to(model.device), max_new_tokens=256)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```
"""


def model_card(log: RunLog, repo: str, base: str, trained: ModelPaths, *, is_adapter: bool) -> str:
    """Return README.md. It names files of this machine without their folders, and has no prompts and no answers."""
    start, settings = log.start, settings_of(log)
    is_lora = trained.adapter is not None
    sources = [str(one.get("path")) for one in settings.get("data.sources", []) if isinstance(one, dict)]
    facts = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["flatout", "sft", *(["lora"] if is_lora else [])],
        "base_model": None if Path(base).exists() else base,
        "base_model_relation": "adapter" if is_adapter else "finetune",
        "datasets": [name for name in sources if name.count("/") == 1 and not Path(name).exists()],
    }
    what = "A LoRA adapter of" if is_adapter else "LoRA, merged into" if is_lora else "Full fine-tuning of"
    parts = [
        f"---\n{yaml.safe_dump({key: value for key, value in facts.items() if value}, sort_keys=False)}---",
        f"# {repo.rpartition('/')[2]}",
        f"{what} {_public(base)}, trained by flatout.",
        "## Load",
        _LOAD.format(repo=repo).strip(),
        "## Results",
        table(["", "", ""], headline(summarize(log))),
        *(["![loss by step](loss.svg)"] if log.steps else []),
    ]
    if scores := list(_scores(log.folder / "eval")):
        parts += ["## Evaluation", table(["task", "metric", "value"], scores)]
    if start is not None:
        parts += ["## Data", f"{_public(start.data)}: {start.plan.num_samples:,} samples for training, "
                  f"{start.plan.num_eval_samples:,} for evaluation."]  # fmt: skip
        parts += ["## Plan", table(["", "planned", "actual"], plan_rows(log))]
    changed = {name: value for name, (value, _) in changed_settings(settings).items() if name not in _OWN_NAMES}
    parts += ["## Settings", table(["setting", "value"], [(name, show(_public(value))) for name, value in changed.items()])]
    if start is not None:
        versions = ", ".join(f"{name} {version}" for name, version in start.versions.items())
        parts += ["## Versions", f"{versions}; {start.num_ranks} × {start.gpus[0].name if start.gpus else start.device}."]
    return "\n\n".join(parts) + "\n"


def _public(value: Any) -> Any:
    """Return a value with the names of files in place of their paths."""
    if isinstance(value, dict):
        return {key: _public(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_public(one) for one in value]
    is_local = isinstance(value, str) and "/" in value and (value[0] in "/.~" or Path(value).exists())
    return Path(value).name if is_local else printable(value) if isinstance(value, str) else value


def _scores(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield task, metric and value of what `flatout eval` has written."""
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        for row in content.get("tasks", []):
            yield str(row["task"]), str(row["metric"]), f"{row['value']:.4f}"
        if "exact_match" in content:
            yield file.stem, "exact match", f"{content['exact_match']:.4f}"


def loss_svg(log: RunLog) -> str:
    """Return the loss by step as an image: training, smoothed, and evaluations as dots. Nothing without a step."""
    if not log.steps:
        return ""
    xs, ys = (np.array([getattr(one, name) for one in log.steps], dtype=np.float64) for name in ("step", "loss"))
    dots = [(one.step, one.eval_loss) for one in log.evals]
    every = np.concatenate([ys, [loss for _, loss in dots]])
    across = x_scale(float(xs[0]), float(xs[-1]), WIDTH)
    up = y_scale(float(np.nanmin(every)), float(np.nanmax(every)), HEIGHT)

    def points(x: Any, y: Any) -> list[str]:
        places = zip(across.place(np.array(x)).tolist(), up.place(np.array(y)).tolist(), strict=True)
        return [f"{left + LEFT:.1f},{top + 8:.1f}" for left, top in places]

    marks = [
        f'<polyline points="{" ".join(points(*downsampled(xs, line)))}" stroke-opacity="{opacity}"/>'
        for line, opacity in ((ys, 0.35), (moving_average(ys), 1))
    ]
    marks += [
        f'<circle cx="{one.split(",")[0]}" cy="{one.split(",")[1]}" r="3.5"/>' for one in points(*zip(*dots, strict=True))
    ] if dots else []
    labels = [
        f'<text x="{LEFT - 8}" y="{(1 - share) * HEIGHT + 12:.1f}" text-anchor="end">{tick}</text>'
        for share, tick in up.ticks(5)
    ] + [
        f'<text x="{share * WIDTH + LEFT:.1f}" y="{HEIGHT + BELOW}" text-anchor="middle">{tick}</text>'
        for share, tick in across.ticks(6)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + LEFT + 24} {HEIGHT + BELOW + 16}">'
        "<style>polyline{fill:none;stroke:#0072b2;stroke-width:1.6}circle{fill:#d55e00}"
        "text{font:12px sans-serif;fill:#808080}</style>"
        f"{''.join(marks)}{''.join(labels)}<title>loss by step; dots: evaluation</title></svg>\n"
    )
