"""Grouped products of experts against transformers' own loop over experts: values and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import VOCAB_SIZE, tiny_model
from torch import Tensor, nn
from usual import every, usual

from flatout.config.schema import LoraConfig, ModelConfig
from flatout.kernels import moe
from flatout.kernels.moe import reference
from flatout.models.experts.block import experts_modules, prepare_experts, register_experts
from flatout.models.load.model import load_model
from flatout.models.lora.layer import add_lora

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5}
_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
_DEEPSEEK = {
    "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "mixtral": _EXPERTS,
    "gpt_oss": {**_EXPERTS, "layer_types": ["full_attention"] * 2},
    "deepseek_v3": _DEEPSEEK,
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "granitemoe": _EXPERTS,
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48},
}
GROUPED = [family for family in FAMILIES if family != "llama4_text"]


def experts_model(family: str, dtype: torch.dtype) -> Any:
    register_experts()
    model = tiny_model(family, dtype, **FAMILIES[family])
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        # some families start at zero
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model


def gradients(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    output = model(input_ids=ids, labels=ids, use_cache=False)
    output.loss.backward()
    return {"logits": output.logits.detach()} | {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def error(found: Tensor, true: Tensor) -> float:
    return float((found - true).norm() / true.norm().clamp(min=1e-30))


@pytest.mark.parametrize("dtype", usual(TOLERANCES, [torch.float64]), ids=str)
@pytest.mark.parametrize("family", usual(GROUPED, ["qwen3_moe", "gpt_oss", "deepseek_v3"]))
def test_whole_models_have_transformers_logits_and_gradients(family, dtype):
    model = experts_model(family, dtype)
    ids = torch.randint(0, VOCAB_SIZE, (2, 17), generator=torch.Generator().manual_seed(1))
    model.set_experts_implementation("eager")
    true = gradients(model, ids)
    model.set_experts_implementation("flatout")
    assert "grouped products, activation silu" in str(prepare_experts(model))
    found = gradients(model, ids)
    assert found.keys() == true.keys()
    assert max(error(found[name], true[name]) for name in true) < TOLERANCES[dtype]


def choices(kind: str, num_tokens: int, k: int, num_experts: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    weights = {
        "balanced": torch.ones(num_experts),
        "zipf": 1 / torch.arange(1, num_experts + 1) ** 2.0,
        # every token takes the first k experts, and the others get none
        "one": torch.tensor([1.0] * k + [1e-30] * (num_experts - k)),
    }[kind]
    return torch.multinomial(weights.expand(num_tokens, -1), k, generator=generator)


ROUTINGS = [
    (family, kind, frozen) for family in GROUPED for kind in ("balanced", "zipf", "one") for frozen in (True, False)
]


@pytest.mark.parametrize(("family", "kind", "frozen"), every(5, ROUTINGS))
def test_every_routing_gives_transformers_gradients(family, kind, frozen):
    model = experts_model(family, torch.float64)
    prepare_experts(model)
    experts: Any = list(experts_modules(model).values())[-1].requires_grad_(not frozen)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(13, 32, dtype=torch.float64, generator=generator).requires_grad_()
    k = 3 if family in ("qwen3_moe", "deepseek_v3") else 2
    index = choices(kind, len(x), k, experts.num_experts)
    weights = torch.rand(len(x), k, dtype=torch.float64, generator=generator).requires_grad_()
    direction = torch.randn(13, 32, dtype=torch.float64, generator=generator)
    inputs = [x, weights, *([] if frozen else experts.parameters())]
    results = []
    for implementation in ("eager", "flatout"):
        model.set_experts_implementation(implementation)
        output = experts(x, index, weights)
        results.append([output.detach(), *torch.autograd.grad(output, inputs, direction)])
    true, found = results
    assert max(error(one, other) for one, other in zip(found, true, strict=True)) < 1e-12


def test_activations_that_are_not_recognized_use_the_models_code():
    model = experts_model("qwen3_moe", torch.float64)
    for experts in experts_modules(model).values():
        experts.act_fn = nn.Softplus()
    ids = torch.randint(0, VOCAB_SIZE, (1, 9), generator=torch.Generator().manual_seed(1))
    model.set_experts_implementation("eager")
    true = gradients(model, ids)
    model.set_experts_implementation("flatout")
    assert "the model's own code" in str(prepare_experts(model))
    found = gradients(model, ids)
    assert max(error(found[name], true[name]) for name in true) < 1e-12


@pytest.mark.parametrize("act", every(2, ["gelu", "gelu_pytorch_tanh", "relu2", "relu"]))
def test_other_activations_are_recognized(act):
    model = tiny_model("qwen3_moe", torch.float64, **FAMILIES["qwen3_moe"], hidden_act=act)
    ids = torch.randint(0, VOCAB_SIZE, (1, 9), generator=torch.Generator().manual_seed(1))
    true = gradients(model, ids)
    register_experts()
    model.set_experts_implementation("flatout")
    assert str(prepare_experts(model)).endswith(act.replace("_pytorch", ""))
    found = gradients(model, ids)
    assert max(error(found[name], true[name]) for name in true) < 1e-9


def test_slots_of_other_ranks_experts_add_nothing():
    """With expert parallelism, ids from the number of experts on are another rank's."""
    moe.register_ops()
    generator = torch.Generator().manual_seed(0)
    index = torch.tensor([[0, 4], [4, 2], [5, 4], [2, 0]])
    weights = torch.rand(4, 2, dtype=torch.float64, generator=generator)
    x, weight = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 5, 6, dtype=torch.float64)
    routing = moe.route(index, 4)
    assert routing.offsets.tolist() == [0, 2, 2, 4, 4]
    rows = moe.grouped_linear(x, weight, routing, gather=True)
    # rows without an expert are undefined
    rows[4:] = float("nan")
    expected = torch.zeros(4, 5, dtype=torch.float64)
    for token, slot in [(0, 0), (1, 1), (3, 0), (3, 1)]:
        expected[token] += weights[token, slot] * (weight[index[token, slot]] @ x[token])
    torch.testing.assert_close(moe.combine(rows, routing, weights), expected)
    dx = moe.grouped_linear_dx(rows, weight, routing, scatter=2)
    assert bool(dx.isfinite().all())
    assert not dx[2].any()


