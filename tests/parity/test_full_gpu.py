"""On a CUDA GPU: compiled lean updates, updates in the backward pass, fp8 products and flat adapters, beside the CPU's
or the plain ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_tiny_model, tiny_samples
from torch import nn

from flatout.checkpoint.optimizer_state import load_optimizer_state, optimizer_state
from flatout.config.schema import FullConfig, ModelConfig, OptimConfig
from flatout.models.compile.layers import CompileOptions, compile_layers
from flatout.models.load.model import load_model
from flatout.models.model_with_loss import packed_cross_entropy
from flatout.models.packed import flatten_samples, padded_num_boundaries
from flatout.models.trained_fp8 import convert_to_float8
from flatout.optim.build import make_optimizer
from flatout.optim.update import BackwardUpdate, set_lr

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
SHAPES = {"layer.weight": (96, 128), "odd.weight": (33, 129), "wide.weight": (512, 1024), "norm.weight": (7,)}
SHAPE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384, "initializer_range": 0.05}


def parameters(dtype: torch.dtype, device: torch.device) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {n: nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for n, s in SHAPES.items()}


def steps(named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for parameter in named.values():
            gradient = 0.5 + torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(parameter.device, parameter.dtype)
        set_lr(optimizer, 0.01 / (seed + 1))
        optimizer.step()


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_lean_update_is_the_cpus(name, dtype):
    """The random bits are equal on both, so bf16 weights differ only where a rounding error meets the draw."""
    config = OptimConfig.model_validate({"name": name, "lr": 0.01, "weight_decay": 0.1})
    cpu, gpu, again = parameters(dtype, torch.device("cpu")), parameters(dtype, CUDA), parameters(dtype, CUDA)
    for named in (cpu, gpu, again):
        steps(named, make_optimizer(named, config, seed=5), range(5))
    for key in cpu:
        assert torch.equal(gpu[key], again[key]), f"{key} does not repeat"
        differs = (cpu[key].detach().double() - gpu[key].detach().double().cpu()).abs()
        if dtype == torch.float32:
            # an 8-bit moment on the border of two codes may fall either way
            assert (differs > 1e-5).double().mean() < (1e-3 if name == "adamw8bit" else 1e-9)
            assert differs.max() < 1e-3
        else:
            assert (differs > 0).double().mean() < 2e-3
            assert differs.max() < 0.05


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_lean_updates_resume_recompile_nothing_and_never_wait(name):
    config = OptimConfig.model_validate({"name": name, "lr": 0.01})
    named, again = parameters(torch.bfloat16, CUDA), parameters(torch.bfloat16, CUDA)
    optimizer = make_optimizer(named, config, seed=5)
    steps(named, optimizer, range(2))
    saved = {key: tensor.clone() for key, tensor in optimizer_state(optimizer, named).items()}
    for key, parameter in again.items():
        parameter.data.copy_(named[key].data)
    resumed = make_optimizer(again, config, seed=5)
    load_optimizer_state(resumed, again, {key: tensor.cpu() for key, tensor in saved.items()}, config.traits)
    with torch.compiler.set_stance("fail_on_recompile"):
        steps(named, optimizer, range(2, 5))
        steps(again, resumed, range(2, 5))
    assert all(torch.equal(named[key], again[key]) for key in named)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_flat_adapters_take_the_steps_of_separate_ones(name):
    config = OptimConfig.model_validate({"name": name, "lr": 0.01, "weight_decay": 0.1})
    flat, separate = parameters(torch.float32, CUDA), parameters(torch.float32, CUDA)
    for named, is_flat in ((flat, True), (separate, False)):
        optimizer = make_optimizer(named, config, flat=is_flat)
        for seed in range(5):
            generator = torch.Generator().manual_seed(seed)
            optimizer.zero_grad(set_to_none=True)
            loss = sum((p * torch.randn(p.shape, generator=generator).to(CUDA)).sum() for p in named.values())
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            optimizer.step()
    for key in flat:
        torch.testing.assert_close(flat[key], separate[key], rtol=1e-6, atol=1e-7)


def load(folder: Path, num_layers: int = 2, **full: Any) -> Any:
    if not (folder / "config.json").exists():
        save_tiny_model(folder, "qwen3", num_hidden_layers=num_layers, **SHAPE)
    model = ModelConfig(name=str(folder), precision="bf16")
    return load_model(model, method="full", device=CUDA, seed=0, full=FullConfig.model_validate(full))


def batches(count: int) -> list[Any]:
    lengths = [[5, 300, 1, 90], [64, 200], [17, 33, 250, 41], [128] * 3]
    return [
        flatten_samples(tiny_samples(lengths[i % 4], seed=i % 4), num_boundaries=padded_num_boundaries(100)).to(CUDA)
        for i in range(count)
    ]


def loss_of(loaded: Any, batch: Any) -> torch.Tensor:
    with torch.autocast("cuda", dtype=loaded.dtype, enabled=loaded.autocast):
        sums = packed_cross_entropy(loaded.model, batch)
    mean: torch.Tensor = sums.loss_sum / batch.num_label_tokens
    return mean


def losses(loaded: Any, optimizer: torch.optim.Optimizer, num_steps: int) -> torch.Tensor:
    found = []
    for batch in batches(num_steps):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(loaded, batch)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


@pytest.mark.parametrize(("weights", "name"), [("fp32", "adamw"), ("bf16", "adamw"), ("bf16", "adamw8bit")])
def test_updates_in_backward_through_compiled_layers(tmp_path, weights, name):
    torch._dynamo.reset()
    config = OptimConfig.model_validate({"name": name, "lr": 1e-3})
    curves = []
    for in_backward in (False, True):
        loaded = load(tmp_path, weights=weights)
        assert compile_layers(loaded, "auto", CompileOptions(padded_num_boundaries(100))).is_complete
        named = dict(loaded.model.named_parameters())
        optimizer = make_optimizer(named, config, seed=1)
        if not in_backward:
            curves.append(losses(loaded, optimizer, 24))
            continue
        update = BackwardUpdate(optimizer, list(named.values()))
        found = []
        for batch in batches(24):
            loss = loss_of(loaded, batch)
            update.start(1e-3)
            loss.backward()
            assert torch.isfinite(update.finish())
            assert all(parameter.grad is None for parameter in named.values())
            found.append(loss.detach())
        curves.append(torch.stack(found))
    ordinary, backward = curves
    assert ordinary[-4:].mean() < 0.9 * ordinary[:4].mean()
    assert ((ordinary - backward).abs() / ordinary).max() < 0.02


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
@pytest.mark.parametrize(("compute", "scale"), [("fp8", "tensor"), ("fp8_rowwise", "row")])
def test_fp8_products_learn_as_bf16_ones_do(tmp_path, weights, compute, scale):
    pytest.importorskip("torchao", reason="needs the gpu extra")
    torch._dynamo.reset()
    curves, gradients = [], []
    for each in ("model", compute):
        loaded = load(tmp_path, 4, weights=weights, compute=each)
        if each != "model":
            line = convert_to_float8(loaded.model, compute, compile_mode="auto", shards=False)
            assert line.startswith(f"14 linear layers compute in fp8, one scale per {scale}; 14 do not")
        assert compile_layers(loaded, "auto", CompileOptions(padded_num_boundaries(100), fp8=True)).is_complete
        named = dict(loaded.model.named_parameters())
        grads = torch.autograd.grad(loss_of(loaded, batches(1)[0]), list(named.values()))
        gradients.append(torch.cat([grad.double().flatten() for grad in grads]))
        curves.append(losses(loaded, make_optimizer(named, OptimConfig(lr=1e-3), seed=1), 40))
    cosine = torch.nn.functional.cosine_similarity(gradients[0], gradients[1], dim=0).item()
    worst = ((curves[1] - curves[0]).abs().max() / curves[0][0]).item()
    print(f"{compute} beside bf16, weights {weights}: gradient cosine {cosine:.4f}, worst loss difference {worst:.2%}")
    # torchao's emulation gives 0.982 on the CPU for this model, which is small and far from trained
    assert cosine > 0.97
    assert worst < 0.05
    assert curves[1][-4:].mean() < 0.9 * curves[1][:4].mean()


def test_narrow_hidden_states_compile_and_learn_as_wide_ones_do(tmp_path):
    torch._dynamo.reset()
    curves, gradients = [], []
    for hidden_states in ("fp32", "model"):
        loaded = load(tmp_path, 4, hidden_states=hidden_states)
        assert compile_layers(loaded, "auto", CompileOptions(padded_num_boundaries(100))).is_complete
        named = dict(loaded.model.named_parameters())
        grads = torch.autograd.grad(loss_of(loaded, batches(1)[0]), list(named.values()))
        assert {grad.dtype for grad in grads} == {torch.float32}
        gradients.append(torch.cat([grad.double().flatten() for grad in grads]))
        curves.append(losses(loaded, make_optimizer(named, OptimConfig(lr=1e-3), seed=1), 40))
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.99
    assert ((curves[1] - curves[0]).abs().max() / curves[0][0]) < 0.05
    assert curves[1][-4:].mean() < 0.9 * curves[1][:4].mean()
