"""experts.bias_update: biases of routers move as in a loop written out, in any micro-batches, and are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from built_run import built_run
from model_table import tiny as tiny_config_of
from run_folders import as_after, require_equal
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

from flatout.config.schema import ExpertsConfig
from flatout.errors import NumericError, UsageError
from flatout.models.experts.block import register_experts
from flatout.models.experts.router import Routers, prepare_biases
from flatout.models.load.auto_class import auto_class
from flatout.parallel.rank import Rank
from flatout.track.callback import Reporter
from flatout.trainer.planned_run import open_and_plan
from flatout.trainer.run import train
from flatout.trainer.step import step_launcher
from tests.usual import usual

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="session")
def skewed_dir(tiny, tmp_path_factory):
    """A model whose biases send most tokens to the first two of eight experts."""
    folder = tmp_path_factory.mktemp("skewed")
    AutoTokenizer.from_pretrained(tiny.model_dir).save_pretrained(folder)
    shape = json.loads((tiny.model_dir / "config.json").read_text())
    config = DeepseekV3Config(
        **{name: shape[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "pad_token_id")},
        num_hidden_layers=2, num_key_value_heads=shape["num_attention_heads"], intermediate_size=64,
        moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(config)
    model.get_buffer(BIAS)[:2] = 0.5
    model.save_pretrained(folder)
    return folder


def config_of(tiny: Any, folder: Path, model_dir: Path, **sections: Any) -> Any:
    values: dict[str, Any] = {
        "method": "full",
        "model": {"name": str(model_dir), "precision": "fp64"},
        "batch": {"samples_per_step": 4, "micro_batch_tokens": 520, "max_steps": 6},
        "experts": {"bias_update": 0.03},
    }
    return tiny.config(folder, **{**values, **sections})


def test_biases_are_those_of_a_loop_written_out(tiny, skewed_dir, tmp_path, metrics_of):
    lr, speed = 1e-2, 0.03
    config = config_of(
        tiny, tmp_path / "run", skewed_dir,
        optim={"name": "sgd", "beta1": 0, "lr": lr, "max_grad_norm": None}, schedule={"kind": "constant"},
    )  # fmt: skip
    planned = open_and_plan(config, Reporter(), Rank())
    options: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(skewed_dir, dtype=torch.float64, **options).train()
    bias, loads = model.get_buffer(BIAS), torch.zeros(8)
    first = bias.clone()

    def count(_: Any, __: Any, output: Any) -> None:
        loads.add_(torch.bincount(output[2].flatten(), minlength=8))

    model.model.layers[1].mlp.gate.register_forward_hook(count)
    losses = []
    for step in planned.plan.steps():
        loads.zero_()
        model.zero_grad()
        total, num_label_tokens = torch.zeros((), dtype=torch.float64), 0
        for ids, mask in (planned.store.sample(index).pair for index in step.sample_ids):
            logits = model(torch.tensor(ids.tolist())[None], use_cache=False).logits[0, :-1]
            labels = torch.tensor(ids.tolist()).where(torch.tensor(mask.tolist()), -100)[1:]
            total = total + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            num_label_tokens += int((labels >= 0).sum())
        loss = total / num_label_tokens
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * (0 if parameter.grad is None else parameter.grad)
            for expert in range(8):
                bias[expert] += speed * (float(loads[expert] < loads.mean()) - float(loads[expert] > loads.mean()))
    train(config)
    records = metrics_of(tmp_path / "run")
    assert max(record["num_micro_batches"] for record in records) > 1
    assert [record["loss"] for record in records] == pytest.approx(losses, rel=1e-6)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run/final")
    torch.testing.assert_close(exported.get_buffer(BIAS), bias, rtol=0, atol=1e-6)
    assert len((bias - first).unique()) > 3, "all experts moved alike, which shows little"


@pytest.mark.parametrize("name", usual(["adamw", "adamw8bit"], ["adamw8bit"]))
def test_a_resumed_run_ends_with_the_same_bits(tiny, skewed_dir, tmp_path, name):
    sections: dict[str, Any] = {"optim": {"name": name, "lr": 1e-3}, "checkpoint": {"every_steps": 3}}
    train(config_of(tiny, tmp_path / "run", skewed_dir, **sections))
    whole = load_file(tmp_path / "run/final/model.safetensors")
    as_after(tmp_path / "run", 3)
    train(config_of(tiny, tmp_path / "run", skewed_dir, **sections))
    resumed = load_file(tmp_path / "run/final/model.safetensors")
    require_equal(resumed, whole)
    assert not torch.equal(whole[BIAS], load_file(skewed_dir / "model.safetensors")[BIAS])


@pytest.mark.parametrize("update", usual(["step", "backward"], ["step"]))
def test_the_load_gets_more_even(tiny, skewed_dir, tmp_path, metrics_of, update):
    peaks = {}
    for speed in (0.0, 0.05):
        config = config_of(
            tiny, tmp_path / str(speed), skewed_dir,
            # hardly any other change
            optim={"lr": 1e-9, "max_grad_norm": None}, experts={"bias_update": speed}, full={"update": update},
            batch={"samples_per_step": 4, "micro_batch_tokens": 5000, "max_steps": 18},
        )  # fmt: skip
        train(config)
        records = metrics_of(tmp_path / str(speed))
        peaks[speed] = [record["expert_peak_load"][0] for record in records]
        # whole maps of a longer run are in at most 16 records
        assert [record["step"] for record in records if record["expert_loads"]] == list(range(2, 19, 2))
    # the most is four, as each token takes two of eight
    assert min(peaks[0.0]) > 2.5
    assert peaks[0.05][0] == peaks[0.0][0]
    assert sum(peaks[0.05][-8:]) / 8 < 1.75


@pytest.mark.parametrize("name", usual(["adamw", "adamw8bit"], ["adamw8bit"]))
def test_a_skipped_update_moves_no_bias(tiny, skewed_dir, tmp_path, name):
    config = config_of(tiny, tmp_path / "run", skewed_dir, optim={"name": name})
    run = built_run(config)
    step = next(iter(run.plan.steps()))
    before = run.aux_loss.buffers[BIAS].clone()
    step_launcher(run)(step)()
    after = run.aux_loss.buffers[BIAS].clone()
    assert not torch.equal(after, before)
    with torch.no_grad():
        run.model.lm_head.weight[0] = torch.nan
    with pytest.raises(NumericError):
        step_launcher(run)(step)()
    assert torch.equal(run.aux_loss.buffers[BIAS], after)
    assert run.model.get_buffer(BIAS) is run.aux_loss.buffers[BIAS]


def test_files_keep_the_biases_of_a_16_bit_run_exact(tiny, skewed_dir, tmp_path):
    model = {"name": str(skewed_dir), "precision": "bf16"}
    sections: dict[str, Any] = {"model": model, "full": {"weights": "bf16"}, "experts": {"bias_update": 0.0007}}
    train(config_of(tiny, tmp_path / "run", skewed_dir, **sections))
    final = load_file(tmp_path / "run/final/model.safetensors")
    moved = (final[BIAS] - load_file(skewed_dir / "model.safetensors")[BIAS]).abs() / 0.0007
    assert final["lm_head.weight"].dtype == torch.bfloat16
    assert moved.max() > 0.9
    torch.testing.assert_close(moved, moved.round(), rtol=0, atol=1e-3)


KEPT = ["ernie4_5_moe", "laguna", "lfm2_moe", "afmoe", "deepseek_v4", "glm4_moe", "hy_v3", "minimax_m2"]


@pytest.mark.parametrize("model_type", usual(KEPT, KEPT[:3]))
def test_biases_are_found_where_models_keep_them(model_type):
    register_experts()
    with torch.device("meta"):
        model = auto_class(config := tiny_config_of(model_type)).from_config(config)
    names = ("e_score_correction_bias", "expert_bias")
    every = dict(model.named_parameters()) | dict(model.named_buffers())
    expected = {name for name in every if name.endswith(names)}
    prepare_biases(model)
    routers = Routers(model, ExpertsConfig(bias_update=0.001))
    assert routers.buffers.keys() == expected != set()
    assert all(bias.numel() == routers.num_experts for bias in routers.buffers.values())
    assert f"{len(expected)} biases updated by 0.001" in routers.line


def test_what_has_no_biases_is_refused(tiny, skewed_dir, tmp_path):
    with pytest.raises(UsageError, match=r"experts.bias_update is only for method: full"):
        config_of(tiny, tmp_path / "run", skewed_dir, method="lora")
    with pytest.raises(UsageError, match=r"experts.bias_update: model type qwen3 has no router with a correction bias"):
        train(config_of(tiny, tmp_path / "run", tiny.model_dir))
