"""Packed attention, form by form, against the truth written out with one mask: values and gradients."""

import itertools

import pytest
import torch
from tiny_models import tiny_model

from flatout.kernels.attention.flash import make_varlen_attention
from flatout.kernels.attention.reference import packed_attention, plain_attention, sdpa_attention

LENGTHS = [1, 13, 2, 7, 1]


def boundaries(lengths, device="cpu"):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def inputs(dtype=torch.float64, device="cpu", heads=4, kv_heads=2, size=8, lengths=LENGTHS, value_size=None):
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), heads, size), (sum(lengths), kv_heads, size), (sum(lengths), kv_heads, value_size or size)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(device, dtype).requires_grad_(True) for tensor in tensors]


def both(form, truth, tensors, tolerance=1e-12):
    """Outputs and all gradients of two forms, with one random gradient coming in."""
    ours, true = form(*tensors), truth(*tensors)
    torch.testing.assert_close(ours, true, atol=tolerance, rtol=tolerance)
    incoming = torch.randn(true.shape, dtype=true.dtype, generator=torch.Generator().manual_seed(1))
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    for mine, exact in zip(
        torch.autograd.grad(ours, leaves, incoming), torch.autograd.grad(true, leaves, incoming), strict=True
    ):
        torch.testing.assert_close(mine, exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 1, 4, 13, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("form", [sdpa_attention, plain_attention])
@pytest.mark.parametrize(("with_sinks", "value_size"), [(False, 8), (True, 8), (True, 6)])
def test_form_equals_truth(form, heads, kv_heads, window, with_sinks, value_size):
    cu_seqlens = boundaries(LENGTHS)
    arguments = {"scale": 0.3, "window": window}
    sinks = torch.linspace(-3, 8, heads, dtype=torch.float64, requires_grad=True) if with_sinks else None
    both(
        lambda *t: form(*t[:3], cu_seqlens, sinks=sinks, **arguments),
        lambda *t: packed_attention(*t[:3], cu_seqlens, sinks=sinks, **arguments),
        [*inputs(heads=heads, kv_heads=kv_heads, value_size=value_size), *([sinks] if with_sinks else [])],
    )


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_plain_softcap_and_sinks(softcap, with_sinks):
    cu_seqlens = boundaries(LENGTHS)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True) if with_sinks else None
    tensors = inputs(value_size=6)
    arguments = {"scale": 0.3, "window": 4, "softcap": softcap, "sinks": sinks}
    both(
        lambda *t: plain_attention(*t[:3], cu_seqlens, **arguments),
        lambda *t: packed_attention(*t[:3], cu_seqlens, **arguments),
        tensors if sinks is None else [*tensors, sinks],
    )


def test_truth_by_hand():
    """Two documents of two tokens, one head: a first token returns its own value, a second a known mixture."""
    query = key = torch.tensor([1.0, 2.0, 1.0, 2.0], dtype=torch.float64).view(4, 1, 1)
    value = torch.tensor([1.0, 3.0, 5.0, 9.0], dtype=torch.float64).view(4, 1, 1)
    output = packed_attention(query, key, value, boundaries([2, 2]), scale=1.0).flatten()
    share = torch.sigmoid(torch.tensor(2.0, dtype=torch.float64))  # scores 2*1 and 2*2 differ by 2
    expected = torch.stack([value[0, 0, 0], 1 + 2 * share, value[2, 0, 0], 5 + 4 * share])
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("form", [sdpa_attention, plain_attention])
def test_strided_inputs_and_extreme_scores(form):
    cu_seqlens = boundaries(LENGTHS)
    query, key, value = (
        torch.randn(4 if i == 0 else 2, 24, 16, dtype=torch.float64)[:, :, ::2].transpose(0, 1) for i in range(3)
    )
    query = query * 1e4
    ours = form(query, key, value, cu_seqlens, scale=1.0)
    assert bool(ours.isfinite().all())
    torch.testing.assert_close(ours, packed_attention(query, key, value, cu_seqlens, scale=1.0))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 2, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (64, 8)])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_varlen_errs_no_more_than_plain(window, heads, kv_heads, heads_first, with_sinks, compiled):
    """Rule K: at most 2x (values) and 3x (gradients) the plain form's own bf16 error against fp64."""
    lengths = [1, 130, 2, 300, 1]
    cu_seqlens = boundaries(lengths, "cuda")
    exact = inputs(torch.float64, "cuda", heads=heads, kv_heads=kv_heads, size=64, lengths=lengths)
    if with_sinks:
        exact.append(torch.linspace(-2, 4, heads, dtype=torch.float64, device="cuda"))
    rounded = [tensor.detach().to(torch.bfloat16) for tensor in exact]
    if heads_first:
        rounded[:3] = [tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in rounded[:3]]
    rounded = [tensor.requires_grad_(True) for tensor in rounded]
    exact = [tensor.detach().double().requires_grad_(True) for tensor in rounded]
    varlen = make_varlen_attention()
    if compiled:
        # each case would be one more graph of the same function
        torch._dynamo.reset()
        varlen = torch.compile(varlen, fullgraph=True, dynamic=True)

    def with_settings(form, tensors, *documents):
        return form(*tensors[:3], *documents, scale=0.125, window=window, sinks=tensors[3] if with_sinks else None)

    true = with_settings(packed_attention, exact, cu_seqlens)
    outputs = [
        with_settings(varlen, rounded, cu_seqlens, max(lengths)),
        with_settings(plain_attention, rounded, cu_seqlens),
    ]
    incoming = torch.randn(true.shape, generator=torch.Generator().manual_seed(1)).to(true.device, torch.bfloat16)
    gradients = [torch.autograd.grad(output, rounded, incoming) for output in outputs]
    true_gradients = torch.autograd.grad(true, exact, incoming.double())

    def error(mine, truth):
        return float((mine.double() - truth).norm().detach())

    assert error(outputs[0], true) <= 2 * error(outputs[1], true)
    for mine, plain, truth in zip(*gradients, true_gradients, strict=True):
        # few values, as of sinks, may all round well in the plain form
        rounding = torch.finfo(torch.bfloat16).eps / 2 * float(truth.norm())
        assert error(mine, truth) <= 3 * error(plain, truth) + (rounding if len(truth) <= 64 and truth.ndim == 1 else 0)


def test_a_window_counts_beside_sinks():
    """Through the registered entry, as gpt-oss calls it: each document is longer than the window."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}
    packed, alone = (tiny_model("gpt_oss", attention=form, **sizes) for form in ("flatout_plain", "eager"))
    documents = [torch.arange(3, 14), torch.arange(20, 29)]
    bounds = torch.tensor([0, 11, 20], dtype=torch.int32)
    logits = packed(
        input_ids=torch.cat(documents)[None], position_ids=torch.cat([torch.arange(11), torch.arange(9)])[None],
        use_cache=False, cu_seq_lens_q=bounds, max_length_q=11,
    ).logits[0]  # fmt: skip
    for own, document in zip(logits.split([11, 9]), documents, strict=True):
        truth = alone(input_ids=document[None], use_cache=False).logits[0]
        # transformers' eager attention takes its softmax in float32
        torch.testing.assert_close(own, truth, atol=1e-5, rtol=1e-5)
