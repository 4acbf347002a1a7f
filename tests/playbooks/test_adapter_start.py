"""The playbook of an adapter's start in docs/extending.md, followed in a file outside of the package."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from flatout.config.model import ADAPTER_STARTS, LoraConfig
from flatout.config.read import make_config
from flatout.errors import ProblemsError, UsageError
from flatout.models.lora.layer import add_lora, lora_layers
from flatout.models.lora.starts import AdapterPlace, gaussian
from flatout.track.callback import MemoryCallback
from flatout.trainer.run import train
from flatout.verifier.run import verify

PRINCIPAL = """
import torch

def principal(place, generator):
    *_, rows = torch.linalg.svd(place.weight(), full_matrices=False)
    return rows[: place.num_rows].contiguous()
"""


@pytest.fixture
def principal(tmp_path):
    (tmp_path / "start.py").write_text(PRINCIPAL)
    return f"{tmp_path / 'start.py'}:principal"


def config_of(tiny: Any, folder: Path, **lora: Any) -> Any:
    return tiny.config(folder, lora={"rank": 4, "targets": ["q_proj"], **lora}, batch={"max_steps": 1})


def test_an_adapter_starts_from_values_of_ones_own(tiny, tmp_path, principal):
    told = MemoryCallback()
    # without a learning rate to speak of, the adapter is saved as it began
    config = config_of(tiny, tmp_path / "run", init_path=principal)
    config = config.model_copy(update={"optim": config.optim.model_copy(update={"lr": 1e-30})})
    train(config, callbacks=[told])
    state = load_file(tmp_path / "run" / "final" / "adapter_model.safetensors")
    base = load_file(next(Path(tiny.model_dir).glob("*.safetensors")))
    name = "model.layers.0.self_attn.q_proj"
    *_, rows = torch.linalg.svd(base[f"{name}.weight"].float(), full_matrices=False)
    assert torch.equal(state[f"base_model.model.{name}.lora_A.weight"], rows[:4].contiguous())
    # B begins with zeros, so that the model is its base: PEFT reads the same
    assert any("PEFT" in str(line) for line in told.stages)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_verify_starts_from_the_same_values(tiny, tmp_path, principal, num_ranks):
    rows, _ = verify(config_of(tiny, tmp_path / "run", init_path=principal), num_ranks=num_ranks)
    assert any(row.num_ranks == num_ranks and row.verdict == "ok" for row in rows), rows
    assert [row for row in rows if row.verdict == "FAIL" or "init_path" in row.note] == []


def test_a_start_that_cannot_be_used_is_refused(tiny, tmp_path, principal):
    with pytest.raises(UsageError, match="no such function"):
        train(config_of(tiny, tmp_path / "run", init_path=principal.replace(":principal", ":minor")))
    (tmp_path / "start.py").write_text(PRINCIPAL.replace("[: place.num_rows]", "[:1]"))
    with pytest.raises(UsageError, match="returned a tensor of shape"):
        train(config_of(tiny, tmp_path / "run", init_path=principal))
    (tmp_path / "start.py").write_text(PRINCIPAL.replace("linalg.svd", "linalg.none"))
    with pytest.raises(UsageError, match=r"start\.py:5: the adapter start's own code failed with AttributeError"):
        train(config_of(tiny, tmp_path / "run", init_path=principal))
    with pytest.raises(ProblemsError, match="continue_from"):
        make_config({"model": "m", "lora": {"init_path": principal, "continue_from": str(tmp_path)}})


def test_a_gaussian_start_has_the_spread_of_peft(tiny):
    """Of each layer's own rank, also for the matrices of all experts, whose rows are rank times experts."""
    for num_rows, rank in ((64, 64), (64, 8)):
        place = AdapterPlace(num_rows, 1000, lambda: pytest.fail("it reads no weight"), rank)
        ours = gaussian(place, torch.Generator().manual_seed(0))
        settings = peft.LoraConfig(r=rank, init_lora_weights="gaussian", target_modules=["0"])
        (theirs,) = peft.inject_adapter_in_model(settings, nn.Sequential(nn.Linear(1000, 3)))[0].lora_A.parameters()
        assert ours.mean().item() == pytest.approx(0, abs=0.02 / rank)
        assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.05)
    model = AutoModelForCausalLM.from_pretrained(tiny.model_dir)
    add_lora(model, LoraConfig(init="gaussian", rank=4, rank_pattern={"down_proj": 16}), seed=0)
    for name, layer in lora_layers(model).items():
        rank = 16 if name.endswith("down_proj") else 4
        assert layer.lora_a.std().item() == pytest.approx(1 / rank, rel=0.2)
        assert not layer.lora_b.any()


def test_every_row_is_whole():
    assert set(get_args(LoraConfig.model_fields["init"].annotation)) == set(ADAPTER_STARTS)
    for name, place in ADAPTER_STARTS.items():
        module, _, function = place.partition(".")
        assert callable(getattr(import_module(f"flatout.models.lora.{module}"), function)), name
