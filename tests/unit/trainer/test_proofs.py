"""What an equal start has proved is reused, and anything that could change the verdict proves it again."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flatout.cli.main import main
from flatout.config.read import dump_config
from flatout.config.schema import ModelConfig
from flatout.models.load.model import Loading, load_model
from flatout.models.proof_key import proof_key
from flatout.track.run_log import read_run
from flatout.track.start_up import EVENT, stages_of
from flatout.trainer.run import train

REUSED = re.compile(r"checked \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC with the same code, model, settings and device")


@pytest.fixture
def start(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Start the same run anew by the command line, with overrides; return its train.log."""
    monkeypatch.delenv("FLATOUT_CHECK_AGAIN")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    shutil.copytree(tiny.model_dir, model)
    config = tiny.config(tmp_path / "run", model={"name": str(model)}, batch={"max_steps": 1})
    (tmp_path / "run.yaml").write_text(dump_config(config))

    def start_it(*overrides: str, file: str = "run.yaml") -> str:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        assert main(["train", str(tmp_path / file), *overrides]) == 0
        return (tmp_path / "run" / "train.log").read_text()

    return start_it


def is_reused(log: str) -> bool:
    (line,) = re.findall(r"^\S+ self-test .*", log, re.MULTILINE)
    assert "no leak between documents" in line
    return REUSED.search(line) is not None


def test_a_second_start_reuses_the_verdict_says_since_when_and_trains_alike(start: Any, tmp_path: Path) -> None:
    losses, shape = [], tmp_path / "model" / "config.json"
    # some configurations hold infinity
    shape.write_text(json.dumps({**json.loads(shape.read_text()), "time_step_limit": [0.0, float("inf")]}))
    for index in range(2):
        assert is_reused(start()) == (index == 1)
        run = read_run(tmp_path / "run")
        losses.append([step.loss for step in run.steps])
        (event,) = (event for event in run.events if event["kind"] == EVENT)
        stages = stages_of(event)
        assert {"starting Python", "opening the tokens", "planning", "self-test", "step"} <= set(stages)
        assert event["total_s"] == pytest.approx(sum(stages.values()), abs=0.01 * len(stages))
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "change",
    [
        "lora.rank=8",
        "model.attention=plain",
        "seed=8 model.init=random",
        "deterministic=true",
        "lora.rslora=true",
        "batch.layout=rows",
    ],
)
def test_another_setting_proves_again(start: Any, change: str) -> None:
    start()
    assert not is_reused(start(*change.split()))
    assert is_reused(start())


@pytest.mark.parametrize("change", ["optim.lr=1e-4", "name=other", "batch.max_steps=2", "log_every_steps=2"])
def test_a_setting_that_no_check_depends_on_does_not(start: Any, change: str) -> None:
    start()
    assert is_reused(start(change))


@pytest.mark.exhaustive
def test_ranks_that_share_micro_batches_prove_anew_and_compare_shares_in_every_start(start: Any) -> None:
    pair = ("gpus=[0,1]", "device=cpu")
    start(*pair)
    for reused in (False, True):
        log = start(*pair, "context.parallel=2")
        assert is_reused(log) == reused
        assert "2 ranks share each micro-batch; equal to whole within" in log
    assert is_reused(start(*pair))


def test_a_verdict_on_packed_documents_is_none_on_rows(tiny: Any) -> None:
    """Of one configuration: a model that cannot be packed is planned again in rows."""
    config, cpu = ModelConfig(name=str(tiny.model_dir), precision="fp32"), torch.device("cpu")
    packed, rows = (
        load_model(config, method="lora", device=cpu, seed=0, how=Loading(is_padded=rows)) for rows in (False, True)
    )
    assert proof_key(packed, cpu) == proof_key(replace(packed), cpu)
    assert proof_key(packed, cpu) != proof_key(replace(packed, is_padded=True), cpu)
    assert proof_key(packed, cpu) != proof_key(rows, cpu)


def test_other_weights_another_environment_or_precision_prove_again(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][0] *= 1.001
    save_file(weights, file, {"format": "pt"})
    assert not is_reused(start())
    assert is_reused(start())
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    assert not is_reused(start())
    monkeypatch.delenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
    torch.set_float32_matmul_precision("medium")
    try:
        assert not is_reused(start())
    finally:
        torch.set_float32_matmul_precision("highest")
    assert is_reused(start())


def test_a_user_can_have_everything_checked_again(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    monkeypatch.setenv("FLATOUT_CHECK_AGAIN", "1")
    log = start()
    assert not is_reused(log)
    assert "checks     none is reused: FLATOUT_CHECK_AGAIN is set" in log


def test_code_of_others_in_the_process_proves_again(start: Any, tiny: Any, tmp_path: Path) -> None:
    """A .py configuration, and a script that calls `train`, can have changed anything."""
    start()
    lines = (
        "from pathlib import Path",
        "from flatout.config.read import load_config",
        f"config = load_config(Path({str(tmp_path / 'run.yaml')!r}))",
    )
    (tmp_path / "run.py").write_text("\n".join(lines))
    assert not is_reused(start(file="run.py"))
    shutil.rmtree(tmp_path / "run")
    train(tiny.config(tmp_path / "run", model={"name": str(tmp_path / "model")}, batch={"max_steps": 1}))
    assert not is_reused((tmp_path / "run" / "train.log").read_text())


def test_a_damaged_verdict_is_told_and_made_again(start: Any, tmp_path: Path) -> None:
    start()
    kept = {path.name.rpartition("-")[0]: path for path in (tmp_path / "cache" / "flatout" / "checks").iterdir()}
    assert {"self-test", "adapter", "gradient-paths", "tokenizer"} <= set(kept)
    content = json.loads(kept["self-test"].read_text())
    content["content"]["facts"]["line"] = "packed = alone within nan"
    kept["self-test"].write_text(json.dumps(content))
    kept["adapter"].write_text("{")
    kept["tokenizer"].write_text("[]")
    log = start()
    assert not is_reused(log)
    assert "self-test-" in log
    assert "does not match its hash; this record is ignored" in log
    assert log.count("is ignored") == 3
    assert is_reused(start())
