"""Adapters that read float8 inputs: the reference, layers that use it, the copies of A and B, and the kernel."""

import pytest
import torch

from flatout.config.schema import LoraConfig
from flatout.kernels import low_rank, segmented
from flatout.kernels.capability import HOPPER
from flatout.kernels.fp8_matmul import bounded_scales, quantize_rows
from flatout.kernels.low_rank import MatrixCopies, low_rank_product, reference, register_ops
from flatout.kernels.low_rank.reference import MatrixCopy
from flatout.models.frozen.frozen_linear import Fp8BackwardLinear, Fp8Linear, Nf4Linear
from flatout.models.lora.fused import FusedLayers, FusedLora
from flatout.models.lora.layer import LoraLinear

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_HOPPER, reason="no Hopper GPU")]
RANKS = (4, 8)
SIZES = (32, 48)


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def relative(found, truth):
    return float((found - truth).norm() / truth.norm())


def rounded(rows):
    codes, scales = quantize_rows(rows)
    return codes.double() * scales.double()


def joined(matrix):
    terms, scales = reference.two_terms(matrix)
    return (terms[0].double() + terms[1].double() / 16) * scales.double()[:, None]


def test_two_float8_terms_are_more_exact_than_bfloat16():
    values = draw(6, 4096) * 10.0 ** -torch.arange(6)[:, None]
    error = (joined(values) - values).abs()
    large = values.abs() > values.abs().amax(dim=1, keepdim=True) * 2.0**-14
    assert (error[large] / values.abs()[large]).max() < 2.0**-8.7
    assert relative(joined(values), values) < 0.5 * relative(values.bfloat16().double(), values)
    assert torch.equal(joined(torch.zeros(2, 16)), torch.zeros(2, 16).double())


def test_the_reference_multiplies_what_the_bytes_stand_for():
    parts = [quantize_rows(draw(7, 48) * 10.0 ** torch.arange(7)[:, None]), quantize_rows(draw(7, 16, seed=1))]
    matrices = [draw(5, 48, seed=2), draw(3, 16, seed=3)]
    terms, scales = torch.zeros(2, 5, 64, dtype=torch.float8_e4m3fn), torch.zeros(2, 5)
    for index, (matrix, columns) in enumerate(zip(matrices, (slice(0, 48), slice(48, 64)), strict=True)):
        terms[:, : len(matrix), columns], scales[index, : len(matrix)] = reference.two_terms(matrix)
    register_ops()
    found = low_rank_product(*map(list, zip(*parts, strict=True)), terms, scales, [5, 3], torch.float64)
    rows = [codes.double() * scale.double() for codes, scale in parts]
    truth = torch.cat([row @ joined(matrix).T for row, matrix in zip(rows, matrices, strict=True)], dim=1)
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


BASES = {
    "fp8": lambda weight: Fp8Linear(weight, None),
    "nf4": lambda weight: Nf4Linear.from_dense(weight, None),
    "fp8 backward": lambda weight: Fp8BackwardLinear(linear_of(weight)),
}


def linear_of(weight):
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    linear.weight.data.copy_(weight)
    return linear.requires_grad_(False)


def fused_layers(base, weights):
    members = []
    for index, (weight, rank) in enumerate(zip(weights, RANKS, strict=True)):
        # alpha follows the rank, so that both have the scaling 2
        lora = LoraConfig(rank=rank, alpha=2 * rank)
        members.append(LoraLinear(BASES[base](weight), lora, torch.Generator().manual_seed(index)))
        members[-1].lora_b.data.copy_(draw(len(weight), rank, seed=2 + index))
    fused = FusedLora(members, fp8=base == "nf4")
    FusedLayers([fused]).refresh()
    return fused, members


def outputs_and_gradients(members):
    x = draw(2, 5, 64, seed=5).requires_grad_()
    directions = [draw(2, 5, size, seed=6 + index) for index, size in enumerate(SIZES)]
    outputs = [member(x) for member in members]
    masters = [matrix for member in members for matrix in (member.lora_a, member.lora_b)]
    rows = [x.detach().flatten(0, 1), *(direction.flatten(0, 1) for direction in directions)]
    return [output.flatten(0, 1) for output in outputs], torch.autograd.grad(outputs, [x, *masters], directions), rows


