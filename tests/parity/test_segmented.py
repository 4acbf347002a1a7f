"""Frozen products and their adapters in one accumulator: the reference, layers that use it, and the Hopper kernel."""

import pytest
import torch
from tiny_models import save_tiny_model, tiny_samples
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from usual import usual

from flatout.config.schema import LoraConfig, ModelConfig
from flatout.kernels import low_rank, segmented
from flatout.kernels.capability import HOPPER
from flatout.kernels.fp8_matmul import quantize_rows
from flatout.kernels.segmented import reference, register_ops, segmented_product
from flatout.kernels.segmented.reference import Segments
from flatout.models.blocks import decoder_layers, replace_module
from flatout.models.frozen.frozen_linear import Fp8BackwardLinear, Fp8Linear, Nf4Linear
from flatout.models.load.model import load_model
from flatout.models.lora.fused import FusedLayers, FusedLora, fuse_layers
from flatout.models.lora.layer import LoraLinear, add_lora, lora_layers, trainable_parameters
from flatout.models.model_with_loss import packed_cross_entropy
from flatout.models.packed import flatten_samples
from flatout.models.trained_fp8 import convert_backward_to_float8

CPU = torch.device("cpu")
HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_HOPPER, reason="no Hopper GPU")]


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative(found, truth):
    return float((found - truth).norm() / truth.norm())


