"""Where layers cannot be compiled, a run goes on eagerly and says why. The GPU tests hold the other half."""

import re
import subprocess
import sys
from typing import ClassVar

import numpy as np
import pytest
import torch
from tiny_models import save_tiny_model
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from flatout.config.schema import LoraConfig, ModelConfig
from flatout.kernels.attention.reference import packed_attention
from flatout.models.attention import window_marker
from flatout.models.blocks import decoder_layers
from flatout.models.compile import layers as compiling
from flatout.models.compile.layers import CompileOptions
from flatout.models.compile.regions import ends_of_kinds
from flatout.models.load.model import load_model
from flatout.models.lora.layer import add_lora
from flatout.models.model_with_loss import ModelWithLoss, packed_cross_entropy
from flatout.models.packed import flatten_samples
from flatout.objectives.protocol import Metric, Objective


@pytest.fixture
def loaded(tmp_path):
    save_tiny_model(tmp_path, "qwen3", num_hidden_layers=3)
    config = ModelConfig(name=str(tmp_path), precision="fp32", attention="sdpa")
    loaded = load_model(config, method="lora", device=torch.device("cpu"), seed=0)
    # one adapter a layer: tracing each takes as long as a layer
    add_lora(loaded.model, LoraConfig(rank=2, targets=["q_proj"]), seed=0)
    yield loaded
    torch._dynamo.reset()


def attention_on_the_device(module, query, key, value, mask, scaling=None, cu_seq_lens_q=None, **_):
    """Documents from the boundaries as a tensor, so that a layer with it is one graph on the CPU too."""
    tensors = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return packed_attention(*tensors, cu_seq_lens_q, scale=scaling)[None], None


@pytest.fixture
def runs():
    """One entry for each time that a compiled layer runs."""
    return []


@pytest.fixture
def compilable(loaded, runs, monkeypatch):
    """The same model with attention that compiles here, its layers compiled by a backend that takes no time."""
    AttentionInterface.register("on_the_device", attention_on_the_device)
    AttentionMaskInterface.register("on_the_device", window_marker)
    loaded.model.set_attn_implementation("on_the_device")
    compile_module = nn.Module.compile

    def backend(graph, _):
        return lambda *args: runs.append(1) or graph(*args)

    def compile_here(module, **options):
        compile_module(module, **{"backend": backend, **options})

    monkeypatch.setattr(nn.Module, "compile", compile_here)
    return loaded


def batch():
    return flatten_samples([(np.arange(9), np.ones(9, bool))], num_boundaries=64)


class Own(Objective):
    """A person's own loss that reads an estimate and has metrics of its own."""

    metrics: ClassVar = {"certainty": Metric("higher"), "surprise": Metric("lower")}
    estimates = ("kl",)

    def __call__(self, tokens):
        p = tokens.logprobs.exp()
        loss = (tokens.estimates["kl"].to(p.dtype) * p - tokens.logprobs).sum()
        return {"loss": loss, "certainty": p.sum(), "surprise": (1 - p).sum()}


def compile_on_the_cpu(loaded, large_lengths=(), objective=None, **options):
    loss = ModelWithLoss(loaded.model, objective=objective)
    return compiling._compile(loaded, CompileOptions(64, **options), 0.99, loss, loss, large_lengths)


def compiles_elsewhere():
    """Whether what a user compiles in this process is compiled."""
    compiled = []
    torch.compile(lambda x: x + 1, backend=lambda graph, _: compiled.append(graph) or graph.forward)(torch.ones(2))
    return len(compiled) == 1


def test_layers_that_are_no_graph_run_eagerly_and_the_line_says_so(loaded):
    """The per-document loop of the sdpa form reads boundaries on the host, so no layer with it is one graph."""
    before = packed_cross_entropy(loaded.model, batch()).loss_sum
    outcome = compile_on_the_cpu(loaded)
    assert outcome.num_compiled == 0
    assert not outcome.is_complete
    assert outcome.line.startswith("off: Qwen3DecoderLayer is not one graph (")
    assert torch.equal(packed_cross_entropy(loaded.model, batch()).loss_sum, before)
    assert all(parameter.grad is None for parameter in loaded.model.parameters())
    assert compiles_elsewhere()


def loss_and_runs(loaded, runs):
    """The loss of a batch, and how many of its layers ran compiled."""
    runs.clear()
    loss = packed_cross_entropy(loaded.model, batch()).loss_sum
    return loss, len(runs)


