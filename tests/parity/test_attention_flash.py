"""FlashAttention-4 behind our operator: a package of the same calls, made of plain torch, stands in on the CPU."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from test_attention_forms import both, boundaries, inputs
from tiny_models import tiny_config

from flatout.errors import UsageError
from flatout.kernels.attention.flash import (
    flash_disagreement,
    make_flash_attention,
    make_varlen_attention,
    packed_operator,
)
from flatout.kernels.attention.reference import document_mask, packed_attention, plain_attention
from flatout.models import attention as models_attention
from flatout.models.attention import choose_attention, registered_name

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
LENGTHS = [1, 13, 2, 7, 1]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def scores_of(q: Any, k: Any, cu_seqlens: Any, scale: float, left: int | None) -> Any:
    window = None if left is None or left < 0 else left + 1
    q, k = (tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in (q, k))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    return scores.masked_fill(~document_mask(cu_seqlens, len(q), window), float("-inf"))


def forward(q: Any, k: Any, v: Any, cu_seqlens: Any, scale: float, left: int | None) -> Any:
    scores = scores_of(q, k, cu_seqlens, scale, left)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    # a layout of its own, as a kernel may have
    output = torch.einsum("hts,shd->htd", scores.softmax(-1).to(v.dtype), v).transpose(0, 1)
    return output, scores.logsumexp(-1)


def backward(
    output_grad: Any, q: Any, k: Any, v: Any, output: Any, log_sums: Any, cu_seqlens: Any, scale: float, left: Any
) -> Any:
    """The gradient by the formula of the FlashAttention papers, from the saved output and log-sum-exp."""
    groups = q.shape[1] // k.shape[1]
    weights = (scores_of(q, k, cu_seqlens, scale, left) - log_sums[..., None]).exp().to(q.dtype)
    wide_k, wide_v = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
    weight_grad = torch.einsum("thd,shd->hts", output_grad, wide_v)
    score_grad = weights * (weight_grad - (output_grad * output).sum(-1).T[..., None]) * scale
    grads = [
        torch.einsum("hts,shd->thd", score_grad, wide_k),
        torch.einsum("hts,thd->shd", score_grad, q),
        torch.einsum("hts,thd->shd", weights, output_grad),
    ]
    return [grads[0], *(grad.unflatten(1, (-1, groups)).sum(2) for grad in grads[1:])]


def plain_passes(by_token: bool) -> tuple[Any, Any]:
    """Both passes of a kernel in the inputs' dtype; its log-sum-exps are (T, H) or (H, T)."""

    def kernel(q: Any, k: Any, v: Any, cu_seqlens: Any, _: int, *rest: Any) -> Any:
        output, log_sums = forward(q, k, v, cu_seqlens, *rest)
        return output, log_sums.T if by_token else log_sums

    def kernel_backward(*arguments: Any) -> Any:
        *tensors, log_sums, cu_seqlens, _, scale, left = arguments
        return tuple(backward(*tensors, log_sums.T if by_token else log_sums, cu_seqlens, scale, left))

    return kernel, kernel_backward


def fa4_package(wrong: float = 0.0) -> ModuleType:
    """The calls of flash_attn.cute.interface."""
    module: Any = ModuleType("flash_attn.cute.interface")

    def check(settings: dict[str, Any]) -> tuple[Any, float, Any]:
        assert settings["causal"] is True
        assert settings["window_size_right"] == 0
        assert settings["cu_seqlens_q"] is settings["cu_seqlens_k"]
        assert settings["max_seqlen_q"] == settings["max_seqlen_k"] >= 256
        return settings["cu_seqlens_q"], settings["softmax_scale"], settings["window_size_left"]

    def _flash_attn_fwd(q: Any, k: Any, v: Any, *, return_lse: bool, **settings: Any) -> Any:
        assert return_lse
        output, log_sums = forward(q, k, v, *check(settings))
        return output + wrong, log_sums, None, None, None

    def _flash_attn_bwd(
        q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, *, deterministic: bool, **settings: Any
    ) -> Any:
        return tuple(backward(dout, q, k, v, out, lse, *check(settings)))

    module._flash_attn_fwd, module._flash_attn_bwd = _flash_attn_fwd, _flash_attn_bwd
    return module


