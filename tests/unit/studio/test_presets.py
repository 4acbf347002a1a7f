"""Each control of a form begins with the default of its setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from flatout.config.names import dotted_names
from flatout.config.read import dump_config, make_config
from flatout.config.template import describe_setting
from flatout.studio.trainings import Trainings
from flatout.studio.workspace import Workspace
from tests.studio_client import CHOSEN, write_run

SHORT_FORMS = {"model", "data", "track", "objective"}


def test_each_default_is_a_choice_and_reads_back_to_itself(tmp_path: Path) -> None:
    """Not only of the settings that have a field: YAML quotes some words, such as off, and not others."""
    needed = {"model.name": "m"}
    usual = Workspace(tmp_path).config(needed)
    for name in {*dotted_names()} - SHORT_FORMS - CHOSEN:
        if name.startswith("data.sources."):
            continue
        setting = describe_setting(name)
        assert setting.default is not None, name
        assert not setting.choices or setting.default in setting.choices, name
        assert Workspace(tmp_path).config({**needed, name: setting.default}) == usual, name


# values whose YAML is not their text, each for a setting that takes it
OTHER_VALUES = [
    ("compile", "off"), ("data.dedupe", "exact"), ("checkpoint.every_steps", None), ("optim.max_grad_norm", None),
    ("eval.prompts", ["yes", "null", "1"]), ("lora.targets", "[qv]_proj"), ("batch.share_prefix", "on"),
    ("track", {"to": ["wandb"], "project": "2024"}), ("data.shuffle", False), ("optim.lr", 1e-5), ("gpus", [1]),
    ("data.end_of_turn", "null"), ("data.new_tokens", ["<a>", "off"]), ("lora.rank_pattern", {"down_proj": 4}),
    ("data.template", "'x'"), ("name", "007"), ("data.max_tokens", None), ("data.end_of_turn", "no # yes"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), OTHER_VALUES)
def test_the_settings_of_a_run_start_the_same_run(tmp_path: Path, name: str, value: Any) -> None:
    values: dict[str, Any] = {"model": {"name": "m"}, "eval": {"fraction": 0.1}}
    *sections, leaf = name.split(".")
    holder = values
    for section in sections:
        holder = holder.setdefault(section, {})
    holder[leaf] = value
    folder = write_run(tmp_path / "runs" / "a")
    made = make_config(values)
    (folder / "config.yaml").write_text(dump_config(made))
    workspace = Workspace(tmp_path)
    found = Trainings(workspace).settings(folder)
    # a field sends its text, and what has no field is a line below
    for again in (workspace.config(found), workspace.config({}, [f"{key}={text}" for key, text in found.items()])):
        assert without_name(again) == without_name(made), found


def without_name(config: BaseModel) -> dict[str, Any]:
    return {key: value for key, value in config.model_dump().items() if key != "name"}
