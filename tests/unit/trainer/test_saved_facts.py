"""A checkpoint's facts, edited by hand: the hash tells; and where somebody made the hash agree, the field is named."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from flatout.checkpoint.manifest import encode_manifest, read_manifest
from flatout.errors import CheckpointError
from flatout.io.durable_io import digest
from flatout.trainer.run import train
from tests.usual import usual

Facts = dict[str, Any]


@pytest.fixture(scope="module")
def stopped(tiny, tmp_path_factory):
    """A run of four steps whose only checkpoint is that of step 2."""
    config = tiny.config(
        tmp_path_factory.mktemp("facts") / "run",
        batch={"max_steps": 4},
        eval={"fraction": 0.1, "every_steps": 2},
        checkpoint={"every_steps": 2, "keep": 5},
    )
    train(config)
    for name in ("final", "best", "checkpoints/step-4"):
        shutil.rmtree(config.folder / name, ignore_errors=True)
    return config


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


EDITS: dict[str, tuple[Callable[[Facts], None], str]] = {
    "no config": (drop("config"), "config"),
    "config a list": (put("config", value=[]), "config"),
    "config without a model": (drop("config", "model"), "model"),
    "config of a wrong type": (put("config", "batch", value=3), "batch"),
    "config with an unknown key": (put("config", "lore", value={}), "lore"),
    "other settings": (put("config", "optim", "lr", value=0.5), "optim.lr"),
    "no fingerprints": (drop("fingerprints"), "fingerprints"),
    "fingerprints a text": (put("fingerprints", value="x"), "fingerprints"),
    "no fingerprint of the data": (drop("fingerprints", "data"), "data"),
    "no fingerprint of the model": (drop("fingerprints", "model"), "model"),
    "other data": (put("fingerprints", "data", value="x"), "data"),
    "other plan": (put("fingerprints", "plan", value=[]), "plan"),
    "other model": (put("fingerprints", "model", value={}), "model"),
    "a model of a wrong type": (put("fingerprints", "model", value=7), "model"),
    "no progress": (drop("progress"), "progress"),
    "progress a number": (put("progress", value=2), "progress"),
    "progress empty": (put("progress", value={}), "progress"),
    "progress without a count": (drop("progress", "num_tokens"), "num_tokens"),
    "progress with an unknown key": (put("progress", "steps", value=2), "steps"),
    "progress of another step": (put("progress", "step", value=1), "progress.step"),
    "step huge": (put("progress", "step", value=10**9), "progress.step"),
    "step negative": (put("progress", "step", value=-1), "progress.step"),
    "step a text": (put("progress", "step", value="2"), "progress.step"),
    "step true": (put("progress", "step", value=True), "progress.step"),
    "more updates than steps": (put("progress", "num_updates", value=3), "num_updates"),
    "a best step to come": (put("progress", "best_step", value=3), "best_step"),
    "negative seconds": (put("progress", "elapsed_s", value=-1.0), "elapsed_s"),
    "endless seconds": (put("progress", "elapsed_s", value=1e308 * 10), "state.json"),
    "stopped a number": (put("progress", "stopped_early", value=1), "stopped_early"),
    "no scaler": (drop("scaler"), "scaler"),
    "half a scaler": (put("scaler", value={"scale": 1.0}), "scaler"),
    "an unknown fact": (put("more", value=1), "more"),
}


def edit_state(config: Any, edit: Callable[[Facts], None], *, rehash: bool) -> None:
    path = config.folder / "checkpoints" / "step-2"
    state = json.loads((path / "state.json").read_text())
    edit(state["facts"])
    (path / "state.json").write_text(json.dumps(state))
    if rehash:
        manifest = read_manifest(path)
        files = {**manifest.files, "state.json": digest(path / "state.json")}
        (path / "manifest.json").write_bytes(encode_manifest(dataclasses.replace(manifest, files=files)))


@pytest.mark.parametrize("name", usual(EDITS, ["no config", "other settings", "step huge", "half a scaler"]))
@pytest.mark.parametrize("rehash", usual([False, True], [True]))
def test_an_edited_state_is_refused_by_name(stopped, tmp_path, name, rehash):
    shutil.copytree(stopped.folder, tmp_path / "run")
    config = stopped.model_copy(update={"run_dir": tmp_path / "run"})
    edit, named = EDITS[name]
    edit_state(config, edit, rehash=rehash)
    with pytest.raises(CheckpointError) as raised:
        train(config)
    assert (named if rehash else "state.json: ") in str(raised.value)
    assert not (config.folder / "final").exists()


def test_the_state_as_it_was_is_taken(stopped, tmp_path):
    shutil.copytree(stopped.folder, tmp_path / "run")
    config = stopped.model_copy(update={"run_dir": tmp_path / "run"})
    edit_state(config, lambda facts: None, rehash=True)
    assert train(config).progress.step == 4
