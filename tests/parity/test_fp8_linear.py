"""Trained linear layers with float8 products: close to exact ones, and their weight gradients are exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flatout.models.trained_fp8 import TrainedFp8Linear


def layers(dtype: torch.dtype, *, bias: bool) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    exact = nn.Linear(96, 64, bias=bias, dtype=dtype)
    # rows of very different sizes, which one scale per tensor would lose
    with torch.no_grad():
        exact.weight *= torch.logspace(-4, 2, 64, dtype=dtype)[:, None]
    quantized = nn.Linear(96, 64, bias=bias, dtype=dtype)
    quantized.load_state_dict(exact.state_dict())
    quantized.__class__ = TrainedFp8Linear
    return exact, quantized


def outcome(layer: nn.Linear, x: torch.Tensor, grad: torch.Tensor, **autocast: Any) -> tuple[torch.Tensor, ...]:
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", enabled=bool(autocast), **autocast):
        output = layer(x)
    return output, *torch.autograd.grad(output, [x, *layer.parameters()], grad.to(output.dtype))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(40, 96), (1, 40, 96), (4, 10, 96)])
def test_products_are_within_fp8_and_weight_gradients_exact(shape, bias):
    exact, quantized = layers(torch.float64, bias=bias)
    x = torch.randn(shape, dtype=torch.float64) * torch.logspace(-3, 3, 40, dtype=torch.float64).view(*shape[:-1], 1)
    grad = torch.randn(*shape[:-1], 64, dtype=torch.float64)
    (y, x_grad, *trained), (true_y, true_x_grad, *true_trained) = (
        outcome(layer, x, grad) for layer in (quantized, exact)
    )
    # by rows, as each has a scale of its own; e4m3 rounds both factors within 1/16
    for mine, true in ((y, true_y), (x_grad, true_x_grad)):
        assert mine.shape == true.shape
        errors = (mine - true).flatten(0, -2).norm(dim=-1) / true.flatten(0, -2).norm(dim=-1)
        assert 1e-4 < float(errors.max().detach()) < 0.1
    for mine, true in zip(trained, true_trained, strict=True):
        torch.testing.assert_close(mine, true, atol=1e-12, rtol=1e-12)


def test_autocast_decides_the_dtype_and_gradients_are_as_wide_as_weights():
    exact, quantized = layers(torch.float32, bias=True)
    x, grad = torch.randn(32, 96), torch.randn(32, 64)
    ours, truth = (outcome(layer, x, grad, dtype=torch.bfloat16) for layer in (quantized, exact))
    assert [tensor.dtype for tensor in ours] == [tensor.dtype for tensor in truth]
    assert ours[0].dtype == torch.bfloat16
    torch.testing.assert_close(ours[2], truth[2], atol=1e-2, rtol=2e-2)


def test_a_compiled_layer_equals_an_eager_one():
    _, quantized = layers(torch.float32, bias=True)
    x, grad = torch.randn(32, 96), torch.randn(32, 64)
    compiled = torch.compile(quantized, backend="aot_eager", fullgraph=True)
    for mine, true in zip(outcome(compiled, x, grad), outcome(quantized, x, grad), strict=True):
        torch.testing.assert_close(mine, true)


def test_frozen_inputs_and_weights_get_no_gradient():
    _, quantized = layers(torch.float32, bias=False)
    quantized.weight.requires_grad_(False)
    x = torch.randn(32, 96, requires_grad=True)
    quantized(x).sum().backward()
    assert x.grad is not None
    assert quantized.weight.grad is None
