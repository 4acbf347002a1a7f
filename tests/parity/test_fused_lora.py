"""Joined LoRA layers equal the layers alone: values and every gradient, any architecture, traced as one graph."""

import pytest
import torch
from tiny_models import FAMILIES, save_tiny_model, tiny_samples
from usual import usual

from flatout.config.schema import LoraConfig, ModelConfig
from flatout.models.blocks import decoder_layers
from flatout.models.load.model import load_model
from flatout.models.lora.fused import FusedLora, fuse_layers
from flatout.models.lora.layer import add_lora, lora_layers, trainable_parameters
from flatout.models.model_with_loss import packed_cross_entropy
from flatout.models.packed import flatten_samples

CPU = torch.device("cpu")


def adapted(folder, family, *, precision="fp64", **lora):
    save_tiny_model(folder, family)
    config = ModelConfig(name=str(folder), precision=precision)
    model = load_model(config, method="lora", device=CPU, seed=0).model
    add_lora(model, LoraConfig(rank=3, **lora), seed=0)
    generator = torch.Generator().manual_seed(1)
    for layer in lora_layers(model).values():
        layer.lora_b.data.normal_(0, 0.3, generator=generator)
    return model


def loss_and_gradients(model):
    batch = flatten_samples(tiny_samples([9, 1, 17, 5]))
    loss = packed_cross_entropy(model, batch).loss_sum
    named = trainable_parameters(model)
    gradients = torch.autograd.grad(loss, list(named.values()))
    return loss.detach(), dict(zip(named, gradients, strict=True))


def fused_modules(model):
    return [module for module in model.modules() if isinstance(module, FusedLora)]


@pytest.mark.parametrize("family", usual(FAMILIES, ["llama", "qwen2", "phi3", "qwen3_moe"]))
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
