"""A whole run that goes on under another strategy and number of ranks: the same final/ and best/ as one process."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_gloo import finish, start

from flatout.trainer.run import train

WEIGHTS = {"full": "model.safetensors", "lora": "adapter_model.safetensors"}


def keep_only(source: Path, target: Path, step: int) -> None:
    """A copy of a run as it was after `step`."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("final", "best", ".lock"))
    for path in (target / "checkpoints").iterdir():
        if path.name != f"step-{step}":
            shutil.rmtree(path)


@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=pytest.mark.exhaustive)])
def test_a_run_moves_to_shards_and_back(tiny, tmp_path, method):
    def config(name: str, **more: Any) -> Any:
        return tiny.config(
            tmp_path / name,
            method=method,
            model={"name": str(tiny.model_dir), "precision": "fp64"},
            batch={"samples_per_step": 5, "micro_batch_tokens": 600, "max_steps": 6},
            # so large a delta that only the state of step 4 counts as better than the start
            eval={"fraction": 0.1, "every_steps": 2, "min_delta": 0.8 if method == "full" else 0.06},
            optim={"lr": 0.02 if method == "full" else 0.01},
            schedule={"kind": "wsd", "decay_ratio": 0.9},
            **more,
        )

    one = config("one", checkpoint={"every_steps": 2, "keep": 5})
    train(one)
    keep_only(one.folder, tmp_path / "sharded", 2)
    background = {"every_steps": 2, "keep": 5, "asynchronous": True}
    sharded = config("sharded", strategy="fsdp", checkpoint=background)
    assert finish(start(sharded, tmp_path, 2)) == [0, 0]
    parts = sorted(path.name for path in (sharded.folder / "checkpoints" / "step-4").glob("model*"))
    assert parts == ["model-rank-0.safetensors", "model-rank-1.safetensors"]
    keep_only(sharded.folder, tmp_path / "back", 4)
    train(config("back", checkpoint={"every_steps": 2, "keep": 5}))
    for name, folder in (("sharded", "final"), ("back", "final"), ("sharded", "best")):
        expected = load_file(one.folder / folder / WEIGHTS[method])
        got = load_file(tmp_path / name / folder / WEIGHTS[method])
        assert got.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(got[key], tensor, rtol=1e-9, atol=1e-11)
        ours, theirs = (tmp_path / run / folder for run in (name, "one"))
        assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in theirs.iterdir())
        if method == "full":
            assert (ours / "config.json").read_text() == (theirs / "config.json").read_text()
