"""`faults.spike`: which steps count as spikes, what becomes of them, and that a resumed run decides alike."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from run_folders import as_after, require_equal, state_of

from flatout.errors import NumericError, UsageError
from flatout.track.run_log import read_run
from flatout.trainer.run import train
from tests.usual import usual

# the loss soon stays at one level, and ordinary noise around it counts as a spike, so no data has to be made for it
SIGMAS, NUM_STEPS = 0.4, 50


def config_of(tiny: Any, folder: Path, action: str, **sections: Any) -> Any:
    faults = {"spike": action} | ({} if action == "off" else {"spike_sigmas": SIGMAS})
    values: dict[str, Any] = {
        "batch": {"samples_per_step": 2, "max_steps": NUM_STEPS},
        "optim": {"lr": 3e-2},
        "checkpoint": {"every_steps": 20, "keep": 9},
    }
    return tiny.config(folder / action, faults=faults, **{**values, **sections})


def expected_spikes(losses: list[float]) -> list[int]:
    """The steps whose loss is over mean + SIGMAS deviations of the losses before, written down once more."""
    mean = variance = 0.0
    spikes = []
    for number, loss in enumerate(losses):
        if number >= 32:
            limit = mean + SIGMAS * max(math.sqrt(variance), 0.01 * abs(mean))
            if loss > limit:
                spikes.append(number + 1)
                loss = limit
        weight = 1 / min(number + 1, 128)
        variance = (1 - weight) * (variance + weight * (loss - mean) ** 2)
        mean += weight * (loss - mean)
    return spikes


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("spikes")
    for action in ("off", "warn", "skip"):
        train(config_of(tiny, folder, action))
    return folder


@pytest.mark.parametrize("action", ["off", "warn", "skip"])
def test_spikes_are_told_and_their_samples_kept(runs, action):
    run_dir = runs / action
    spikes = expected_spikes([record.loss for record in read_run(run_dir).steps])
    assert spikes
    told = [] if action == "off" else spikes
    assert [event["step"] for event in events(run_dir, "loss_spike")] == told
    assert sorted(path.name for path in run_dir.glob("spikes/*")) == sorted(f"step-{step}.json" for step in told)
    for step in told:
        found = json.loads((run_dir / "spikes" / f"step-{step}.json").read_text())
        assert found["loss"] > found["limit"] > found["usual"]
        assert all(":" in origin for origin in found["samples"].values())
        assert len(found["samples"]) == 2
    skipped = spikes if action == "skip" else []
    assert [(event["step"], event["why"]) for event in events(run_dir, "skipped")] == [
        (step, "loss spike") for step in skipped
    ]
    state = json.loads((run_dir / "checkpoints" / f"step-{NUM_STEPS}" / "state.json").read_text())
    progress = state.get("facts", state)["progress"]
    assert progress["num_updates"] == NUM_STEPS - len(skipped)


def test_only_skipping_changes_weights(runs):
    off, warn, skip = (state_of(runs / action, NUM_STEPS) for action in ("off", "warn", "skip"))
    require_equal(warn, off)
    assert any(not torch.equal(tensor, off[name]) for name, tensor in skip.items())


@pytest.mark.parametrize("action", usual(["warn", "skip"], ["skip"]))
def test_a_resumed_run_decides_alike(runs, tiny, tmp_path, action):
    as_after(runs / action, 40, tmp_path / action)
    train(config_of(tiny, tmp_path, action))
    assert events(tmp_path / action, "resumed")[-1]["step"] == 40
    require_equal(state_of(tmp_path / action, NUM_STEPS), state_of(runs / action, NUM_STEPS))
    told = [event["step"] for event in events(tmp_path / action, "loss_spike")]
    assert sorted(set(told)) == [event["step"] for event in events(runs / action, "loss_spike")]


def test_a_spike_stops_a_run_before_its_update(runs, tiny, tmp_path):
    config = config_of(tiny, tmp_path, "stop", checkpoint={"every_steps": 1, "keep": 99})
    with pytest.raises(NumericError, match=r"loss .* deviations over the usual .*; the weights were not updated; its"):
        train(config)
    (first, *_) = [event["step"] for event in events(runs / "warn", "loss_spike")]
    (path,) = (tmp_path / "stop" / "spikes").iterdir()
    assert path.name == f"step-{first}.json"
    assert max(int(path.name[5:]) for path in (tmp_path / "stop" / "checkpoints").iterdir()) == first - 1


def test_what_would_have_no_effect_is_refused(tiny, tmp_path):
    with pytest.raises(UsageError, match="spike_sigmas"):
        tiny.config(tmp_path, faults={"spike_sigmas": 3.0})
    assert tiny.config(tmp_path, faults={"spike_sigmas": 3.0, "spike": "warn"}).faults.spike_sigmas == 3.0
    sections = {"gpus": [0, 1], "faults": {"spike": "skip"}}
    with pytest.raises(UsageError, match=r"faults\.spike: skip does not work with strategy: deepspeed"):
        tiny.config(tmp_path, strategy="deepspeed", deepspeed={"zero_optimization": {"stage": 1}}, **sections)
    assert tiny.config(tmp_path, strategy="ddp", **sections).faults.spike == "skip"
