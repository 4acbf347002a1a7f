"""NF4 with double quantization: golden values from the format's definition, and bit-equality with bitsandbytes."""

import pytest
import torch

from flatout.kernels.nf4 import dequantize, register_ops
from flatout.kernels.nf4.reference import NF4_LEVELS, Nf4Weight, dequantize_absmax, dynamic_map, quantize, row_scale
from flatout.kernels.nf4.reference import dequantize as plain

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# one block, an odd number of elements, blocks across rows, more than one nested block, a single row
SHAPES = [(1, 64), (7, 9), (129, 65), (64, 512), (3, 128), (100, 333)]


@pytest.fixture(autouse=True)
def ops():
    register_ops()


def weight_of(shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    parallel_layout = torch.rand(shape[0], 1, generator=generator) + 0.01
    return (torch.randn(shape, generator=generator) * parallel_layout).to(dtype)


def test_two_blocks_by_hand():
    levels = torch.tensor(NF4_LEVELS).repeat(4)
    stored = quantize(torch.stack([2 * levels, 4 * levels]))
    assert stored.packed.tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF] * 8
    # the absmax 2 and 4 are 3 - 1 and 3 + 1; the map ends at -(1 - 0.9 / 128) and at 1
    assert stored.offset.item() == 3
    assert stored.nested_absmax.tolist() == [1]
    assert stored.absmax.tolist() == [0, 255]
    lowest = 3 - (1 - 0.9 / 128)
    assert dequantize_absmax(stored).tolist() == pytest.approx([lowest, 4], abs=1e-6)
    dense = plain(stored, 2, 64, torch.float32)
    assert torch.equal(dense[1], 4 * levels)
    torch.testing.assert_close(dense[0], lowest * levels, atol=1e-6, rtol=0)
    torch.testing.assert_close(row_scale(stored, 2, 64), torch.tensor([lowest, 4]) / 448)


def test_levels_are_quantiles_of_a_normal_distribution():
    normal = torch.distributions.Normal(0, 1)
    above = normal.icdf(torch.linspace(0.9677083, 0.5, 9, dtype=torch.float64)[:-1])
    below = -normal.icdf(torch.linspace(0.9677083, 0.5, 8, dtype=torch.float64)[:-1])
    expected = torch.cat([above, below, torch.zeros(1)]).sort().values / above[0]
    torch.testing.assert_close(torch.tensor(NF4_LEVELS, dtype=torch.float64), expected, atol=1e-6, rtol=0)


def test_dynamic_map_has_the_decades():
    levels = dynamic_map()
    assert len(levels) == 256
    assert bool((levels.diff() > 0).all())
    positive = levels[levels > 0]
    counts = [int(((positive >= 10.0**-k / 10) & (positive < 10.0**-k)).sum()) for k in range(7)]
    assert counts == [64, 32, 16, 8, 4, 2, 1]
    assert levels[127] == 0
    assert levels[-1] == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_every_element_has_its_nearest_level(shape):
    weight = weight_of(shape)
    stored = quantize(weight)
    blocks = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    scaled = (blocks / blocks.abs().amax(1, keepdim=True).clamp(min=1e-38)).flatten()[: weight.numel()]
    nearest = (scaled[:, None] - torch.tensor(NF4_LEVELS)).abs().amin(1)
    codes = torch.stack([stored.packed >> 4, stored.packed & 15], 1).flatten()[: weight.numel()]
    torch.testing.assert_close((scaled - torch.tensor(NF4_LEVELS)[codes.int()]).abs(), nearest, atol=1e-6, rtol=0)


def test_zeros_stay_zeros():
    stored = quantize(torch.zeros(3, 100))
    assert not plain(stored, 3, 100, torch.float32).any()
    scale = row_scale(stored, 3, 100)
    assert bool((scale > 0).all())
    assert not dequantize([stored], [3], 100, torch.float8_e4m3fn, scales=[scale]).float().any()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("num_columns", [128, 70])
def test_several_weights_below_each_other(num_columns, transposed):
    rows = [5, 64, 33]
    stored = [quantize(weight_of((count, num_columns), seed=count)) for count in rows]
    dense = torch.cat([plain(one, count, num_columns, torch.float32) for one, count in zip(stored, rows, strict=True)])
    for dtype in (*DTYPES, torch.float64):
        assert torch.equal(dequantize(stored, rows, num_columns, dtype), dense.to(dtype))
    scales = [row_scale(one, count, num_columns) for one, count in zip(stored, rows, strict=True)]
    scaled = dequantize(stored, rows, num_columns, torch.float8_e4m3fn, scales=scales, transposed=transposed)
    assert scaled.is_contiguous()
    assert scaled.dtype == torch.float8_e4m3fn
    scaled = (scaled.t() if transposed else scaled).float()
    # each row fills e4m3's range, and e4m3 keeps three bits after the leading one
    assert 440 < scaled.abs().max() <= 448
    error = scaled * torch.cat(scales)[:, None] - dense
    limit = dense.abs() / 16 + torch.cat(scales)[:, None] * 2.0**-10
    assert bool((error.abs() <= limit * (1 + 1e-5)).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantizes_as_bitsandbytes(shape, dtype):
    bnb = pytest.importorskip("bitsandbytes").functional
    weight = weight_of(shape, dtype)
    packed, state = bnb.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    ours = quantize(weight)
    assert torch.equal(ours.packed, packed.view(-1))
    assert torch.equal(ours.nested_absmax, state.state2.absmax)
    assert torch.equal(ours.offset, state.offset)
    assert torch.equal(ours.nested_map, state.state2.code)
    # its CPU form finds 8-bit levels through a coarse table and may miss the nearest one; ours never is further off
    blocks = torch.nn.functional.pad(weight.float().flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    truth = blocks.abs().amax(1)
    theirs = dequantize_absmax(ours._replace(absmax=state.absmax))
    assert bool(((dequantize_absmax(ours) - truth).abs() <= (theirs - truth).abs() + 1e-6).all())
    assert float((ours.absmax != state.absmax).float().mean()) < 0.02 or len(ours.absmax) == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantizes_to_the_bits_of_bitsandbytes(shape, dtype, device):
    bnb = pytest.importorskip("bitsandbytes").functional
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    weight = weight_of(shape, dtype).to(device)
    packed, state = bnb.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    stored = Nf4Weight(packed.view(-1), state.absmax, state.state2.absmax, state.state2.code, state.offset)
    theirs = bnb.dequantize_4bit(packed, state)
    assert torch.equal(dequantize([stored], [shape[0]], shape[1], dtype), theirs.view(shape))