def test_models_outside_the_interface_keep_their_own_experts():
    model = experts_model("llama4_text", torch.float64)
    model.set_experts_implementation("flatout")
    assert prepare_experts(model) is None


def test_layer_is_one_graph_for_every_number_of_tokens():
    model = experts_model("qwen3_moe", torch.float32).requires_grad_(False)
    model.set_experts_implementation("flatout")
    prepare_experts(model)
    mlp = model.model.layers[1].mlp
    compiled = torch.compile(mlp, fullgraph=True, dynamic=True, backend="aot_eager")

    def run(block: Any, num_tokens: int) -> list[Tensor]:
        x = torch.randn(1, num_tokens, 32, generator=torch.Generator().manual_seed(num_tokens)).requires_grad_()
        output = block(x)
        return [output, *torch.autograd.grad(output.square().sum(), x)]

    torch._dynamo.reset()
    run(compiled, 17)
    with torch.compiler.set_stance("fail_on_recompile"):
        for num_tokens in (33, 20):
            for one, other in zip(run(compiled, num_tokens), run(mlp, num_tokens), strict=True):
                torch.testing.assert_close(one, other)


def test_experts_with_adapters_compile_without_gradients(tmp_path):
    """As in the passes that only count what routers choose."""
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    named = ModelConfig(name=str(tmp_path), precision="fp32")
    loaded = load_model(named, method="lora", device=torch.device("cpu"), seed=0)
    add_lora(loaded.model, LoraConfig(rank=4, targets=["experts"]), seed=0)
    mlp = loaded.model.model.layers[1].mlp
    x = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    compiled = torch.compile(mlp, fullgraph=True, dynamic=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), mlp(x))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["balanced", "zipf", "one"])
def test_cuda_products_equal_the_reference_without_synchronizing(kind):
    moe.register_ops()
    generator = torch.Generator(device="cuda").manual_seed(0)
    index = choices(kind, 1000, 4, 16).cuda()
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    x, dy = torch.randn(1000, 96, **options), torch.randn(1000, 160, **options)
    weight, low = torch.randn(16, 160, 96, **options), torch.randn(4000, 8, **options)
    low_weight = torch.randn(16, 160, 8, **options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    routing = moe.route(index, 16)
    found = [
        moe.grouped_linear(x, weight, routing, gather=True, low=low, low_weight=low_weight),
        moe.grouped_linear_dx(dy, weight, routing, gather=True, scatter=4),
        moe.grouped_outer(x, dy, routing, gather_x=True, gather_dy=True),
    ]
    torch.cuda.set_sync_debug_mode("default")
    x, dy, weight, low, low_weight = (side.double() for side in (x, dy, weight, low, low_weight))
    true = [
        reference.grouped_linear(x, weight, routing, gather=True, low=low, low_weight=low_weight),
        reference.grouped_linear(dy, weight.transpose(1, 2), routing, gather=True, scatter=4),
        reference.grouped_outer(x, dy, routing, gather_x=True, gather_dy=True),
    ]
    assert max(error(one.double(), other) for one, other in zip(found, true, strict=True)) < 5e-3
