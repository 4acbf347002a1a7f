"""Prefixes that samples share are computed once: loss and all gradients equal those of samples packed on their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_attention_flash import plain_passes
from test_attention_forms import boundaries, inputs
from test_models_packed import relative
from tiny_models import VOCAB_SIZE, tiny_model, use_rotary_table
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from usual import usual

from flatout.kernels.attention.flash import make_varlen_attention, packed_operator
from flatout.kernels.attention.reference import plain_attention, sdpa_attention
from flatout.kernels.attention.shared_prefix import SharedPrefixes
from flatout.models.attention import registered_name
from flatout.models.blocks import replace_module
from flatout.models.model_with_loss import ModelWithLoss, packed_cross_entropy
from flatout.models.packed import PackedBatch, flatten_samples, segment_lengths

# tokens of a prefix, and of what follows in each of its samples; 0: no prefix
GROUPS = {
    "one": [(8, [5, 3, 11])],
    "two": [(8, [5, 3, 11]), (5, [2, 7]), (0, [6])],
    "pairs": [(1, [2, 2]), (30, [1, 40])],
    "none": [(0, [6]), (0, [9])],
}
# a window that no sample reaches does not act
WIDE = {"sliding_window": 4096}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "phi3": {},
    "gpt_neox": {},
    "gemma2": WIDE,
    "gemma3_text": WIDE,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **WIDE},
    "qwen3_moe": {},
}
# gemma2 soft-caps its scores, which only the plain form does
CASES = [(model, form) for model in MODELS for form in ("plain", "sdpa") if (model, form) != ("gemma2", "sdpa")]


def samples_of(groups: list[tuple[int, list[int]]]) -> tuple[list[Any], list[tuple[int, int]]]:
    """Samples whose labels start after the first token that follows a prefix, and the prefixes."""
    random, samples, shared = np.random.default_rng(0), [], []
    for num_tokens, rests in groups:
        prefix = random.integers(3, VOCAB_SIZE, num_tokens)
        for rest in rests:
            loss_mask = np.zeros(num_tokens + rest, bool)
            loss_mask[num_tokens + 1 :] = random.random(rest - 1) < 0.7
            samples.append((np.concatenate([prefix, random.integers(3, VOCAB_SIZE, rest)]), loss_mask))
        shared += [(num_tokens, len(rests))] if num_tokens else []
    return samples, shared


class ExactNorm(nn.Module):
    """An RMSNorm in its input's dtype: transformers' own computes in float32, and its gradients are rounded to that."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.added = norm.weight, float("Gemma" in type(norm).__name__)
        self.eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (self.added + self.weight)


def exact_model(family: str, dtype: torch.dtype, form: Any, **changes: Any) -> Any:
    model = use_rotary_table(tiny_model(family, dtype, registered_name(form), **changes))
    for name, module in list(model.named_modules()):
        if "RMSNorm" in type(module).__name__:
            replace_module(model, name, ExactNorm(module))
    return model


