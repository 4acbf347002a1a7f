"""The Triton twin of the adapters' gradients: on a CUDA GPU, or on the CPU with TRITON_INTERPRET=1."""

import os

import pytest
import torch

from flatout.kernels.lora import adapter_gradients, reference, register_ops, uses_kernel

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a CUDA GPU or TRITON_INTERPRET=1"
    ),
    pytest.mark.skipif(
        ON_GPU and torch.cuda.get_device_capability()[0] != 9, reason="the tiles need a Hopper GPU's shared memory"
    ),
]
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
# Triton's interpreter has no bf16 products
DTYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float16]
# tokens, columns and rank of each member: members of one and of several slices, odd sizes, every padded rank, one token
SIZES = [
    (256, [512], [16]),
    (300, [1100, 96, 513], [8, 8, 8]),
    (1, [1, 1], [1, 1]),
    (190, [70, 600], [3, 20]),
    (129, [64, 40, 8, 16, 24], [33, 1, 2, 64, 5]),
]


def values(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def members(num_tokens, columns, ranks, dtype):
    """Gradients, inputs and B of these sizes."""
    grads = [values(num_tokens, width, dtype=dtype, seed=index) for index, width in enumerate(columns)]
    wides = [values(width, rank, dtype=dtype, seed=9) for width, rank in zip(columns, ranks, strict=True)]
    return grads, values(num_tokens, sum(ranks), dtype=dtype, seed=5), wides


def one_pass(grads, low, wides, *, num_processors=132, dtype=torch.float32):
    """The kernel's result, from partial sums in memory that was full of NaN."""
    from flatout.kernels.lora import triton

    torch.use_deterministic_algorithms(True)
    try:
        assert low.new_empty(3).isnan().all()
        low_grad, flat = triton.adapter_gradients(grads, low, wides, 0.3, dtype, num_processors=num_processors)
    finally:
        torch.use_deterministic_algorithms(False)
    return low_grad, flat


def require_close(found, grads, low, wides):
    """One rounding to 16 bits of the first; the second is in fp32, but for the order of its sums."""
    low_grad, flat = found
    doubles = [grad.double() for grad in grads], low.double(), [wide.double() for wide in wides]
    true_low, true_wides = reference.adapter_gradients(*doubles, 0.3, torch.float64)
    torch.testing.assert_close(low_grad, true_low.to(low.dtype), rtol=2 * torch.finfo(low.dtype).eps, atol=1e-3)
    assert low_grad.is_contiguous()
    true_flat = torch.cat([grad.flatten() for grad in true_wides])
    assert float((flat.double() - true_flat).norm()) <= 1e-5 * float(true_flat.norm())


@pytest.mark.parametrize("num_processors", [1, 7, 132])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_gradients_equal_those_in_fp64(size, dtype, num_processors):
    """Few processors make long blocks of tokens, many of them short blocks."""
    inputs = members(*size, dtype)
    require_close(one_pass(*inputs, num_processors=num_processors), *inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_of_poisoned_memory(dtype):
    """Gradients as columns of one tensor, odd offsets and strides, transposed ones, and one row for all tokens."""
    num_tokens, columns, ranks = 150, [136, 65, 40, 24], [16, 4, 4, 4]
    grads, low, wides = members(num_tokens, columns, ranks, dtype)
    buffer = torch.full((num_tokens + 2, sum(columns) + 7), torch.nan, dtype=dtype, device=DEVICE)
    views = list(buffer[1:-1, 3 : 3 + sum(columns)].split(columns, dim=1))
    views[2] = torch.full((columns[2] + 2, num_tokens + 2), torch.nan, dtype=dtype, device=DEVICE)[1:-1, 1:-1].t()
    for view, grad in zip(views, grads, strict=True):
        view.copy_(grad)
    views[3] = grads[3] = grads[3][:1].expand(num_tokens, -1)
    wide_low = torch.full((num_tokens, sum(ranks) + 8), torch.nan, dtype=dtype, device=DEVICE)[:, 8:]
    wide_low.copy_(low)
    require_close(one_pass(views, wide_low, wides), grads, low, wides)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_tokens_gradients_are_zero(dtype):
    low_grad, flat = one_pass(*members(0, [520, 16], [4, 4], dtype))
    assert low_grad.shape == (0, 8)
    assert torch.equal(flat, torch.zeros(536 * 4, device=DEVICE))


@pytest.mark.parametrize("master", [torch.float16, torch.bfloat16, torch.float64] if ON_GPU else [torch.float16])
def test_gradients_of_b_have_the_masters_dtype(master):
    inputs = members(100, [64], [4], DTYPES[0])
    rounded, exact = (one_pass(*inputs, dtype=dtype)[1] for dtype in (master, torch.float32))
    assert rounded.dtype == master
    # the interpreter truncates where hardware rounds
    torch.testing.assert_close(rounded.float(), exact, rtol=torch.finfo(master).eps, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_inputs_have_equal_bits(dtype):
    inputs = members(5000 if ON_GPU else 700, [1024, 520], [16, 16], dtype)
    first, *others = (one_pass(*inputs) for _ in range(5 if ON_GPU else 2))
    for other in others:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, other, strict=True))


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU")
@pytest.mark.parametrize("rank", [16, 64, 65, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_operator_on_cuda(dtype, rank):
    """With and without a kernel; the host never waits for the device."""
    register_ops()
    grads, low, wides = members(3000, [768, 512], [rank, rank], dtype)
    assert uses_kernel([rank, rank], dtype, DEVICE) == (dtype.itemsize == 2 and rank <= 64)
    # the first call loads the kernels
    adapter_gradients(grads, low, wides, 0.3, dtype)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        low_grad, wide_grads = adapter_gradients(grads, low, wides, 0.3, dtype)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    doubles = [grad.double() for grad in grads], low.double(), [wide.double() for wide in wides]
    true_low, true_wides = reference.adapter_gradients(*doubles, 0.3, torch.float64)
    # one or two roundings of 16 bits, or the errors of sums over 3,000 tokens
    tolerance = torch.finfo(dtype).eps * (1 if dtype.itemsize == 2 else 30)
    for found, truth in zip([low_grad, *wide_grads], [true_low, *true_wides], strict=True):
        assert found.dtype == dtype
        assert found.shape == truth.shape
        assert float((found.double() - truth).norm()) <= tolerance * float(truth.norm())
