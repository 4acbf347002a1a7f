"""Which layers LoRA swaps, what it says about it, and that nothing else moves."""

import pytest
import torch
from tiny_models import tiny_model

from flatout.config.schema import LoraConfig
from flatout.errors import CheckpointError, UsageError
from flatout.models.export import save_model
from flatout.models.lora.adapter import apply_adapter, load_adapter, save_adapter
from flatout.models.lora.layer import LoraLinear, add_lora, freeze, lora_layers, trainable_parameters, without_adapter


def swapped(model, **settings):
    return add_lora(model, LoraConfig(rank=2, **settings), seed=0)


def test_all_linear_leaves_out_the_head():
    model = tiny_model("llama", torch.float32)
    (line,) = swapped(model)
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert ": " + ", ".join(f"2 {name}" for name in names) + "; " in line
    assert not isinstance(model.lm_head, LoraLinear)
    assert f"; {sum(p.numel() for p in trainable_parameters(model).values()):,} trainable parameters" in line
    assert all("lora_" in name for name in trainable_parameters(model))


def test_regex_and_list():
    model = tiny_model("llama", torch.float32)
    swapped(model, targets=r"model\.layers\.0\..*(q|v)_proj")
    assert list(lora_layers(model)) == ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"]
    model = tiny_model("llama", torch.float32)
    swapped(model, targets=["self_attn.o_proj", "model.layers.1.mlp.up_proj"])
    assert len(lora_layers(model)) == 3


def test_twice_is_refused():
    model = tiny_model("llama", torch.float32)
    swapped(model)
    with pytest.raises(UsageError, match="already has LoRA"):
        swapped(model)


def test_start_depends_on_seed_and_name_only():
    models = [tiny_model("llama", torch.float32) for _ in range(3)]
    before = torch.get_rng_state()
    add_lora(models[0], LoraConfig(rank=2), seed=1)
    torch.randn(7)
    add_lora(models[1], LoraConfig(rank=2, targets=["down_proj", "q_proj"]), seed=1)
    add_lora(models[2], LoraConfig(rank=2), seed=2)
    layers = [lora_layers(model) for model in models]
    for name, layer in layers[1].items():
        assert torch.equal(layer.lora_a, layers[0][name].lora_a)
        assert not torch.equal(layer.lora_a, layers[2][name].lora_a)
    rows = [layer.lora_a.flatten()[:8] for layer in layers[0].values()]
    assert len({tuple(row.tolist()) for row in rows}) == len(rows), "every layer starts differently"
    torch.set_rng_state(before)
    add_lora(tiny_model("llama", torch.float32), LoraConfig(rank=2), seed=1)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("base", "master"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)],
)
def test_masters(base, master):
    model = tiny_model("llama", base)
    swapped(model, dora=True)
    assert {parameter.dtype for parameter in trainable_parameters(model).values()} == {master}
    logits = model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False).logits
    assert logits.dtype == base
    logits.float().sum().backward()
    assert all(parameter.grad is not None for parameter in trainable_parameters(model).values())


def test_freeze_by_pattern():
    model = tiny_model("llama", torch.float32)
    line = freeze(model, ["embed_tokens", r"layers\.0\."])
    assert "1 by 'embed_tokens'" in line
    assert all("layers.0." not in name and "embed" not in name for name in trainable_parameters(model))
    with pytest.raises(UsageError, match="'embed_token_s' matches no parameter"):
        freeze(model, ["embed_token_s"])
    with pytest.raises(UsageError, match="nothing is left to train"):
        freeze(model, [".*"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 4}, "lora.rank is 4, but the adapter's is 2"),
        ({"alpha": 1.0}, "scale by 0.5, but the adapter by 16"),
        ({"dora": True}, "lora.dora is True"),
        ({"targets": ["q_proj"]}, "differ in 12 layers"),
    ],
)
def test_continuing_with_other_settings_is_refused(tmp_path, changes, message):
    config = LoraConfig(rank=2)
    model = tiny_model("llama", torch.float32)
    add_lora(model, config, seed=0)
    save_adapter(model, tmp_path, base_name="tiny", config=config)
    other = tiny_model("llama", torch.float32)
    add_lora(other, config.model_copy(update=changes), seed=0)
    with pytest.raises(UsageError, match=message):
        load_adapter(other, tmp_path)


def test_adapter_of_another_model_and_damaged_ones(tmp_path):
    config = LoraConfig(rank=2)
    model = tiny_model("llama", torch.float32)
    add_lora(model, config, seed=0)
    save_adapter(model, tmp_path, base_name="tiny", config=config)
    with pytest.raises(UsageError, match="belongs to a different base model"):
        apply_adapter(tiny_model("llama", torch.float32, intermediate_size=64), tmp_path)
    with pytest.raises(UsageError, match="still has LoRA layers"):
        save_model(model, None, tmp_path / "out")
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        apply_adapter(tiny_model("llama", torch.float32), tmp_path)
    weights.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        apply_adapter(tiny_model("llama", torch.float32), tmp_path)


def test_unsupported_peft_options_are_refused(tmp_path):
    import json

    config = LoraConfig(rank=2)
    model = tiny_model("llama", torch.float32)
    add_lora(model, config, seed=0)
    save_adapter(model, tmp_path, base_name="tiny", config=config)
    file = tmp_path / "adapter_config.json"
    content = json.loads(file.read_text())
    for changes, message in (
        ({"bias": "all"}, "bias"),
        ({"rank_pattern": {"q_proj": 4}}, "has shape"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"init_lora_weights": "pissa"}, "pissa"),
    ):
        file.write_text(json.dumps({**content, **changes}))
        with pytest.raises(UsageError, match=message):
            apply_adapter(tiny_model("llama", torch.float32), tmp_path)


def test_without_its_adapter_a_model_is_its_base():
    model = tiny_model("llama", torch.float32)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        base = model(tokens).logits
        add_lora(model, LoraConfig(rank=4), seed=0)
        for layer in lora_layers(model).values():
            layer.lora_b.fill_(0.1)
        adapted = model(tokens).logits
        with without_adapter(model):
            assert torch.equal(model(tokens).logits, base)
        assert torch.equal(model(tokens).logits, adapted)
    assert not torch.equal(adapted, base)


def test_a_target_that_matches_nothing_names_near_misses():
    with pytest.raises(UsageError, match=r"'qproj' matches no linear layer.*did you mean q_proj"):
        swapped(tiny_model("llama", torch.float32), targets=["k_proj", "qproj"])


def test_tied_head_gets_no_adapter():
    with pytest.raises(UsageError, match="tied to the embeddings"):
        swapped(tiny_model("qwen3", torch.float32), targets=["lm_head"])


def test_a_rank_that_no_layer_has_is_refused_before_memory_is_taken():
    with pytest.raises(UsageError, match=r"lora\.rank is 1,000,000,000, but no layer .* above 32"):
        add_lora(tiny_model("llama", torch.float32), LoraConfig(rank=1_000_000_000), seed=0)
    swapped(tiny_model("llama", torch.float32), targets=["k_proj"])
