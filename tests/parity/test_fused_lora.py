"""Joined LoRA layers equal the layers alone: values and every gradient, any architecture, traced as one graph."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, save_tiny_model, tiny_samples

from flatout.config.schema import LoraConfig, ModelConfig
from flatout.models.blocks import decoder_layers
from flatout.models.head import packed_loss
from flatout.models.load.model import load_model
from flatout.models.lora.fused import FusedLora, fuse_layers
from flatout.models.lora.layer import add_lora, lora_layers, trainable_parameters
from flatout.models.packed import flatten_samples

CPU = torch.device("cpu")


def adapted(folder, family, *, precision="fp64", device=CPU, shape=None, **lora):
    save_tiny_model(folder, family, **(shape or {}))
    config = ModelConfig(name=str(folder), precision=precision)
    model = load_model(config, method="lora", device=device, seed=0).model
    add_lora(model, LoraConfig(**{"rank": 3, **lora}), seed=0)
    generator = torch.Generator().manual_seed(1)
    for layer in lora_layers(model).values():
        layer.lora_b.data.copy_(torch.empty(layer.lora_b.shape).normal_(0, 0.3, generator=generator))
    return model


def loss_and_gradients(model, lengths=(9, 1, 17, 5)):
    batch = flatten_samples(tiny_samples(lengths)).to(model.device)
    loss = packed_loss(model, batch).loss_sum
    named = trainable_parameters(model)
    gradients = torch.autograd.grad(loss, list(named.values()))
    return loss.detach(), dict(zip(named, gradients, strict=True))


def relative(found, truth):
    return float((found.double() - truth).norm() / truth.norm())


def fused_modules(model):
    return [module for module in model.modules() if isinstance(module, FusedLora)]


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_equals_alone(family, tmp_path):
    model = adapted(tmp_path, family)
    loss, gradients = loss_and_gradients(model)
    fuse_layers(model)
    assert fused_modules(model)
    fused_loss, fused_gradients = loss_and_gradients(model)
    torch.testing.assert_close(fused_loss, loss, rtol=1e-12, atol=0)
    assert fused_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(fused_gradients[name], gradient, rtol=1e-10, atol=1e-13, msg=name)


@pytest.mark.parametrize("alpha", [6, 3])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_the_one_pass_operator_has_the_plain_gradients(backend, alpha, tmp_path):
    """Without a kernel it computes the reference, so every bit is the same."""
    torch._dynamo.reset()
    model = adapted(tmp_path, "qwen2", precision="fp32", alpha=alpha)
    fuse_layers(model)
    assert not any(module.one_pass for module in fused_modules(model))
    loss, gradients = loss_and_gradients(model)
    for module in fused_modules(model):
        module.one_pass = True
    for layer in decoder_layers(model):
        if backend is not None:
            layer.mlp.compile(backend=backend, fullgraph=True, dynamic=True)
    one_pass_loss, one_pass = loss_and_gradients(model)
    assert torch.equal(one_pass_loss, loss)
    for name, gradient in gradients.items():
        assert torch.equal(one_pass[name], gradient), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("rank", [8, 16, 64])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_gradients_by_the_kernel_are_as_near_to_fp64_as_the_plain_ones(is_compiled, rank, tmp_path):
    """In bf16, eager and compiled, for several sizes of a batch."""
    torch._dynamo.reset()
    shape = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 640}
    cuda = torch.device("cuda", 0)
    truth = adapted(tmp_path, "qwen3", rank=rank, alpha=rank // 2, shape=shape)
    model = adapted(tmp_path, "qwen3", rank=rank, alpha=rank // 2, shape=shape, precision="bf16", device=cuda)
    fuse_layers(truth)
    fuse_layers(model)
    if not all(module.one_pass for module in fused_modules(model)):
        pytest.skip("this GPU has no kernel")
    if is_compiled:
        for layer in decoder_layers(model):
            layer.compile(fullgraph=True, dynamic=True)
    for lengths in ([300, 211], [97, 64, 5], [700]):
        _, exact = loss_and_gradients(truth, lengths)
        errors = []
        for one_pass in (True, False):
            for module in fused_modules(model):
                module.one_pass = one_pass
            _, found = loss_and_gradients(model, lengths)
            errors.append({name: relative(found[name].cpu(), gradient) for name, gradient in exact.items()})
        for name in exact:
            assert errors[0][name] <= 1.2 * errors[1][name] + 2e-3, name


def test_what_is_fused(tmp_path):
    model = adapted(tmp_path, "qwen2")
    fuse_layers(model)
    members = [[member.out_features for member in module.members] for module in fused_modules(model)]
    assert members == [[32, 16, 16], [32], [48, 48], [32]] * 2
    assert [len(module.biases) for module in fused_modules(model)] == [3, 1, 2, 1] * 2


def test_only_targets_are_fused(tmp_path):
    model = adapted(tmp_path, "llama", targets=["q_proj", "v_proj"])
    loss, gradients = loss_and_gradients(model)
    fuse_layers(model)
    assert [[member.out_features for member in module.members] for module in fused_modules(model)] == [[32, 16]] * 2
    fused_loss, fused_gradients = loss_and_gradients(model)
    torch.testing.assert_close(fused_loss, loss, rtol=1e-12, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(fused_gradients[name], gradient, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("lora", [{"dropout": 0.1}, {"dora": True}])
def test_dropout_and_dora_keep_their_own_products(lora, tmp_path):
    model = adapted(tmp_path, "llama", **lora)
    fuse_layers(model)
    assert not fused_modules(model)


def test_refresh_brings_an_update_in(tmp_path):
    model = adapted(tmp_path, "llama")
    fused = fuse_layers(model)
    before, _ = loss_and_gradients(model)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.mul_(1.5)
    fused.refresh()
    after, gradients = loss_and_gradients(model)
    alone = adapted(tmp_path, "llama")
    with torch.no_grad():
        for parameter in trainable_parameters(alone).values():
            parameter.mul_(1.5)
    truth, true_gradients = loss_and_gradients(alone)
    assert before != after
    torch.testing.assert_close(after, truth, rtol=1e-12, atol=0)
    for name, gradient in true_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-13)


def test_a_layer_with_fused_products_is_one_graph(tmp_path):
    """Without graph breaks, and equal to eager."""
    torch._dynamo.reset()
    model = adapted(tmp_path, "qwen3", precision="fp32")
    fuse_layers(model)
    loss, gradients = loss_and_gradients(model)
    for layer in decoder_layers(model):
        layer.mlp.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    compiled_loss, compiled_gradients = loss_and_gradients(model)
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-5, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(compiled_gradients[name], gradient, rtol=1e-4, atol=1e-5)
