"""flatout finds what this distribution offers by its entry points, and says what to install where it is missing."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from flatout.cli.main import main


def without_entry_points(**_: Any) -> tuple[()]:
    return ()


def test_the_verb_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["convert", "--help"])
    assert ended.value.code == 0
    assert "--from" in capsys.readouterr().out


def test_without_this_package_the_verb_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", without_entry_points)
    assert main(["convert", "theirs.yaml"]) == 2
    error = capsys.readouterr().err
    assert "pip install" in error
    assert "migrate" in error
    assert len(error.splitlines()) == 1


def test_modules_of_compat_are_those_of_this_package() -> None:
    from flatout.compat.unsloth.trl import SFTTrainer

    import flatout_migrate.unsloth.trl

    assert SFTTrainer is flatout_migrate.unsloth.trl.SFTTrainer


def test_without_this_package_compat_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", without_entry_points)
    monkeypatch.delitem(sys.modules, "flatout.compat", raising=False)
    with pytest.raises(ImportError, match="pip install"):
        importlib.import_module("flatout.compat")


def test_a_data_set_is_built_of_one_source() -> None:
    from flatout_migrate.doors import parser_of

    parser, tokenizer = parser_of("hypersloth-build-dataset"), ["--tokenizer", "t"]
    assert parser.parse_args(["org/chats", *tokenizer]).dataset == "org/chats"
    for sources in ([], ["org/chats", "--local_path", "a.json"]):
        with pytest.raises(SystemExit):
            parser.parse_args([*sources, *tokenizer])


def test_opensloths_devices_are_its_gpus() -> None:
    from flatout_migrate.doors.opensloth import OpenSlothConfig, TrainingArguments

    config = OpenSlothConfig(data={"path": "a.jsonl"}, fast_model_args={"model_name": "m"}, devices=[0, 1])
    assert config.to_config(TrainingArguments(report_to="none")).gpus == [0, 1]
