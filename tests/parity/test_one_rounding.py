"""A change that an adapter makes reaches the output and the input's gradient however small it is beside them.

y is rounded to 16 bits once, with the adapter's part in the sum. If the frozen product were rounded before the part is
added, a part below half a unit in the last place of y would be lost, always. Here parts are about a tenth of that.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flatout.config.schema import LoraConfig
from flatout.kernels import moe
from flatout.models.frozen.frozen_linear import Fp8BackwardLinear, Fp8Linear, Nf4Linear
from flatout.models.lora.fused import FusedLayers, FusedLora
from flatout.models.lora.layer import LoraLinear

on_gpu = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]
OUT = (96, 48)
# inputs' width and tokens: on a GPU enough for its kernels, and wide enough for torch's products to carry the part
SIZES = {"cpu": (128, 900), "cuda": (512, 9000)}
BASES: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "dense": lambda linear: linear,
    "fp8": lambda linear: Fp8Linear(linear.weight.detach(), linear.bias),
    "nf4": lambda linear: Nf4Linear.from_dense(linear.weight.detach(), linear.bias),
    "fp8 backward": Fp8BackwardLinear,
}


def make_layers(base: str, width: int, dtype: torch.dtype, device: str, **lora: float) -> list[LoraLinear]:
    """Two adapted layers of one input, the same numbers in every dtype; B is zero."""
    layers = []
    for index, num_out in enumerate(OUT):
        generator = torch.Generator().manual_seed(index)
        linear = nn.Linear(width, num_out, bias=False, dtype=torch.bfloat16)
        linear.weight.data = (torch.randn(num_out, width, generator=generator) / 8).bfloat16()
        made = BASES[base](linear if dtype == torch.bfloat16 else linear.to(dtype))
        config = LoraConfig(rank=8, alpha=16, **lora)
        layers.append(LoraLinear(made, config, generator).to(device).train())
    return layers


def wake(layers: list[LoraLinear], scale: float) -> None:
    for index, layer in enumerate(layers):
        generator = torch.Generator().manual_seed(50 + index)
        layer.lora_b.data = (torch.randn(layer.lora_b.shape, generator=generator) * scale).to(layer.lora_b)
        if layer.magnitude is not None:
            layer.magnitude.data *= 1 + scale


def results(layers: list[LoraLinear], x: Tensor, fused: FusedLayers | None = None) -> list[Tensor]:
    """Outputs of all layers, and the gradient of their input, in fp64 on the CPU."""
    if fused is not None:
        fused.refresh()
    torch.manual_seed(7)
    x = x.clone().requires_grad_()
    outputs = [layer(x) for layer in layers]
    directions = [
        torch.randn(output.shape, generator=torch.Generator().manual_seed(20 + index)).bfloat16().to(output)
        for index, output in enumerate(outputs)
    ]
    gradient = torch.autograd.grad(outputs, x, directions)
    return [own.detach().double().cpu() for own in (*outputs, *gradient)]


def shares(with_part: list[Tensor], without: list[Tensor], exact: list[Tensor]) -> list[float]:
    """How much of each exact change is in the difference of the rounded results, by projection; 1 is all of it."""
    return [
        float(((own - frozen) * part).sum() / part.square().sum())
        for own, frozen, part in zip(with_part, without, exact, strict=True)
    ]


def draw_x(width: int, num_tokens: int, dtype: torch.dtype, device: str) -> Tensor:
    x = torch.randn(3, num_tokens // 3, width, generator=torch.Generator().manual_seed(9))
    return x.bfloat16().to(device, dtype)


CASES = [
    *((base, {}, fused) for base in BASES for fused in (False, True)),
    ("dense", {"dropout": 0.25}, False), ("nf4", {"dropout": 0.25}, False),
    ("dense", {"dora": True}, False), ("fp8", {"dora": True}, False),
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("base", "lora", "fused"), CASES, ids=str)
def test_all_of_a_small_part_reaches_outputs_and_input_gradients(base, lora, fused, device):
    if "dropout" in lora and device == "cuda":
        pytest.skip("a GPU draws other masks than the CPU, whose exact twin this compares with")
    found, (width, num_tokens) = {}, SIZES[device]
    for dtype in (torch.bfloat16, torch.float64):
        # quantized layers' exact twin is dense, with the values that they hold
        rounded = dtype == torch.bfloat16
        layers = make_layers(base, width, dtype, device, **lora) if rounded else exact_twins(base, width, lora)
        x = draw_x(width, num_tokens, dtype, device if rounded else "cpu")
        group = None
        if fused and rounded:
            group = FusedLayers([FusedLora(layers, fp8=False)])
        without = results(layers, x, group)
        wake(layers, 1e-4)
        found[dtype] = results(layers, x, group), without
    (own, frozen), (exact, exact_frozen) = found[torch.bfloat16], found[torch.float64]
    parts = [a - b for a, b in zip(exact, exact_frozen, strict=True)]
    largest_ulp = 2.0**-8 * float(exact_frozen[0].abs().median())
    assert float(parts[0].abs().median()) < largest_ulp / 4, "the part is too large to be lost"
    reached = shares(own, frozen, parts)
    # float8 gradients lie on a coarser grid; what DoRA's ratio changes in a gradient is rounded before the product
    of_input = (0.5, 1.5) if "fp8" in base else (0.4, 1.3) if "dora" in lora else (0.85, 1.15)
    for share, (least, most) in zip(reached, ((0.9, 1.1), (0.9, 1.1), of_input), strict=True):
        assert least < share < most, reached


def exact_twins(base: str, width: int, lora: dict[str, float]) -> list[LoraLinear]:
    twins = make_layers("dense", width, torch.float64, "cpu", **lora)
    for twin, layer in zip(twins, make_layers(base, width, torch.bfloat16, "cpu"), strict=True):
        twin.base.weight.data = layer.base.weight.detach().double()
        if twin.magnitude is not None:
            twin.magnitude.data = twin.base.weight.norm(dim=1)
    return twins


@pytest.mark.parametrize("device", DEVICES)
def test_all_of_a_small_part_reaches_outputs_of_experts(device):
    moe.register_ops()
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(512, 64, generator=generator), torch.randn(4, 96, 64, generator=generator) / 8
    low, low_weight = torch.randn(512, 8, generator=generator), torch.randn(4, 96, 8, generator=generator) * 2e-4
    x, weight, low, low_weight = (side.bfloat16().to(device) for side in (x, weight, low, low_weight))
    routing = moe.route(torch.randint(4, (512, 1), generator=generator).to(device), 4)
    own, frozen = (
        moe.grouped_linear(x, weight, routing, low=one, low_weight=one if one is None else low_weight).double().cpu()
        for one in (low, None)
    )
    sides = [side.double().cpu() for side in (x, weight, low, low_weight)]
    routing = type(routing)(*(own.cpu() for own in routing))
    exact, exact_frozen = (
        moe.reference.grouped_linear(*sides[:2], routing, low=one, low_weight=one if one is None else sides[3])
        for one in (sides[2], None)
    )
    (share,) = shares([own], [frozen], [exact - exact_frozen])
    assert 0.9 < share < 1.1
