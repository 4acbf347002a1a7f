"""A checkpoint edited by hand, its hashes made to agree: the tensor or field is named, or the one before it is used."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_folders import as_after, require_equal
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flatout.checkpoint.manifest import encode_manifest, read_manifest
from flatout.cli.main import main
from flatout.config.read import dump_config
from flatout.errors import CheckpointError
from flatout.io.durable_io import digest
from flatout.trainer.run import train
from tests.usual import usual

Change = Callable[[torch.Tensor], torch.Tensor] | None
Facts = dict[str, Any]


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    """Four steps with a checkpoint and an evaluation after every second one."""
    config = tiny.config(
        tmp_path_factory.mktemp("edited") / "run", batch={"max_steps": 4}, eval={"fraction": 0.1, "every_steps": 2},
        checkpoint={"every_steps": 2, "keep": 5},
    )  # fmt: skip
    train(config)
    return config


@pytest.fixture
def killed(finished, tmp_path):
    """A copy of the run as if it had been killed after its last checkpoint."""
    config = finished.model_copy(update={"run_dir": as_after(finished.folder, 4, tmp_path / "run")})
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
    rehash(path)


def rehash(path: Path) -> None:
    """Make the manifest agree with a file."""
    manifest = read_manifest(path.parent)
    manifest = replace(manifest, files={**manifest.files, path.name: digest(path)})
    (path.parent / "manifest.json").write_bytes(encode_manifest(manifest))


EDITS: list[tuple[str, str, Change, str | None]] = [
    ("optimizer", "/exp_avg", lambda old: old.flatten()[:-1].clone(), "has shape ("),
    ("optimizer", "/exp_avg", None, "but this one needs exp_avg, exp_avg_sq, step"),
    ("model", "lora_b", lambda old: old.to(torch.int32), "is torch.int32, but torch.float32 in this run"),
    ("model", "lora_b", lambda old: old + 1, None),
    ("optimizer", "/exp_avg", lambda old: old.clone(), None),
    ("optimizer", "/exp_avg", lambda old: old.to(torch.int32), "of torch.int32, but this run's"),
    ("optimizer", "/exp_avg", lambda old: old.double(), "of torch.float64, but this run's"),
    ("optimizer", "/step", lambda old: torch.ones(3), "has shape (3,)"),
]


@pytest.mark.parametrize(("stem", "key", "change", "said"), usual(EDITS, EDITS[:4]))
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
    require_equal(ours, theirs)


def put(*keys: str, value: Any) -> Callable[[Facts], None]:
    def edit(facts: Facts) -> None:
        for key in keys[:-1]:
            facts = facts[key]
        facts[keys[-1]] = value

    return edit


def drop(*keys: str) -> Callable[[Facts], None]:
    def edit(facts: Facts) -> None:
        for key in keys[:-1]:
            facts = facts[key]
        del facts[keys[-1]]

    return edit


OF_FACTS: dict[str, tuple[Callable[[Facts], None], str | None]] = {
    "as it was": (lambda facts: None, None),
    "no config": (drop("config"), "config"),
    "other settings": (put("config", "optim", "lr", value=0.5), "optim.lr"),
    "step huge": (put("progress", "step", value=10**9), "progress.step"),
    "half a scaler": (put("scaler", value={"scale": 1.0}), "scaler"),
    "config without a model": (drop("config", "model"), "model"),
    "config of a wrong type": (put("config", "batch", value=3), "batch"),
    "config with an unknown key": (put("config", "lore", value={}), "lore"),
    "no fingerprints": (drop("fingerprints"), "fingerprints"),
    "no fingerprint of the data": (drop("fingerprints", "data"), "data"),
    "other plan": (put("fingerprints", "plan", value=[]), "plan"),
    "a model of a wrong type": (put("fingerprints", "model", value=7), "model"),
    "progress a number": (put("progress", value=2), "progress"),
    "progress without a count": (drop("progress", "num_tokens"), "num_tokens"),
    "progress with an unknown key": (put("progress", "steps", value=2), "steps"),
    "progress of another step": (put("progress", "step", value=1), "progress.step"),
    "step true": (put("progress", "step", value=True), "progress.step"),
    "more updates than steps": (put("progress", "num_updates", value=3), "num_updates"),
    "a best step to come": (put("progress", "best_step", value=3), "best_step"),
    "negative seconds": (put("progress", "elapsed_s", value=-1.0), "elapsed_s"),
    "endless seconds": (put("progress", "elapsed_s", value=1e308 * 10), "state.json"),
    "an unknown fact": (put("more", value=1), "more"),
}


@pytest.mark.parametrize("name", usual(OF_FACTS, list(OF_FACTS)[:5]))
def test_an_edited_state_is_refused_by_name(killed, name):
    edit, named = OF_FACTS[name]
    path = as_after(killed.folder, 2) / "checkpoints" / "step-2" / "state.json"
    state = json.loads(path.read_text())
    edit(state["facts"])
    path.write_text(json.dumps(state))
    if named is None:
        rehash(path)
        assert train(killed).progress.step == 4
        return
    for is_hashed in (False, True):
        if is_hashed:
            rehash(path)
        with pytest.raises(CheckpointError) as raised:
            train(killed)
        assert (named if is_hashed else "state.json: ") in str(raised.value)
        assert not (killed.folder / "final").exists()
