"""The Triton twins of grouped products over experts: on a CUDA GPU, or on the CPU with TRITON_INTERPRET=1."""

import pytest
import torch
from triton_twins import DEVICE, DTYPE, MARKS, ON_GPU, TOLERANCE

from flatout.kernels.fp8_matmul import quantize_rows
from flatout.kernels.moe import reference
from flatout.kernels.moe.reference import Routing

pytest.importorskip("triton")
pytestmark = MARKS
# e4m3 has three bits after the leading one; the interpreter truncates where hardware rounds
FP8_TOLERANCE = 0.04 if ON_GPU else 0.08
# tokens, slots, experts, wide and narrow size: odd sizes, several tiles an expert, sizes that are no multiple of a tile
SIZES = [(37, 2, 5, 64, 24), (300, 2, 3, 136, 40), (190, 3, 4, 72, 264)]
KINDS = ["balanced", "zipf", "one", "sentinels"]


def choices(kind, num_tokens, k, num_experts):
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    if kind == "zipf":
        scores = scores.log() * torch.arange(1, num_experts + 1)
    if kind == "one":
        return torch.zeros(num_tokens, k, dtype=torch.int64, device=DEVICE)
    index = scores.topk(k).indices
    if kind == "sentinels":
        index[torch.rand(index.shape, generator=generator) < 0.3] = num_experts
    return index.to(DEVICE)


def routed(kind, num_tokens, k, num_experts):
    from flatout.kernels.moe.triton import make_tiles

    index = choices(kind, num_tokens, k, num_experts)
    routing = reference.route(index, num_experts)
    return routing._replace(tiles=make_tiles(routing.offsets, index.numel()))


def values(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, DTYPE)


def require_close(ours, truth, routing: Routing | None = None):
    if routing is not None:
        # rows of no expert are undefined
        end = int(routing.offsets[-1])
        ours, truth = ours[:end], truth[:end]
    assert ours.shape == truth.shape
    assert float((ours.double() - truth.double()).norm()) <= TOLERANCE * float(truth.double().norm()) + 1e-6


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_product_with_a_narrow_part(size, kind, transposed, gather):
    from flatout.kernels.moe.triton import grouped_product

    num_tokens, k, num_experts, depth, width = size
    routing = routed(kind, num_tokens, k, num_experts)
    x = values(num_tokens if gather else num_tokens * k, depth)
    shape = (num_experts, depth, width) if transposed else (num_experts, width, depth)
    weight = values(*shape, seed=1)
    weight = weight.transpose(1, 2) if transposed else weight
    low, low_weight = values(num_tokens * k, 8), values(num_experts, 8, width, seed=2).transpose(1, 2)
    for extra in ({}, {"low": low, "low_weight": low_weight}):
        doubles = {name: tensor.double() for name, tensor in extra.items()}
        truth = reference.grouped_linear(x.double(), weight.double(), routing, gather=gather, **doubles)
        require_close(grouped_product(x, weight, routing, gather=gather, **extra), truth, routing)


@pytest.mark.parametrize("kind", KINDS)
def test_float8_product_has_the_scales_of_rows_and_columns(kind):
    from flatout.kernels.moe.triton import grouped_product

    num_tokens, k, num_experts, depth, width = 100, 2, 4, 160, 144
    if ON_GPU and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs float8 arithmetic")
    routing = routed(kind, num_tokens, k, num_experts)
    x, row_scale = quantize_rows(values(num_tokens, depth))
    weight, column_scale = quantize_rows(values(num_experts, width, depth, seed=1))
    truth = reference.grouped_linear(x.double() * row_scale, weight.double() * column_scale, routing, gather=True)
    ours = grouped_product(
        x, weight, routing, gather=True, row_scale=row_scale[:, 0], column_scale=column_scale[..., 0], dtype=DTYPE
    )
    require_close(ours, truth, routing)


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_outer_products_are_zero_without_rows(kind, transposed, gather):
    from flatout.kernels.moe.triton import narrow_outer

    num_tokens, k, num_experts, width, rank = 290, 2, 5, 200, 8
    routing = routed(kind, num_tokens, k, num_experts)
    wide, narrow = values(num_tokens if gather else num_tokens * k, width), values(num_tokens * k, rank, seed=1)
    truth = reference.grouped_outer(narrow.double(), wide.double(), routing, gather_dy=gather)
    ours = narrow_outer(wide, narrow, routing, gather=gather, transposed=transposed)
    require_close(ours.transpose(1, 2) if transposed else ours, truth)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_slots_leave_out_rows_of_no_expert(kind, weighted):
    from flatout.kernels.moe.triton_rows import sum_slots

    num_tokens, k, num_experts, width = 50, 3, 4, 72
    routing = routed(kind, num_tokens, k, num_experts)
    rows = values(num_tokens * k, width)
    rows[int(routing.offsets[-1]) :] = torch.nan
    weights = torch.rand(num_tokens, k, device=DEVICE) if weighted else None
    truth = reference.sum_slots(rows.double(), routing, k, weights)
    require_close(sum_slots(rows, routing, k, weights), truth)


