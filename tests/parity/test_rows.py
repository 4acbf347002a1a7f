"""Rows equal packed documents and documents one by one, on models that pack and on models with a state."""

from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_config, tiny_samples
from usual import usual

from flatout.config.schema import ModelConfig
from flatout.errors import PackingError
from flatout.models.blocks import model_inputs
from flatout.models.load.model import LoadedModel, Loading, load_model
from flatout.models.model_with_loss import packed_cross_entropy
from flatout.models.packed import PackedBatch, flatten_samples
from flatout.models.selftest import prove_layout

MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
STATEFUL: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "falcon_h1": {"mamba_d_ssm": 64, **MAMBA2},
    "bamba": {"attn_layer_indices": [1], **MAMBA2},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "qwen3_5_text": DELTA,
    "qwen3_next": {**DELTA, **MOE, "shared_expert_intermediate_size": 16},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
    "rwkv": {"attention_hidden_size": 32, "rescale_every": 0},
}
# models whose attention does not go through transformers' interface for it
WITHOUT_INTERFACE = ("mamba", "bloom", "rwkv")
SAMPLES = tiny_samples([9, 1, 17, 5, 30])


def load(folder, family: str, precision: str, rows: bool = True) -> LoadedModel:
    tiny_config(family, **STATEFUL.get(family, {})).save_pretrained(folder)
    config = ModelConfig(name=str(folder), init="random", precision=precision)
    loaded = load_model(config, method="full", device=torch.device("cpu"), seed=0, how=Loading(is_padded=rows))
    loaded, line = prove_layout(loaded, longest=40, any_attention=True)
    assert line.startswith("rows = alone" if rows else "packed = alone")
    loaded.model.eval()
    return loaded


def loss_and_gradients(loaded: LoadedModel, batches: list[PackedBatch]) -> tuple[float, dict[str, torch.Tensor]]:
    loaded.model.zero_grad(set_to_none=True)
    total = 0.0
    for batch in batches:
        loss_sum = packed_cross_entropy(loaded.model, batch).loss_sum
        loss_sum.backward()
        total += loss_sum.item()
    return total, {name: p.grad.clone() for name, p in loaded.model.named_parameters() if p.grad is not None}


def assert_equal(ours, truth, limit: float) -> None:
    assert ours[0] == pytest.approx(truth[0], rel=limit)
    assert ours[1].keys() == truth[1].keys()
    floor = 1e-3 * max(float(gradient.norm()) for gradient in truth[1].values())
    for name, gradient in truth[1].items():
        assert float((ours[1][name] - gradient).norm()) <= limit * (float(gradient.norm()) + floor), name


WITH_THE_SUITE = ["mistral", "qwen3_moe", "bloom", "mamba2", "falcon_h1", "lfm2", "qwen3_next", "rwkv"]


@pytest.mark.parametrize("precision", usual(["fp64", "fp32"], ["fp64"]))
@pytest.mark.parametrize(
    "family", usual(["llama", "mistral", "gemma2", "qwen3_moe", "bloom", *STATEFUL], WITH_THE_SUITE)
)
def test_rows_equal_one_by_one_and_packed(tmp_path, family, precision):
    loaded = load(tmp_path, family, precision)
    assert (loaded.attention == "transformers") == (family in WITHOUT_INTERFACE)
    # recurrent layers and rope compute in float32 also in fp64
    limit = 1e-6 if precision == "fp64" else 1e-4
    alone = [flatten_samples([sample], row_length=len(sample[0])) for sample in SAMPLES]
    truth = loss_and_gradients(loaded, alone)
    assert_equal(loss_and_gradients(loaded, [flatten_samples(SAMPLES, row_length=32)]), truth, limit)
    cut = [flatten_samples(SAMPLES[:2], row_length=16), flatten_samples(SAMPLES[2:], row_length=48)]
    assert_equal(loss_and_gradients(loaded, cut), truth, limit)
    if family not in STATEFUL and family != "bloom":
        packed = load(tmp_path, family, precision, rows=False)
        assert_equal(loss_and_gradients(packed, [flatten_samples(SAMPLES)]), truth, limit)


def test_a_batch_of_rows():
    batch = flatten_samples([(np.array([5, 6, 7]), np.array([1, 0, 1])), (np.array([8]), np.array([1]))], row_length=4)
    assert batch.token_ids.tolist() == [5, 6, 7, 0, 8, 0, 0, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert batch.cu_seqlens.tolist() == [0, 4, 8]
    assert (batch.label_rows.tolist(), batch.label_ids.tolist()) == ([1], [7])
    with pytest.raises(ValueError, match="negative"):
        flatten_samples([(np.arange(5), np.ones(5, bool))], row_length=4)


@pytest.mark.parametrize("leak", ["from another row", "from padding"])
def test_the_self_test_finds_a_leak(tmp_path, leak):
    loaded = load(tmp_path, "llama", "fp64")

    def leaky(module, args, kwargs, output):
        if output.shape[0] == 1 or output.shape[1] < 32:
            return output
        return output + (output[-1:, :1] if leak == "from another row" else output[:, -1:]) * 1e-9

    loaded.model.get_input_embeddings().register_forward_hook(leaky, with_kwargs=True)
    with pytest.raises(PackingError, match="changes the logits of another"):
        prove_layout(loaded, longest=40, any_attention=False)


def test_a_layer_that_drops_the_boundaries_attends_within_its_row(tmp_path):
    loaded = load(tmp_path, "llama", "fp64")
    batch = flatten_samples(SAMPLES, row_length=32)
    inputs, _ = model_inputs(loaded.model, batch)
    without = {name: value for name, value in inputs.items() if "row" not in name}
    assert len(without) < len(inputs)
    assert torch.equal(loaded.model(**inputs).logits, loaded.model(**without).logits)
