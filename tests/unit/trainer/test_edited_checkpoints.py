"""A checkpoint whose hashes are right and whose tensors are not: one sentence, or the checkpoint before it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flatout.checkpoint.manifest import encode_manifest, read_manifest
from flatout.cli.main import main
from flatout.config.read import dump_config
from flatout.io.durable_io import digest
from flatout.trainer.run import train
from tests.usual import usual

Change = Callable[[torch.Tensor], torch.Tensor] | None


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    """Four steps with a checkpoint after every second one."""
    config = tiny.config(
        tmp_path_factory.mktemp("edited") / "run", batch={"max_steps": 4}, checkpoint={"every_steps": 2, "keep": 5}
    )
    train(config)
    return config


@pytest.fixture
def killed(finished, tmp_path):
    """A copy of the run as if it had been killed after its last checkpoint."""
    shutil.copytree(finished.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "final")
    config = finished.model_copy(update={"run_dir": tmp_path / "run"})
    (tmp_path / "run.yaml").write_text(dump_config(config))
    return config


def edit(folder: Path, stem: str, key: str, change: Change) -> None:
    """Change the first tensor whose name ends in `key` (None: remove it), and the manifest with it."""
    path = folder / f"{stem}.safetensors"
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(path)
    name = min(name for name in tensors if name.endswith(key))
    held = tensors.pop(name)
    save_file(tensors if change is None else {**tensors, name: change(held)}, path, metadata)
    manifest = read_manifest(folder)
    manifest = replace(manifest, files={**manifest.files, path.name: digest(path)})
    (folder / "manifest.json").write_bytes(encode_manifest(manifest))


@pytest.mark.parametrize(
    ("stem", "key", "change", "said"),
    [
        ("optimizer", "/exp_avg", lambda old: old.flatten()[:-1].clone(), "has shape ("),
        ("optimizer", "/exp_avg", lambda old: old.to(torch.int32), "of torch.int32, but this run's"),
        ("optimizer", "/exp_avg", lambda old: old.double(), "of torch.float64, but this run's"),
        ("optimizer", "/exp_avg", None, "but this one needs exp_avg, exp_avg_sq, step"),
        ("optimizer", "/step", lambda old: torch.ones(3), "has shape (3,)"),
        ("model", "lora_b", lambda old: old.to(torch.int32), "is torch.int32, but torch.float32 in this run"),
        ("optimizer", "/exp_avg", lambda old: old.clone(), None),
        ("model", "lora_b", lambda old: old + 1, None),
    ],
)
def test_state_that_does_not_fit_is_one_sentence(killed, stem, key, change, said, capsys):
    edit(killed.folder / "checkpoints" / "step-4", stem, key, change)
    code = main(["train", str(killed.folder.with_name("run.yaml"))])
    error = capsys.readouterr().err
    if said is None:
        assert code == 0, error
        return
    assert code == 4
    assert said in error
    assert "restore it from a backup" in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(("stem", "key"), [("optimizer", "/exp_avg_sq"), ("model", "lora_a")])
@pytest.mark.parametrize("value", usual([math.nan, math.inf], [math.inf]))
def test_state_that_is_not_finite_is_passed_over_for_the_older_checkpoint(killed, finished, stem, key, value, capsys):
    def spoil(held: torch.Tensor) -> torch.Tensor:
        held = held.clone()
        held.view(-1)[-1] = value
        return held

    edit(killed.folder / "checkpoints" / "step-4", stem, key, spoil)
    assert main(["train", str(killed.folder.with_name("run.yaml"))]) == 0, capsys.readouterr().err
    events = [json.loads(line) for line in (killed.folder / "events.jsonl").read_text().splitlines()]
    refused = [event["why"] for event in events if event["kind"] == "refused"]
    assert len(refused) == 1
    assert "is not finite; it was edited or damaged" in refused[0]
    assert [event["step"] for event in events if event["kind"] == "resumed"][-1:] == [2]
    # as if nothing had happened
    ours, theirs = (
        load_file(folder / "final" / "adapter_model.safetensors") for folder in (killed.folder, finished.folder)
    )
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
