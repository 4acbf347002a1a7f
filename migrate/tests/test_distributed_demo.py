"""The Distributed Training Demo's command lines: what each flag sets, Comet only when asked for, and resuming."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from typed import settings_typed

import flatout
from flatout.data.token_store import TokenStore
from flatout.trainer import loop
from flatout_migrate.doors import distributed_demo

DOCUMENTS = [{"text": f"Document {n} says " + "word " * (3 + n % 9)} for n in range(40)]
SMALL = ["--num-epochs", "2", "-b", "4", "-s", "64", "--save-dir", "outputs"]


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of documents, in an empty working folder, without settings of Comet."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("COMET_")]:
        monkeypatch.delenv(name)
    return write(tmp_path / "texts.jsonl", DOCUMENTS)


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def type_in(patch: pytest.MonkeyPatch, script: Any, tiny: Any, data: Path, *flags: str) -> int:
    patch.setattr(sys, "argv", ["train-llm.py", "-m", str(tiny.model_dir), "-d", str(data), *flags])
    return distributed_demo.main(script)


@pytest.fixture
def settings_of(tiny: Any, texts: Path) -> Any:
    """The settings that flags become, by dotted name."""

    def resolve(script: Any, *flags: str, data: Path = texts) -> dict[str, Any]:
        return settings_typed(distributed_demo, lambda patch: type_in(patch, script, tiny, data, *flags))

    return resolve


@pytest.mark.parametrize(
    ("script", "flags", "expected"),
    [
        ("single-gpu", "", {
            "method": "full", "strategy": "single", "device": "cuda", "model.precision": "bf16", "optim.lr": 3e-5,
            "batch.epochs": 100.0, "seed": 0, "data.max_tokens": 1024, "data.loss_type": "all",
            "checkpoint.every_steps": 500, "schedule.kind": "cosine", "schedule.min_lr_ratio": 0.01, "track.to": [],
            "model.init": "pretrained",
        }),
        ("single-gpu", "--device cpu --dtype fp32", {"device": "cpu", "model.precision": "fp32"}),
        ("single-gpu", "--device cuda --dtype fp16", {"device": "cuda", "model.precision": "fp16"}),
        ("single-gpu", "-e first", {"name": "first", "run_dir": "../outputs/first"}),
        ("ddp", "--experiment-name ddp-4gpu", {"name": "ddp-4gpu", "strategy": "ddp", "model.precision": "bf16"}),
        ("fsdp", "", {"strategy": "fsdp", "sharding.offload": False}),
        ("fsdp", "--cpu-offload", {"strategy": "fsdp", "sharding.offload": True}),
        ("ddp", "--num-epochs 3 --lr 1e-4 --seed 5", {"batch.epochs": 3.0, "optim.lr": 1e-4, "seed": 5}),
        ("ddp", "--log-freq 10 --ckpt-freq 20", {"log_every_steps": 10, "checkpoint.every_steps": 20}),
        ("ddp", "--seq-length 32 optim.weight_decay=0", {
            "data.max_tokens": 32, "data.too_long": "split", "optim.weight_decay": 0,
        }),
    ],
)  # fmt: skip
def test_each_flag_becomes_a_setting(settings_of: Any, script: str, flags: str, expected: dict[str, Any]) -> None:
    found = settings_of(script, *flags.split())
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(("script", "flag"), [("ddp", "--cpu-offload"), ("fsdp", "--dtype=bf16"), ("ddp", "--magic")])
def test_flags_of_another_script_are_refused(
    tiny: Any, texts: Path, monkeypatch: pytest.MonkeyPatch, script: str, flag: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        type_in(monkeypatch, script, tiny, texts, flag)
    assert refused.value.code == 2


@pytest.mark.parametrize(
    ("env", "overrides"), [({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, []), ({}, ["gpus=[0,1]"])]
)
def test_a_step_has_the_tokens_of_its_rows_on_all_ranks(
    settings_of: Any, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], overrides: list[str]
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    found = settings_of("ddp", "-b", "3", "-s", "64", *overrides)
    store = TokenStore.open(Path("data/built_dataset/texts"))
    assert float(store.lengths.mean()) * found["batch.samples_per_step"] == pytest.approx(2 * 3 * 64, rel=0.05)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"instruction": "a", "text": "b"}, {"format": "text", "columns": {}}),
        ({"instruction": "a", "input": "", "output": "b"}, {"format": "alpaca", "columns": {}}),
        ({"story": "a", "author": "b"}, {"format": "text", "columns": {"text": "story"}}),
    ],
)
def test_the_text_column_then_alpaca_then_the_first_column(
    settings_of: Any, tmp_path: Path, row: dict[str, str], expected: dict[str, Any]
) -> None:
    found = settings_of("ddp", data=write(tmp_path / "rows.jsonl", [row] * 3))
    [source] = found["data.sources"]
    assert {name: source[name] for name in expected} == expected
    assert found["data.template"] == ("alpaca" if expected["format"] == "alpaca" else None)
    assert (found["data.loss_type"], found["data.too_long"]) == ("all", "split")


@pytest.mark.parametrize(
    ("flags", "env", "to"),
    [
        ("", {"COMET_API_KEY": "secret"}, []),
        ("-e first", {}, []),
        ("-e first", {"COMET_API_KEY": "secret"}, ["comet"]),
        ("-e first", {"COMET_START_ONLINE": "0"}, ["comet"]),
        ("-e first --comet-project-name mine", {}, ["comet"]),
    ],
)
def test_comet_is_on_only_when_asked_for(
    settings_of: Any, monkeypatch: pytest.MonkeyPatch, flags: str, env: dict[str, str], to: list[str]
) -> None:
    monkeypatch.delenv("COMET_WORKSPACE", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    found = settings_of("single-gpu", *flags.split())
    assert found["track.to"] == to
    if to:
        assert found["track.project"] == ("mine" if "mine" in flags else "distributed-training-demo")
        assert os.environ["COMET_WORKSPACE"] == "intro-ai"
    monkeypatch.setenv("COMET_WORKSPACE", "x")  # so that it is removed at the end


def test_comet_flags_without_a_name_are_refused(
    tiny: Any, texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert type_in(monkeypatch, "ddp", tiny, texts, "--comet-workspace", "mine") == 2
    assert "--comet-workspace has no effect without --experiment-name" in capsys.readouterr().err


def test_an_experiment_is_resumed_by_its_name(
    tiny: Any, texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that was stopped goes on, and equals one that never was."""
    cpu = ["--device", "cpu", "--dtype", "fp32", *SMALL]
    assert type_in(monkeypatch, "single-gpu", tiny, texts, "-e", "whole", *cpu) == 0
    whole = flatout.load("outputs/whole")
    num_steps = whole.log.steps[-1].num_steps
    assert num_steps > 2
    stop = [*cpu, "--ckpt-freq", "1"]
    with monkeypatch.context() as patch:
        patch.setattr("flatout.trainer.loop.save", stop_after(2))
        assert type_in(monkeypatch, "single-gpu", tiny, texts, "-e", "first", *stop) == 75
    capsys.readouterr()
    assert type_in(monkeypatch, "single-gpu", tiny, texts, "-e", "first", *stop) == 0
    assert "resume" in capsys.readouterr().out
    first = flatout.load("outputs/first")
    assert [step.loss for step in first.log.steps] == [step.loss for step in whole.log.steps]
    assert type_in(monkeypatch, "single-gpu", tiny, texts, "-e", "first", *cpu, "--lr", "1e-3") == 4
    assert "optim.lr" in capsys.readouterr().err


