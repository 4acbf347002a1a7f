"""The NF4 linear layer: values and gradient of a plain one with its dense weight, and nothing dense kept in between."""

import pytest
import torch
import torch.nn.functional as F

from flatout.models.frozen.frozen_linear import Nf4Linear

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make(num_rows, num_columns, device, dtype=torch.float32, bias=True):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    torch.manual_seed(0)
    weight, offset = torch.randn(num_rows, num_columns), torch.randn(num_rows)
    layer = Nf4Linear.from_dense(weight.to(device, dtype), offset.to(device, dtype) if bias else None)
    x = torch.randn(3, 7, num_columns).to(device, dtype).requires_grad_()
    return layer, x, torch.randn(3, 7, num_rows).to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "num_columns", "bias"), [(48, 128, True), (7, 33, True), (65, 64, False)])
def test_equals_a_dense_layer(num_rows, num_columns, bias, dtype, device):
    layer, x, upstream = make(num_rows, num_columns, device, dtype, bias)
    dense = layer.weight
    assert dense.shape == (num_rows, num_columns)
    assert dense.dtype == layer.weight.dtype == dtype
    outcomes = []
    for product in (layer, lambda x: F.linear(x, dense) if layer.bias is None else F.linear(x, dense) + layer.bias):
        output = product(x)
        outcomes.append((output, *torch.autograd.grad(output, x, upstream)))
    for ours, theirs in zip(*outcomes, strict=True):
        assert torch.equal(ours, theirs)
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def test_a_normal_weight_loses_a_tenth():
    layer, _, _ = make(256, 512, "cpu")
    torch.manual_seed(0)
    weight = torch.randn(256, 512)
    assert 0.08 < float((layer.weight - weight).norm() / weight.norm()) < 0.1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_columns", [64, 40])
def test_compiles_and_keeps_no_dense_weight(num_columns, device):
    torch._dynamo.reset()
    layer, x, upstream = make(96, num_columns, device)
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    compiled = torch.compile(
        lambda x: torch.tanh(layer(x)), fullgraph=True, dynamic=True, backend="aot_eager_decomp_partition"
    )
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = compiled(x)
    (ours,) = torch.autograd.grad(output, x, upstream)
    (theirs,) = torch.autograd.grad(torch.tanh(F.linear(x, layer.weight, layer.bias)), x, upstream)
    torch.testing.assert_close(ours, theirs)
    assert kept
    assert not [tensor for tensor in kept if 96 * num_columns <= tensor.numel()]
