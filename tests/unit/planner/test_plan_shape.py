"""Sizes from config.json alone: against published sizes, PEFT's adapters and transformers' own windows."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from qwen3_8b import QWEN3_8B
from transformers import AutoConfig, AutoModelForCausalLM

from flatout.config.schema import LoraConfig as Lora
from flatout.errors import UsageError
from flatout.trainer.model_shape import make_shape

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "pad_token_id": 0,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
GEMMA3_4B = {
    # a nested text part that leaves most keys to the defaults
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
}
MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def tiny_config(model_type, **changes):
    defaults = AutoConfig.for_model(model_type).to_dict()
    known = {key: value for key, value in TINY.items() if key in defaults}
    return AutoConfig.for_model(model_type, **{**known, **changes})


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gemma3_text", "phi3", "gpt_neox", "smollm3"])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj", "query_key_value", "qkv_proj"]])
def test_adapter_size_is_pefts(model_type, targets):
    config = tiny_config(model_type)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    peft_model = get_peft_model(model, LoraConfig(r=5, target_modules=targets, task_type="CAUSAL_LM"))
    trained = sum(parameter.numel() for parameter in peft_model.parameters() if parameter.requires_grad)
    assert make_shape(config.to_dict()).num_lora_params(Lora(rank=5, targets=targets)) == trained


def test_a_regex_targets_single_layers():
    shape = make_shape(tiny_config("llama").to_dict())
    one = shape.num_lora_params(Lora(rank=4, targets=r"model\.layers\.1\.self_attn\.q_proj"))
    assert one == 4 * (32 + shape.num_heads * shape.head_dim)


@pytest.mark.parametrize(
    ("values", "num_params"),
    [
        (QWEN3_8B, 8_190_735_360),
        (GEMMA3_4B, 3_880_263_168),
        (MIXTRAL_8X7B, 46_702_792_704),
        ({"model_type": "gpt2"}, 124_439_808),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)
def test_published_sizes(values, num_params):
    assert make_shape(values).num_params == num_params


@pytest.mark.parametrize(
    ("model_type", "num_projections"), [("llama", 3), ("phi3", 3), ("gemma2", 3), ("gpt_neox", 2), ("phi", 2)]
)
def test_an_mlp_keeps_its_projections_and_their_product(model_type, num_projections):
    shape = make_shape(tiny_config(model_type).to_dict())
    assert shape.layers[0].mlp_elements == num_projections * 48


def test_a_token_meets_its_own_experts_only():
    values = tiny_config("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24).to_dict()
    layer = make_shape(values).layers[0]
    attention = sum(linear.num_weights for linear in layer.linears)
    assert layer.num_active_weights == attention + 2 * 3 * 32 * 24 + 4 * 32
    assert layer.mlp_elements == 2 * (3 * 24 + 2 * 32)


HYBRIDS = {
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], "num_experts": 0},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 16},
}


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_a_layer_without_softmax_attention_costs_no_pairs(model_type):
    shape = make_shape(tiny_config(model_type, **HYBRIDS[model_type]).to_dict())
    assert [layer.pair_width > 0 for layer in shape.layers] == [False, True]
    assert shape.layers[0].mixer_elements > shape.layers[1].mixer_elements > 0
    assert not shape.has_experts


@pytest.mark.parametrize("model_type", ["mamba", "rwkv", "xlstm", "falcon_mamba"])
def test_models_without_attention_are_planned_by_their_parameters(model_type):
    shape = make_shape({"model_type": model_type, "num_hidden_layers": 2})
    assert (shape.num_heads, shape.num_layers) == (0, 2)
    assert sum(layer.num_active_weights for layer in shape.layers) < shape.num_params
    assert all(layer.mixer_elements for layer in shape.layers)


def test_towers_are_held_but_not_counted_as_the_model():
    text = make_shape(GEMMA3_4B["text_config"])
    whole = make_shape(GEMMA3_4B)
    assert whole.num_params == text.num_params
    assert whole.layers == text.layers
    assert whole.num_tower_params > 9e7
    assert text.num_tower_params == 0
    for model_type in ("qwen3_vl", "mistral3", "llava"):
        shape = make_shape({"model_type": model_type})
        assert shape.num_tower_params
        assert "vision" not in shape.layers_path


def test_a_vision_language_checkpoint_is_measured_in_its_own_class():
    values = {"model_type": "qwen3_5", "vision_config": {"depth": 1}}
    whole = make_shape({**values, "architectures": ["Qwen3_5ForConditionalGeneration"]})
    text = make_shape({**values, "architectures": ["Qwen3_5ForCausalLM"]})
    assert whole.layers_path == "model.language_model.layers"
    assert text.layers_path == "model.layers"
    assert whole.num_params == text.num_params
    assert whole.num_tower_params > text.num_tower_params == 0


def windows(values):
    shape = make_shape({**LLAMA, **values})
    return sum(layer.has_window for layer in shape.layers), shape.sliding_window


def test_sliding_windows_in_all_their_spellings():
    assert windows({}) == (0, None)
    assert windows({"model_type": "mistral", "sliding_window": 8}) == (6, 8)
    assert windows({"model_type": "mistral", "sliding_window": None}) == (0, None)
    assert windows({"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 2}) == (0, None)
    qwen = {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}
    assert windows(qwen) == (4, 8)
    assert windows({"model_type": "gemma2"}) == (3, 4096)
    assert windows({"model_type": "gemma3_text", "sliding_window": 16}) == (5, 16)
    kinds = ["sliding_attention"] * 2 + ["full_attention"] * 4
    assert windows({"model_type": "gemma2", "layer_types": kinds, "sliding_window": 16}) == (2, 16)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "model_type is None"),
        ({**LLAMA, "model_type": "brand_new"}, "model_type is 'brand_new', which the installed transformers"),
        ({**LLAMA, "hidden_size": "32"}, "config.json: transformers rejects it: .*hidden_size"),
        ({**LLAMA, "num_attention_heads": 0}, "config.json: transformers rejects it"),
        ({"model_type": "t5gemma2"}, "encoder-decoder"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_sentence(values, message):
    with pytest.raises(UsageError, match=message) as refused:
        make_shape(values)
    assert "\n" not in str(refused.value)
