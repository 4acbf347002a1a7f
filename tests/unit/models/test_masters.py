"""fp32 masters of 16-bit weights start at random within their rounding: same outputs, and small updates arrive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from flatout.kernels.rounding import dither_within_rounding
from flatout.models.lora.saved import SavedModule
from flatout.models.masters import Dither
from flatout.trainer.run import train


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_places_round_to_the_value_and_are_uniform(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = (torch.randn(300, 400) * 0.05).to(dtype).float()
    values[0, :6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 2.0**-130])
    values[1, :4] = torch.tensor([1.0, -1.0, 0.5, -0.25])
    dither = values.clone()
    dither_within_rounding(dither, dtype, seed=7)
    assert torch.equal(dither.to(dtype).view(torch.int16), values.to(dtype).view(torch.int16))
    kept = dither.view(torch.int32) == values.view(torch.int32)
    assert kept[0, :5].all()
    assert kept[2:].float().mean() < 1e-3
    # an update of a hundredth of a step moves about a hundredth of the weights by a step, in each direction
    step = torch.where(values.isfinite(), values.abs(), 1).log2().floor().clamp(-10).exp2() / (
        128 if dtype == torch.bfloat16 else 1024
    )
    for size in (0.01, 0.1, -0.1):
        arrived = ((dither + size * step).to(dtype).float() - values)[2:] / step[2:]
        large = values[2:].abs() > 2**-9
        assert arrived[large].mean().item() == pytest.approx(size, rel=0.15)
        assert ((values + size * step).to(dtype).float() - values)[2:][large].abs().max() == 0


def test_a_part_gets_the_places_of_the_whole_and_other_values_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    values = torch.randn(6, 40, 30).bfloat16().float()
    whole = values.clone()
    dither_within_rounding(whole, torch.bfloat16, seed=3)
    part = values[2:5, 10:20].clone()
    dither_within_rounding(part, torch.bfloat16, seed=3, offset=(2, 10, 0))
    assert torch.equal(part, whole[2:5, 10:20])
    again = whole.clone()
    dither_within_rounding(again, torch.bfloat16, seed=3)
    assert torch.equal(again, whole)
    other = values.clone()
    dither_within_rounding(other, torch.bfloat16, seed=4)
    assert (other != whole).float().mean() > 0.9
    monkeypatch.setattr("flatout.kernels.rounding._CHUNK_ELEMENTS", 1000)
    in_parts = values.clone()
    dither_within_rounding(in_parts, torch.bfloat16, seed=3)
    assert torch.equal(in_parts, whole)


@pytest.mark.parametrize("kind", ["head", "embedding", "norm"])
def test_modules_that_lora_trains_in_full_compute_the_same_at_first(kind: str) -> None:
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
def bf16_model(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose file is in bf16, as most are."""
    folder = tmp_path_factory.mktemp("bf16") / "model"
    folder.mkdir()
    for file in tiny.model_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    narrow = {name: weight.bfloat16() for name, weight in weights.items()}
    save_file(narrow, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_full_fine_tuning_in_bf16_learns_as_fp32_does(
    tiny: Any, tmp_path: Path, metrics_of: Any, bf16_model: Path
) -> None:
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