def compile_and_compare(loaded, runs, **options):
    """The outcome of compiling, and how many graphs a batch then runs; its loss must stay the same."""
    before = packed_cross_entropy(loaded.model, batch()).loss_sum
    outcome = compile_on_the_cpu(loaded, **options)
    after, num_graphs = loss_and_runs(loaded, runs)
    assert torch.allclose(after, before)
    return outcome, num_graphs


def test_the_ends_of_each_kind_of_layer(compilable):
    layers = decoder_layers(compilable.model)
    assert ends_of_kinds(layers, compilable.model) == {layers[0], layers[2]}
    compilable.model.config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    assert ends_of_kinds(layers, compilable.model) == set(layers)


def test_layers_that_compile_are_told_with_their_proof_and_serve_shared_prefixes_too(compilable, runs):
    """Warmed up by a person's own loss; that the operator merges both parts is in parity/test_shared_prefix.py."""
    outcome = compile_on_the_cpu(compilable, num_shared_boundaries=9, objective=Own())
    assert outcome.is_complete
    assert outcome.line == "3 layers as one graph; gradients equal eager ones (smallest cosine 1.000000)"
    texts = [np.arange(40) % 7, np.append(np.arange(30) % 7, [9, 8, 7]), np.arange(50)]
    samples = [(ids, np.arange(len(ids)) > 30) for ids in texts]
    for shared in (((30, 2),), (), ((29, 2),)):
        prefixes = flatten_samples(samples, num_boundaries=64, shared=shared, num_shared_boundaries=9)
        runs.clear()
        with torch._dynamo.config.patch(error_on_recompile=True):
            after = packed_cross_entropy(compilable.model, prefixes).loss_sum
        assert len(runs) == 3
        with torch.compiler.set_stance("force_eager"):
            assert torch.allclose(after, packed_cross_entropy(compilable.model, prefixes).loss_sum)


def test_one_type_of_layer_that_does_not_compile_leaves_the_others_of_its_class_compiled(compilable, runs):
    """As in hybrids, whose recurrent layers have the class of those with attention."""
    layers = decoder_layers(compilable.model)

    class Hybrid(type(layers[1])):
        def forward(self, *args, **kwargs):
            if self.is_recurrent:
                torch._dynamo.graph_break()
            return super().forward(*args, **kwargs)

    for index, layer in enumerate(layers):
        layer.__class__, layer.is_recurrent = Hybrid, index < 2
    config = compilable.model.config
    config.layer_types, config.sliding_window = ["sliding_attention", "sliding_attention", "full_attention"], 4096
    compilable.model.model.has_sliding_layers = True
    outcome, num_compiled = compile_and_compare(compilable, runs)
    assert (outcome.num_compiled, outcome.num_layers) == (1, 3)
    assert "2 run eagerly: Hybrid is not one graph (" in outcome.line
    assert num_compiled == 1


@pytest.mark.exhaustive  # so is a recurrence that is a loop, below
def test_layers_around_a_kernel_that_excludes_itself_are_several_graphs(compilable, runs):
    """As the recurrent layers of hybrids are with flash-linear-attention."""
    layers = decoder_layers(compilable.model)
    calls = []

    @torch.compiler.disable
    def kernel(x):
        calls.append(torch.compiler.is_compiling())
        return x * 2

    class Mixer(type(layers[0].mlp)):
        def forward(self, x):
            return super().forward(kernel(x + 1) - 1)

    class Recurrent(type(layers[0])):
        pass

    for layer in layers[:2]:
        layer.__class__, layer.mlp.__class__ = Recurrent, Mixer
    outcome, num_graphs = compile_and_compare(compilable, runs)
    assert (outcome.num_compiled, outcome.num_split, outcome.is_complete) == (3, 2, False)
    assert "3 of 3 layers; gradients equal eager ones" in outcome.line
    assert "2 are several graphs: Recurrent is not one graph (" in outcome.line
    calls.clear()
    loss_and_runs(compilable, runs)
    # two norms, attention, and the mixer before and after its kernel
    assert num_graphs == 2 * 5 + 1
    assert calls == [False, False]


def without_kinds(config, model_type):
    """Another model type, whose config does not tell each layer's type; this model's code still reads its own."""
    config.model_type, config.layer_types = model_type, [*config.layer_types, "full_attention"]


