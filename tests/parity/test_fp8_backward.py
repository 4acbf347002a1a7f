"""`base.backward: fp8`: the forward pass keeps its bits, and input gradients stay within the rounding of float8."""

import pytest
import torch
import torch.nn.functional as F
from test_fp8_products import CPU, draw, loss_and_gradient, on_gpu, relative
from tiny_models import save_tiny_model
from torch import nn
from usual import usual

from flatout.config.read import make_config
from flatout.config.schema import LoraConfig, ModelConfig
from flatout.errors import ResourceError, UsageError
from flatout.models.blocks import decoder_layers
from flatout.models.frozen.frozen_linear import Fp8BackwardLinear
from flatout.models.load.model import load_model
from flatout.models.lora.fused import fuse_layers
from flatout.models.lora.layer import add_lora, lora_layers, trainable_parameters
from flatout.models.trained_fp8 import convert_backward_to_float8
from flatout.planner.memory.estimate import MemoryModel
from flatout.planner.memory.sizes import MicroBatchSize
from flatout.planner.settings import PlanSettings
from flatout.trainer.model_shape import make_shape

SETTINGS = {"model": {"name": "m"}, "base": {"backward": "fp8"}}


def adapted_model(folder, name="qwen3", *, device=CPU, precision="fp32", **lora):
    """A tiny model with adapters whose B is not zero."""
    save_tiny_model(folder, name, hidden_size=64, intermediate_size=96)
    loaded = load_model(ModelConfig(name=str(folder), precision=precision), method="lora", device=device, seed=0)
    add_lora(loaded.model, LoraConfig(rank=4, **lora), seed=0)
    generator = torch.Generator().manual_seed(1)
    for adapted in lora_layers(loaded.model).values():
        if hasattr(adapted, "lora_b"):
            adapted.lora_b.data.copy_(0.1 * torch.randn(adapted.lora_b.shape, generator=generator))
    return loaded.model


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(48,), (3, 48), (2, 5, 48)])
def test_a_layer_keeps_its_forward_bits_and_rounds_its_input_gradient(shape, with_bias, dtype):
    plain = nn.Linear(48, 32, bias=with_bias).to(dtype).requires_grad_(False)
    with torch.no_grad():
        # columns of very different size each have a scale of their own
        plain.weight.copy_(draw(32, 48) * torch.logspace(-6, 6, 48))
    layer = Fp8BackwardLinear(plain)
    x, direction = draw(*shape, seed=3).to(dtype).requires_grad_(), draw(*shape[:-1], 32, seed=4).to(dtype)
    output = layer(x)
    assert torch.equal(output, plain(x))
    (found,) = torch.autograd.grad(output, x, direction)
    truth = direction.double() @ plain.weight.double()
    stored = (layer.transposed.double() * layer.column_scale.double()[:, None]).t()
    # the weight's and the gradient's rounding to 3 bits, 2^-4 / sqrt(3) each at most, in every column by itself
    errors = (found.double() - truth).reshape(-1, 48).norm(dim=0) / direction.double().norm()
    assert (errors < 2 * 0.036 * plain.weight.double().norm(dim=0)).all()
    assert relative(stored, plain.weight.double()) < 0.036
    assert list(layer.state_dict()) == list(plain.state_dict())
    # as cuBLAS wants it
    assert layer.transposed.is_contiguous()


def test_the_input_gradient_is_that_of_what_the_bytes_stand_for():
    """With a gradient that float8 holds exactly, only the weight's rounding is left."""
    layer = Fp8BackwardLinear(nn.Linear(48, 32, bias=False, dtype=torch.float64).requires_grad_(False))
    x = draw(7, 48, dtype=torch.float64).requires_grad_()
    # 448 in each row makes the scale 1
    direction = torch.randint(-8, 9, (7, 32), generator=torch.Generator().manual_seed(0)).double()
    direction[:, 0] = 448
    (found,) = torch.autograd.grad(layer(x), x, direction)
    stored = (layer.transposed.double() * layer.column_scale.double()[:, None]).t()
    torch.testing.assert_close(found, direction @ stored, rtol=1e-12, atol=1e-12)


LORA = {
    "alone and fused": {},
    "some targets": {"targets": ["q_proj", "v_proj", "down_proj"]},
    "dora": {"dora": True},
    "saved in full": {"targets": ["q_proj"], "modules_to_save": ["o_proj", "norm"]},
}


CASES = [("qwen3", lora) for lora in LORA] + [("qwen2", lora) for lora in LORA]


