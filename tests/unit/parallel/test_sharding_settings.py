"""What strategies do inside one process: the order of buckets, and memory that runs out."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatout.config.read import make_config
from flatout.errors import ResourceError
from flatout.parallel.rank import Rank
from flatout.parallel.strategies.buckets import into_buckets
from flatout.parallel.strategies.ddp import DDP
from flatout.parallel.strategies.sharded import Sharded
from flatout.planner.parallel_layout import ParallelLayout

CPU = torch.device("cpu")


@pytest.fixture
def group(tmp_path):
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_buckets_come_in_reverse_order_and_large_gradients_travel_alone():
    sizes = (100, 3, 4, 200, 5, 6)
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    wide = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    buckets = [[p.numel() for p in bucket] for bucket in into_buckets([*parameters, wide], bucket_bytes=44)]
    assert buckets == [[6, 5], [200], [100], [2], [4, 3]]


def run_out(strategy: Any, *, last: bool, model: nn.Module | None = None) -> None:
    with strategy.accumulate(last=last):
        if model is not None:
            model(torch.ones(1, 4)).sum().backward()
        raise torch.OutOfMemoryError


def test_memory_that_runs_out_is_final_where_other_ranks_cannot_follow(group):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = make_config({"model": {"name": "x"}, "method": "full"})
    replicated = DDP(Rank(), CPU, config, ParallelLayout("ddp"))
    replicated.prepare(model, [], lambda: torch.optim.SGD(model.parameters()))
    with pytest.raises(torch.OutOfMemoryError):
        run_out(replicated, last=False, model=model)
    with pytest.raises(torch.OutOfMemoryError):
        run_out(replicated, last=True)
    with pytest.raises(ResourceError, match="during the gradient all-reduce"):
        run_out(replicated, last=True, model=model)
    sharded = Sharded(Rank(), CPU, config, ParallelLayout("zero3", reshard_after_forward=True))
    sharded.prepare(model, list(model), lambda: torch.optim.SGD(model.parameters()))
    with pytest.raises(ResourceError, match="that all ranks run together"):
        run_out(sharded, last=False)
