import pytest
import torch
from torch import nn

from flatout.checkpoint.optimizer_state import load_optimizer_state, optimizer_state, state_sizes
from flatout.config.optim import OPTIMIZERS, OptimConfig
from flatout.errors import CheckpointError, UsageError
from flatout.optim.build import make_optimizer, split_by_decay
from flatout.optim.update import set_lr

MATRICES = ("layer.weight",)


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    # 8-bit states begin at 4,096 entries
    shapes = {"layer.weight": (64, 80), "layer.bias": (5,), "norm.weight": (3,)}
    return {n: nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for n, s in shapes.items()}


def step(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    optimizer.step()


def test_norms_and_biases_never_decay():
    assert split_by_decay(parameters()) == (["layer.weight"], ["layer.bias", "norm.weight"])


def test_adamw_equals_the_formula_for_100_steps():
    """Algorithm 2 of Loshchilov and Hutter 2019, written out in fp64."""
    config = OptimConfig(lr=0.01, weight_decay=0.1, beta1=0.8, beta2=0.95)
    named = parameters()
    optimizer = make_optimizer(named, config, seed=0)
    value = {name: parameter.detach().clone() for name, parameter in named.items()}
    mean = {name: torch.zeros_like(v) for name, v in value.items()}
    square = {name: torch.zeros_like(v) for name, v in value.items()}
    for t in range(1, 101):
        lr = config.lr / t
        set_lr(optimizer, lr)
        step(optimizer, named, seed=t)
        for name, parameter in named.items():
            assert parameter.grad is not None
            mean[name] = 0.8 * mean[name] + 0.2 * parameter.grad
            square[name] = 0.95 * square[name] + 0.05 * parameter.grad**2
            decay = 0.1 if name == "layer.weight" else 0.0
            update = (mean[name] / (1 - 0.8**t)) / ((square[name] / (1 - 0.95**t)).sqrt() + config.eps)
            value[name] = value[name] * (1 - lr * decay) - lr * update
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.detach(), value[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_survives_a_round_trip_to_the_bit(name):
    config = OptimConfig.model_validate({"name": name, "lr": 0.01})
    named, again = parameters(torch.float32), parameters(torch.float32)
    optimizer, other = (make_optimizer(each, config, seed=0, matrices=MATRICES) for each in (named, again))
    for seed in range(3):
        step(optimizer, named, seed)
    saved = {key: tensor.clone() for key, tensor in optimizer_state(optimizer, named).items()}
    for key, parameter in named.items():
        again[key].data.copy_(parameter.data)
    load_optimizer_state(other, again, saved, config.traits)
    step(optimizer, named, 9)
    step(other, again, 9)
    for key, parameter in named.items():
        assert torch.equal(parameter, again[key])
    assert {k: v.dtype for k, v in optimizer_state(other, again).items()} == {k: v.dtype for k, v in saved.items()}


def test_state_of_other_parameters_is_refused():
    named = parameters()
    optimizer = make_optimizer(named, OptimConfig(), seed=0)
    step(optimizer, named, 0)
    saved = optimizer_state(optimizer, named)
    with pytest.raises(CheckpointError, match=r"state for other, which this run does not train"):
        load_optimizer_state(optimizer, named, {**saved, "other/exp_avg": torch.zeros(1)}, OptimConfig().traits)
    partial = {key: tensor for key, tensor in saved.items() if not key.startswith("norm")}
    with pytest.raises(CheckpointError, match=r"no state for norm\.weight"):
        load_optimizer_state(optimizer, named, partial, OptimConfig().traits)


def test_a_name_makes_its_optimizer_and_one_without_a_row_none():
    named = parameters(torch.float32)
    made = {name: make_optimizer(named, OptimConfig(name=name), seed=0, matrices=MATRICES) for name in OPTIMIZERS}
    assert {name: type(one).__name__ for name, one in made.items()} == {
        "adamw": "AdamW", "adamw8bit": "AdamW8bit", "sgd": "SGD", "muon": "Muon",
        "adafactor": "Adafactor", "lion": "Lion",
    }  # fmt: skip
    config = OptimConfig.model_construct(**{**OptimConfig().model_dump(), "name": "lamb"})
    with pytest.raises(KeyError):
        make_optimizer(parameters(torch.float32), config, seed=0)
    with pytest.raises(KeyError):
        state_sizes(parameters(torch.float32), config)
    with pytest.raises(UsageError, match="would lose updates"):
        make_optimizer(parameters(torch.bfloat16), OptimConfig(name="sgd"), seed=0)
