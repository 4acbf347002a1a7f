"""Our LoRA against PEFT's: the same adapter gives the same logits and gradients, in both directions of the format."""

import json

import peft
import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_models import tiny_model
from usual import every, usual

from flatout.config.schema import LoraConfig
from flatout.models.export import merge
from flatout.models.lora.adapter import adapter_state, load_adapter, save_adapter
from flatout.models.lora.layer import add_lora, lora_layers

IDS = torch.arange(3, 20)[None]
VARIANTS = {
    "plain": {},
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "two": {"targets": ["q_proj", "mlp.down_proj"]},
    "regex": {"targets": r".*layers\.1\..*(k_proj|v_proj)"},
    "head": {"targets": ["q_proj", "lm_head"]},
}


def randomised(model, seed=1):
    """Non-zero B (and shifted magnitudes): an adapter that does something."""
    generator = torch.Generator().manual_seed(seed)
    for layer in lora_layers(model).values():
        layer.lora_b.data.copy_(torch.randn(layer.lora_b.shape, generator=generator, dtype=torch.float64) * 0.1)
        if layer.magnitude is not None:
            layer.magnitude.data.mul_(1.1)
    return model


def ours_with(variant, family="llama", dtype=torch.float64, **changes):
    config = LoraConfig(rank=3, alpha=5, **VARIANTS[variant], **changes)
    model = tiny_model(family, dtype)
    add_lora(model, config, seed=3)
    return randomised(model), config


def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


# the last three have names of the llama layout, and an untied head
IN_PEFT = [
    (variant, family)
    for family in ("llama", "qwen2", "phi3")
    for variant in (VARIANTS if family == "llama" else list(VARIANTS)[:3])
]


@pytest.mark.parametrize(("variant", "family"), usual(IN_PEFT, [*IN_PEFT[:6], ("dora", "phi3")]))
def test_our_adapter_in_peft(tmp_path, variant, family):
    ours, config = ours_with(variant, family)
    save_adapter(ours, tmp_path, base_name="tiny", config=config)
    theirs = PeftModel.from_pretrained(
        tiny_model(family), str(tmp_path), is_trainable=True, autocast_adapter_dtype=False
    )
    # PEFT makes its adapters in fp32 before it loads ours
    theirs = theirs.double()
    theirs.load_state_dict(
        {name.replace(".weight", ".default.weight") if "lora_A" in name or "lora_B" in name
         else name.replace("magnitude_vector", "magnitude_vector.default.weight"): tensor
         for name, tensor in load_file(tmp_path / "adapter_model.safetensors").items()}, strict=False,
    )  # fmt: skip
    theirs.eval()
    torch.testing.assert_close(logits(ours), logits(theirs), atol=1e-10, rtol=1e-10)
    logits(ours).square().sum().backward()
    logits(theirs).square().sum().backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    mine = {}
    for name, layer in lora_layers(ours).items():
        mine[f"base_model.model.{name}.lora_A.default.weight"] = layer.lora_a.grad
        mine[f"base_model.model.{name}.lora_B.default.weight"] = layer.lora_b.grad
        if layer.magnitude is not None:
            mine[f"base_model.model.{name}.lora_magnitude_vector.default.weight"] = layer.magnitude.grad
    assert mine.keys() == gradients.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, gradients[name], atol=1e-9, rtol=1e-9, msg=name)
    assert all(p.grad is None for name, p in ours.named_parameters() if "lora_" not in name and "magnitude" not in name)


def with_biases(model):
    """Biases of a new model are zero."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if name.endswith("proj.bias"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def test_dora_of_layers_with_a_bias_is_peft_s(tmp_path):
    """DoRA scales W x + B A x; the bias is added as it is."""
    config = LoraConfig(rank=3, alpha=5, dora=True)
    ours = with_biases(tiny_model("qwen2"))
    add_lora(ours, config, seed=3)
    save_adapter(randomised(ours), tmp_path, base_name="tiny", config=config)
    base = with_biases(tiny_model("qwen2"))
    theirs = PeftModel.from_pretrained(base, str(tmp_path), autocast_adapter_dtype=False).double()
    torch.testing.assert_close(logits(theirs), logits(ours), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("variant", ["plain", "rslora", "dora", "two"])
def test_peft_adapter_in_ours(tmp_path, variant):
    config = LoraConfig(rank=3, alpha=5, **VARIANTS[variant])
    theirs = get_peft_model(
        tiny_model("llama", torch.float32),
        peft.LoraConfig(
            r=3, lora_alpha=5, target_modules=config.targets, use_rslora=config.rslora, use_dora=config.dora,
            init_lora_weights=False,
        ),
    )  # fmt: skip
    theirs.eval().save_pretrained(tmp_path)
    model = tiny_model("llama", torch.float32)
    add_lora(model, config, seed=9)
    load_adapter(model, tmp_path)
    torch.testing.assert_close(logits(model), logits(theirs), atol=1e-5, rtol=1e-5)
    assert all(layer.lora_a.requires_grad for layer in lora_layers(model).values())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype", "tolerance"), every(2, [(torch.float64, 1e-12), (torch.float32, 1e-5)]))
def test_merged_equals_adapter(variant, dtype, tolerance):
    model, _ = ours_with(variant, dtype=dtype)
    before = logits(model)
    num_merged = len(lora_layers(model))
    assert merge(model) == num_merged
    assert not lora_layers(model)
    assert dict(model.named_parameters()).keys() == dict(tiny_model("llama", dtype).named_parameters()).keys()
    scale = float(before.abs().max())
    torch.testing.assert_close(logits(model), before, atol=tolerance * scale, rtol=0)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_zero_b_equals_the_base_bit_for_bit(dora, dtype):
    base = tiny_model("qwen2", dtype)
    model = tiny_model("qwen2", dtype)
    add_lora(model, LoraConfig(rank=4, dora=dora), seed=0)
    assert torch.equal(logits(model), logits(base))
    merge(model)
    if not dora:
        for mine, true in zip(model.parameters(), base.parameters(), strict=True):
            assert torch.equal(mine, true)


def test_short_target_names_are_written_when_they_say_the_same(tmp_path):
    ours, config = ours_with("plain")
    save_adapter(ours, tmp_path / "all", base_name="tiny", config=config)
    written = json.loads((tmp_path / "all" / "adapter_config.json").read_text())
    assert written["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    ours, config = ours_with("regex")
    save_adapter(ours, tmp_path / "some", base_name="tiny", config=config)
    written = json.loads((tmp_path / "some" / "adapter_config.json").read_text())
    assert written["target_modules"] == ["model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.v_proj"]


def test_dropout_has_the_right_mean_and_none_in_eval():
    model, _ = ours_with("plain", dropout=0.5)
    still, _ = ours_with("plain")
    layer, plain = (m.model.layers[0].self_attn.q_proj for m in (model, still))
    x = torch.randn(4, 32, dtype=torch.float64)
    assert torch.equal(layer.eval()(x), plain(x))
    torch.manual_seed(0)
    mean = torch.stack([layer.train()(x) for _ in range(4000)]).mean(0)
    assert float((mean - plain(x)).norm() / (plain(x) - plain.base(x)).norm()) < 0.06


def test_continuing_restores_every_tensor(tmp_path):
    ours, config = ours_with("dora")
    save_adapter(ours, tmp_path, base_name="tiny", config=config)
    other = tiny_model("llama")
    add_lora(other, config, seed=77)
    load_adapter(other, tmp_path)
    for name, tensor in adapter_state(ours).items():
        assert torch.equal(adapter_state(other)[name], tensor), name