@pytest.mark.parametrize("base", BASES)
def test_adapters_of_float8_products_read_the_quantized_input_and_gradient(base, monkeypatch):
    """Outputs and gradients of a fused group, in fp64, beside formulas on the dequantized rows."""
    for module in (segmented, low_rank):
        monkeypatch.setattr(module, "fits", lambda *_: True)
    monkeypatch.setattr(segmented, "load_error", lambda *_, **__: None)
    fused, members = fused_layers(base, [draw(size, 64, seed=index) for index, size in enumerate(SIZES)])
    outputs, found, (x, *directions) = outputs_and_gradients(members)
    is_forward = base != "fp8 backward"
    scales = fused.storage_0.double().split(SIZES) if is_forward else [torch.ones(size).double() for size in SIZES]
    read, low_grads = rounded(x) if is_forward else x, []
    for index, (member, direction, scale) in enumerate(zip(members, directions, scales, strict=True)):
        narrow, wide = member.lora_a.detach().double(), 2 * member.lora_b.detach().double()
        low = read @ (joined(narrow) if is_forward else narrow).T
        # the weight's scales are part of what is rounded
        grad = rounded(direction * scale)
        low_grads.append(grad @ joined(wide.T / scale).T)
        if base != "nf4":
            output = read @ member.base.weight.double().T + low @ wide.T
            torch.testing.assert_close(outputs[index].double(), output, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found[1 + 2 * index].double(), low_grads[index].T @ x, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(found[2 + 2 * index].double(), 2 * direction.T @ low, rtol=1e-5, atol=1e-4)
        # and it is another than that of an exact gradient
        assert relative(found[1 + 2 * index].double(), (direction @ wide).T @ x) > 1e-3
    assert fused.a_terms is not None or not is_forward
    assert (fused.a is None) == is_forward


@pytest.mark.parametrize("base", ["fp8", "nf4"])
@pytest.mark.parametrize("zeros", [slice(0, 8), slice(None)], ids=["some rows", "all rows"])
def test_adapters_of_rows_of_zeros_are_trained(base, zeros, monkeypatch):
    """Their scales are part of the gradient that is quantized, and must not hide it."""
    found = {}
    for is_fp8 in (False, True):
        for module in (segmented, low_rank):
            monkeypatch.setattr(module, "fits", lambda *_, fits=is_fp8: fits)
        monkeypatch.setattr(segmented, "load_error", lambda *_, **__: None)
        weights = [draw(size, 64, seed=index) for index, size in enumerate(SIZES)]
        weights[0][zeros] = 0
        _, members = fused_layers(base, weights)
        found[is_fp8] = outputs_and_gradients(members)[1]
    for low, exact in zip(found[True], found[False], strict=True):
        assert relative(low, exact) < 0.1


def test_scales_are_bounded():
    scales = torch.tensor([1e-9, 0.5, 2.0, 1e-12 / 448])
    assert bounded_scales(scales).tolist() == [2 / 64, 0.5, 2.0, 2 / 64]
    assert bounded_scales(torch.full((3,), 1e-12 / 448)).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "shape", [(1, [64], [8]), (700, [4096, 1024], [16, 8]), (4099, [1040], [48]), (16384, [12288], [16]),
              (333, [96, 80, 16], [128, 4, 64])],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_the_kernel_equals_the_reference(shape, device):
    register_ops()
    num_rows, sizes, ranks = shape
    sizes_of_rows = 10.0 ** -torch.arange(num_rows).remainder(5)[:, None]
    parts = [quantize_rows((draw(num_rows, size, seed=i) * sizes_of_rows).to(device)) for i, size in enumerate(sizes)]
    codes, row_scales = map(list, zip(*parts, strict=True))
    terms = torch.zeros(2, max(ranks), sum(sizes), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.zeros(len(ranks), max(ranks), device=device)
    for index, (size, rank) in enumerate(zip(sizes, ranks, strict=True)):
        first = sum(sizes[:index])
        own = reference.two_terms(draw(rank, size, seed=10 + index).to(device))
        terms[:, :rank, first : first + size], scales[index, :rank] = own
    found = low_rank_product(codes, row_scales, terms, scales, ranks, torch.bfloat16).double()
    truth = reference.low_rank_product(codes, row_scales, terms, scales, ranks, torch.float64)
    assert found.shape == truth.shape
    # bf16 output, and the accumulator's 14 bits
    assert float(((found - truth).norm(dim=1) / truth.norm(dim=1)).max()) < 2e-2
    assert relative(found, truth) < 5e-3


def copies_of(device):
    """Every kind of copy, into poisoned memory, and all the memory."""
    zeros = {"dtype": torch.bfloat16, "device": device}
    narrow, narrow_t = torch.full((24, 4000), 7.0, **zeros), torch.full((4000, 24), 7.0, **zeros)
    terms = torch.full((2, 24, 4000), 7.0, device=device).to(torch.float8_e4m3fn)
    wide_terms = torch.full((2, 16, 2300), 7.0, device=device).to(torch.float8_e4m3fn)
    scales, divisor = torch.full((2, 24), 7.0, device=device), torch.rand(2300, device=device) + 0.1
    copies, first = [], 0
    for rank in (8, 16):
        ranks, source = slice(first, first + rank), draw(rank, 4000, seed=rank).float().to(device)
        targets = [narrow[ranks], narrow_t[:, ranks].t()]
        copies.append(MatrixCopy(source, 1.0, targets, terms=terms[:, ranks], scales=scales[0, ranks]))
        copies.append(MatrixCopy(source, 1.0, targets[:1]))
        first += rank
    wide = torch.full((2300, 16), 7.0, **zeros)
    source = draw(2300, 16, seed=3).float().to(device) * 10.0 ** -torch.arange(16, device=device)
    of_terms = {"terms": wide_terms, "scales": scales[1, :16], "divisor": divisor}
    copies.append(MatrixCopy(source, 0.3, [wide.t()], transposed=True, **of_terms))
    return copies, [narrow, narrow_t, wide, terms, wide_terms, scales]


@pytest.mark.parametrize(("major", "minor"), [pytest.param(*own, marks=on_gpu) for own in ((7, 5), (8, 0), (8, 6))])
def test_copies_without_terms_compile_for_gpus_without_float8(major, minor):
    """Compiled, not run, as triton refuses the type itself there."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from flatout.kernels.low_rank.triton import _write_lora_copies

    constants = {"ROWS": 16, "COLUMNS": 256, "SECOND_TERM": 1 / 16, "TERMS": False}
    for dtype in ("fp16", "fp32"):
        signature = {"table": "*i64", "like": f"*{dtype}"} | dict.fromkeys(constants, "constexpr")
        source = ASTSource(fn=_write_lora_copies, signature=signature, constexprs=constants)
        assert compile(source, target=GPUTarget("cuda", 10 * major + minor, 32)).asm["ptx"]


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_copies_of_all_matrices_in_one_launch_are_those_of_the_reference(device):
    torch.manual_seed(0)
    copies, memory = copies_of(torch.device(device))
    reference.write(copies)
    expected = [own.float() for own in memory]
    for own in memory[:4]:
        own.zero_()
    written = MatrixCopies(copies)
    written.write()
    for found, truth in zip(memory, expected, strict=True):
        if found.dtype == torch.float8_e4m3fn:
            # a division rounded otherwise can move a value to the neighbor
            assert (found.float() != truth).float().mean() < 1e-3
        else:
            torch.testing.assert_close(found.float(), truth, rtol=1e-6, atol=0)
    # and again, from masters that are elsewhere
    for master in {id(copy.master): copy.master for copy in copies}.values():
        master.data = master * 2
    written.write()
    torch.testing.assert_close(memory[0].float(), expected[0] * 2, rtol=1e-6, atol=0)