def test_a_recurrence_that_is_a_loop_over_tokens_is_never_compiled(compilable, runs):
    """Such a loop would be unrolled, once for each number of tokens."""
    layers = decoder_layers(compilable.model)
    without_kinds(compilable.model.config, "jamba")
    traced = []

    class Recurrence(type(layers[0].mlp)):
        def forward(self, x):
            traced.append(torch.compiler.is_compiling())
            return super().forward(x)

    for layer in layers[:2]:
        layer.mlp.__class__, layer.mlp.conv1d = Recurrence, nn.Conv1d(1, 1, 1)
    outcome, num_graphs = compile_and_compare(compilable, runs)
    assert (outcome.num_compiled, outcome.num_split) == (3, 2)
    assert "2 are several graphs: transformers may compute its recurrence by a loop over tokens" in outcome.line
    assert num_graphs == 2 * 3 + 1
    assert not any(traced)


@pytest.mark.parametrize(
    ("broken", "differs", "num_compiled"),
    [(None, "output differs there", 2), pytest.param("it is no graph there", None, 0, marks=pytest.mark.exhaustive)],
)
def test_what_another_rank_finds_holds_here_too(compilable, runs, broken, differs, num_compiled):
    """Layers may exchange tensors with other ranks, so all ranks run the same ones compiled."""
    found = iter([(None, None), (broken, differs)])

    def gather(own):
        return [own, next(found, (None, None))]

    outcome = compile_on_the_cpu(compilable, gather=gather)
    assert outcome.num_compiled == num_compiled
    assert (broken or differs) in outcome.line
    assert loss_and_runs(compilable, runs)[1] == num_compiled


class NoGradient(torch.autograd.Function):
    """The identity, with a gradient of NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.nan


@pytest.mark.parametrize(
    "spoil",
    [pytest.param(torch.neg, id="negated", marks=pytest.mark.exhaustive), pytest.param(NoGradient.apply, id="nan")],
)
def test_a_layer_that_differs_compiled_runs_eagerly(compilable, runs, monkeypatch, spoil):
    layers = decoder_layers(compilable.model)
    compile_module = nn.Module.compile

    def wrong(graph, _):
        return lambda *args: tuple(map(spoil, graph(*args)))

    def compile_wrongly(module, **options):
        compile_module(module, **{**options, **({"backend": wrong} if module is layers[2] else {})})

    monkeypatch.setattr(nn.Module, "compile", compile_wrongly)
    outcome, num_compiled = compile_and_compare(compilable, runs)
    assert (outcome.num_compiled, outcome.num_layers) == (2, 3)
    # all gradients are negated, so rounding decides which has the smallest cosine
    assert re.search("1 run eagerly: the .* of layer 2 differs compiled from eager", outcome.line)
    assert num_compiled == 2


def test_the_kernel_of_norms_gradients_does_not_depend_on_the_number_of_tokens():
    import torch._inductor.config as inductor_config

    assert not inductor_config.triton.mix_order_reduction_non_strict_mode
    with compiling._compiler_settings():
        assert inductor_config.triton.mix_order_reduction_non_strict_mode
    assert not inductor_config.triton.mix_order_reduction_non_strict_mode


def test_what_compiles_within_steps_is_heard():
    heard = []
    twice = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    twice(torch.ones(3))
    with compiling.report_compilations(heard.append):
        twice(torch.ones(3))
        assert heard == []
        twice(torch.ones(4))
    assert len(heard) == 1
    assert heard[0] > 0
    twice(torch.ones(5))
    assert len(heard) == 1
    torch._dynamo.reset()


def test_what_is_imported_early_compiles_nothing_and_leaves_the_process_as_it_is():
    """In a process of its own, where nothing is imported yet: what compiles, while weights are read, puts the random
    state, the default dtype and more back for every thread."""
    script = """
import sys, torch
from torch import nn
from flatout.models.compile.layers import import_compiler

call = nn.Module.__call__
thread = import_compiler()
torch.set_default_dtype(torch.bfloat16)
torch.manual_seed(3)
state = torch.get_rng_state()
thread.join()
assert torch.get_default_dtype() == torch.bfloat16
assert torch.equal(torch.get_rng_state(), state)
assert nn.Module.__call__ is call
assert "torch._inductor.compile_fx" in sys.modules
assert not torch._dynamo.utils.counters["frames"], torch._dynamo.utils.counters
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