@pytest.fixture
def install(monkeypatch):
    """Put stand-ins in the packages' places; they are there, and the device is one they serve."""

    def put(*names: str, wrong: float = 0.0) -> None:
        make_flash_attention.cache_clear()
        monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", fa4_package(wrong))
        no_flash = None if "fa4" in names else "fa4 is not installed"
        monkeypatch.setattr(models_attention, "flash_problem", lambda _: no_flash)
        missing = None if "cudnn" in names else "cudnn is not installed"
        monkeypatch.setattr(models_attention, "cudnn_problem", lambda _: missing)
        monkeypatch.setattr(models_attention, "make_cudnn_attention", lambda: plain_varlen)
        # the proof and its rival then run on the CPU
        monkeypatch.setattr(models_attention, "varlen_problem", lambda *_: None)
        monkeypatch.setattr(models_attention, "make_varlen_attention", lambda: plain_varlen)

    yield put
    make_flash_attention.cache_clear()


def plain_varlen(q: Any, k: Any, v: Any, cu_seqlens: Any, _: int, **settings: Any) -> Any:
    return plain_attention(q, k, v, cu_seqlens, **settings)


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_the_operator_equals_the_truth(install, heads, kv_heads, window):
    install("fa4")
    form, cu_seqlens = make_flash_attention(), boundaries(LENGTHS)
    both(
        lambda *t: form(*t, cu_seqlens, 16, scale=0.3, window=window),
        lambda *t: packed_attention(*t, cu_seqlens, scale=0.3, window=window),
        inputs(heads=heads, kv_heads=kv_heads),
    )


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("trained", [True, False])
def test_sinks_enter_by_the_log_sum_exp(heads, kv_heads, window, by_token, trained):
    """In fp64, through a kernel that knows no sinks; frozen ones get no gradient."""
    form = packed_operator("flatout_tests::sinks", *plain_passes(by_token), log_sums_by_token=by_token)
    cu_seqlens, settings = boundaries(LENGTHS), {"scale": 0.3, "window": window}
    # from one that takes nearly nothing to one that takes nearly all
    sinks = torch.tensor([-30.0, -1.0, 2.0, 40.0][:heads], dtype=torch.float64, requires_grad=trained)
    both(
        lambda *t: form(*t[:3], cu_seqlens, 16, sinks=t[3], **settings),
        lambda *t: packed_attention(*t[:3], cu_seqlens, sinks=t[3], **settings),
        [*inputs(heads=heads, kv_heads=kv_heads), sinks],
    )


@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_operator_is_sound_for_the_compiler(install, with_sinks):
    """Fake shapes, strides and dtypes are those of the real ones, also for inputs in a layout of their own."""
    install("fa4")
    make_flash_attention()
    query, key, value = (tensor.detach() for tensor in inputs(torch.float32))
    query = query.transpose(0, 1).contiguous().transpose(0, 1)
    sinks = torch.randn(4) if with_sinks else None
    arguments = (query, key, value, boundaries(LENGTHS), 16, 0.3, None, sinks, None, None, None)
    operator, operator_backward = (getattr(torch.ops.flatout, f"fa4{pass_}") for pass_ in ("", "_backward"))
    torch.library.opcheck(operator.default, arguments)
    output, log_sums = operator(*arguments)
    saved = (query, key, value, output, log_sums, *arguments[3:7])
    torch.library.opcheck(operator_backward.default, (query, *saved, None, None, None))


