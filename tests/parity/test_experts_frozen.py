"""Frozen experts in fp8 and NF4, and trained ones in fp8: products equal those of the dense weights."""

import pytest
import torch
from tiny_models import tiny_model

from flatout.kernels.moe import register_ops, route
from flatout.models.experts.block import IMPLEMENTATION, MATMUL, experts_modules, prepare_experts, register_experts
from flatout.models.frozen.frozen_experts import CAST_TO_FP8, DENSE, Fp8Experts, Nf4Experts
from flatout.models.trained_fp8 import experts_to_float8

NUM_TOKENS, NUM_EXPERTS, K = 48, 4, 2
register_ops()


def make(storage, weight, *, is_down=False):
    return Nf4Experts(weight) if storage == "nf4" else Fp8Experts(weight, scales_inputs=is_down)


@pytest.mark.parametrize("is_down", [False, True])
@pytest.mark.parametrize("storage", ["fp8", "nf4"])
def test_products_are_those_of_the_dense_weight(storage, is_down):
    generator = torch.Generator().manual_seed(1)
    routing = route(torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator).topk(K).indices, NUM_EXPERTS)
    weight = torch.randn(NUM_EXPERTS, 64, 128, generator=generator, dtype=torch.float64)
    stored = make(storage, weight, is_down=is_down)
    dense = stored.weight
    assert dense.shape == weight.shape
    assert float((dense - weight).norm() / weight.norm()) < (0.03 if storage == "fp8" else 0.12)
    low, low_b = torch.randn(NUM_TOKENS * K, 8, dtype=torch.float64), torch.randn(NUM_EXPERTS, 64, 8).double()
    tolerance = 0.05 if storage == "fp8" else 1e-12
    x = torch.randn(NUM_TOKENS * K if is_down else NUM_TOKENS, 128, generator=generator, dtype=torch.float64)
    options = {"gather": not is_down, "low": low, "low_weight": low_b}
    ours, truth = (
        form.forward(x, tensors, routing, **options)
        for form, tensors in ((stored.matmul, stored.storage), (DENSE, [dense]))
    )
    assert float((ours - truth).norm() / truth.norm()) < tolerance
    dy = torch.randn(NUM_TOKENS if is_down else NUM_TOKENS * K, 64, generator=generator, dtype=torch.float64)
    options = {"low": low, "low_weight": torch.randn(NUM_EXPERTS, 8, 128).double()}
    options |= {"gather": True} if is_down else {"scatter": K}
    ours, truth = (
        form.backward(dy, tensors, routing, **options)
        for form, tensors in ((stored.matmul, stored.storage), (DENSE, [dense]))
    )
    assert float((ours - truth).norm() / truth.norm()) < tolerance


def test_products_of_trained_experts_are_those_of_frozen_ones():
    generator = torch.Generator().manual_seed(3)
    routing = route(torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator).topk(K).indices, NUM_EXPERTS)
    weight = torch.randn(NUM_EXPERTS, 64, 128, generator=generator)
    x, dy = (torch.randn(NUM_TOKENS, width, generator=generator) for width in (128, 64))
    by_output, by_input = (Fp8Experts(weight, scales_inputs=inputs) for inputs in (False, True))
    frozen = by_output.matmul.forward(x, by_output.storage, routing, gather=True)
    # as a model with transposed weights stores them
    for stored in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
        torch.testing.assert_close(CAST_TO_FP8.forward(x, [stored], routing, gather=True), frozen)
        found = CAST_TO_FP8.backward(dy, [stored], routing, gather=True)
        torch.testing.assert_close(found, by_input.matmul.backward(dy, by_input.storage, routing, gather=True))
        truth = DENSE.backward(dy, [weight], routing, gather=True)
        assert float((found - truth).norm() / truth.norm()) < 0.05


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_gradients_of_trained_fp8_experts_have_the_same_direction(family):
    sizes = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    changes = {"intermediate_size": 32, "num_hidden_layers": 4, "initializer_range": 0.1, **sizes}
    if family == "gpt_oss":
        changes["layer_types"] = ["full_attention"] * 4
    register_experts()
    model = tiny_model(family, torch.float32, **changes).train()
    model.set_experts_implementation(IMPLEMENTATION)
    prepare_experts(model)
    generator = torch.Generator().manual_seed(1)
    experts = [*experts_modules(model).values()]
    x = torch.randn(40, 32, generator=generator).requires_grad_()
    weights, index = torch.rand(40, 6, generator=generator).topk(2)
    direction = torch.randn(40, 32, generator=generator)
    inputs = [x, weights.requires_grad_()]

    def results():
        outputs = [one(x, index, weights) for one in experts]
        grads = [
            torch.autograd.grad(out, [*inputs, *one.parameters()], direction)
            for out, one in zip(outputs, experts, strict=True)
        ]
        return [[out.detach(), *own] for out, own in zip(outputs, grads, strict=True)]

    true = results()
    assert experts_to_float8(model) == 2
    assert [hasattr(module, MATMUL) for module in experts] == [False, True, True, False]
    found = results()
    for layer, (own, expected) in enumerate(zip(found, true, strict=True)):
        cosines = [
            float(torch.cosine_similarity(a.flatten(), b.flatten(), 0)) for a, b in zip(own, expected, strict=True)
        ]
        if layer in (0, 3):
            assert all(map(torch.equal, own, expected))
        else:
            assert 0.995 < min(cosines) < 1 - 1e-6
