"""fp32 masters of 16-bit weights start at random within their rounding: same outputs, and small updates arrive."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from flatout.models.lora.saved import SavedModule
from flatout.models.masters import Dither
from flatout.trainer.run import train


@pytest.mark.parametrize("kind", ["head", "embedding", "norm"])
def test_modules_that_lora_trains_in_full_compute_the_same_at_first(kind):
    torch.manual_seed(0)
    base: nn.Module = {"head": nn.Linear(32, 40), "embedding": nn.Embedding(40, 32), "norm": nn.LayerNorm(32)}[kind]
    nn.init.normal_(next(base.parameters()))
    model = nn.ModuleDict({"saved": SavedModule(base.bfloat16())})
    before = next(model["saved"].trained.parameters()).detach().clone()
    Dither(model, compute=None, seed=0).apply_to(model)
    assert not torch.equal(next(model["saved"].trained.parameters()), before)
    x = torch.arange(40) if kind == "embedding" else torch.randn(5, 32).bfloat16()
    assert torch.equal(model["saved"](x), base(x))


@pytest.fixture(scope="module")
def bf16_model(tiny, tmp_path_factory):
    """A tiny model whose file is in bf16, as most are."""
    folder = tmp_path_factory.mktemp("bf16") / "model"
    folder.mkdir()
    for file in tiny.model_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    narrow = {name: weight.bfloat16() for name, weight in weights.items()}
    save_file(narrow, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_full_fine_tuning_in_bf16_learns_as_fp32_does(tiny, tmp_path, metrics_of, bf16_model):
    learnt = {}
    for precision in ("fp32", "bf16"):
        losses = {}
        for lr in (1e-12, 5e-6):
            config = tiny.config(
                tmp_path / f"{precision}-{lr}",
                method="full",
                model={"name": str(bf16_model), "precision": precision},
                # an update is a small part of a rounding step of most weights
                optim={"name": "adamw", "lr": lr, "weight_decay": 0.0},
                batch={"samples_per_step": 8, "micro_batch_tokens": 4000, "max_steps": 8},
                schedule={"kind": "constant", "warmup_steps": 0},
            )
            train(config)
            losses[lr] = torch.tensor([record["loss"] for record in metrics_of(config.run_dir)])
        learnt[precision] = (losses[1e-12] - losses[5e-6])[1:].sum().item()
    share = learnt["bf16"] / learnt["fp32"]
    print(f"share of what fp32 learns: {share:.3f}")
    assert share == pytest.approx(1, abs=0.2)
