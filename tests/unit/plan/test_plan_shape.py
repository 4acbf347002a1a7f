"""Parameter counts from config.json alone against real transformers and PEFT models on the meta device."""

import dataclasses
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from qwen3_8b import QWEN3_8B
from transformers import AutoConfig, AutoModelForCausalLM

from flatout.errors import UsageError
from flatout.plan.cost import target_matcher
from flatout.plan.families import FAMILIES
from flatout.plan.shape import ModelShape, num_lora_params, num_params

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "pad_token_id": 0,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}


def tiny_config(model_type, **changes):
    defaults = AutoConfig.for_model(model_type).to_dict()
    known = {key: value for key, value in TINY.items() if key in defaults}
    return AutoConfig.for_model(model_type, **{**known, **changes})


def meta_model(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def saved_values(config, tmp_path):
    config.save_pretrained(tmp_path)
    return json.loads((tmp_path / "config.json").read_text())


def count(parameters):
    return sum(parameter.numel() for parameter in parameters)


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_parameter_count_is_exact(model_type, tmp_path):
    config = tiny_config(model_type)
    shape = ModelShape.from_config(saved_values(config, tmp_path))
    assert num_params(shape) == count(meta_model(config).parameters())


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen3", {"attention_bias": True, "head_dim": 64}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("gpt_neox", {"attention_bias": False}),
        ("smollm3", {"tie_word_embeddings": False}),
        ("gemma3_text", {"head_dim": 16}),
        ("qwen3_moe", {"mlp_only_layers": [0], "head_dim": 16}),
        ("qwen2_moe", {"decoder_sparse_step": 2}),
        ("deepseek_v3", {"q_lora_rank": None}),
        ("deepseek_v3", {"attention_bias": True, "n_shared_experts": 2}),
    ],
)
def test_parameter_count_follows_the_settings(model_type, changes, tmp_path):
    config = tiny_config(model_type, **changes)
    shape = ModelShape.from_config(saved_values(config, tmp_path))
    assert num_params(shape) == count(meta_model(config).parameters())


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_family_defaults_are_those_of_transformers(model_type):
    actual = AutoConfig.for_model(model_type).to_dict()
    for key, value in FAMILIES[model_type].defaults.items():
        assert actual[key] == value, key
    assert bool(actual.get("tie_word_embeddings")) == bool(FAMILIES[model_type].defaults.get("tie_word_embeddings"))


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gemma3_text", "phi3", "gpt_neox", "smollm3"])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj", "query_key_value", "qkv_proj"]])
def test_adapter_size_is_pefts(model_type, targets):
    config = tiny_config(model_type)
    peft_model = get_peft_model(meta_model(config), LoraConfig(r=5, target_modules=targets, task_type="CAUSAL_LM"))
    trained = count(parameter for parameter in peft_model.parameters() if parameter.requires_grad)
    assert num_lora_params(ModelShape.from_config(config.to_dict()), 5, target_matcher(targets)) == trained


def test_a_regex_targets_single_layers():
    shape = ModelShape.from_config(tiny_config("llama").to_dict())
    one = num_lora_params(shape, 4, target_matcher(r"model\.layers\.1\.self_attn\.q_proj"))
    assert one == 4 * (32 + shape.num_heads * shape.head_dim)


# num_params as published with each model
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            QWEN3_8B,
            8_190_735_360,
        ),
        (
            # gemma-3-4b-it: a nested text part that leaves most keys to the defaults
            {
                "model_type": "gemma3",
                "text_config": {
                    "model_type": "gemma3_text",
                    "hidden_size": 2560,
                    "intermediate_size": 10240,
                    "num_hidden_layers": 34,
                    "sliding_window": 1024,
                },
            },
            3_880_263_168,
        ),
    ],
)
def test_published_sizes(values, expected):
    assert num_params(ModelShape.from_config(values)) == expected


def window_layers(values):
    shape = ModelShape.from_config({**LLAMA, **values})
    return shape.num_window_layers, shape.sliding_window


LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def test_sliding_windows_in_all_their_spellings():
    assert window_layers({}) == (0, None)
    assert window_layers({"model_type": "mistral", "sliding_window": 8}) == (6, 8)
    assert window_layers({"model_type": "mistral", "sliding_window": None}) == (0, None)
    assert window_layers({"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 2}) == (0, None)
    qwen = {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}
    assert window_layers(qwen) == (4, 8)
    assert window_layers({"model_type": "gemma2"}) == (3, 4096)
    assert window_layers({"model_type": "gemma3_text", "sliding_window": 16}) == (5, 16)
    kinds = ["sliding_attention"] * 2 + ["full_attention"] * 4
    assert window_layers({"model_type": "gemma2", "layer_types": kinds, "sliding_window": 16}) == (2, 16)


@pytest.mark.parametrize("model_type", ["qwen2", "gemma2", "gemma3_text", "olmo3", "cohere2", "gpt_oss"])
def test_window_layers_match_transformers(model_type):
    config = tiny_config(model_type, num_hidden_layers=7)
    values = config.to_dict()
    kinds = values.pop("layer_types")
    values.setdefault("sliding_window", None)
    assert ModelShape.from_config(values).num_window_layers == kinds.count("sliding_attention")


def test_a_missing_key_is_named():
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"):
        values = {name: value for name, value in LLAMA.items() if name != key}
        with pytest.raises(UsageError, match=rf"model/config\.json: {key} is missing"):
            ModelShape.from_config(values, origin="model/config.json")
    with pytest.raises(UsageError, match="model_type is missing"):
        ModelShape.from_config({})
    with pytest.raises(UsageError, match="num_experts_per_tok is missing"):
        ModelShape.from_config({**LLAMA, "model_type": "mixtral", "num_local_experts": 4})
    with pytest.raises(UsageError, match="text_config: hidden_size is missing"):
        ModelShape.from_config({"text_config": {"model_type": "llama", "num_hidden_layers": 2}})


def test_wrong_values_and_other_attention_are_refused():
    with pytest.raises(UsageError, match="hidden_size is '32'; expected a whole number"):
        ModelShape.from_config({**LLAMA, "hidden_size": "32"})
    with pytest.raises(UsageError, match="linear_attention"):
        ModelShape.from_config({**LLAMA, "layer_types": ["linear_attention", "full_attention"]})


def test_an_unknown_type_says_so():
    shape = ModelShape.from_config({**LLAMA, "model_type": "brand_new"})
    assert not shape.known
    llama = ModelShape.from_config(LLAMA)
    assert num_params(shape) == num_params(llama)
    assert dataclasses.replace(shape, model_type="llama", known=True) == llama
