"""Each control of a form begins with the default of its setting."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from html.parser import HTMLParser
from typing import Any

import pytest
from pydantic import BaseModel

from flatout.cli.chat import add_arguments
from flatout.config.describe import describe_setting, dotted_names
from flatout.config.read import dump_config, make_config
from flatout.studio.trainings import Trainings
from flatout.studio.workspace import Workspace
from tests.studio_client import CHOSEN, open_studio, shows_default, write_run

SHORT_FORMS = {"model", "data", "track", "objective"}


class Controls(HTMLParser):
    """Name and value of each control, as a browser has it: of a select without a selected option, the first."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.values: dict[str, str] = {}
        self._select, self._options = "", list[tuple[str, bool]]()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        name = given.get("name") or ""
        if tag == "select":
            self._select, self._options = name, []
        elif tag == "option":
            self._options.append((given.get("value") or "", "selected" in given))
        elif tag == "input" and given.get("type") not in ("radio", "checkbox", "file") and name:
            self.values[name] = given.get("value") or given.get("placeholder") or ""
        elif tag == "input" and given.get("type") == "checkbox":
            assert "checked" not in given

    def handle_endtag(self, tag: str) -> None:
        if tag == "select" and self._select and self._options:
            assert sum(is_selected for _, is_selected in self._options) == 1, self._select
            self.values[self._select] = next(text for text, is_selected in self._options if is_selected)


@pytest.fixture
def client(tmp_path):
    with open_studio(tmp_path) as client:
        yield client


@pytest.mark.parametrize("page", ["/data", "/plan"])
def test_each_setting_is_called_by_words_above_its_key(client, page):
    text = client.get(page).text
    labels = re.findall(r'<label for="f-(.*?)">(.*?) <code>(.*?)</code></label>', text)
    assert len(labels) >= text.count("data-setting=") > 6
    for name, words, key in labels:
        assert key.replace("<wbr>", "") == name != words
        assert words[0].isupper()


@pytest.mark.parametrize("page", ["/data", "/plan"])
def test_each_control_shows_the_default_of_its_setting(client, page):
    values = Controls(client.get(page).text).values
    shown = {name: text for name, text in values.items() if name not in CHOSEN}
    assert len(shown) >= 6
    assert {name: text for name, text in shown.items() if not shows_default(name, text)} == {}


def test_a_chat_answers_as_long_as_on_the_command_line(client, tmp_path):
    (write_run(tmp_path / "runs" / "a") / "final").mkdir()
    parser = ArgumentParser()
    add_arguments(parser)
    shown = re.search(r'id="max-tokens"[^>]* value="(\d+)"', client.get("/chat").text)
    assert shown is not None
    assert int(shown[1]) == parser.get_default("max_new_tokens")


def test_each_default_is_a_choice_and_reads_back_to_itself(tmp_path):
    """Not only of the settings that have a field: YAML quotes some words, such as off, and not others."""
    needed = {"model.name": "m"}
    usual = Workspace(tmp_path).config(needed)
    for name in {*dotted_names()} - SHORT_FORMS - CHOSEN:
        if name.startswith(("data.sources.", "rollout.rewards.")):
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
def test_the_settings_of_a_run_start_the_same_run(tmp_path, name, value):
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
