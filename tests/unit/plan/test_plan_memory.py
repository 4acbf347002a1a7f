"""The memory model: its parts against real tensors' sizes, and its totals against hand-made sums."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from flatout.plan.memory import activation_elements, estimate_memory
from flatout.plan.shape import ModelShape, num_params

QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
SHAPE = ModelShape.from_config(QWEN3_8B)


def estimate(**changes):
    settings = {"method": "lora", "micro_batch_tokens": 16384, "micro_batch_labels": 9000}
    return estimate_memory(SHAPE, **{**settings, **changes})


def tiny_llama():
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "llama",
            hidden_size=32,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=96,
        )
    )


@pytest.mark.parametrize("method", ["lora", "full"])
def test_weights_gradients_and_optimizer_are_the_real_bytes(method):
    model = tiny_llama()
    shape = ModelShape.from_config(model.config.to_dict())
    if method == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    model(input_ids=torch.arange(10)[None]).logits.sum().backward()
    optimizer.step()
    moments = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    guess = estimate_memory(
        shape, method=method, precision="fp32", lora_rank=4, micro_batch_tokens=10, micro_batch_labels=10
    )
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert guess.weights_bytes + guess.adapter_bytes == weights
    assert guess.gradients_bytes == sum(parameter.grad.nbytes for parameter in trained)
    assert guess.optimizer_bytes == sum(value.nbytes for value in moments)


def test_activations_per_token_of_an_8b_model():
    # residuals, norm outputs, q k v twice and output, gate, up and product: 4.9 MB a token in bf16
    assert 36 * (activation_elements(SHAPE) * 2 + 32 * 4) == pytest.approx(4.94e6, rel=0.01)
    assert estimate().activations_bytes == pytest.approx(16384 * 4.94e6, rel=0.01)
    again = estimate(gradient_checkpointing=True)
    assert again.activations_bytes == pytest.approx(16384 * (0.295e6 + 4.94e6 / 36), rel=0.01)


def test_mixture_of_experts_counts_the_tokens_experts():
    values = QWEN3_8B | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }
    shape = ModelShape.from_config(values)
    assert 48 * (activation_elements(shape) * 2 + 32 * 4) == pytest.approx(7.04e6, rel=0.01)


def test_precisions_methods_and_optimizers():
    count = num_params(SHAPE)
    assert estimate().weights_bytes == 2 * count
    assert estimate(precision="fp32").weights_bytes == 4 * count
    full = estimate(method="full")
    # fp32 masters, bf16 copies of autocast, fp32 gradients, two fp32 moments
    assert full.weights_bytes + full.gradients_bytes + full.optimizer_bytes == (4 + 2 + 4 + 8) * count
    assert full.adapter_bytes == 0
    assert estimate(method="full", optimizer="adamw8bit").optimizer_bytes == 2 * count
    assert estimate(method="full", precision="fp64").weights_bytes == 8 * count
    assert estimate(lora_rank=32).adapter_bytes == 2 * estimate(lora_rank=16).adapter_bytes
    assert estimate(lora_targets=["q_proj"]).adapter_bytes < estimate().adapter_bytes


def test_the_head_holds_one_tile():
    assert estimate(micro_batch_labels=10).head_bytes == 10 * 151936 * 6
    assert estimate(micro_batch_labels=5000).head_bytes == 2048 * 151936 * 6
    whole = estimate()
    parts = (whole.weights_bytes, whole.adapter_bytes, whole.gradients_bytes, whole.optimizer_bytes)
    assert whole.total_bytes == sum(parts) + whole.activations_bytes + whole.head_bytes
