"""Packed attention for any transformers model, through its public extension point: documents never see each other."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

import torch
from torch import nn

from flatout.errors import UsageError
from flatout.kernels.attention import (
    FlashName,
    cudnn_problem,
    flash_disagreement,
    flash_problem,
    make_cudnn_attention,
    make_flash_attention,
    make_varlen_attention,
    plain_attention,
    prepare_cudnn_attention,
    sdpa_attention,
    varlen_problem,
)
from flatout.models.families import Family

# from the fastest to the truth
Implementation = Literal["fa4", "fa3", "cudnn", "varlen", "sdpa", "plain"]
PackageName = FlashName | Literal["cudnn"]
# they read the documents' borders on the device, so a compiled layer can hold them
KERNELS: tuple[Implementation, ...] = ("fa4", "fa3", "cudnn", "varlen")
PREFIX = "flatout_"
# FA3 and FA4 take 60 to 110 us more of the host a call, which smaller models cannot hide
MIN_FLASH_HIDDEN_SIZE = 2048


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The implementation a model gets and why."""

    implementation: Implementation
    reason: str

    @property
    def registered_name(self) -> str:
        """The name transformers knows it by (`attn_implementation`)."""
        return PREFIX + self.implementation


def choose_attention(
    wanted: Literal["auto"] | Implementation,
    config: Any,
    family: Family,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> AttentionChoice:
    """Decide once, from the model's config, which packed attention it gets: with auto the fastest that can serve it.

    fa4, fa3 and cudnn must first prove as exact as varlen on the device, with the model's heads and window; auto takes
    the first two for models from MIN_FLASH_HIDDEN_SIZE on. Soft-capped scores and attention sinks exist only in the
    plain form. Raises UsageError when a form was asked for by name and cannot serve this model.
    """
    if wanted != "auto":
        problem = None if wanted == "plain" else _problem(wanted, config, family, device, dtype)
        if problem:
            raise UsageError(f"model.attention: {wanted} does not serve this model: {problem}; use auto")
        return AttentionChoice(wanted, "as asked")
    passed_over: list[str] = []
    for name in KERNELS:
        problem = _too_small(name, config, device) or _problem(name, config, family, device, dtype)
        if problem is None:
            kernel = "torch's FlashAttention kernel" if name == "varlen" else "as exact as torch's kernel here"
            return AttentionChoice(name, "; ".join([kernel, *passed_over]))
        passed_over.append(problem)
    no_kernel, no_sdpa = passed_over[-1], _problem("sdpa", config, family, device, dtype)
    return AttentionChoice("plain", no_sdpa) if no_sdpa else AttentionChoice("sdpa", no_kernel)


def _problem(name: Implementation, config: Any, family: Family, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a form other than plain cannot serve this model (None when it can)."""
    if getattr(config, "attn_logit_softcapping", None):
        return "its attention scores are soft-capped"
    if family.sinks:
        return "its attention has sinks"
    if name == "sdpa":
        return None
    if problem := varlen_problem(device, dtype, _head_dim(config)):
        return problem
    if getattr(config, "attention_dropout", 0.0):
        return f"the {name} kernel has no attention dropout"
    if getattr(config, "v_head_dim", None) is not None:
        return f"the {name} kernel needs keys and values of one size"
    if _is_package(name):
        return _package_problem(name, device) or _disproof(name, config, device, dtype)
    return None


def _is_package(name: Implementation) -> TypeGuard[PackageName]:
    return name in ("fa4", "fa3", "cudnn")


def _package_problem(name: PackageName, device: torch.device) -> str | None:
    return cudnn_problem(device) if name == "cudnn" else flash_problem(name, device)


def _make_package(name: PackageName) -> Callable[..., torch.Tensor]:
    return make_cudnn_attention() if name == "cudnn" else make_flash_attention(name)


def _too_small(name: Implementation, config: Any, device: torch.device) -> str | None:
    hidden_size = getattr(config, "hidden_size", 0)
    if name in ("fa4", "fa3") and hidden_size < MIN_FLASH_HIDDEN_SIZE and flash_problem(name, device) is None:
        return f"{name} costs more host time than a model of hidden size {hidden_size} can hide"
    return None


def _disproof(name: PackageName, config: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """Run a package's attention beside torch's kernel; why it is not taken, or None."""
    num_heads, size = getattr(config, "num_attention_heads", None), _head_dim(config)
    if num_heads is None or size is None:
        return f"{name} cannot be proved: the model's config names no heads"
    heads = (num_heads, getattr(config, "num_key_value_heads", None) or num_heads, size)
    window = getattr(config, "sliding_window", None)
    try:
        form, rival = _make_package(name), make_varlen_attention()
        problem = flash_disagreement(form, rival, heads=heads, window=window, device=device, dtype=dtype)
    except Exception as error:  # noqa: BLE001  (a package that compiles its kernels may raise anything; it is told)
        problem = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
    return None if problem is None else f"{name} fails its proof: {problem}"


def register(implementation: Implementation = "varlen") -> None:
    """Make our attention known to transformers: `flatout_varlen`, `flatout_sdpa`, `flatout_plain`, and a package's
    if it is the one named.

    Safe to call again. Models take one by `attn_implementation`, so two models in one process may differ.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    forms: dict[str, Callable[[_Call], torch.Tensor]] = {
        "varlen": _kernel_form("varlen", make_varlen_attention()),
        "sdpa": _run_sdpa,
        "plain": _run_plain,
    }
    if _is_package(implementation):
        forms[implementation] = _kernel_form(implementation, _make_package(implementation))
    for name, form in forms.items():
        AttentionInterface.register(PREFIX + name, _entry(form))
        AttentionMaskInterface.register(PREFIX + name, window_marker)


def prepare(implementation: Implementation, sizes: Collection[tuple[int, int]], num_borders: int) -> str:
    """Make now what a kernel makes at its first call of a size, for batches of (tokens, max_seqlen) with so many
    borders, once a model ran with that; what to add to a line for the console."""
    if implementation != "cudnn":
        return ""
    return f"; {prepare_cudnn_attention(sizes, num_borders)} cudnn graphs for the plan's sizes"


def _kernel_form(name: str, kernel: Callable[..., torch.Tensor]) -> Callable[[_Call], torch.Tensor]:
    def run(call: _Call) -> torch.Tensor:
        call.refuse(name, softcap=call.softcap, sinks=call.sinks, dropout=call.dropout or None)
        return kernel(*call.tensors, call.cu_seqlens, call.max_seqlen, scale=call.scale, window=call.window)

    return run


def window_marker(*_: Any, local_size: int | None = None, kv_length: int = 0, **__: Any) -> torch.Tensor | None:
    """Our mask function: no mask at all, since the documents' borders say everything.

    A layer with a local window shorter than the batch gets an empty tensor, so that the attention can tell that a
    window was asked for and refuse when its size did not arrive with the layer's own arguments.
    """
    return torch.empty(0) if local_size is not None and kv_length > local_size else None


@dataclass(frozen=True, slots=True)
class _Call:
    """What one layer asks for: query, key and value (T, heads, size), borders, and its variants."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    cu_seqlens: torch.Tensor
    max_seqlen: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    dropout: float

    def refuse(self, form: str, **variants: object) -> None:
        """Raise UsageError when a layer asks for a variant that this form lacks (the choice at load time missed it)."""
        asked = [name for name, value in variants.items() if value is not None]
        if asked:
            raise UsageError(f"packed attention: {form} has no {', '.join(asked)}; set model.attention: plain")


def _run_sdpa(call: _Call) -> torch.Tensor:
    call.refuse("sdpa", softcap=call.softcap, sinks=call.sinks)
    return sdpa_attention(*call.tensors, call.cu_seqlens, scale=call.scale, window=call.window, dropout=call.dropout)


def _run_plain(call: _Call) -> torch.Tensor:
    return plain_attention(
        *call.tensors,
        call.cu_seqlens,
        scale=call.scale,
        window=call.window,
        softcap=call.softcap,
        sinks=call.sinks,
        dropout=call.dropout,
    )


def _entry(form: Callable[[_Call], torch.Tensor]) -> Callable[..., tuple[torch.Tensor, None]]:
    """Wrap a form in transformers' signature: (1, heads, T, size) in, (1, T, heads, size) out."""

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        max_length_q: int | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        _check_mask(attention_mask, sliding_window, module)
        if query.shape[0] != 1:
            raise UsageError(f"packed attention got {query.shape[0]} rows; a packed batch is one row of tokens")
        if cu_seq_lens_q is None or max_length_q is None:
            raise UsageError("packed attention was called without documents; load the model with sdpa to generate")
        call = _Call(
            tensors=_one_dtype(query, key, value),
            cu_seqlens=cu_seq_lens_q,
            max_seqlen=max_length_q,
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
            dropout=dropout,
        )
        return form(call)[None], None

    return attention


def _check_mask(mask: torch.Tensor | None, window: int | None, module: nn.Module) -> None:
    if mask is None or (mask.numel() == 0 and window is not None):
        return
    asked = "a mask of its own" if mask.numel() else "a local window through its mask only"
    raise UsageError(
        f"{type(module).__name__} asks for {asked}, which packed attention cannot honour; "
        "set batch.micro_batch_tokens to at most the window, or choose another model"
    )


def _one_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(1, heads, T, size) to (T, heads, size), all in the autocast dtype, or in the value's without autocast."""
    device_type = tensors[0].device.type
    lower = torch.is_autocast_enabled(device_type) and tensors[0].dtype != torch.float64
    dtype = torch.get_autocast_dtype(device_type) if lower else tensors[-1].dtype
    query, key, value = (tensor[0].transpose(0, 1).to(dtype) for tensor in tensors)
    return query, key, value


def _head_dim(config: Any) -> int | None:
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        return int(head_dim)
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    return hidden // heads if hidden and heads else None