def test_the_reference_is_the_sum_of_its_products():
    parts, weights = [draw(7, 48, seed=1), draw(7, 16, seed=2)], [draw(32, 48, seed=3), draw(32, 16, seed=4)]
    low, wide = draw(7, 8, seed=5), draw(32, 8, seed=6)
    truth = parts[0] @ weights[0].T + parts[1] @ weights[1].T + low @ wide.T
    own = Segments(parts, weights, [], None, low, wide, [0], [0, 8], False)
    transposed = own._replace(weights=[weight.T for weight in weights], weights_kn=True)
    torch.testing.assert_close(reference.segmented_product(own), [truth], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(reference.segmented_product(transposed), [truth], rtol=1e-13, atol=1e-13)


def test_the_reference_scales_rows_of_each_part_and_columns_of_all():
    (left, left_scale), (right, right_scale) = quantize_rows(draw(7, 48)), quantize_rows(draw(7, 16, seed=1) * 100)
    (weights, column_scale) = quantize_rows(draw(32, 64, seed=2))
    low, wide = draw(7, 8, seed=3), draw(32, 8, seed=4)
    dense = weights.double() * column_scale.double()
    truth = (left.double() * left_scale) @ dense[:, :48].T + (right.double() * right_scale) @ dense[:, 48:].T
    own = Segments(
        [left, right], [weights[:, :48], weights[:, 48:]], [left_scale[:, 0], right_scale[:, 0]], column_scale[:, 0],
        low, wide, [0], [0, 8], False,
    )  # fmt: skip
    torch.testing.assert_close(reference.segmented_product(own), [truth + low @ wide.T], rtol=1e-12, atol=1e-12)
    own = own._replace(first_columns=[0, 20], first_ranks=[0, 3, 8])
    apart = torch.cat([low[:, :3] @ wide[:20, :3].T, low[:, 3:] @ wide[20:, 3:].T], dim=1)
    expected = list((truth + apart).split([20, 12], dim=1))
    torch.testing.assert_close(reference.segmented_product(own), expected, rtol=1e-12, atol=1e-12)


BASES = {
    "dense": lambda linear: linear,
    "fp8": lambda linear: Fp8Linear(linear.weight.detach(), linear.bias),
    # made below, from layers that have adapters
    "fp8 backward": lambda linear: linear,
    "nf4": lambda linear: Nf4Linear.from_dense(linear.weight.detach(), linear.bias),
}


def adapted_model(folder, base, family="qwen2", precision="fp64", device=CPU, **lora):
    """Linear layers with another storage, and adapters that do something; qwen2 has biases."""
    save_tiny_model(folder, family, hidden_size=64, intermediate_size=96)
    model = load_model(ModelConfig(name=str(folder), precision=precision), method="lora", device=device, seed=0).model
    for layer in decoder_layers(model):
        for name, linear in list(layer.named_modules()):
            if isinstance(linear, nn.Linear):
                replace_module(layer, name, BASES[base](linear.requires_grad_(False)))
    add_lora(model, LoraConfig(rank=8, **lora), seed=0)
    if base == "fp8 backward":
        convert_backward_to_float8(model)
    generator = torch.Generator().manual_seed(1)
    for adapted in lora_layers(model).values():
        adapted.lora_b.data.copy_(torch.randn(adapted.lora_b.shape, generator=generator) * 0.1)
    return model


def loss_and_gradients(model):
    loss = packed_cross_entropy(model, flatten_samples(tiny_samples([9, 1, 17, 5]))).loss_sum
    named = trainable_parameters(model)
    return loss.detach(), dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


SOME = {"targets": ["q_proj", "v_proj", "down_proj"]}
CASES = [(base, {}) for base in BASES] + [(base, SOME) for base in BASES]


@pytest.mark.parametrize(("base", "lora"), usual(CASES, CASES[:5]))
def test_layers_in_one_accumulator_equal_their_products_apart(base, lora, tmp_path, monkeypatch):
    """In fp64, where the operator computes its reference."""
    found = {}
    for one_accumulator in (False, True):
        monkeypatch.setattr(segmented, "fits", lambda *_, fits=one_accumulator: fits)
        model = adapted_model(tmp_path, base, **lora)
        report = fuse_layers(model, fp8=base == "nf4").report
        assert ("one accumulator" in report) == one_accumulator
        found[one_accumulator] = loss_and_gradients(model)
    (loss, gradients), (one_loss, one_gradients) = found[False], found[True]
    # apart, each layer's copy has scales of its own
    close = base != "fp8 backward"
    torch.testing.assert_close(one_loss, loss, rtol=1e-12, atol=0)
    for name, gradient in gradients.items():
        if close:
            torch.testing.assert_close(one_gradients[name], gradient, rtol=1e-10, atol=1e-13, msg=name)
        else:
            assert relative(one_gradients[name], gradient) < 0.15, name


@pytest.mark.parametrize("reads_float8", usual([False, True], [True]))
def test_layers_in_one_accumulator_compile_as_one_graph(reads_float8, tmp_path, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(segmented, "fits", lambda *_: True)
    monkeypatch.setattr(low_rank, "fits", lambda *_: reads_float8)
    model = adapted_model(tmp_path, "fp8", "qwen3")
    fuse_layers(model)
    mlp = decoder_layers(model)[0].mlp
    x, direction = draw(11, 64).requires_grad_(), draw(11, 64, seed=5)
    inputs = [x, *(parameter for parameter in mlp.parameters() if parameter.requires_grad)]
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True, dynamic=True)
    for eager, traced in zip(
        *(torch.autograd.grad(call(x), inputs, direction) for call in (mlp, compiled)), strict=True
    ):
        torch.testing.assert_close(traced, eager, rtol=1e-10, atol=1e-12)


def test_its_flops_are_those_of_the_products_apart():
    """`recompute: budget` chooses by them."""
    register_ops()
    arguments = [draw(7, 48), draw(7, 16)], [draw(32, 48), draw(32, 16)], draw(7, 12), draw(32, 12)
    for columns, ranks in (([0], [0, 12]), ([0, 20], [0, 4, 12])):
        with FlopCounterMode(display=False) as counter:
            segmented_product(*arguments, first_columns=columns, first_ranks=ranks)
        low_rank = 32 * 12 if len(columns) == 1 else 20 * 4 + 12 * 8
        assert counter.get_flop_counts()["Global"][torch.ops.flatout.segmented_product] == 2 * 7 * (32 * 64 + low_rank)


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_outputs_may_be_modified_in_place(num_tokens, tmp_path, monkeypatch):
    """As OLMo clips queries and keys; the family has no biases, whose sum would be another tensor."""
    monkeypatch.setattr(segmented, "fits", lambda *_: True)
    model = adapted_model(tmp_path, "dense", "llama")
    fuse_layers(model)
    layer, x = decoder_layers(model)[0], draw(1, num_tokens, 64).requires_grad_()
    attention, down = layer.self_attn, layer.mlp.down_proj
    query, key, value = attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)
    single = down(draw(1, num_tokens, 96))
    kept, lowest = value.detach().clone(), single.detach().amin()
    # a saved value does not keep the queries in memory
    assert value.untyped_storage().nbytes() == value.nbytes
    query.clamp_(max=0), key.clamp_(max=0), single.clamp_(max=0)
    assert torch.equal(value, kept)
    assert query.max() <= 0
    assert single.max() <= 0
    assert single.amin() == lowest
    (gradient,) = torch.autograd.grad(query.sum() + value.sum(), x)
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0


