"""Whole runs of a mixture of experts: adapters on the experts are trained, resumed, exported and merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from run_folders import as_after
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from flatout.models.export import merge_adapter
from flatout.models.load.inference import load_trained, resolve_model_paths
from flatout.track.run_log import read_run
from flatout.trainer.run import train
from flatout.view.report import run_fragment


@pytest.fixture(scope="session")
def experts_dir(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    AutoTokenizer.from_pretrained(tiny.model_dir).save_pretrained(folder)
    shape = json.loads((tiny.model_dir / "config.json").read_text())
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = Qwen3MoeConfig(
        **{name: shape[name] for name in sizes},
        intermediate_size=64,
        moe_intermediate_size=24,
        num_experts=5,
        num_experts_per_tok=2,
        pad_token_id=shape["pad_token_id"],
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def config_of(tiny: Any, folder: Path, experts_dir: Path, **sections: Any) -> Any:
    return tiny.config(
        folder,
        model={"name": str(experts_dir), "precision": "fp64"},
        lora={"rank": 4, "alpha": 8, "targets": ["q_proj", "experts"]},
        batch={"samples_per_step": 4, "micro_batch_tokens": 700, "max_steps": 4},
        checkpoint={"every_steps": 2},
        **sections,
    )


def test_adapters_of_experts_train_resume_and_merge(tiny, experts_dir, tmp_path, metrics_of):
    config = config_of(tiny, tmp_path / "run", experts_dir)
    train(config)
    losses = [record["loss"] for record in metrics_of(tmp_path / "run")]
    assert losses[-1] < losses[0]
    # the second half again, recomputing activations
    as_after(tmp_path / "run", 2, tmp_path / "again")
    train(config_of(tiny, tmp_path / "again", experts_dir, recompute="full"))
    again = [record["loss"] for record in metrics_of(tmp_path / "again")]
    assert again == pytest.approx(losses, rel=1e-10)
    adapters = [load_file(tmp_path / name / "final/adapter_model.safetensors") for name in ("run", "again")]
    assert sum(".experts." in name for name in adapters[0]) == 8
    for name, tensor in adapters[0].items():
        torch.testing.assert_close(adapters[1][name], tensor, rtol=1e-6, atol=1e-9)
    merge_adapter(str(tmp_path / "run"), tmp_path / "merged")
    options: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager"}
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", **options)
    adapted, _ = load_trained(resolve_model_paths(str(tmp_path / "run")), device=torch.device("cpu"))
    ids = torch.arange(40)[None] % 300
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits.float(), adapted(ids).logits.float(), rtol=1e-3, atol=1e-3)


def test_losses_on_routers_are_the_same_in_any_micro_batches(tiny, experts_dir, tmp_path, metrics_of):
    records = []
    for tokens in (520, 5000):
        config = tiny.config(
            tmp_path / str(tokens),
            method="full",
            model={"name": str(experts_dir), "precision": "fp64"},
            batch={"samples_per_step": 4, "micro_batch_tokens": tokens, "max_steps": 3},
            experts={"balance_loss": 0.5, "z_loss": 0.01},
        )
        train(config)
        records.append(metrics_of(tmp_path / str(tokens)))
    assert [record["num_micro_batches"] for record in records[0]] != [1, 1, 1]
    for one, other in zip(*records, strict=True):
        for name in ("loss", "grad_norm", "balance_loss", "z_loss"):
            assert one[name] == pytest.approx(other[name], rel=1e-9)
        assert one["expert_peak_load"] == other["expert_peak_load"]
        assert len(one["expert_entropy"]) == 2
        assert one["expert_loads"] == other["expert_loads"]
        for loads, peak in zip(one["expert_loads"], one["expert_peak_load"], strict=True):
            assert sum(loads) == pytest.approx(5, abs=0.05)
            assert max(loads) == pytest.approx(peak, abs=0.006)
        assert all(0 < entropy <= 1 for entropy in one["expert_entropy"])
        # the least, with equal loads, is the number of experts per token
        assert one["balance_loss"] > 1.9
    page = run_fragment(read_run(tmp_path / "520"))
    titles = ("Load of experts", "Unevenness of experts", "Losses of routers", "Load of each expert")
    assert all(title in page for title in titles)
    before, _, after = page.partition("Load of each expert")
    assert "load / mean in step 3" in after.partition("</figure>")[0]
    strips = json.loads(before.rpartition("data-chart='")[2].partition("'")[0])["series"]
    for layer, loads in enumerate(records[0][-1]["expert_loads"]):
        assert strips[layer] == {"name": f"layer {layer}", "y": pytest.approx(loads, rel=1e-2)}
