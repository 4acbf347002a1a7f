"""Recompute levels: the same gradients as without, eager and compiled, and what waits on the host."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from usual import usual

from flatout.config.schema import LoraConfig, ModelConfig
from flatout.models.blocks import decoder_layers
from flatout.models.compile.recompute import (
    MEMORY_BUDGET,
    ActivationOffload,
    HostEmbedding,
    apply_recompute,
    compiling_with,
    offload_embedding,
)
from flatout.models.load.model import load_model
from flatout.models.lora.fused import fuse_layers
from flatout.models.lora.layer import add_lora

NUM_LAYERS = 3


@pytest.fixture
def make_model():
    def make(dtype=torch.float64, dropout=0.0):
        torch.manual_seed(0)
        shape = Qwen3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            attention_dropout=dropout,
        )
        return Qwen3ForCausalLM(shape).to(dtype).train()

    return make


def gradients(model, length=23):
    model.zero_grad()
    ids = torch.randint(0, 64, (1, length), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    model(input_ids=ids, use_cache=False).logits.square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("dropout", usual([0.0, 0.3], [0.3]))
@pytest.mark.parametrize("level", usual(["none", "selective", "budget", 1, "full", "offload"], [1, "full", "offload"]))
def test_every_level_has_the_gradients_of_none(make_model, level, dropout):
    model = make_model(dropout=dropout)
    apply_recompute(model, level)
    for one, other in zip(gradients(make_model(dropout=dropout)), gradients(model), strict=True):
        assert torch.equal(one, other)


def test_layer_inputs_wait_on_the_host_and_nothing_else_does(make_model):
    model, inputs = make_model(), []
    for layer in decoder_layers(model):
        layer.register_forward_pre_hook(lambda layer, args: inputs.append(args[0].detach().clone()))
    apply_recompute(model, "full")
    copies = ActivationOffload(model)
    ids = torch.arange(20)[None]
    loss = model(input_ids=ids, use_cache=False).logits.square().mean()
    moved = [slot.host for slot in copies._slots]
    # the layers' inputs in order, then what the last norm keeps of its own input
    for layer_input, tensor in zip(inputs, moved, strict=False):
        assert torch.equal(layer_input, tensor)
    assert NUM_LAYERS <= len(moved) <= NUM_LAYERS + 3
    # weights, masks and rotations stay where they are
    assert all(tensor.shape == (1, 20, 32) for tensor in moved)
    loss.backward()


def test_what_is_on_the_host_is_what_the_backward_pass_reads(make_model):
    """A copy spoilt on the host must spoil the gradient, or nothing was offloaded."""
    model = make_model()
    apply_recompute(model, "full")
    copies = ActivationOffload(model)
    expected = gradients(model)
    model.zero_grad()
    ids = torch.randint(0, 64, (1, 23), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=ids, use_cache=False).logits.square().mean()
    copies._slots[1].host.zero_()
    loss.backward()
    got = [parameter.grad for parameter in model.parameters()]
    assert not all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))


@pytest.mark.exhaustive
def test_compiled_layers_offload_their_inputs_alike(make_model):
    torch._dynamo.reset()
    model = make_model()
    apply_recompute(model, "full")
    copies = ActivationOffload(model)
    for layer in decoder_layers(model):
        layer.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (23, 37, 5):
        plain = gradients(make_model(), length)
        for one, other in zip(plain, gradients(model, length), strict=True):
            assert torch.allclose(one, other, rtol=1e-10, atol=1e-14)
        assert NUM_LAYERS <= len(copies._slots) <= NUM_LAYERS + 3
    torch._dynamo.reset()


def test_hooks_end_with_the_forward_pass_even_when_it_fails(make_model):
    model = make_model()
    apply_recompute(model, "full")
    copies = ActivationOffload(model)

    def fail(*args):
        raise torch.OutOfMemoryError("planted")

    handle = decoder_layers(model)[1].register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        gradients(model)
    handle.remove()
    num_held = len(copies._slots)
    tensor = torch.ones(1, 4, 32, requires_grad=True)
    (tensor * tensor).sum().backward()
    assert len(copies._slots) == num_held == 1
    for one, other in zip(gradients(make_model()), gradients(model), strict=True):
        assert torch.equal(one, other)


def test_without_gradients_nothing_is_copied(make_model):
    model = make_model()
    apply_recompute(model, "full")
    copies = ActivationOffload(model)
    with torch.no_grad():
        model.eval()(input_ids=torch.arange(9)[None], use_cache=False)
    assert len(copies._slots) == 0


def test_a_frozen_embedding_waits_on_the_host_and_gives_the_same_bits(make_model):
    plain, moved = make_model(), make_model()
    for model in (plain, moved):
        model.get_input_embeddings().requires_grad_(False)
    table = moved.get_input_embeddings().weight
    apply_recompute(moved, "offload")
    assert isinstance(moved.get_input_embeddings(), HostEmbedding)
    assert torch.equal(moved.get_input_embeddings().weight, table)
    assert "model.embed_tokens.weight" not in dict(moved.named_parameters())
    ids = torch.randint(0, 64, (1, 9))
    results = []
    for model in (plain, moved):
        loss = model(input_ids=ids, use_cache=False).logits.square().mean()
        loss.backward()
        results.append([loss, *(parameter.grad for parameter in model.parameters() if parameter.requires_grad)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_an_embedding_that_is_trained_tied_or_no_plain_lookup_stays(make_model):
    trained = make_model()
    assert not offload_embedding(trained)
    tied = make_model()
    tied.set_output_embeddings(torch.nn.Linear(32, 64, bias=False))
    tied.get_output_embeddings().weight = tied.get_input_embeddings().weight
    tied.requires_grad_(False)
    assert not offload_embedding(tied)

    class Scaled(torch.nn.Embedding):
        pass

    scaled = make_model()
    scaled.set_input_embeddings(Scaled(64, 32))
    scaled.requires_grad_(False)
    assert not offload_embedding(scaled)
    assert offload_embedding(make_model().requires_grad_(False))


def test_partial_is_the_compilers_budget_and_only_there():
    from torch._functorch import config

    before = config.activation_memory_budget
    with compiling_with("budget"):
        assert config.activation_memory_budget == MEMORY_BUDGET
    assert config.activation_memory_budget == before
    with compiling_with("full"):
        assert config.activation_memory_budget == before


@pytest.mark.parametrize("level", ["none", "selective"])
def test_lean_keeps_neither_norm_nor_product(level, tmp_path):
    """Through the compiler's own partitioning, of a fused MLP and the norm before it."""
    torch._dynamo.reset()
    width, inner, num_tokens = 32, 80, 50
    shape = {"hidden_size": width, "intermediate_size": inner, "num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=64, num_hidden_layers=1, head_dim=8, **shape)).save_pretrained(tmp_path)
    loaded = load_model(
        ModelConfig(name=str(tmp_path), precision="fp32"), method="lora", device=torch.device("cpu"), seed=0
    )
    add_lora(loaded.model, LoraConfig(rank=2), seed=0)
    fuse_layers(loaded.model)
    layer = loaded.model.get_decoder().layers[0]

    def block(x):
        return layer.mlp(layer.post_attention_layernorm(x))

    def run(forward):
        x = torch.randn(1, num_tokens, width, generator=torch.Generator().manual_seed(0)).requires_grad_()
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            output = forward(x)
        (grad,) = torch.autograd.grad(output.square().sum(), x)
        # what belongs to the tokens and is no view of the input
        sizes = [t.numel() for t in kept if num_tokens in t.shape and t.data_ptr() != x.data_ptr()]
        return grad, sum(sizes) / num_tokens

    truth, _ = run(block)
    with compiling_with(level):
        grad, num_kept = run(torch.compile(block, backend="aot_eager_decomp_partition", fullgraph=True))
    torch.testing.assert_close(grad, truth, rtol=1e-4, atol=1e-5)
    rest = 2 * inner + 1 + 3 * 2  # gate, up, the norm's scale, low-rank products
    assert num_kept == rest + (inner + width if level == "none" else 0)