def gradients_of(model: Any, batch: PackedBatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    sums = packed_cross_entropy(model, batch, tile_rows=5)
    trained = list(model.parameters())
    found = torch.autograd.grad(sums.loss_sum, trained, allow_unused=True)
    return sums.loss_sum.detach(), [torch.zeros(1) if grad is None else grad for grad in found]


@pytest.mark.parametrize("dtype", usual([torch.float64, torch.float32], [torch.float64]), ids=["fp64", "fp32"])
@pytest.mark.parametrize("groups", usual(GROUPS, ["two", "none"]))
@pytest.mark.parametrize(("family", "form"), CASES)
def test_shared_equals_unshared(family, form, groups, dtype):
    model = exact_model(family, dtype, form, **MODELS[family])
    samples, shared = samples_of(GROUPS[groups])
    apart, together = flatten_samples(samples), flatten_samples(samples, shared=shared, fill_tokens=100)
    assert torch.equal(apart.label_ids, together.label_ids)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    (true_loss, truth), (loss, found) = (gradients_of(model, batch) for batch in (apart, together))
    assert relative(loss, true_loss) < tolerance
    for (name, _), mine, true in zip(model.named_parameters(), found, truth, strict=True):
        # these route in float32 whatever the dtype
        loose = family in ("gpt_oss", "qwen3_moe") and dtype == torch.float64
        assert relative(mine, true) < (1e-5 if loose else tolerance * (1 if dtype.itemsize == 8 else 20)), name


def test_each_shared_token_counts_once_for_every_sample():
    """Losses on routers weigh a token by the samples that have it: the same gradients and the same counts."""
    from flatout.config.model import ExpertsConfig
    from flatout.models.auxiliary_loss import StepFacts
    from flatout.models.experts.router import Routers

    model = exact_model("qwen3_moe", torch.float64, "plain").train()
    samples, shared = samples_of(GROUPS["two"])
    outcomes = []
    for batch in (flatten_samples(samples), flatten_samples(samples, shared=shared, fill_tokens=100)):
        loss = ModelWithLoss(model)
        loss.aux_loss = Routers(model, ExpertsConfig(balance_loss=0.1, z_loss=0.1))
        num_tokens = sum(len(ids) for ids, _ in samples)
        loss.aux_loss.start_step(StepFacts(0, num_tokens, 3.0, model.device, lambda values: values))
        found = torch.autograd.grad(loss(batch)[0], list(model.parameters()))
        outcomes.append((found, loss.aux_loss.sums))
    (truth, true_sums), (found, sums) = outcomes
    assert relative(sums, true_sums) < 1e-12
    assert torch.equal(sums[2:], true_sums[2:])
    # transformers' routers compute in float32
    assert all(relative(mine, true) < 1e-6 for mine, true in zip(found, truth, strict=True))


def shared_documents(device: str = "cpu", padded: int | None = None) -> tuple[list[int], SharedPrefixes]:
    """Lengths of the documents of a stream with two prefixes, a sample alone and a tail; and where the prefixes are."""
    samples, shared = samples_of([(70, [5, 130, 11]), (129, [2, 70]), (0, [60])])
    batch = flatten_samples(samples, shared=shared, fill_tokens=512, num_shared_boundaries=padded)
    lengths = segment_lengths([len(ids) for ids, _ in samples], shared)
    assert batch.shared is not None
    prefixes, suffixes, sizes = batch.shared
    return [*lengths, 512 - sum(lengths)], SharedPrefixes(prefixes.to(device), suffixes.to(device), sizes)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1)])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("padded", [None, 9])
