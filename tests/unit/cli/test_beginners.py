"""A beginner's mistakes as they are typed: the exit code, what the error names, and the settings that mend it."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import flatout
from flatout.cli.main import main
from flatout.cli.verbs import all_verbs
from flatout.config.read import make_config
from flatout.config.schema import Config
from flatout.config.spelling import in_python
from flatout.errors import Fix, FlatoutError
from tests.usual import every

MISTAKES = yaml.load((Path(__file__).parent / "mistakes.yaml").read_text(), yaml.CSafeLoader)


def chat(number: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"q {number}"}, {"role": "assistant", "content": f"a {number}"}]}


FILES = {
    "chats.jsonl": "".join(json.dumps(chat(number)) + "\n" for number in range(8)),
    "qa.csv": "Question,Response\n" + "".join(f"q {number},a {number}\n" for number in range(8)),
    "odd.csv": "alpha,beta\n1,2\n",
    "bad.jsonl": '{"messages": [\n',
    "empty.jsonl": "",
    "role.jsonl": json.dumps({"messages": [{"role": "bot", "content": "x"}]}) + "\n",
    "doc.pdf": "%PDF",
    "adapter.bin": "x",
    "unspaced.yaml": "model:org/x\ndata: chats.jsonl\n",
    "sections.yaml": "model: model\nlora.rank: 8\n",
    "zero.json": "{}",
    "run.yaml": "model: model\ndata: chats.jsonl\ndevice: cpu\n",
    # runs that were moved
    "there/moved/run.json": '{"run_id": "0123456789abcdef"}',
    "there/moved/config.yaml": "model: {name: work/base}\n",
    "there/moved/final/adapter_config.json": "{}",
    "there/work/base/config.json": "{}",
    "there/alone/run.json": '{"run_id": "0123456789abcdef"}',
    "there/alone/config.yaml": "model: {name: /nowhere/base}\n",
    "there/alone/final/adapter_config.json": "{}",
    "tab.yaml": "model:\n\tname: x\n",
    "list.yaml": "- a\n- b\n",
    "typo.yaml": "model: model\nlora: {rnak: 8}\n",
    "theirs.yaml": "model_name_or_path: x\nlearning_rate: 1e-4\nper_device_train_batch_size: 4\n",
    "twice.yaml": "model: a\nmodel: b\n",
    "no_model.yaml": "data: chats.jsonl\n",
    "odd.yaml": "model: model\ndata: odd.csv\ndevice: cpu\n",
    "batches.yaml": "model: model\nper_device_train_batch_size: 8\ngradient_accumulation_steps: 4\ngpus: [0, 1]\n",
    "pair.jsonl": json.dumps({"prompt": "q", "chosen": "a"}) + "\n",
    "slips.jsonl": json.dumps({"prompt": "q", "choosen": "a", "rejectd": "b"}) + "\n",
    "winner.jsonl": json.dumps({"question": "q", "winner": "a", "loser": "b"}) + "\n",
    "semicolon.csv": "instruction;output\na;b\n",
    "dash.yaml": "model: model\ndata: chats.jsonl\noptim:\n  - lr: 1e-4\n",
    "one.yaml": "model: [model]\ndata: chats.jsonl\n",
    "indent.yaml": "model: model\n data: chats.jsonl\n",
    "quote.yaml": "model: 'model\ndata: chats.jsonl\n",
    "equals.yaml": "model=model\ndata=chats.jsonl\n",
    "tune.yaml": "model:\n  _component_: torchtune.models.llama3\n",
    "model.gguf": "x",
    "runs/run/run.json": '{"run_id": "0123456789abcdef"}',
    "runs/run/train.log": "",
    "runs/run/metrics.jsonl": "",
    "runs/run/config.yaml": "model: model\n",
}


@pytest.fixture(scope="module")
def world(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("beginner")
    shutil.copytree(tiny.model_dir, root / "model")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    before = Path.cwd()
    os.chdir(root)
    assert main(["data", "build", "chats.jsonl", "--tokenizer", "model", "--name", "chats"]) == 0
    os.chdir(before)
    return root


def spelled(verb: str, fixes: list[dict[str, Any]]) -> list[str]:
    spell = all_verbs()[verb].spell if verb in all_verbs() else str
    return [spell(Fix(settings)) for settings in fixes]


@pytest.mark.parametrize("row", every(5, MISTAKES["commands"]), ids=[row["typed"] for row in MISTAKES["commands"]])
def test_a_mistake_is_told_with_what_mends_it(world, monkeypatch, capsys, row):
    typed = shlex.split(row["typed"])
    monkeypatch.chdir(world)
    capsys.readouterr()
    code, error = main(typed), capsys.readouterr().err
    if "a GPU" in error and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert code == row["code"]
    error = error[error.index("error: ") :]
    assert row["names"] in error
    assert "Traceback" not in error
    assert re.findall(r"^  try (.*?)(?:  # .*)?$", error, re.MULTILINE) == spelled(typed[0], row.get("fixes", []))


MENDED = [row for row in MISTAKES["commands"] if row.get("fixes")]


@pytest.mark.parametrize("row", every(5, MENDED), ids=[row["typed"] for row in MENDED])
def test_each_fix_is_accepted(world, monkeypatch, capsys, row):
    """With what its own refusals say to set besides: eval.every_steps needs rows to evaluate on."""
    monkeypatch.chdir(world)
    verb, *words = row["typed"].split()
    # a field of a loss is set beside the loss
    loss = [word for word in words if word.startswith("objective=")]
    for settings in row["fixes"]:
        for _ in range(3):
            named = {name: value for name, value in settings.items() if name[:2] != "--"}
            try:
                of_loss = loss if any(name.startswith("objective.") for name in named) else []
                make_config({"model": "model"}, [*of_loss, *shlex.split(str(Fix(named)))])
                break
            except FlatoutError as error:
                settings = {**settings, **error.fixes[0].settings}
        else:
            pytest.fail(f"{settings} is refused")
        with pytest.raises(SystemExit):
            main([verb, *row["typed"].split()[1:2], "--help"] if verb == "data" else [verb, "--help"])
        assert {name for name in settings if name[:2] == "--"} <= {*re.findall(r"--[\w-]+", capsys.readouterr().out)}


@pytest.mark.parametrize("row", every(5, MISTAKES["calls"]), ids=[" ".join(row["given"]) for row in MISTAKES["calls"]])
def test_python_is_told_in_python(world, monkeypatch, row):
    monkeypatch.chdir(world)
    with pytest.raises(FlatoutError) as raised:
        flatout.train(**{"model": "model", "data": "chats.jsonl", "device": "cpu", **row["given"]})
    assert row["names"] in str(raised.value)
    assert [dict(fix.settings) for fix in raised.value.fixes] == row.get("fixes", [])
    assert all(in_python(fix) in str(raised.value) for fix in raised.value.fixes)


@pytest.mark.parametrize("given", [{"callbacks": [print]}, {"callbacks": print}, {"compute_metrics": len}])
def test_an_object_that_is_no_setting_is_named(world, monkeypatch, given):
    monkeypatch.chdir(world)
    with pytest.raises(FlatoutError, match=next(iter(given))):
        flatout.train(model="model", data="chats.jsonl", device="cpu", **given)


@pytest.mark.parametrize("verb", list(all_verbs()))
def test_an_empty_word_ends_no_verb_in_a_traceback(world, monkeypatch, capsys, verb):
    """As of a shell's variable that is not set; the verb alone is as before."""
    module = "flatout_migrate.convert" if verb == "convert" else f"flatout.cli.{verb}"
    monkeypatch.setattr(importlib.import_module(module), "run", lambda args: 0)
    monkeypatch.chdir(world)
    for words in ([verb, ""], [verb, "run", "", ""]):
        assert main(words) in (0, 2, 3), words
        assert "Traceback" not in capsys.readouterr().err


