"""No setting is ignored: the code outside of flatout/config reads each one, by the syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import flatout
from flatout.config.describe import PATHS, dotted_names
from flatout.config.schema import Config
from flatout.config.table import RESUME_EFFECTS

SOURCE = Path(flatout.__file__).parent
# what a section is called where its settings are read, besides its own name and `config`
CALLED = {
    "data": ("settings",),
    "data.sources": ("source",),
    "rollout.rewards": ("parameters",),
    "objective.reference": ("reference",),
    "eval": ("eval_config",),
    "": ("self",),
}
# read through a property of the settings, and that property
THROUGH = {
    "run_dir": "folder",
    "device": "wanted_device",
    "model.freeze_vision_tower": "trained_parts",
    "model.freeze_projector": "trained_parts",
    "base.compute": "computes_in_fp8",
    "lora.layers": "layer_indices",
    "lora.rank_pattern": "of_layer",
    "lora.alpha_pattern": "of_layer",
    "data.new_tokens": "added_tokens",
    "data.new_special_tokens": "added_tokens",
    "rollout.rewards.name": "title",
}
# read by a name that is chosen as the program runs
BY_NAME = (
    "faults.stall_s", "faults.long_phase_s", "data.empty_reasoning", "data.end_of_turn", "data.lost_reasoning",
    "rollout.rewards.memory_gb", "rollout.rewards.json_schema",
)  # fmt: skip


def settings() -> list[str]:
    """Every setting that has a value of its own, by its dotted name; those of a source or reward among them."""
    names = list(dotted_names())
    return [name for name in names if name in PATHS or not any(other.startswith(f"{name}.") for other in names)]


def all_reads() -> Iterator[tuple[str, str]]:
    """(owner, attribute) of every attribute that code outside of flatout/config reads, and ("", text) of its texts.

    ("parameters", name) is a setting that a ready reward takes as a parameter of its own.
    """
    for file in SOURCE.rglob("*.py"):
        if file.parent == SOURCE / "config":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value
                name = (
                    owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
                )
                yield name.lstrip("_"), node.attr
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield "", node.value
            elif isinstance(node, ast.FunctionDef) and file.name == "ready.py":
                yield from (("parameters", each.arg) for each in node.args.kwonlyargs)


@cache
def reads() -> frozenset[tuple[str, str]]:
    return frozenset(all_reads())


def unread(names: list[str], found: Collection[tuple[str, str]]) -> list[str]:
    """Those of these settings that no code reads from their section."""

    def is_read(name: str) -> bool:
        section, _, setting = name.rpartition(".")
        owners = {section, "config", *CALLED.get(section, ())}
        attribute = THROUGH.get(name, setting)
        return any((owner, attribute) in found for owner in owners) or (name in BY_NAME and ("", setting) in found)

    return [name for name in names if not is_read(name)]


def test_every_setting_is_read_outside_of_the_configuration():
    assert unread(settings(), reads()) == []


def test_a_setting_that_nothing_reads_is_found():
    assert unread(["lora.zebra"], reads()) == ["lora.zebra"]
    without = {(owner, name) for owner, name in reads() if name != "min_delta"}
    assert unread(settings(), without) == ["eval.min_delta"]


def test_every_setting_has_an_effect_on_a_resumed_run():
    assert set(RESUME_EFFECTS) == {name for name in settings() if name.rpartition(".")[0] not in PATHS}


def test_every_setting_changes_the_resolved_settings():
    """The dumped configuration, which a checkpoint compares by RESUME_EFFECTS, holds every setting under its own
    name."""
    config = Config.model_validate({"model": {"name": "m"}, "data": {"sources": [{"path": "a"}]}}).model_dump()

    def names(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for key, value in values.items():
            if isinstance(value, dict) and f"{prefix}{key}" not in RESUME_EFFECTS:
                yield from names(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}"

    assert set(names(config)) == set(RESUME_EFFECTS)