def test_parts_merge_by_their_log_sum_exps(heads, kv_heads, by_token, with_sinks, padded):
    """Through the operator in fp64, with kernels that know neither prefixes nor sinks."""
    lengths, shared = shared_documents(padded=padded)
    form = packed_operator("flatout_tests::shared", *plain_passes(by_token), log_sums_by_token=by_token)
    sinks = torch.linspace(-3, 8, heads, dtype=torch.float64, requires_grad=True) if with_sinks else None
    tensors = inputs(heads=heads, kv_heads=kv_heads, lengths=lengths)
    leaves, options = [*tensors, *([sinks] if sinks is not None else [])], {"scale": 0.3, "sinks": sinks}
    cu_seqlens = boundaries(lengths)
    incoming = torch.randn(tensors[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    outcomes = []
    for output in (
        form(*tensors, cu_seqlens, 512, shared=shared, **options),
        plain_attention(*tensors, cu_seqlens, shared=shared, **options),
        sdpa_attention(*tensors, cu_seqlens, shared=shared, **options),
    ):
        outcomes.append((output, *torch.autograd.grad(output, leaves, incoming)))
    for other in outcomes[1:]:
        for mine, true in zip(outcomes[0], other, strict=True):
            torch.testing.assert_close(mine, true, atol=1e-12, rtol=1e-12)


def test_one_compiled_graph_serves_batches_with_and_without_prefixes():
    form = packed_operator("flatout_tests::shared_compiled", *plain_passes(False))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def layer(q: Any, k: Any, v: Any, cu_seqlens: Any, max_seqlen: int, *shared: Any) -> Any:
        return form(q * 2, k, v, cu_seqlens, max_seqlen, scale=0.3, shared=SharedPrefixes(*shared)) + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    lengths, shared = shared_documents(padded=9)
    empty = flatten_samples(samples_of(GROUPS["none"])[0], num_shared_boundaries=9).shared
    assert empty is not None
    for sizes, prefixes in ((lengths, shared), ([6, 9], empty), (lengths, shared)):
        cu_seqlens = torch.nn.functional.pad(boundaries(sizes), (0, 12 - len(sizes)), value=sum(sizes))
        tensors = inputs(lengths=sizes)
        output = compiled(*tensors, cu_seqlens, max(sizes), *prefixes)
        truth = plain_attention(tensors[0] * 2, *tensors[1:], cu_seqlens, scale=0.3, shared=prefixes) + 1
        for mine, true in zip(
            torch.autograd.grad(output.sum(), tensors), torch.autograd.grad(truth.sum(), tensors), strict=True
        ):
            torch.testing.assert_close(mine, true, atol=1e-12, rtol=1e-12)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids, mask: (np.where(np.arange(len(ids)) == 7, 1, ids), mask), "do not share 8 tokens"),
        (lambda ids, mask: (ids[:8], mask[:8]), "do not share 8 tokens"),
        (lambda ids, mask: (ids, np.where(np.arange(len(ids)) == 8, True, mask)), "have labels in 8 shared tokens"),
    ],
)
def test_a_prefix_that_would_be_wrong_is_refused(change, message):
    samples, shared = samples_of(GROUPS["one"])
    samples[1] = change(*samples[1])
    with pytest.raises(ValueError, match=message):
        flatten_samples(samples, shared=shared)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["varlen", "cudnn", "fa4"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (32, 8)])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_kernels_err_no_more_than_plain(name, heads, kv_heads, with_sinks, compiled):
    """Rule K: at most 2x (values) and 3x (gradients) the plain form's own bf16 error against fp64."""
    from flatout.kernels.attention.cudnn import cudnn_problem
    from flatout.kernels.attention.flash import flash_problem
    from flatout.models.attention import _make_package

    device = torch.device("cuda", 0)
    if name != "varlen" and (problem := cudnn_problem(device) if name == "cudnn" else flash_problem(device)):
        pytest.skip(problem)
    lengths, shared = shared_documents("cuda", padded=9)
    cu_seqlens = boundaries(lengths, "cuda")
    exact = inputs(torch.float64, "cuda", heads=heads, kv_heads=kv_heads, size=128, lengths=lengths)
    if with_sinks:
        exact.append(torch.linspace(-2, 4, heads, dtype=torch.float64, device="cuda"))
    rounded = [tensor.detach().to(torch.bfloat16).requires_grad_(True) for tensor in exact]
    exact = [tensor.detach().double().requires_grad_(True) for tensor in rounded]
    form = make_varlen_attention() if name == "varlen" else _make_package(name)
    if compiled:
        torch._dynamo.reset()
        form = torch.compile(form, fullgraph=True, dynamic=True)

    def run(form: Any, tensors: Any, *documents: Any) -> Any:
        sinks = tensors[3] if with_sinks else None
        return form(*tensors[:3], *documents, scale=0.09, sinks=sinks, shared=shared)

    def squared_error(mine: Any, truth: Any) -> float:
        return float((mine.double() - truth).detach().square().sum())

    # over several incoming gradients: that of the sinks has four numbers, whose rounding is chance
    errors = torch.zeros(2, 1 + len(rounded))
    for seed in range(8):
        outputs = [run(form, rounded, cu_seqlens, 512), run(plain_attention, rounded, cu_seqlens)]
        true = run(plain_attention, exact, cu_seqlens)
        incoming = torch.randn(true.shape, generator=torch.Generator().manual_seed(seed)).to(rounded[0])
        truths = [true, *torch.autograd.grad(true, exact, incoming.double())]
        for row, output in zip(errors, outputs, strict=True):
            found = [output, *torch.autograd.grad(output, rounded, incoming)]
            row += torch.tensor([squared_error(*pair) for pair in zip(found, truths, strict=True)])
    mine, plain = errors.sqrt()
    assert mine[0] <= 2 * plain[0]
    assert (mine[1:] <= 3 * plain[1:]).all(), (mine, plain)


@pytest.mark.gpu
def test_a_model_in_bf16_on_the_gpu_is_as_close_shared_as_unshared():
    """Whole models with the kernels: the shared batch's error against fp64 is at most twice the unshared batch's."""
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}
    exact = tiny_model("qwen3", torch.float64, "flatout_plain", **sizes).cuda()
    model = tiny_model("qwen3", torch.bfloat16, "flatout_varlen", **sizes).cuda()
    exact.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()})
    samples, shared = samples_of([(100, [5, 20, 11]), (70, [20, 7]), (0, [60])])
    batches = [flatten_samples(samples), flatten_samples(samples, shared=shared, num_shared_boundaries=9)]
    apart, together = (replace(batch.to(model.device), max_seqlen=256) for batch in batches)
    _, truth = gradients_of(exact, apart)
    _, unshared = gradients_of(model, apart)
    _, found = gradients_of(model, together)

    def error(gradients: list[torch.Tensor]) -> float:
        pairs = zip(gradients, truth, strict=True)
        return sum(float((mine.double() - true).square().sum()) for mine, true in pairs) ** 0.5

    assert error(found) <= 2 * error(unshared)
