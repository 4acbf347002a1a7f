"""AdamW with lean states: against AdamW's formula in fp64, without bias, and the same bits after a resume."""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from usual import usual

import flatout.optim.adamw_8bit as lean
from flatout.checkpoint.optimizer_state import load_optimizer_state, optimizer_state
from flatout.config.schema import OptimConfig
from flatout.errors import CheckpointError, UsageError
from flatout.optim.adamw_8bit import (
    AdamW8bit,
    dequantize_blocks,
    dynamic_table,
    quantize_blocks,
    random_bits,
    round_to_bf16,
)
from flatout.optim.build import make_optimizer
from flatout.optim.update import clear_found_inf, set_found_inf

SHAPES = {"layer.weight": (96, 128), "odd.weight": (131, 33), "norm.weight": (7,)}
CPU = torch.device("cpu")


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {n: nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for n, s in SHAPES.items()}


def steps(named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for parameter in named.values():
            # a mean that stays, and noise
            parameter.grad = (0.5 + torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize("eight_bit", [False, True])
def test_fp32_weights_follow_adamw(eight_bit):
    """fp32 moments: torch's AdamW up to rounding. 8 bits: most of the way it went (the codes are a few % apart)."""
    config = OptimConfig(lr=0.01, weight_decay=0.1, beta2=0.99)
    ours, plain = parameters(torch.float32), parameters(torch.float64)
    start = {name: p.detach().clone().double() for name, p in plain.items()}
    optimizer = AdamW8bit(
        [
            {"params": [ours["layer.weight"], ours["odd.weight"]], "weight_decay": 0.1},
            {"params": [ours["norm.weight"]]},
        ],
        lr=0.01, betas=(0.9, 0.99), eps=1e-8, eight_bit=eight_bit, seed=0,
    )  # fmt: skip
    steps(ours, optimizer, range(50))
    steps(plain, make_optimizer(plain, config), range(50))
    for name, parameter in ours.items():
        assert set(optimizer.state[parameter]) == set(optimizer.state_names(parameter))
        moved = plain[name].detach() - start[name]
        error = (parameter.detach().double() - plain[name].detach()).norm() / moved.norm()
        is_8bit = eight_bit and name == "layer.weight"
        assert error < (0.03 if is_8bit else 1e-5), f"{name}: {error:.2e}"


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_bf16_weights_keep_updates_that_nearest_rounding_loses(name):
    """200 updates of 1e-5 on weights from 1 down, where bf16 values are 2^-8 apart: their mean moves by 0.002."""
    weight = nn.Parameter(torch.ones(128, 128, dtype=torch.bfloat16))
    config = OptimConfig.model_validate({"name": name, "lr": 1e-5})
    optimizer = make_optimizer({"weight": weight}, config, seed=3)
    for _ in range(200):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    values = weight.detach().double()
    # 200 times, each of 16,384 weights goes down by 2^-8 with probability 1e-5 / 2^-8; four standard errors
    error = 2**-8 * (200 * 1e-5 * 2**8 / weight.numel()) ** 0.5
    assert abs((1 - values).mean().item() - 0.002) < 4 * error


def test_rounding_is_unbiased_at_every_fraction():
    fractions = torch.arange(0, 1 << 16, 257)
    values = (0x3F800000 + fractions).to(torch.int32).view(torch.float32).repeat_interleave(1 << 12)
    for sign in (1.0, -1.0):
        bits = random_bits(values, torch.tensor(12345))
        up = (round_to_bf16(sign * values, bits).float().abs() > 1).double().view(len(fractions), -1).mean(1)
        expected = fractions / 65536
        limit = 5 * (expected * (1 - expected) / 4096).sqrt() + 1e-12
        assert ((up - expected).abs() <= limit).all()
        assert abs((up - expected).mean()) < 1e-3


def test_random_bits_differ_by_key_and_place():
    like = torch.empty(1 << 16)
    draws = [random_bits(like, torch.tensor(key)).double() for key in (0, 1, 2**32 - 1, 987654321)]
    for draw in draws:
        assert abs(draw.mean() - 32767.5) < 5 * 65536 / (12 * len(draw)) ** 0.5
        centred = draw - draw.mean()
        assert abs((centred[1:] * centred[:-1]).mean() / centred.square().mean()) < 5 / len(draw) ** 0.5
        assert len(draw.unique()) > 0.6 * 65536
    assert not torch.equal(draws[0], draws[3])
    # every one of the 16 bits is set half the time
    one = random_bits(like, torch.tensor(5))
    shares = torch.stack([((one >> bit) & 1).double().mean() for bit in range(16)])
    assert (shares - 0.5).abs().max() < 5 * 0.5 / len(one) ** 0.5


def test_what_is_not_finite_stays_so():
    values = torch.tensor([float("inf"), -float("inf"), float("nan")])
    # the NaN of CUDA, whose bits would carry over into the sign
    cuda_nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    rounded = round_to_bf16(torch.cat([values, cuda_nan]), torch.full((4,), 0xFFFF))
    assert rounded[:2].tolist() == [float("inf"), -float("inf")]
    assert rounded[2:].isnan().all()


@pytest.mark.parametrize("signed", [True, False])
def test_8bit_codes_are_the_nearest_values(signed):
    table = dynamic_table(signed, CPU)
    assert len(table.unique()) == 256
    assert (table.max(), 0.0 in table.tolist(), table.min() < -0.9) == (1.0, True, signed)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(256 * 50, generator=generator) * torch.logspace(-9, 3, 50).repeat_interleave(256)
    values = values if signed else values.square()
    values[256 * 7 : 256 * 8] = 0
    codes, scales = quantize_blocks(values, table)
    got = dequantize_blocks(codes, scales, table)
    scaled = (values.view(-1, 256) / scales.clamp(min=1e-30)[:, None]).view(-1, 1).double()
    distance = (scaled - table.double()).abs()
    chosen = distance.gather(1, codes.long()[:, None])[:, 0]
    assert (chosen <= distance.amin(1) + 1e-7).all()
    assert not got[256 * 7 : 256 * 8].any()


def test_a_small_second_moment_never_becomes_zero():
    """One huge gradient in a block: its neighbors' mean squares fall under the smallest code."""
    weight = nn.Parameter(torch.zeros(64, 64))
    config = OptimConfig.model_validate({"name": "adamw8bit", "lr": 1e-3})
    optimizer = make_optimizer({"weight": weight}, config, seed=0)
    weight.grad = torch.full((64, 64), 1e-4)
    weight.grad[0, 0] = 10.0
    optimizer.step()
    weight.grad = torch.zeros(64, 64)
    optimizer.step()
    assert weight.detach().abs().max() < 0.01


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_resumed_optimizer_takes_the_same_bits(name, dtype):
    config = OptimConfig.model_validate({"name": name, "lr": 0.01, "weight_decay": 0.1})
    named, again, other_seed = (parameters(dtype) for _ in range(3))
    optimizer = make_optimizer(named, config, seed=5)
    steps(named, optimizer, range(3))
    saved = {key: tensor.clone() for key, tensor in optimizer_state(optimizer, named).items()}
    dtypes = {tensor.dtype for tensor in saved.values()}
    assert dtypes == {torch.float32, torch.int64} | ({torch.uint8} if name == "adamw8bit" else set()) or (
        dtype == torch.float32 and name == "adamw"
    )
    weights = {key: parameter.detach().clone() for key, parameter in named.items()}
    steps(named, optimizer, range(3, 6))
    for copy, seed in ((again, 5), (other_seed, 6)):
        resumed = make_optimizer(copy, config, seed=seed)
        for key, parameter in copy.items():
            parameter.data.copy_(weights[key])
        load_optimizer_state(resumed, copy, saved, config.traits)
        steps(copy, resumed, range(3, 6))
    assert all(torch.equal(named[key], again[key]) for key in named)
    is_rounded = dtype == torch.bfloat16
    assert torch.equal(named["layer.weight"], other_seed["layer.weight"]) != is_rounded


@pytest.mark.parametrize(
    ("name", "dtype"), [("adamw", torch.bfloat16), ("adamw8bit", torch.bfloat16), ("adamw8bit", torch.float32)]
)
def test_updates_held_back_change_nothing_and_leave_no_trace(name, dtype):
    """Weights, moments, scales and counts stay; let go, the next updates are those of a run without the bad ones."""
    config = OptimConfig.model_validate({"name": name, "lr": 0.01, "weight_decay": 0.1})
    named, spared = parameters(dtype), parameters(dtype)
    optimizer, twin = (make_optimizer(each, config, seed=5) for each in (named, spared))

    def everything() -> dict[str, Tensor]:
        held = {**{key: parameter.detach() for key, parameter in named.items()}, **optimizer_state(optimizer, named)}
        return {key: tensor.clone() for key, tensor in held.items()}

    set_found_inf(optimizer, torch.tensor(False))
    steps(named, optimizer, range(2))
    before = everything()
    for is_bad, value in ((True, float("nan")), (False, 1.0)):
        set_found_inf(optimizer, torch.tensor(is_bad))
        for parameter in named.values():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
    after = everything()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert before["norm.weight/step"] == 2
    clear_found_inf(optimizer)
    steps(named, optimizer, range(2, 4))
    steps(spared, twin, range(4))
    assert all(torch.equal(named[key], spared[key]) for key in named)


@pytest.mark.parametrize("name", usual(["adamw", "adamw8bit"], ["adamw8bit"]))
def test_one_graph_serves_all_shapes_and_slices(name, monkeypatch):
    counter = CompileCounter()
    which = "_update_8bit" if name == "adamw8bit" else "_update_plain"
    compiled = torch.compile(getattr(lean, which), backend=counter, fullgraph=True, dynamic=True)
    monkeypatch.setattr(lean, which, compiled)
    monkeypatch.setattr(lean, "SLICE_SIZE", 8192)
    # a square first: nothing may be concluded from equal sizes
    shapes = [(64, 64), (64, 80), (160, 64), (96, 128, 2), (4096 + 256,)]
    named = {str(shape): nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in shapes}
    steps(named, make_optimizer(named, OptimConfig.model_validate({"name": name, "lr": 0.01}), seed=0), range(3))
    assert counter.frame_count == 1


def test_slices_do_not_change_the_update(monkeypatch):
    """Three launches for one tensor: moments, blocks and weights as with one launch."""
    config = OptimConfig.model_validate({"name": "adamw8bit", "lr": 0.01})

    def trained() -> dict[str, Tensor]:
        named = parameters(torch.float32)
        steps(named, make_optimizer(named, config, seed=0), range(3))
        return {name: parameter.detach() for name, parameter in named.items()}

    whole = trained()
    monkeypatch.setattr(lean, "SLICE_SIZE", 4096)
    parts = trained()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_states_of_another_kind_and_sgd_on_bf16_are_refused():
    named = parameters(torch.bfloat16)
    optimizer = make_optimizer(named, OptimConfig(name="adamw8bit"), seed=0)
    steps(named, optimizer, range(1))
    saved = optimizer_state(optimizer, named)
    plain = make_optimizer(named, OptimConfig(), seed=0)
    with pytest.raises(CheckpointError, match=r"has exp_avg_codes.* for layer\.weight"):
        load_optimizer_state(plain, named, saved, OptimConfig().traits)
    with pytest.raises(UsageError, match="=sgd") as refused:
        make_optimizer(named, OptimConfig(name="sgd"), seed=0)
    assert refused.value.fixes[0].settings == {"optim.name": "adamw"}
