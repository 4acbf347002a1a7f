"""Adapters of fused experts: equal to merged dense arithmetic, to PEFT's own training, and in PEFT's files."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from test_experts import GROUPED, error, experts_model, gradients
from tiny_models import VOCAB_SIZE
from torch import Tensor
from usual import usual

from flatout.config.schema import LoraConfig
from flatout.errors import UsageError
from flatout.models.experts.lora import ExpertLora
from flatout.models.export import merge
from flatout.models.lora.adapter import apply_adapter, load_adapter, save_adapter
from flatout.models.lora.layer import add_lora, lora_layers, remove_adapter, trainable_parameters, without_adapter
from flatout.models.lora.read_back import read_back

IDS = torch.randint(0, VOCAB_SIZE, (2, 17), generator=torch.Generator().manual_seed(1))
TARGETS = ["o_proj", "experts"]
LORA = LoraConfig(rank=3, alpha=5.0, targets=TARGETS)


def adapted(family: str, lora: LoraConfig = LORA, dtype: torch.dtype = torch.float64) -> Any:
    """A model whose adapters are not zero."""
    model = experts_model(family, dtype)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        add_lora(model, lora, seed=0)
        for layer in lora_layers(model).values():
            layer.lora_b.data.normal_(std=0.2)
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("family", usual(GROUPED, ["qwen3_moe", "gpt_oss"]))
def test_adapters_equal_merged_weights(family):
    model = adapted(family)
    found = logits(model)
    with without_adapter(model):
        assert error(found, logits(model)) > 1e-3
    torch.testing.assert_close(logits(model), found)
    num_adapters = len(lora_layers(model))
    assert merge(model) == num_adapters
    assert not any(isinstance(module, ExpertLora) for module in model.modules())
    model.set_experts_implementation("eager")
    assert error(found, logits(model)) < 1e-12


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_gradients_of_adapters_are_those_of_the_merged_weights(family):
    """dL/dA_e = s B_e' dL/dW_e and dL/dB_e = s dL/dW_e A_e', with dL/dW of transformers' loop over merged weights."""
    model = adapted(family, LORA.model_copy(update={"targets": ["experts"]}))
    found = gradients(model, IDS)
    layers = {f"{layer.parameter} {name}": layer for name, layer in lora_layers(model).items()}
    assert len(layers) == 4
    owners = {name: layer.experts for name, layer in layers.items()}
    merge(model)
    model.set_experts_implementation("eager")
    model.requires_grad_(True)
    gradients(model, IDS)
    for name, layer in layers.items():
        weight_grad = getattr(owners[name], layer.parameter).grad
        weight_grad = weight_grad.transpose(1, 2) if owners[name].is_transposed else weight_grad
        a = layer.lora_a.detach().view(layer.num_experts, layer.rank, -1)
        b = layer.lora_b.detach().permute(2, 0, 1)
        a_grad = layer.scaling * b.transpose(1, 2) @ weight_grad
        b_grad = layer.scaling * weight_grad @ a.transpose(1, 2)
        full = name.partition(" ")[2]
        assert error(found[f"{full}.lora_a"], a_grad.flatten(0, 1)) < 1e-12
        assert error(found[f"{full}.lora_b"], b_grad.permute(1, 2, 0)) < 1e-12


@pytest.mark.parametrize("family", usual(GROUPED, ["gpt_oss", "deepseek_v3"]))
def test_peft_reads_our_files_as_trained(family, tmp_path):
    model = adapted(family)
    save_adapter(model, tmp_path, base_name="base", config=LORA)
    assert read_back(model, tmp_path).is_same
    again = experts_model(family, torch.float64)
    apply_adapter(again, tmp_path)
    torch.testing.assert_close(logits(again), logits(model))


@pytest.mark.parametrize("targets", [["gate_up_proj"], ["mlp.experts.down_proj"], r".*\.1\.mlp\.experts\..*"])
def test_single_matrices_and_layers_are_read_by_peft(targets, tmp_path):
    lora = LORA.model_copy(update={"targets": targets})
    model = adapted("qwen3_moe", lora)
    save_adapter(model, tmp_path, base_name="base", config=lora)
    assert read_back(model, tmp_path).is_same
    again = experts_model("qwen3_moe", torch.float64)
    apply_adapter(again, tmp_path)
    torch.testing.assert_close(logits(again), logits(model))


@pytest.mark.parametrize("family", usual(["qwen3_moe", "gpt_oss", "mixtral"], ["qwen3_moe", "gpt_oss"]))
def test_training_equals_pefts_over_several_steps(family, tmp_path):
    plain = experts_model(family, torch.float64)
    names = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["o_proj"], target_parameters=names, rank_pattern={"experts.down_proj": 2}
    )
    theirs: Any = peft.get_peft_model(plain, config)
    theirs.save_pretrained(tmp_path / "start")
    ours = experts_model(family, torch.float64)
    apply_adapter(ours, tmp_path / "start")
    for layer in lora_layers(ours).values():
        layer.lora_a.requires_grad_()
        layer.lora_b.requires_grad_()
    plain.set_experts_implementation("eager")
    losses: list[list[float]] = []
    for model in (theirs, ours):
        optimizer = torch.optim.AdamW(trainable_parameters(model).values(), lr=0.05)
        losses.append([])
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert losses[0][-1] < losses[0][0]
    theirs.save_pretrained(tmp_path / "end")
    load_adapter(ours, tmp_path / "end")
    assert error(logits(ours), logits(theirs)) < 1e-12
    lora = LORA.model_copy(update={"rank_pattern": {"experts.down_proj": 2}})
    save_adapter(ours, tmp_path / "ours", base_name="base", config=lora)
    remove_adapter(ours)
    merged = peft.PeftModel.from_pretrained(ours, str(tmp_path / "ours")).merge_and_unload()
    assert error(logits(merged), logits(theirs)) < 1e-12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dropout": 0.1}, "lora.dropout: adapters of fused experts"),
        ({"dora": True}, "lora.dora: adapters of fused experts"),
        ({"targets": ["experts.w1"]}, "'experts.w1' matches no linear layer"),
        ({"rank": 40}, "lora.rank is 40"),
    ],
)
def test_what_adapters_of_experts_cannot_do_is_refused(changes, message):
    model = experts_model("qwen3_moe", torch.float32)
    with pytest.raises(UsageError, match=message):
        add_lora(model, LORA.model_copy(update={"targets": ["experts"], **changes}), seed=0)


def test_plans_count_adapters_of_experts():
    from flatout.trainer.model_shape import make_shape

    for family in GROUPED:
        model = experts_model(family, torch.float32)
        shape = make_shape(model.config.to_dict())
        add_lora(model, LORA, seed=0)
        trained = sum(parameter.numel() for parameter in trainable_parameters(model).values())
        assert shape.num_lora_params(LORA) == trained
        experts = LORA.model_copy(update={"targets": ["experts"]})
        per_token = shape.layers[-1].experts[0].num_used / shape.layers[-1].experts[0].num_experts
        assert shape.num_lora_params(experts, used=True) == pytest.approx(per_token * shape.num_lora_params(experts))
