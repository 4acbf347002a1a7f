"""Flat parameters: every step to the bit as torch's own optimizer over separate ones, in one tensor."""

import pytest
import torch
from torch import nn

from flatout.checkpoint.optimizer_state import load_optimizer_state, optimizer_state
from flatout.config.schema import OptimConfig
from flatout.optim.build import make_optimizer
from flatout.optim.flat import flatten, foreach_accumulate
from flatout.optim.update import set_lr

SHAPES = {"a.lora_a": (4, 37), "a.lora_b": (129, 4), "b.lora_a": (1, 7), "b.bias": (33,), "b.lora_b": (5, 1)}
CONFIG = OptimConfig(lr=0.01, weight_decay=0.1, beta1=0.8, beta2=0.95)


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {n: nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for n, s in SHAPES.items()}


def backward(named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Two micro-batches of a loss whose gradient is random, through autograd."""
    for part in range(2):
        generator = torch.Generator().manual_seed(10 * seed + part)
        loss = sum((p * torch.randn(p.shape, generator=generator, dtype=p.dtype)).sum() for p in named.values())
        assert isinstance(loss, torch.Tensor)
        with foreach_accumulate(optimizer):
            loss.backward()


def train(
    named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, num_steps: int, first: int = 0
) -> list[float]:
    """The loop of a step: zero, accumulate, clip, update; returns gradient norms."""
    norms = []
    for index in range(first, first + num_steps):
        optimizer.zero_grad(set_to_none=True)
        backward(named, optimizer, seed=index)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        norms.append(torch.nn.utils.clip_grad_norm_(held, 1e9).item())
        set_lr(optimizer, CONFIG.lr / (index + 1))
        optimizer.step()
    return norms


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize(("dtype", "lr_ratio"), [(torch.float32, 1), (torch.float64, 1), (torch.float32, 16)])
def test_flat_equals_separate_to_the_bit(name, dtype, lr_ratio):
    config = CONFIG.model_copy(update={"name": name, "lr_ratio": lr_ratio})
    named, plain = parameters(dtype), parameters(dtype)
    flat = make_optimizer(named, config, seed=0, flat=True)
    separate = make_optimizer(plain, config, seed=0)
    sizes = [4, 1] if lr_ratio == 1 else [2, 2, 1]
    assert [len(group["params"]) for group in separate.param_groups] == sizes
    assert [len(group["params"]) for group in flat.param_groups] == [1] * len(sizes)
    norms, expected = train(named, flat, 20), train(plain, separate, 20)
    assert norms == pytest.approx(expected, rel=1e-6)
    for key in named:
        assert torch.equal(named[key], plain[key]), key
    got, wanted = optimizer_state(flat, named), optimizer_state(separate, plain)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[key], wanted[key]) and got[key].shape == wanted[key].shape for key in wanted)


def test_b_learns_at_a_multiple_of_the_rate():
    """LoRA+, by torch's AdamW over groups with rates of their own; a weight with one dimension learns as B does."""
    named, plain = parameters(torch.float64), parameters(torch.float64)
    optimizer = make_optimizer(named, CONFIG.model_copy(update={"lr_ratio": 16}), seed=0)
    of_a, of_b = ([p for name, p in plain.items() if name.endswith("lora_a") is is_a] for is_a in (True, False))
    groups = [
        {"params": of_a, "times": 1},
        {"params": [p for p in of_b if p.ndim > 1], "times": 16},
        {"params": [plain["b.bias"]], "times": 16, "weight_decay": 0.0},
    ]
    expected = torch.optim.AdamW(groups, weight_decay=0.1, betas=(0.8, 0.95))
    for index in range(10):
        for model, steps in ((named, optimizer), (plain, expected)):
            steps.zero_grad()
            backward(model, steps, seed=index)
        set_lr(optimizer, CONFIG.lr / (index + 1))
        for group in groups:
            group["lr"] = group["times"] * CONFIG.lr / (index + 1)
        optimizer.step()
        expected.step()
    assert all(torch.equal(named[name], plain[name]) for name in named)


@pytest.mark.parametrize(("saved_flat", "loaded_flat"), [(False, True), (True, False), (True, True)])
def test_a_checkpoint_of_either_layout_resumes_in_the_other(saved_flat, loaded_flat):
    named = parameters()
    optimizer = make_optimizer(named, CONFIG, seed=0, flat=saved_flat)
    train(named, optimizer, 3)
    weights = {name: p.detach().clone() for name, p in named.items()}
    state = {name: tensor.clone() for name, tensor in optimizer_state(optimizer, named).items()}
    again = parameters()
    other = make_optimizer(again, CONFIG, seed=0, flat=loaded_flat)
    for name, parameter in again.items():
        parameter.data.copy_(weights[name])
    load_optimizer_state(other, again, state, CONFIG.traits)
    train(named, optimizer, 3, first=3)
    train(again, other, 3, first=3)
    assert all(torch.equal(named[name], again[name]) for name in named)


def test_gradients_stay_views_of_the_flat_one_and_gaps_stay_zero():
    named = parameters()
    optimizer = make_optimizer(named, CONFIG, seed=0, flat=True)
    train(named, optimizer, 2)
    flats = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in named.values():
        assert parameter.grad is not None
        assert any(parameter.grad.untyped_storage().data_ptr() == f.grad.untyped_storage().data_ptr() for f in flats)
        assert parameter.storage_offset() * parameter.element_size() % 128 == 0
    for flat in flats:
        mine = [p for p in named.values() if p.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()]
        assert flat.detach().abs().double().sum().item() == pytest.approx(
            sum(p.detach().abs().double().sum().item() for p in mine), rel=1e-12
        )
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is not None and not p.grad.any() for p in named.values())


def test_each_dtype_has_a_tensor_of_its_own():
    mixed = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.float32)]
    assert [flat.dtype for flat in flatten(mixed)] == [torch.float32, torch.float64]


def test_a_pass_that_fails_adds_nothing_and_leaves_gradients_in_their_place():
    named = parameters()
    optimizer = make_optimizer(named, CONFIG, seed=0, flat=True)
    backward(named, optimizer, seed=0)
    places = {name: p.grad for name, p in named.items()}
    before = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}

    def fail_half_way() -> None:
        with foreach_accumulate(optimizer):
            assert all(p.grad is None for p in named.values())
            sum(p.sum() for p in list(named.values())[:3]).backward()
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        fail_half_way()
    assert all(named[name].grad is place for name, place in places.items())
    assert all(torch.equal(named[name].grad, before[name]) for name in named)