def test_only_files_are_proposed(world, tmp_path, monkeypatch, capsys):
    """No folder or pipe with the ending of a file; a file is."""
    for folder in ("a.yaml", "a.jsonl"):
        (tmp_path / folder).mkdir()
    os.mkfifo(tmp_path / "b.jsonl")
    os.mkfifo(tmp_path / "b.yaml")
    model = str(world / "model")
    missing = (
        ["convert", "no.yaml"],
        ["train", "no.yaml"],
        ["init", "--data", "no.jsonl", "--model", model, "new.yaml"],
    )
    monkeypatch.chdir(tmp_path)
    for words in missing:
        assert main(words) in (2, 3)
        error = capsys.readouterr().err
        assert not re.search(r"\b[ab]\.(yaml|jsonl)", error), error
    (tmp_path / "c.jsonl").write_text(FILES["chats.jsonl"])
    (tmp_path / "c.yaml").write_text(FILES["theirs.yaml"])
    for words in missing:
        assert main(words) in (2, 3)
        assert re.search(r"\bc\.(yaml|jsonl)", capsys.readouterr().err)
    assert main(["init", ".", "--model", model, "--data", "c.jsonl"]) == 2
    assert "is a folder; name a file in it, such as run.yaml" in capsys.readouterr().err


def test_targets_are_a_list_also_without_brackets():
    assert Config(model="m", targets="q_proj, v_proj").lora.targets == ["q_proj", "v_proj"]
    assert Config(model="m", targets=r".*layers\.\d{1,2}\.q_proj").lora.targets == r".*layers\.\d{1,2}\.q_proj"


def test_a_home_that_is_there_is_found(world, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(world))
    assert main(["init", "--data", "~/chats.jsonl", "--model", str(world / "model"), str(tmp_path / "new.yaml")]) == 0
