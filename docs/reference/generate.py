"""Writes the reference pages of the documentation: settings, commands and metrics from what the program reads.

python docs/reference/generate.py && zensical build
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from flatout.cli.parser import Parser
from flatout.cli.verbs import all_verbs
from flatout.config.data import SourceConfig
from flatout.config.describe import ADVANCED, Setting, describe_setting
from flatout.config.rewards import RewardConfig
from flatout.config.schema import Config
from flatout.track.record import EVAL, EVAL_OF_DATA, HELD_OUT, ROUND, STEP

PYTHON = {
    "flatout": ["train", "load", "plan", "verify", "build_data"],
    "flatout.api.run": ["Run", "Page"],
    "flatout.track.callback": ["Callback"],
    "flatout.objectives.protocol": ["Objective", "Metric"],
    "flatout.objectives.loss_inputs": ["LabelTokens"],
    "flatout.config.optim": ["OptimizerTraits"],
    "flatout.models.lora.starts": ["AdapterPlace"],
    "flatout.errors": ["FlatoutError"],
}


def settings() -> Iterator[str]:
    """Yield the page of all settings, a table a section."""
    yield (
        "# Settings\n\nThis page lists every setting with its default and allowed values. The settings of a "
        "configuration file come first, as `flatout init --all` writes them; those that few runs need are "
        "[at the end](#advanced-settings), as `flatout init --advanced` writes them.\n"
    )
    yield from _section(Config, "")
    items: dict[str, type[BaseModel]] = {"data.sources": SourceConfig, "rollout.rewards": RewardConfig}
    for name, kind in items.items():
        yield f"\n## {name}\n\n" + " ".join(str(kind.__doc__).split()) + "\n"
        yield from _table(f"{name}.", kind.model_fields, shown="")
    yield "\n## Advanced settings\n\n| setting | default | allowed | | why it exists |\n|---|---|---|---|---|"
    for name, why in ADVANCED.items():
        yield _row(describe_setting(name), name, why)


def _section(section: type[BaseModel], prefix: str) -> Iterator[str]:
    inner = {name: kind for name, field in section.model_fields.items() if _is_section(kind := field.annotation)}
    own = [name for name in section.model_fields if name not in inner and prefix + name not in ADVANCED]
    yield from _table(prefix, own)
    for name, kind in inner.items():
        if all(f"{prefix}{name}.{leaf}" in ADVANCED for leaf in kind.model_fields):
            continue
        yield f"\n## {prefix}{name}\n\n" + " ".join(str(kind.__doc__).split()) + "\n"
        yield from _section(kind, f"{prefix}{name}.")


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _table(prefix: str, names: Any, shown: str | None = None) -> Iterator[str]:
    yield "\n| setting | default | allowed | |\n|---|---|---|---|"
    for name in names:
        yield _row(describe_setting(prefix + name), (prefix if shown is None else shown) + name)


def _row(setting: Setting, name: str, *more: str) -> str:
    default = "required" if setting.default is None else f"`{setting.default}`"
    cells = (f"`{name}`", default, setting.allowed, setting.help, *more)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


def commands() -> Iterator[str]:
    """Yield the page of all commands, with the text of their --help."""
    yield "# Commands\n\nEvery command with its options, as `flatout COMMAND --help` prints them.\n"
    for name, verb in all_verbs().items():
        parser = Parser(prog=f"flatout {name}", example=f"flatout {name} {verb.example}")
        parser.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=80)
        verb.arguments(parser)
        yield f"## flatout {name}\n\n{verb.help[0].upper()}{verb.help[1:]}.\n\n```text"
        yield f"{parser.format_help().rstrip()}\n```\n"


def python() -> Iterator[str]:
    """Yield the page of the Python API, which mkdocstrings fills."""
    yield "# Python API\n\nThe site fills this page from docstrings; [Python](../python.md) is the guide.\n"
    for module, names in PYTHON.items():
        yield from (f"::: {module}.{name}\n" for name in names)


def metrics() -> Iterator[str]:
    """Yield the page of all figures, a table a kind of record."""
    yield (
        "# Metrics\n\nEvery figure of `metrics.jsonl`, from the table in `flatout/track/record.py`. A line of kind "
        "`step` is one optimizer step over all ranks, a line of kind `eval` one evaluation. `metrics` in both has the "
        "figures that [an objective](../objectives.md) names. In a run of rounds, a line of kind `round` is one round, "
        "a line of kind `held_out` the answers to held-out prompts; `metrics` has the mean of each reward.\n\n"
        "* **ranks**: how the ranks' values become one; same: all ranks have this value; mean of busy: of ranks that "
        "had a pass\n"
        "* **steps**: how the steps since the last record become one (`log_every_steps`): the last one's value, the "
        "mean per step, the sum per second, or the sum\n"
        "* **better**: which of two runs a comparison marks"
    )
    kinds = {"step": STEP, "eval": EVAL, "eval: by_data": EVAL_OF_DATA, "round": ROUND, "held_out": HELD_OUT}
    for kind, table in kinds.items():
        yield f"\n## {kind}\n\n| name | unit | ranks | steps | better | chart | |\n|---|---|---|---|---|---|---|"
        for name, row in table.items():
            cells = (f"`{name}`", row.unit, row.ranks, row.steps, row.better, row.chart, row.meaning)
            yield "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    pages = {"settings": settings, "commands": commands, "metrics": metrics, "python": python}
    for page, lines in ((page, make()) for page, make in pages.items()):
        Path(__file__).with_name(f"{page}.md").write_text("\n".join(lines), encoding="utf-8")
