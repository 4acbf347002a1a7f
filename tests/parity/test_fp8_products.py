"""Float8 and 4-bit products: what the bytes stand for, values and gradients, alone and fused."""

import pytest
import torch
from tiny_models import save_tiny_model, tiny_samples
from torch import nn

from flatout.config.schema import LoraConfig, ModelConfig
from flatout.errors import ResourceError
from flatout.kernels.fp8_matmul import fp8_problem, quantize_rows, scaled_product
from flatout.models.blocks import decoder_layers, replace_module
from flatout.models.frozen.frozen_linear import Fp8Linear, Nf4Linear, fuse_frozen
from flatout.models.load.model import load_model
from flatout.models.lora.fused import FusedLora, fuse_layers
from flatout.models.lora.layer import add_lora, lora_layers, trainable_parameters
from flatout.models.model_with_loss import packed_cross_entropy
from flatout.models.packed import flatten_samples

CPU = torch.device("cpu")
on_gpu = pytest.mark.gpu


def draw(*shape, seed=0, **options):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **options)


def relative(one, other):
    return ((one - other).norm() / other.norm()).item()


def test_a_quantized_row_is_within_half_a_step():
    values = draw(7, 48, dtype=torch.float64) * torch.tensor([1e-8, 1e-3, 1.0, 10.0, 1e4, 1.0, 0.0])[:, None]
    values[5, 3:] *= 1e-4
    stored, scale = quantize_rows(values)
    restored = stored.double() * scale.double()
    # e4m3 has 3 bits behind the point; the smallest steps are 2^-9 of the scale
    allowed = torch.maximum(values.abs() * 2**-4, scale.double() * 2**-10) * 1.01
    assert ((restored - values).abs() <= allowed).all()
    assert stored.float().isfinite().all()
    assert stored.float().abs().amax(dim=1)[:-1].eq(448).all()
    assert not stored[-1].float().any()


def test_rows_are_quantized_alike_from_any_memory_layout():
    values = draw(32, 24)
    stored, scale = quantize_rows(values.t())
    again, same_scale = quantize_rows(values.t().contiguous())
    assert torch.equal(stored.float(), again.float())
    assert torch.equal(scale, same_scale)


def test_a_scaled_product_is_that_of_what_the_bytes_stand_for():
    left, left_scale = quantize_rows(draw(5, 48))
    right, right_scale = quantize_rows(draw(32, 48, seed=1))
    product = scaled_product(left, right, left_scale, right_scale[:, 0], torch.float64)
    truth = (left.double() * left_scale.double()) @ (right.double() * right_scale.double()).T
    torch.testing.assert_close(product, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(48,), (3, 48), (2, 5, 48)])
def test_an_fp8_layer_computes_what_it_stands_for(shape):
    linear = Fp8Linear(draw(32, 48), draw(32, seed=2))
    x, direction = draw(*shape, seed=3).requires_grad_(), draw(*shape[:-1], 32, seed=4)
    output = linear(x)
    (x_grad,) = torch.autograd.grad(output, x, direction)
    weight = linear.weight.double()
    # the input's and the gradient's own rounding to 3 bits is all that is left: 2^-4 / sqrt(3) at most
    assert relative(output.double(), x.double() @ weight.T + linear.bias.double()) < 0.036
    assert relative(x_grad.double(), direction.double() @ weight) < 0.036
    assert relative(weight, draw(32, 48).double()) < 0.036


def adapted_model(folder, make, targets="all-linear"):
    """A tiny model whose linear layers have another storage, with adapters."""
    save_tiny_model(folder, "qwen3", hidden_size=64, intermediate_size=96)
    model = load_model(ModelConfig(name=str(folder), precision="fp32"), method="lora", device=CPU, seed=0).model
    for layer in decoder_layers(model):
        for name, linear in list(layer.named_modules()):
            if isinstance(linear, nn.Linear):
                replace_module(layer, name, make(linear.weight.detach(), linear.bias))
    add_lora(model, LoraConfig(rank=4, targets=targets), seed=0)
    generator = torch.Generator().manual_seed(1)
    for adapted in lora_layers(model).values():
        adapted.lora_b.data.normal_(0, 0.1, generator=generator)
    return model


def stored_model(folder, make, *, fp8):
    """Loss and gradients of an adapted model alone and fused, and how the products describe themselves."""
    model = adapted_model(folder, make)
    alone = loss_and_gradient(model)
    fuse_layers(model, fp8=fp8)
    kinds = {module.product.describe for module in model.modules() if isinstance(module, FusedLora)}
    return alone, loss_and_gradient(model), kinds


def loss_and_gradient(model):
    loss = packed_cross_entropy(model, flatten_samples(tiny_samples([9, 1, 17, 5]))).loss_sum
    gradients = torch.autograd.grad(loss, list(trainable_parameters(model).values()))
    return loss.item(), torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize(("make", "kind"), [(Fp8Linear, "float8"), (Nf4Linear.from_dense, "4-bit")])
def test_fused_products_equal_those_alone(make, kind, tmp_path):
    (loss, truth), (fused_loss, fused), kinds = stored_model(tmp_path, make, fp8=False)
    assert kinds == {kind}
    # float8 falls on the other side of a step where fp32 sums differ in the last bit
    assert fused_loss == pytest.approx(loss, rel=1e-3 if kind == "float8" else 1e-5)
    assert relative(fused, truth) < (0.1 if kind == "float8" else 1e-4)


def test_4_bit_weights_in_float8_products_are_close_to_dense_ones(tmp_path):
    (loss, truth), (fused_loss, fused), kinds = stored_model(tmp_path, Nf4Linear.from_dense, fp8=True)
    assert kinds == {"4-bit, float8 matmuls"}
    assert fused_loss == pytest.approx(loss, rel=0.02)
    assert torch.nn.functional.cosine_similarity(truth, fused, dim=0) > 0.9


def test_sizes_that_no_kernel_takes_are_named():
    assert fp8_problem(CPU, 32, 48) is None
    assert "multiples of 16" in str(fp8_problem(CPU, 30, 48))
    odd = [Fp8Linear(draw(30, 48), None)]
    with pytest.raises(ResourceError, match=r"30 x 48") as refused:
        fuse_frozen(odd, fp8=True)
    assert refused.value.fixes[0].settings == {"base.storage": "nf4", "base.compute": "model"}


@pytest.mark.parametrize("shape", [(16, 32, 48), (1, 64, 16), (333, 128, 4096)])
@pytest.mark.parametrize("marked", [pytest.param(None, marks=on_gpu)])
def test_the_library_s_product_equals_the_reference(shape, marked):
    rows, outputs, inputs = shape
    left, left_scale = quantize_rows(draw(rows, inputs).cuda())
    right, right_scale = quantize_rows(draw(outputs, inputs, seed=1).cuda())
    product = scaled_product(left, right, left_scale, right_scale[:, 0], torch.bfloat16)
    # in float64 it is the reference on every device
    truth = scaled_product(left, right, left_scale, right_scale[:, 0], torch.float64)
    # bf16 output, and the fast accumulator's 14 bits
    assert relative(product.double(), truth) < 4e-3
