"""The gradient norm that clips: as exact over one flat tensor as over many small ones."""

import torch
from torch import nn

from flatout.config.read import make_config
from flatout.parallel.rank import Rank
from flatout.parallel.strategies.protocol import Single
from flatout.planner.parallel_layout import SINGLE_RANK


def test_one_large_gradient_loses_no_more_than_many_small_ones():
    gradient = 1e-3 * torch.randn(5_000_000, generator=torch.Generator().manual_seed(0))
    flat = nn.Parameter(torch.empty_like(gradient))
    flat.grad = gradient
    small = [nn.Parameter(torch.empty_like(part)) for part in gradient.split(1000)]
    for parameter, part in zip(small, gradient.split(1000), strict=True):
        parameter.grad = part
    config = make_config({"model": {"name": "x"}})
    strategy = Single(Rank(), torch.device("cpu"), config, SINGLE_RANK)
    truth = gradient.double().norm().item()
    for parameters in ([flat], small):
        assert abs(strategy.grad_norm(parameters).item() - truth) / truth < 1e-6
