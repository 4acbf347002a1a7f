"""Updates equal those of the published method, written out here or by its own library, for 20 steps in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flatout.config.optim import OptimConfig
from flatout.errors import UsageError
from flatout.optim.build import make_optimizer
from flatout.optim.update import set_lr

SHAPES = {"up.weight": (48, 32), "down.weight": (32, 48), "embed.weight": (40, 32), "norm.weight": (32,)}
MATRICES = ("up.weight", "down.weight")
DECAY = 0.1
Update = Callable[[dict[str, Tensor], float], None]


def decay_of(name: str) -> float:
    return 0.0 if name == "norm.weight" else DECAY


def muon(weights: dict[str, Tensor]) -> Update:
    """torch's Muon over the matrices and its AdamW over the others, two optimizers side by side."""
    named = {name: nn.Parameter(weight) for name, weight in weights.items()}
    groups = [
        [{"params": [named[name]], "weight_decay": decay_of(name)} for name in named if (name in MATRICES) is chosen]
        for chosen in (True, False)
    ]
    both = torch.optim.Muon(groups[0], adjust_lr_fn="match_rms_adamw"), torch.optim.AdamW(groups[1])

    def update(gradients: dict[str, Tensor], lr: float) -> None:
        for name, gradient in gradients.items():
            named[name].grad = gradient
        for optimizer in both:
            set_lr(optimizer, lr)
            optimizer.step()

    return update


def adafactor(weights: dict[str, Tensor]) -> Update:
    """Algorithms 4 and 5 of Shazeer and Stern 2018 (arXiv:1804.04235), with means for sums and steps of `lr`."""
    states: dict[str, dict[str, Tensor]] = {}
    num_updates = 0

    def update(gradients: dict[str, Tensor], lr: float) -> None:
        nonlocal num_updates
        num_updates += 1
        beta = 1 - num_updates**-0.8
        for name, gradient in gradients.items():
            squares, state = gradient**2 + 1e-30, states.setdefault(name, {})
            means = {"all": squares} if squares.ndim == 1 else {"rows": squares.mean(1), "columns": squares.mean(0)}
            for key, mean in means.items():
                state[key] = beta * state.get(key, torch.zeros_like(mean)) + (1 - beta) * mean
            second = state["all"] if "all" in state else torch.outer(state["rows"], state["columns"])
            step = gradient / (second / (1.0 if "all" in state else state["rows"].mean())).sqrt()
            step = step / max(1.0, float(step.square().mean().sqrt()))
            weights[name] *= 1 - lr * decay_of(name)
            weights[name] -= lr * step

    return update


def lion(weights: dict[str, Tensor]) -> Update:
    """Algorithm 2 of Chen et al. 2023 (arXiv:2302.06675), with its values of beta."""
    momentum = {name: torch.zeros_like(weight) for name, weight in weights.items()}

    def update(gradients: dict[str, Tensor], lr: float) -> None:
        for name, gradient in gradients.items():
            direction = (0.9 * momentum[name] + 0.1 * gradient).sign()
            weights[name] -= lr * (direction + decay_of(name) * weights[name])
            momentum[name] = 0.99 * momentum[name] + 0.01 * gradient

    return update


REFERENCES: dict[str, Callable[[dict[str, Tensor]], Update]] = {"muon": muon, "adafactor": adafactor, "lion": lion}


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {n: nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for n, s in SHAPES.items()}


@pytest.mark.parametrize("name", REFERENCES)
def test_updates_equal_the_published_method(name):
    named = parameters()
    expected = {key: parameter.detach().clone() for key, parameter in named.items()}
    reference = REFERENCES[name](expected)
    config = OptimConfig(name=name, weight_decay=DECAY)
    optimizer = make_optimizer(named, config, matrices=MATRICES)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 21):
        gradients = {key: torch.randn(p.shape, generator=generator, dtype=p.dtype) for key, p in named.items()}
        for key, parameter in named.items():
            parameter.grad = gradients[key].clone()
        set_lr(optimizer, 0.01 / step)
        optimizer.step()
        reference({key: gradient.clone() for key, gradient in gradients.items()}, 0.01 / step)
    for key, parameter in named.items():
        torch.testing.assert_close(parameter.detach(), expected[key], rtol=1e-12, atol=1e-12, msg=key)


def test_muon_moves_a_matrix_as_far_in_every_direction():
    """The first update of a matrix has singular values near 0.2 sqrt(longer side), however unequal the gradient's."""
    named = {"up.weight": nn.Parameter(torch.zeros(48, 32, dtype=torch.float64))}
    optimizer = make_optimizer(named, OptimConfig(name="muon", lr=1.0), matrices=MATRICES)
    generator = torch.Generator().manual_seed(0)
    named["up.weight"].grad = torch.randn(48, 32, generator=generator, dtype=torch.float64) @ torch.diag(
        torch.logspace(0, -1, 32, dtype=torch.float64)
    )
    optimizer.step()
    values = torch.linalg.svdvals(named["up.weight"].detach()) / (0.2 * 48**0.5)
    assert 0.6 < values.min() < values.max() < 1.3
    assert (
        torch.linalg.svdvals(named["up.weight"].grad).max() > 10 * torch.linalg.svdvals(named["up.weight"].grad).min()
    )


def test_muon_without_a_matrix_is_refused():
    named = {name: parameter for name, parameter in parameters().items() if name not in MATRICES}
    with pytest.raises(
        UsageError, match=r"optim\.name: muon updates hidden matrices, but this run trains none"
    ) as error:
        make_optimizer(named, OptimConfig(name="muon"), matrices=MATRICES)
    assert [fix.settings for fix in error.value.fixes] == [{"optim.name": "adamw"}]