def test_the_kernel_is_for_bf16_on_hopper_gpus(monkeypatch):
    layers = ([64, 32], 48, [8, 8])
    assert not segmented.fits(CPU, torch.bfloat16, *layers)
    monkeypatch.setattr(segmented, "capability", lambda _: HOPPER)
    assert segmented.fits(CPU, torch.bfloat16, *layers)
    assert not segmented.fits(CPU, torch.float32, *layers)
    for unfit in (([64, 24], 48, [8, 8]), ([64, 32], 40, [8, 8]), ([64, 32], 48, [8, 4]), ([16] * 4, 48, [8] * 4)):
        assert not segmented.fits(CPU, torch.bfloat16, *unfit)


def test_a_gpu_that_cannot_load_it_uses_torchs_products_and_says_so(tmp_path, monkeypatch):
    def load(*_, **__):
        raise OSError("libnvrtc.so.13 is not there\nand more")

    monkeypatch.setattr(segmented, "capability", lambda _: HOPPER)
    monkeypatch.setattr(segmented.hopper, "load", load)
    segmented.load_error.cache_clear()
    try:
        report = fuse_layers(adapted_model(tmp_path, "dense", precision="bf16")).report
    finally:
        segmented.load_error.cache_clear()
    expected = (
        "torch's products sum layers and adapters, as the kernel for one accumulator fails: libnvrtc.so.13 is not there"
    )
    assert report.endswith(f"(dense); {expected}")


def operands(num_rows, sizes, num_columns, rank, kind, seed=0):
    """Random parts (M, K_i) of very different sizes, weights, and a low-rank product, for the kernel; all on CUDA."""
    cuda = {"device": "cuda", "dtype": torch.bfloat16}
    generator = torch.Generator("cuda").manual_seed(seed)
    parts = [torch.randn(num_rows, k, generator=generator, **cuda) * 10.0**-i for i, k in enumerate(sizes)]
    whole = torch.randn(num_columns, sum(sizes), generator=generator, **cuda) * 0.02
    low, wide = (torch.randn(n, rank, generator=generator, **cuda) for n in (num_rows, num_columns))
    if kind == "bf16":
        return (parts, whole.split(sizes, dim=1), low, wide), {}
    if kind == "bf16 kn":
        return (parts, whole.T.contiguous().split(sizes), low, wide), {"weights_kn": True}
    (quantized, column_scale), rows = quantize_rows(whole), [quantize_rows(part) for part in parts]
    scales = {"row_scales": [scale[:, 0] for _, scale in rows], "column_scale": column_scale[:, 0].contiguous()}
    return ([part for part, _ in rows], quantized.split(sizes, dim=1), low, wide), scales


def exact(arguments, options):
    (parts, weights, low, wide) = arguments
    scales, columns = options.get("row_scales", []), options.get("column_scale")
    weights_kn = options.get("weights_kn", False)
    blocks = [0], [0, wide.shape[1]]
    own = Segments(parts, weights, scales, columns, low.double(), wide.double(), *blocks, weights_kn)
    return reference.segmented_product(own)[0]


@pytest.mark.parametrize(
    "shape",
    [(1, [64], 48, 8), (700, [512, 128, 144], 4096, 24), (4099, [3072, 1024], 1040, 64), (16384, [4096], 512, 16),
     (9000, [16], 16 * 77, 200)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=on_gpu) for kind in ("fp8", "bf16", "bf16 kn")])