def test_a_compiled_layer_holds_it_for_any_number_of_tokens(install):
    install("fa4")
    form = make_flash_attention()
    torch._dynamo.reset()

    def layer(q: Any, k: Any, v: Any, sinks: Any, cu_seqlens: Any, max_seqlen: int) -> Any:
        return form(q * 2, k, v, cu_seqlens, max_seqlen, scale=0.3, sinks=sinks) + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in (LENGTHS, [5, 9, 30, 1, 1]):
        cu_seqlens = boundaries(lengths)
        both(
            lambda *t, c=cu_seqlens, n=lengths: compiled(*t, c, max(n)),
            lambda *t, c=cu_seqlens: packed_attention(t[0] * 2, *t[1:3], c, scale=0.3, sinks=t[3]) + 1,
            [*inputs(lengths=lengths), torch.arange(4.0, dtype=torch.float64, requires_grad=True)],
        )


def choose(wanted: Any = "auto", **fields: Any) -> Any:
    shape = {"hidden_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, **fields}
    return choose_attention(wanted, tiny_config("mistral", **shape), device=CPU, dtype=torch.bfloat16)


def test_the_fastest_that_is_there_and_proves_exact_is_taken(install):
    install("fa4")
    assert choose().implementation == "fa4"
    assert registered_name(choose().implementation) == "flatout_fa4"
    assert choose("varlen").implementation == "varlen"


def test_one_that_is_missing_or_wrong_is_passed_over_with_the_reason(install):
    install("cudnn")
    assert (choose().implementation, choose(hidden_size=1024).implementation) == ("cudnn", "cudnn")
    assert "fa4 is not installed" in choose().reason
    install("fa4", wrong=0.1)
    choice = choose()
    assert choice.implementation == "varlen"
    assert "fa4 fails its check: its values have" in choice.reason
    with pytest.raises(UsageError, match=r"model\.attention: fa4 .*fa4 fails its check"):
        choose("fa4")


def test_a_disagreement_names_what_errs():
    def shifted(*tensors: Any, **settings: Any) -> Any:
        return plain_varlen(*tensors, **settings) + 0.1

    def nan_gradient(q: Any, k: Any, *rest: Any, **settings: Any) -> Any:
        return plain_varlen(q, k + 0 * (k - k.detach()).sqrt(), *rest, **settings)

    def without_window(*tensors: Any, window: Any, **settings: Any) -> Any:
        return plain_varlen(*tensors, window=None, **settings)

    def without_sinks(*tensors: Any, sinks: Any = None, **settings: Any) -> Any:
        return plain_varlen(*tensors, **settings) + (0 if sinks is None else 0 * sinks.sum())

    def of_one_layout(q: Any, *rest: Any, **settings: Any) -> Any:
        return plain_varlen(q, *rest, **settings) + (0.0 if q.is_contiguous() else 0.1)

    def judge(form: Any, window: int | None = 5) -> Any:
        settings = {"heads": (4, 2, 16), "window": window, "device": CPU, "dtype": torch.bfloat16}
        return flash_disagreement(form, plain_varlen, **settings)

    assert judge(plain_varlen) is None
    assert "values" in judge(shifted)
    assert "values" in judge(of_one_layout)
    assert "key gradients" in judge(nan_gradient)
    assert "values" in judge(without_window)
    assert judge(without_window, window=None) is None
    assert "values" in judge(without_sinks)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("heads", [(16, 8, 128), (32, 8, 128), (8, 8, 64), (64, 8, 64), (4, 1, 256)])
@pytest.mark.parametrize("name", ["fa4", "cudnn"])
def test_the_real_package_is_as_exact_as_torchs_kernel(name, heads, window):
    if problem := models_attention.cudnn_problem(CUDA) if name == "cudnn" else models_attention.flash_problem(CUDA):
        pytest.skip(problem)
    form, settings = models_attention._make_package(name), {"heads": heads, "window": window, "dtype": torch.bfloat16}
    assert flash_disagreement(form, make_varlen_attention(), device=CUDA, **settings) is None
    compiled = torch.compile(lambda *t, **k: form(*t, **k), fullgraph=True, dynamic=True)
    assert flash_disagreement(compiled, make_varlen_attention(), device=CUDA, **settings) is None
