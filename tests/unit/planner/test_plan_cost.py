"""The FLOP model against torch's own counter on real models, and the pair counts against masks."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from flatout.config.read import make_config
from flatout.config.schema import LoraConfig as Lora
from flatout.planner.cost import ATTENTION_BACKWARD, CostModel, make_cost
from flatout.planner.settings import PlanSettings
from flatout.trainer.model_shape import make_shape

NUM_TOKENS = 24
FULL = PlanSettings.of(make_config({"model": {"name": "m"}, "method": "full"}))
LORA = PlanSettings.of(make_config({"model": {"name": "m"}, "lora": {"rank": 4}}))


def tiny(model_type):
    values = AutoConfig.for_model(model_type).to_dict()
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "pad_token_id": 0,
    }
    return AutoConfig.for_model(model_type, **{key: value for key, value in sizes.items() if key in values})


def counted_flops(model):
    ids = torch.arange(NUM_TOKENS)[None] % 90
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


def eager_attention_flops(shape):
    # eager attention multiplies whole T x T matrices, twice forward and four times backward
    products = 2 * NUM_TOKENS**2 * shape.layers[0].pair_width
    return shape.num_layers * 3 * products


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "phi3", "gpt_neox"])
def test_full_training_counts_what_torch_counts(model_type):
    config = tiny(model_type)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    shape = make_shape(config.to_dict())
    cost = make_cost(FULL, shape)
    linear_and_head = NUM_TOKENS * (cost.per_token + cost.per_label)
    counted = counted_flops(model) - eager_attention_flops(shape)
    # rotary tables are made by a T-row product too: 2 x T x head_dim / 2, once
    assert counted == pytest.approx(linear_and_head, rel=1e-3)
    assert abs(counted - linear_and_head) <= 2 * NUM_TOKENS * shape.head_dim


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "phi3"])
def test_lora_training_counts_what_torch_counts(model_type):
    config = tiny(model_type)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    peft_model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    # the model of cost counts the input gradient of every layer, the first one's too
    model.enable_input_require_grads()
    shape = make_shape(config.to_dict())
    cost = make_cost(LORA, shape)
    counted = counted_flops(peft_model) - eager_attention_flops(shape)
    assert abs(counted - NUM_TOKENS * (cost.per_token + cost.per_label)) <= 2 * NUM_TOKENS * shape.head_dim


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_pass_without_gradients_counts_what_torch_counts(model_type, method):
    config = tiny(model_type)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    shape = make_shape(config.to_dict())
    run = FULL if method == "full" else LORA
    if method == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(NUM_TOKENS)[None] % 90, use_cache=False)
    forward = make_cost(run, shape).forward
    assert forward == make_cost(run, shape, "full").forward
    counted = counter.get_total_flops() - eager_attention_flops(shape) / 3
    assert abs(counted - NUM_TOKENS * (forward.per_token + forward.per_label)) <= 2 * NUM_TOKENS * shape.head_dim
    assert forward.per_pair == 2 * shape.num_layers * shape.layers[0].pair_width


@pytest.mark.parametrize("window", [1, 3, 7, 100])
def test_pairs_are_the_entries_of_the_mask(window):
    cost = CostModel(per_token=0.0, per_window_pair=1.0, window=window)
    full = CostModel(per_token=0.0, per_pair=1.0)
    for length in (1, 2, 3, 7, 8, 40):
        query, key = np.arange(length)[:, None], np.arange(length)[None]
        assert cost.flops([length], [0])[0] == ((key <= query) & (query - key < window)).sum()
        assert full.flops([length], [0])[0] == (key <= query).sum()


def test_attention_and_recompute_terms():
    shape = make_shape(tiny("llama").to_dict())
    plain = make_cost(LORA, shape)
    again = make_cost(LORA, shape, "full")
    pair = 2 * shape.num_heads * 2 * shape.head_dim * shape.num_layers
    assert plain.per_pair == pair * (1 + ATTENTION_BACKWARD)
    assert again.per_pair - plain.per_pair == pair
    # one more forward of the blocks: of base and adapter alike, by the counts of full training
    adapter = (plain.per_token - make_cost(FULL, shape).per_token * 4 / 6) / 6
    base = make_cost(FULL, shape).per_token / 6
    assert again.per_token - plain.per_token == pytest.approx(2 * base + 2 * adapter)
    assert again.per_label == plain.per_label == 4 * shape.vocab_size * shape.hidden_size
    # utilisation counts nothing twice
    assert (again.useful, plain.useful) == (plain, None)
    full, full_again = make_cost(FULL, shape), make_cost(FULL, shape, "full")
    assert full_again.per_token / full.per_token == pytest.approx(8 / 6)


def test_windows_split_the_layers():
    shape = make_shape(tiny("gemma2").to_dict())
    cost = make_cost(FULL, shape)
    assert sum(layer.has_window for layer in shape.layers) == 2
    assert cost.per_window_pair == 2 * cost.per_pair
    assert cost.window == 4096


def test_samples_are_counted_one_by_one():
    cost = CostModel(per_token=2.0, per_pair=3.0, per_label=5.0)
    assert cost.flops([4, 1], [2, 0]).tolist() == [4 * 2 + 10 * 3 + 2 * 5, 2 + 3]
    # two documents of 4 cost less than one of 8: no pair crosses a border
    assert cost.flops([4, 4], [2, 2]).sum() < cost.flops([8], [4])[0]


def test_active_experts_only():
    values = {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "tie_word_embeddings": False,
    }
    cost = make_cost(FULL, make_shape(values))
    # "A3B": 3.3 B active parameters, of them 0.62 B in embedding and head
    assert cost.per_token / 6 == pytest.approx(2.73e9, rel=0.01)


def test_targets_are_a_regex_for_the_full_name_or_name_endings():
    shape = make_shape(tiny("qwen3").to_dict())

    def targeted(targets, **changes):
        return [linear.name for linear in shape.targeted(Lora(targets=targets, **changes)).values()]

    assert len(targeted("all-linear")) == 3 * 7
    assert targeted(["q_proj"]) == targeted(["self_attn.q_proj"]) == ["self_attn.q_proj"] * 3
    assert targeted(["proj"]) == targeted("q_proj") == []
    assert len(targeted(r".*\.2\..*")) == len(targeted("all-linear", layers="2")) == 7
    assert targeted(["q_proj", "v_proj"], modules_to_save=["q_proj"], layers=[0, 2]) == ["self_attn.v_proj"] * 2
