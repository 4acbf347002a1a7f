"""`flatout bench`: a user's own configuration or model, measured in a temporary folder."""

import json
import tempfile

import pytest

from flatout.bench.figures import figures
from flatout.bench.inputs import CHAT, MAX_ID, digest, random_samples
from flatout.cli.main import main
from flatout.config.read import dump_config
from flatout.data.build import open_or_build


def test_rates_are_tokens_over_intervals_without_the_warm_up():
    found = figures([7.0, 1.0, 1.0, 2.0, 1.0], [7, 7, 7, 100, 200], [1, 1, 1, 50, 60])
    assert found["tokens_per_s"] == 300 / 3
    assert found["label_tokens_per_s"] == 110 / 3
    assert found["launch_to_first_step_s"] == 7.0
    assert found["step_p50_s"] == 1.5
    assert found["step_p95_s"] == 2.0


def test_chat_samples_are_seeded_by_group():
    ids, loss_mask, lengths = random_samples(2, 151936)
    assert lengths.tolist() == CHAT.group(0) + CHAT.group(1)
    assert min(lengths) >= 32
    assert max(lengths) <= 2048
    assert max(random_samples(2, 151936, max_tokens=100)[2]) == 100
    assert ids.min() >= 4
    assert ids.max() < MAX_ID
    assert loss_mask.sum() / len(loss_mask) == pytest.approx(0.6, abs=0.01)
    # the first token of a sample has nothing before it
    assert not loss_mask[lengths.cumsum() - lengths].any()
    other = random_samples(2, 151936)
    assert digest(ids, loss_mask) == digest(other[0], other[1])
    loss_mask[-1] = False
    assert digest(ids, loss_mask) != digest(other[0], other[1])


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """Where temporary folders are made, and the working directory: nothing may be left in either."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path
    assert not list((tmp_path / "scratch").iterdir())
    assert not list((tmp_path / "here").iterdir())


def test_a_folder_with_only_a_config_is_measured_with_random_weights(tiny, scratch, capsys):
    folder = scratch / "shape"
    folder.mkdir()
    (folder / "config.json").write_bytes((tiny.model_dir / "config.json").read_bytes())
    words = ["bench", str(folder), "--steps", "4", "device=cpu", "data.max_tokens=64", "batch.samples_per_step=4"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["weights"], found["data"]) == ("random", "random token ids with chat-like lengths")
    assert len(found["steps_s"]) == 4
    assert found["steps_s"][0] == pytest.approx(found["launch_to_first_step_s"], abs=1e-3)
    assert found["tokens_per_s"] == pytest.approx(4 * 64 / found["step_p50_s"], rel=0.2)
    assert 0 < found["label_tokens_per_s"] < found["tokens_per_s"]
    assert found["peak_memory_bytes"] > 0
    assert found["mfu"] is None


def test_a_configuration_is_measured_on_its_own_data_and_weights(tiny, scratch, capsys):
    config = tiny.config(scratch / "run", eval={"fraction": 0.2, "every_steps": 1}, log_every_steps=7)
    open_or_build(config.data, config.model.name)
    (scratch / "run.yaml").write_text(dump_config(config))
    assert main(["bench", str(scratch / "run.yaml"), "--steps", "5", "lora.rank=8"]) == 0
    told = capsys.readouterr()
    assert "chats, as built" in told.out
    assert "pretrained weights" in " ".join(told.out.split())
    assert "5/5" in told.err
    assert "rank 8" in told.err
    # a path is not broken
    assert all(len(line) <= 80 or str(tiny.model_dir) in line for line in told.out.splitlines())
    for name in ("tokens/s", "label tokens/s", "step time", "peak memory", "MFU", "first step"):
        assert any(line.startswith(name) for line in told.out.splitlines())
    assert not config.folder.exists()


def test_what_cannot_be_measured_is_one_line(tiny, capsys):
    assert main(["bench", str(tiny.model_dir), "--steps", "3"]) == 2
    assert main(["bench", str(tiny.model_dir), "gpus=[0,1]", "device=cpu"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].startswith("error: --steps is 3")
    assert errors[1].startswith("error: gpus: [0, 1]")