@pytest.mark.parametrize("kind", KINDS)
def test_swiglu_and_its_gradients(kind):
    from flatout.kernels.moe.triton_rows import swiglu, swiglu_backward

    routing, width = routed(kind, 33, 2, 3), 40
    gate_up, grad, weights = values(66, 2 * width), values(66, width), torch.rand(66, device=DEVICE)
    truth = reference.swiglu_backward(gate_up.double(), grad.double(), weights.double(), routing)
    leaf = gate_up.double().requires_grad_()
    (reference.swiglu(leaf, routing)[0] * weights[:, None] * grad).sum().backward()
    require_close(truth[1], leaf.grad)
    require_close(swiglu(gate_up, routing)[0], truth[0], routing)
    for ours, theirs in zip(swiglu_backward(gate_up, grad, weights, routing), truth, strict=True):
        require_close(ours, theirs, routing)


@pytest.mark.parametrize("kind", KINDS)
def test_swiglu_in_float8_is_its_result_quantized(kind):
    from flatout.kernels.moe.triton_rows import quantize_rows as quantize
    from flatout.kernels.moe.triton_rows import swiglu, swiglu_backward

    num_experts, width = 3, 40
    routing = routed(kind, 33, 2, num_experts)
    gate_up, grad, weights = values(66, 2 * width), values(66, width), torch.rand(66, device=DEVICE)
    scale = torch.rand(num_experts, 2 * width, device=DEVICE) + 0.5
    end, narrow = int(routing.offsets[-1]), scale[:, :width].contiguous()
    product, *forward = swiglu(gate_up, routing, narrow)
    _, rows_grad, _, *backward = swiglu_backward(gate_up, grad, weights, routing, scale)
    for found, expected in (
        (forward, quantize(product, routing, narrow)),
        (backward, quantize(rows_grad, routing, scale)),
    ):
        assert torch.equal(found[0][:end].view(torch.uint8), expected[0][:end].view(torch.uint8))
        assert torch.equal(found[1][:end], expected[1][:end])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_float8_are_multiplied_by_their_experts_scales(kind, scaled):
    from flatout.kernels.moe.triton_rows import quantize_rows as quantize

    num_tokens, k, num_experts, width = 40, 2, 4, 56
    routing = routed(kind, num_tokens, k, num_experts)
    rows = values(num_tokens * k, width)
    scale = torch.rand(num_experts, width, device=DEVICE) + 0.5 if scaled else None
    expected = rows.double() * (scale[reference.row_experts(routing)] if scaled else 1.0)
    quantized, row_scale = quantize(rows, routing, scale)
    error = (quantized.double() * row_scale[:, None] - expected)[: int(routing.offsets[-1])]
    assert float(error.norm()) <= FP8_TOLERANCE * float(expected.norm())


def test_transposed_bytes():
    from flatout.kernels.moe.triton_rows import transpose_bytes

    weight = values(3, 150, 272).to(torch.float8_e4m3fn)
    assert torch.equal(transpose_bytes(weight).view(torch.uint8), weight.view(torch.uint8).transpose(1, 2))
