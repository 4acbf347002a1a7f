"""Frozen experts in fp8 and NF4: their products equal those of the dense weights that they stand for."""

from __future__ import annotations

import pytest
import torch

from flatout.kernels.moe import register_ops, route
from flatout.models.bases.frozen_experts import DENSE, Fp8Experts, Nf4Experts

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
    if storage == "fp8":
        stored.keep_transposed()
    dy = torch.randn(NUM_TOKENS if is_down else NUM_TOKENS * K, 64, generator=generator, dtype=torch.float64)
    options = {"low": low, "low_weight": torch.randn(NUM_EXPERTS, 8, 128).double()}
    options |= {"gather": True} if is_down else {"scatter": K}
    ours, truth = (
        form.backward(dy, tensors, routing, **options)
        for form, tensors in ((stored.matmul, stored.storage), (DENSE, [dense]))
    )
    assert float((ours - truth).norm() / truth.norm()) < tolerance


def test_a_transposed_copy_changes_no_bit():
    generator = torch.Generator().manual_seed(2)
    routing = route(torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator).topk(K).indices, NUM_EXPERTS)
    stored = Fp8Experts(torch.randn(NUM_EXPERTS, 32, 48, generator=generator), scales_inputs=False)
    dy = torch.randn(NUM_TOKENS * K, 32, generator=generator)
    without = stored.matmul.backward(dy, stored.storage, routing, scatter=K)
    stored.keep_transposed()
    assert len(stored.storage) == 3
    assert torch.equal(stored.matmul.backward(dy, stored.storage, routing, scatter=K), without)