# qwen2 has biases
@pytest.mark.parametrize(("name", "lora"), usual(CASES, CASES[1:5]))
def test_the_loss_keeps_its_bits_and_gradients_their_direction(name, lora, tmp_path):
    truth, own = (adapted_model(tmp_path, name, **LORA[lora]) for _ in range(2))
    line = convert_backward_to_float8(own)
    num_linears = 7 * len(decoder_layers(own)) - (len(decoder_layers(own)) if "modules_to_save" in LORA[lora] else 0)
    assert line.startswith(f"{num_linears} linear layers compute input gradients in fp8")
    for _ in ("alone", "fused"):
        (loss, gradient), (exact_loss, exact) = loss_and_gradient(own), loss_and_gradient(truth)
        assert loss == exact_loss
        assert 0 < relative(gradient, exact) < 0.1
        assert F.cosine_similarity(gradient, exact, dim=0) > 0.98
        fuse_layers(own)
        fuse_layers(truth)
    assert own.state_dict().keys() == truth.state_dict().keys()
    assert trainable_parameters(own).keys() == trainable_parameters(truth).keys()


def test_fused_products_equal_those_alone(tmp_path):
    model = adapted_model(tmp_path)
    convert_backward_to_float8(model)
    loss, alone = loss_and_gradient(model)
    assert "(dense, float8 input gradients)" in fuse_layers(model).report
    fused_loss, fused = loss_and_gradient(model)
    assert fused_loss == pytest.approx(loss, rel=1e-5)
    # float8 falls on the other side of a step where fp32 sums differ in the last bit
    assert relative(fused, alone) < 0.05


@pytest.mark.parametrize("is_fused", usual([False, True], [True]))
def test_traced_layers_compute_the_same_bits(is_fused, tmp_path):
    model = adapted_model(tmp_path)
    convert_backward_to_float8(model)
    if is_fused:
        fuse_layers(model)
    mlp = decoder_layers(model)[0].mlp
    x, direction = draw(11, 64).requires_grad_(), draw(11, 64, seed=5)
    gradients = [
        torch.autograd.grad(call(x), [x, *(p for p in mlp.parameters() if p.requires_grad)], direction)
        for call in (mlp, torch.compile(mlp, backend="aot_eager", fullgraph=True, dynamic=True))
    ]
    for eager, traced in zip(*gradients, strict=True):
        assert torch.equal(eager, traced)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"]])
def test_the_plan_counts_the_copies(targets, tmp_path):
    model = adapted_model(tmp_path, targets=targets)
    convert_backward_to_float8(model)
    added = [buffer for name, buffer in model.named_buffers() if name.endswith(("transposed", "column_scale"))]
    copies = sum(buffer.nbytes for buffer in added)
    # fused layers hold the same tensors
    fuse_layers(model)
    assert {id(buffer) for buffer in added} <= {id(buffer) for buffer in model.buffers()}
    float8 = [buffer for buffer in model.buffers() if buffer.dtype == torch.float8_e4m3fn]
    assert len(float8) == len(added) / 2
    shape, size = make_shape(model.config.to_dict()), MicroBatchSize(32, 16, 4)
    planned, plain = (
        MemoryModel(
            PlanSettings.of(make_config({**SETTINGS, "base": {"backward": backward}})), shape, "fp32", False
        ).estimate(size, "none")
        for backward in ("fp8", "same")
    )
    assert planned.weights_bytes - plain.weights_bytes == copies > 0
    assert planned.working_bytes == plain.working_bytes


def test_experts_stay_exact_and_the_line_says_so(tmp_path):
    model = adapted_model(tmp_path, "qwen3_moe", targets=["q_proj", "experts"])
    line = convert_backward_to_float8(model)
    assert line.endswith(f"experts of {len(decoder_layers(model))} layers stay in float32 in both passes")
    assert loss_and_gradient(model)[1].isfinite().all()


def test_widths_without_float8_products_are_refused(tmp_path):
    save_tiny_model(tmp_path, "qwen3", hidden_size=64, intermediate_size=88)
    model = load_model(ModelConfig(name=str(tmp_path), precision="fp32"), method="lora", device=CPU, seed=0).model
    add_lora(model, LoraConfig(rank=4), seed=0)
    with pytest.raises(ResourceError, match=r"88 x 64") as refused:
        convert_backward_to_float8(model)
    assert refused.value.fixes[0].settings == {"base.backward": "same"}


def test_a_model_without_such_layers_is_refused(tmp_path):
    model = adapted_model(tmp_path)
    convert_backward_to_float8(model)
    with pytest.raises(UsageError, match=r"base\.backward: fp8 needs frozen") as refused:
        convert_backward_to_float8(model)
    assert refused.value.fixes[0].settings == {"base.backward": "same"}


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_a_gpu_s_layer_equals_the_reference(device):
    """torch's rowwise GEMM beside fp64 products of the same bytes."""
    plain = nn.Linear(4096, 1024, bias=True).to(device, torch.bfloat16).requires_grad_(False)
    layer = Fp8BackwardLinear(plain)
    x = draw(333, 4096).to(device, torch.bfloat16).requires_grad_()
    direction = draw(333, 1024, seed=4).to(device, torch.bfloat16)
    output = layer(x)
    assert torch.equal(output, plain(x))
    (found,) = torch.autograd.grad(output, x, direction)
    wide, wide_direction = x.detach().double().requires_grad_(), direction.double()
    (truth,) = torch.autograd.grad(layer.double()(wide), wide, wide_direction)
    assert relative(found.double(), truth) < 4e-3
