"""Full fine-tuning with bf16 weights alone: it learns as fp32 masters do, and resumes to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from run_folders import as_after, require_equal, state_of
from safetensors.torch import load_file
from tiny_models import save_tiny_model

from flatout.errors import UsageError
from flatout.trainer.run import train
from tests.usual import usual

NUM_STEPS = 24


@pytest.fixture(scope="module")
def wide_model(tiny, tmp_path_factory):
    """A model whose rows are wide enough for moments in 8 bit."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    save_tiny_model(folder, "qwen3", hidden_size=64, intermediate_size=128, vocab_size=512)
    for file in (*tiny.model_dir.glob("*token*"), *tiny.model_dir.glob("chat_template*")):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def bf16_config(tiny: Any, run_dir: Path, weights: str, name: str, model: Path, **sections: Any) -> Any:
    return tiny.config(
        run_dir,
        method="full",
        model={"name": str(model), "precision": "bf16"},
        full={"weights": weights},
        optim={"name": name, "lr": 1e-3},
        batch={"samples_per_step": 6, "micro_batch_tokens": 4000, "max_steps": NUM_STEPS},
        schedule={"kind": "constant", "warmup_steps": 0},
        **sections,
    )


@pytest.mark.parametrize("name", [pytest.param("adamw", marks=pytest.mark.exhaustive), "adamw8bit"])
def test_learns_as_fp32_masters_do(tiny, tmp_path, metrics_of, name, wide_model):
    curves = {}
    for weights, optimizer in (("fp32", "adamw"), ("bf16", name)):
        run_dir = tmp_path / weights
        train(bf16_config(tiny, run_dir, weights, optimizer, wide_model))
        curves[weights] = torch.tensor([record["loss"] for record in metrics_of(run_dir)])
        saved = load_file(run_dir / "checkpoints" / f"step-{NUM_STEPS}" / "model.safetensors")
        assert {tensor.dtype for tensor in saved.values()} == {torch.float32 if weights == "fp32" else torch.bfloat16}
    worst = ((curves["bf16"] - curves["fp32"]).abs() / curves["fp32"]).max().item()
    learnt = (curves["fp32"][0] - curves["fp32"][-1]).item()
    print(f"{name}: worst relative difference {worst:.2e}, fp32 loss fell by {learnt:.3f}")
    assert worst < 0.02
    # a loss that stood still would differ by this much
    assert learnt / curves["fp32"][-1].item() > 0.1


@pytest.mark.parametrize("name", usual(["adamw", "adamw8bit"], ["adamw8bit"]))
def test_a_resumed_run_ends_with_the_same_bits(tiny, tmp_path, name, wide_model):
    checkpoint = {"every_steps": 3, "keep": 20}
    batch = {"samples_per_step": 6, "micro_batch_tokens": 4000, "max_steps": 8}
    config = bf16_config(tiny, tmp_path / "run", "bf16", name, wide_model, checkpoint=checkpoint)
    config = config.model_copy(update={"batch": config.batch.model_copy(update=batch)})
    train(config)
    train(config.model_copy(update={"run_dir": as_after(tmp_path / "run", 3, tmp_path / "again")}))
    one, other = (state_of(tmp_path / run, 8) for run in ("run", "again"))
    require_equal(one, other)
    if name == "adamw8bit":
        assert torch.uint8 in {tensor.dtype for tensor in other.values()}


def test_bf16_weights_without_bf16_arithmetic_are_refused(tiny, tmp_path):
    config = tiny.config(tmp_path, method="full", full={"weights": "bf16"})
    with pytest.raises(UsageError, match=r"got model\.precision fp32 on this device"):
        train(config)