def stop_after(num_saves: int) -> Any:
    """Saving, which asks the run to stop after so many saves, as a signal does."""
    real, calls = loop.save, []

    def save(*args: Any, **kwargs: Any) -> Any:
        saved = real(*args, **kwargs)
        calls.append(1)
        if len(calls) == num_saves:
            signal.raise_signal(signal.SIGTERM)
        return saved

    return save


def test_tasks_of_srun_are_ranks(tiny: Any, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "node1"}
    for name, value in task.items():
        monkeypatch.setenv(name, value)
    # removed again at the end
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    kept: list[Any] = []
    monkeypatch.setattr("flatout_migrate.doors.launched.train", kept.append)
    assert type_in(monkeypatch, "ddp", tiny, texts, "-b", "3", "-s", "64") == 0
    store = TokenStore.open(Path("data/built_dataset/texts"))
    samples = kept[0].batch.samples_per_step
    assert float(store.lengths.mean()) * samples == pytest.approx(2 * 3 * 64, rel=0.05)


def test_the_batch_needs_a_number_of_tokens(
    tiny: Any, texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert type_in(monkeypatch, "ddp", tiny, texts, "data.max_tokens=null") == 2
    assert "data.max_tokens: null" in capsys.readouterr().err


def test_runs_without_a_name_are_apart(settings_of: Any) -> None:
    cpu = ("--device", "cpu", "-s", "64")
    first, again, other = (settings_of("single-gpu", *cpu, "--dtype", dtype) for dtype in ("fp32", "fp32", "bf16"))
    assert first["name"].startswith("single-gpu-")
    assert (first["run_dir"], first["run_dir"]) == (f"../outputs/{first['name']}", again["run_dir"])
    assert other["run_dir"] != first["run_dir"]
