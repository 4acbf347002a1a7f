"""Values at random places within the rounding of a narrower dtype: they round to the same, and are uniform."""

import pytest
import torch

from flatout.kernels.rounding import dither_within_rounding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_places_round_to_the_value_and_are_uniform(dtype):
    torch.manual_seed(0)
    values = (torch.randn(300, 400) * 0.05).to(dtype).float()
    values[0, :6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 2.0**-130])
    values[1, :4] = torch.tensor([1.0, -1.0, 0.5, -0.25])
    dither = values.clone()
    dither_within_rounding(dither, dtype, seed=7)
    assert torch.equal(dither.to(dtype).view(torch.int16), values.to(dtype).view(torch.int16))
    kept = dither.view(torch.int32) == values.view(torch.int32)
    assert kept[0, :5].all()
    assert kept[2:].float().mean() < 1e-3
    # an update of a hundredth of a step moves about a hundredth of the weights by a step, in each direction
    step = torch.where(values.isfinite(), values.abs(), 1).log2().floor().clamp(-10).exp2() / (
        128 if dtype == torch.bfloat16 else 1024
    )
    for size in (0.01, 0.1, -0.1):
        arrived = ((dither + size * step).to(dtype).float() - values)[2:] / step[2:]
        large = values[2:].abs() > 2**-9
        assert arrived[large].mean().item() == pytest.approx(size, rel=0.15)
        assert ((values + size * step).to(dtype).float() - values)[2:][large].abs().max() == 0


def test_a_part_gets_the_places_of_the_whole_and_other_values_stay():
    torch.manual_seed(0)
    values = torch.randn(6, 40, 30).bfloat16().float()
    whole = values.clone()
    dither_within_rounding(whole, torch.bfloat16, seed=3)
    part = values[2:5, 10:20].clone()
    dither_within_rounding(part, torch.bfloat16, seed=3, offset=(2, 10, 0))
    assert torch.equal(part, whole[2:5, 10:20])
    again = whole.clone()
    dither_within_rounding(again, torch.bfloat16, seed=3)
    assert torch.equal(again, whole)
    other = values.clone()
    dither_within_rounding(other, torch.bfloat16, seed=4)
    assert (other != whole).float().mean() > 0.9
