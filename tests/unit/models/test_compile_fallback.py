"""Where layers cannot be compiled, a run goes on eagerly and says why. The GPU tests hold the other half."""

import subprocess
import sys
import threading

import pytest
import torch
from tiny_models import save_tiny_model

from flatout.config.schema import LoraConfig, ModelConfig
from flatout.models import compile as compiling
from flatout.models.head import PackedLoss, packed_loss
from flatout.models.load import load_model
from flatout.models.lora import add_lora
from flatout.models.packed import pack


@pytest.fixture
def loaded(tmp_path):
    save_tiny_model(tmp_path, "qwen3")
    config = ModelConfig(name=str(tmp_path), precision="fp32", attention="sdpa")
    loaded = load_model(config, method="lora", device=torch.device("cpu"), seed=0)
    add_lora(loaded.model, LoraConfig(rank=2), seed=0)
    yield loaded
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


def test_off_on_the_cpu(loaded):
    assert compiling.compile_layers(loaded, "auto", num_borders=None) == "off: only on CUDA"
    assert compiling.compile_layers(loaded, "off", num_borders=None) == "off: as asked"


def test_a_layer_that_is_no_graph_runs_eagerly_and_says_so(loaded):
    """The per-document loop of the sdpa form reads borders on the host, so no layer with it is one graph."""
    batch = pack([(torch.arange(9).numpy(), torch.ones(9, dtype=torch.bool).numpy())])
    before = packed_loss(loaded.model, batch).loss_sum
    loss = PackedLoss(loaded.model)
    line = compiling._compile(loaded, 64, 0.99, loss, loss)
    assert line.startswith("off: this model's layers do not compile (")
    assert torch.equal(packed_loss(loaded.model, batch).loss_sum, before)
    assert all(parameter.grad is None for parameter in loaded.model.parameters())


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
from flatout.models.compile import import_compiler

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


def test_a_compiler_that_cannot_be_imported_ends_nothing(monkeypatch):
    def broken(name):
        raise RuntimeError("no C compiler")

    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    monkeypatch.setattr(compiling, "import_module", broken)
    thread = compiling.import_compiler()
    thread.join(timeout=120)
    assert not thread.is_alive()
    assert not raised
