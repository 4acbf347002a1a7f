"""`recompute: budget` keeps half of what compiled layers would keep, with the operators that training uses."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_attention_flash import backward, forward
from tiny_models import tiny_config
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface
from usual import usual

from flatout.config.schema import BaseConfig, LoraConfig, ModelConfig
from flatout.kernels import moe
from flatout.kernels.attention.flash import packed_operator
from flatout.models.attention import _entry, window_marker
from flatout.models.compile.recompute import MEMORY_BUDGET, compiling_with
from flatout.models.load.model import load_model
from flatout.models.lora.fused import fuse_layers
from flatout.models.lora.layer import add_lora
from flatout.planner.memory.estimate import BUDGET_SHARE

NUM_TOKENS, LONGEST = 301, 512
SHAPE = {
    "hidden_size": 64, "intermediate_size": 192, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 1,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@cache
def attention_operator() -> Any:
    """An attention kernel made of plain torch, as an operator that the compiler cannot look into."""
    return packed_operator(
        "flatout::budget_test",
        lambda q, k, v, cu_seqlens, _, *rest: forward(q, k, v, cu_seqlens, *rest),
        lambda *tensors: tuple(backward(*tensors[:7], *tensors[8:])),
    )


def make_layer(folder: Path, family: str, storage: str) -> tuple[Any, Any]:
    """A fused decoder layer with adapters as a function of hidden states, and its input."""
    config = tiny_config(family, **SHAPE, **(EXPERTS if "moe" in family else {}))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    loaded = load_model(
        ModelConfig(name=str(folder), precision="bf16" if storage == "fp8" else "fp32"), method="lora",
        device=torch.device("cpu"), seed=0, base=BaseConfig(storage=storage),
    )  # fmt: skip
    add_lora(loaded.model, LoraConfig(rank=4), seed=0)
    fuse_layers(loaded.model, fp8=storage == "fp8")
    AttentionInterface.register("budget_test", _entry("varlen", attention_operator()))
    AttentionMaskInterface.register("budget_test", window_marker)
    loaded.model.set_attn_implementation("budget_test")
    decoder, boundaries = loaded.model.get_decoder(), torch.tensor([0, 100, NUM_TOKENS], dtype=torch.int32)
    positions = torch.arange(NUM_TOKENS)[None]

    def layer(x: Tensor) -> Tensor:
        rotations = decoder.rotary_emb(x, positions)
        result: Tensor = decoder.layers[0](
            x, position_embeddings=rotations, cu_seq_lens_q=boundaries, max_length_q=LONGEST
        )
        return result

    draw = torch.Generator().manual_seed(0)
    return layer, torch.randn(1, NUM_TOKENS, SHAPE["hidden_size"], generator=draw).to(loaded.dtype).requires_grad_()


def run(layer: Any, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The gradient of the layer's input, and the tensors of its tokens that the backward pass reads, without x."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = layer(x)
    (gradient,) = torch.autograd.grad(output.square().sum(), x)
    found = {tensor.data_ptr(): tensor for tensor in kept if {NUM_TOKENS, 2 * NUM_TOKENS} & set(tensor.shape)}
    return gradient, [tensor for address, tensor in found.items() if address != x.data_ptr()]


@pytest.mark.parametrize(
    ("family", "storage"),
    usual([("qwen3", "model"), ("qwen3", "fp8"), ("qwen3_moe", "model")], [("qwen3", "fp8")]),
    ids=str,
)
def test_half_of_a_fused_layers_activations_are_kept(family, storage, tmp_path):
    layer, x = make_layer(tmp_path, family, storage)
    truth, _ = run(layer, x)
    num_bytes = {}
    for level in ("none", "budget"):
        torch._dynamo.reset()
        with compiling_with(level):
            gradient, kept = run(torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True), x)
        assert (gradient - truth).norm() <= 1e-5 * truth.norm()
        num_bytes[level] = sum(tensor.nbytes for tensor in kept)
    torch._dynamo.reset()
    # the planner counts on this share
    assert 0.8 * BUDGET_SHARE < num_bytes["budget"] / num_bytes["none"] <= MEMORY_BUDGET
    # attention to long documents costs most beside its output, so it is not computed again
    assert (SHAPE["num_attention_heads"], NUM_TOKENS) in [tuple(tensor.shape) for tensor in kept]


def num_flops(function: Any, *arguments: Any, **options: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*arguments, **options)
    return int(counter.get_total_flops())


@pytest.mark.parametrize(("window", "num_keys"), [(None, 24), (5, 5)])
def test_attention_counts_the_products_of_its_keys(window, num_keys):
    operator, boundaries = attention_operator(), torch.tensor([0, 48], dtype=torch.int32)
    q, k, v = (torch.randn(48, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    one_product = 2 * 48 * 4 * 8 * num_keys

    def both_passes() -> None:
        operator(q, k, v, boundaries, 48, scale=1.0, window=window).sum().backward()

    assert num_flops(operator, q, k, v, boundaries, 48, scale=1.0, window=window) == 2 * one_product
    assert num_flops(both_passes) == 7 * one_product


@pytest.mark.parametrize("rank", [None, 3])
def test_experts_count_the_products_of_their_slots(rank):
    moe.register_ops()
    x, weight = torch.randn(9, 16), torch.randn(4, 24, 16)
    routing = moe.route(torch.randint(4, (9, 2), generator=torch.Generator().manual_seed(0)), 4)
    low = {} if rank is None else {"low": torch.randn(18, rank), "low_weight": torch.randn(4, 24, rank)}
    one_product = 2 * 18 * 24 * 16
    found = num_flops(moe.grouped_linear, x, weight, routing, gather=True, **low)
    assert found == one_product + 2 * 18 * 24 * (rank or 0)
    assert num_flops(moe.grouped_outer, x, torch.randn(18, 24), routing, gather_x=True) == one_product
    assert num_flops(moe.grouped_linear_dx, torch.randn(18, 24), weight, routing) == one_product
    in_fp8 = weight.to(torch.float8_e4m3fn)
    assert (
        num_flops(moe.grouped_linear_fp8, x, in_fp8, routing, gather=True, out_scale=torch.ones(4, 24), **low) == found
    )
