"""The Triton twin of NF4's dequantize: on a CUDA GPU, or on the CPU with TRITON_INTERPRET=1."""

import pytest
import torch
from triton_twins import DEVICE, MARKS, ON_GPU

from flatout.kernels.nf4 import dequantize, register_ops
from flatout.kernels.nf4 import reference as plain
from flatout.kernels.nf4.reference import nf4_levels, quantize, row_scale

pytest.importorskip("triton")
pytestmark = MARKS
# fewer rows and blocks than a tile, odd ones, more than a tile; rows of one block
SHAPES = [(1, 64), (5, 64), (70, 192), (130, 704), (3, 4160)]
# Triton's interpreter truncates to bf16 where hardware rounds
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if ON_GPU else [torch.float32, torch.float16]


def stored_weight(num_rows, num_columns):
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(num_rows, num_columns, generator=generator) * torch.rand(num_rows, 1, generator=generator)
    weight[num_rows // 2] = 0
    return quantize(weight.to(DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_dense_rows_of_a_larger_buffer(shape, dtype):
    from flatout.kernels.nf4.triton import dequantize_into

    num_rows, num_columns = shape
    stored = stored_weight(*shape)
    expected = plain.dequantize(stored, *shape, dtype)
    for buffer in (
        torch.full((num_rows + 3, num_columns), torch.nan, dtype=dtype, device=DEVICE),
        torch.full((num_rows + 3, num_columns + 8), torch.nan, dtype=dtype, device=DEVICE)[:, 3 : 3 + num_columns],
        torch.full((num_columns, num_rows + 3), torch.nan, dtype=dtype, device=DEVICE).t(),
    ):
        dequantize_into(stored, buffer[1 : 1 + num_rows], nf4_levels(DEVICE), None)
        assert torch.equal(buffer[1 : 1 + num_rows], expected)
        assert bool(buffer[:1].isnan().all())
        assert bool(buffer[1 + num_rows :].isnan().all())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_scaled_rows_before_rounding_to_float8(shape, transposed):
    from flatout.kernels.nf4.triton import dequantize_into

    stored = stored_weight(*shape)
    scale = row_scale(stored, *shape)
    out = torch.full(shape[::-1] if transposed else shape, torch.nan, device=DEVICE)
    out = out.t() if transposed else out
    dequantize_into(stored, out, nf4_levels(DEVICE), scale)
    expected = plain.dequantize(stored, *shape, torch.float8_e4m3fn, scale)
    assert torch.equal(out.to(torch.float8_e4m3fn).float(), expected.float())


@pytest.mark.skipif(not ON_GPU or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with float8")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("num_columns", [704, 100])
def test_float8_of_several_weights_is_the_reference_to_the_bit(num_columns, transposed):
    register_ops()
    rows = [5, 130, 64]
    stored = [stored_weight(count, num_columns) for count in rows]
    scales = [row_scale(one, count, num_columns) for one, count in zip(stored, rows, strict=True)]
    ours = dequantize(stored, rows, num_columns, torch.float8_e4m3fn, scales=scales, transposed=transposed)
    parts = [
        plain.dequantize(one, count, num_columns, torch.float8_e4m3fn, scale).float()
        for one, scale, count in zip(stored, scales, rows, strict=True)
    ]
    expected = torch.cat(parts).t() if transposed else torch.cat(parts)
    assert ours.is_contiguous()
    assert torch.equal(ours.float(), expected)


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("num_columns", [704, 100])
def test_cuda_equals_cpu_to_the_bit(num_columns, dtype):
    register_ops()
    stored = stored_weight(37, num_columns)
    ours = dequantize([stored], [37], num_columns, dtype)
    on_cpu = type(stored)(*(tensor.cpu() for tensor in stored))
    assert torch.equal(ours.cpu(), plain.dequantize(on_cpu, 37, num_columns, dtype))