def test_the_kernel_equals_the_reference(kind, shape):
    register_ops()
    arguments, options = operands(*shape, kind)
    found, truth = segmented_product(*arguments, **options)[0].double(), exact(arguments, options)
    # bf16 output, and the fast accumulator's 14 bits
    assert relative(found, truth) < 4e-3
    assert float(((found - truth).norm(dim=1) / truth.norm(dim=1)).max()) < 2e-2


@pytest.mark.parametrize(
    "ranks", [pytest.param(ranks, marks=on_gpu) for ranks in ([16, 16, 16], [4, 20, 8], [64, 8, 96])]
)
def test_each_adapter_has_its_own_columns(ranks):
    register_ops()
    sizes = [1200, 304, 2016]
    arguments, options = operands(5000, [1024], sum(sizes), sum(ranks), "fp8")
    wide = torch.block_diag(*(torch.randn(n, r, device="cuda") for n, r in zip(sizes, ranks, strict=True))).bfloat16()
    arguments = (*arguments[:3], wide)
    first_columns, first_ranks = [0, 1200, 1504], [0, ranks[0], ranks[0] + ranks[1], sum(ranks)]
    found = segmented_product(*arguments, **options, first_columns=first_columns, first_ranks=first_ranks)
    truth = exact(arguments, options)
    for mine, theirs in zip(found, truth.split(sizes, dim=1), strict=True):
        assert mine.is_contiguous()
        assert relative(mine.double(), theirs) < 4e-3


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_the_kernel_is_deterministic_and_can_be_recorded(device):
    register_ops()
    arguments, options = operands(4096, [1024, 1024], 4096, 16, "fp8")
    (first,) = segmented_product(*arguments, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (recorded,) = segmented_product(*arguments, **options)
    for _ in range(20):
        recorded.zero_()
        graph.replay()
        assert torch.equal(recorded, first)


def fused_group(base, device):
    """Three layers of one input, fused, in bf16 on a device; the same numbers on every device."""
    sizes, members = (512, 144, 80), []
    for index, size in enumerate(sizes):
        linear = nn.Linear(1024, size, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        linear.weight.copy_(draw(size, 1024, seed=index) * 0.02)
        lora = LoraConfig(rank=8 * (1 + index % 2), alpha=16 * (1 + index % 2))
        made = Fp8BackwardLinear(linear) if base == "fp8 backward" else BASES[base](linear)
        members.append(LoraLinear(made, lora, torch.Generator().manual_seed(index)).to(device))
        members[-1].lora_b.data.copy_(draw(*members[-1].lora_b.shape, seed=10 + index) * 0.1)
    group = FusedLora(members, fp8=base == "nf4")
    FusedLayers([group]).refresh()
    return group


def results_of(group, device):
    """Outputs, input gradient and gradients of all adapters."""
    x = draw(4000, 1024, seed=20).bfloat16().to(device).requires_grad_()
    outputs = [member(x) for member in group.members]
    directions = [draw(*output.shape, seed=30 + index).to(output) for index, output in enumerate(outputs)]
    masters = [matrix for member in group.members for matrix in (member.lora_a, member.lora_b)]
    found = [*outputs, *torch.autograd.grad(outputs, [x, *masters], directions)]
    return [own.detach().double().cpu() for own in found]


@pytest.mark.parametrize("reads_float8", [False, True])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("base", BASES)
def test_layers_on_a_hopper_gpu_equal_the_reference(base, device, reads_float8, tmp_path, monkeypatch):
    """The reference runs on a CPU, and rounds to bf16 and float8 in the same places."""
    if not reads_float8:
        monkeypatch.setattr(low_rank, "fits", lambda *_: False)
    group = fused_group(base, device)
    assert group.product.one_accumulator
    assert (group.b_terms is not None) == (reads_float8 and base != "dense")
    assert (group.a_terms is not None) == (reads_float8 and base in ("fp8", "nf4"))
    found = results_of(group, device)
    for module in (segmented, low_rank):
        monkeypatch.setattr(module, "fits", lambda *_, fits=module is segmented or reads_float8: fits)
    monkeypatch.setattr(segmented, "load_error", lambda *_, **__: None)
    for mine, truth in zip(found, results_of(fused_group(base, CPU), CPU), strict=True):
        assert mine.shape == truth.shape
        assert relative(mine, truth) < 1e-2
