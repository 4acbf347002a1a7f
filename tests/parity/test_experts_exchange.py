"""Experts with an exchange of tokens beside those without, in a group of one rank: eager, compiled, recomputed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch.distributed as dist
from test_experts import error, experts_model, gradients
from tiny_models import VOCAB_SIZE
from torch.utils.checkpoint import checkpoint

from flatout.models.blocks import decoder_layers
from flatout.models.collectives import RankGroup
from flatout.models.experts.block import experts_modules, prepare_experts
from flatout.models.experts.parallel import slice_experts

IDS = torch.randint(0, VOCAB_SIZE, (1, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield RankGroup(dist.group.WORLD.group_name, 1, 0)
    dist.destroy_process_group()


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.exhaustive)])
# as flatout compiles layers
@torch._dynamo.config.patch(specialize_float=True)
def test_layers_with_an_exchange_are_one_graph_with_equal_gradients(family, group):
    model = experts_model(family, torch.float32)
    model.set_experts_implementation("flatout")
    prepare_experts(model)
    true = gradients(model, IDS)
    slices = slice_experts(model, group)
    # both matrices, and the biases of gpt-oss, in two layers
    assert len(slices) == (4 if family == "qwen3_moe" else 8)
    found = gradients(model, IDS)
    assert max(error(found[name], true[name]) for name in true) < 1e-6
    torch.compiler.reset()
    for layer in decoder_layers(model):
        layer.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    found = gradients(model, IDS)
    assert max(error(found[name], true[name]) for name in true) < 1e-6
    longer = IDS.repeat(1, 3)
    with torch.compiler.set_stance("force_eager"):
        true = gradients(model, longer)
    # another size needs no other graph
    with torch.compiler.set_stance("fail_on_recompile"):
        found = gradients(model, longer)
    assert max(error(found[name], true[name]) for name in true) < 1e-6


def test_recomputation_waits_for_all_that_it_sends(group):
    """A collective whose result is dropped before it has arrived would be written to memory that is in use again."""
    model = experts_model("qwen3_moe", torch.float64)
    model.set_experts_implementation("flatout")
    prepare_experts(model)
    slice_experts(model, group)
    experts: Any = next(iter(experts_modules(model).values()))
    x = torch.randn(12, 32, dtype=torch.float64, requires_grad=True)
    chosen, weights = torch.arange(24).view(12, 2) % 7, torch.rand(12, 2, dtype=torch.float64, requires_grad=True)
    output = checkpoint(experts, x, chosen, weights, use_reentrant=False)
    output.sum().backward()
    assert torch._C._distributed_c10d._get_work_registry_size() == 0
