"""Packed attention for any transformers model, through the public AttentionInterface: no attention across documents."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from flatout.errors import Fix, PackingError, UsageError, first_line
from flatout.kernels.attention.cudnn import cudnn_problem, make_cudnn_attention, prepare_cudnn_attention
from flatout.kernels.attention.flash import (
    flash_disagreement,
    flash_problem,
    make_flash_attention,
    make_varlen_attention,
    varlen_problem,
)
from flatout.kernels.attention.reference import plain_attention, sdpa_attention
from flatout.kernels.attention.shared_prefix import SharedPrefixes
from flatout.kernels.attention.slots import slot_attention
from flatout.models.blocks import layer_configs
from flatout.models.collectives import RankGroup
from flatout.models.context.attention import attention_over_ranks
from flatout.models.packed import KeyPieces
from flatout.models.slot_cache import SlotReads, autocast_dtype

# from the fastest to the reference
Implementation = Literal["fa4", "cudnn", "varlen", "sdpa", "plain"]
# these read the documents' boundaries on the device, so they work inside compiled layers
KERNELS: tuple[Implementation, ...] = ("fa4", "cudnn", "varlen")
# these may be missing, and are proved before they are used
_PACKAGES: tuple[Implementation, ...] = ("fa4", "cudnn")
# FA4 takes 60 to 110 us more host time per call, which smaller models cannot hide
MIN_FLASH_HIDDEN_SIZE = 2048


class AttentionChoice(NamedTuple):
    """The implementation that a model uses, and why."""

    implementation: Implementation
    reason: str


def registered_name(implementation: Implementation) -> str:
    """Return the name under which an implementation is registered in transformers (`attn_implementation`)."""
    # transformers rejects any name containing "sdpa" for models without their own sdpa
    return "flatout_documents" if implementation == "sdpa" else f"flatout_{implementation}"


def choose_attention(
    setting: Literal["auto"] | Implementation,
    config: Any,
    *,
    device: torch.device,
    dtype: torch.dtype,
    context_ranks: int = 1,
) -> AttentionChoice:
    """Choose a model's packed attention from its config; `auto` takes the fastest that supports it.

    fa4 and cudnn must first pass a check on the device, with the model's heads and window, that they are as exact as
    varlen; auto uses fa4 from MIN_FLASH_HIDDEN_SIZE on. Only the plain form has soft-capped scores. If
    several `context_ranks` share micro-batches, auto uses neither, see `register_over_ranks`.
    Raises UsageError if the requested form does not support this model.
    """
    if setting != "auto":
        problem = None if setting == "plain" else _problem(setting, config, device, dtype)
        if problem:
            raise UsageError(
                f"model.attention: {setting} is not possible: {problem}", [Fix({"model.attention": "auto"})]
            )
        return AttentionChoice(setting, "as configured")
    passed_over = [] if context_ranks == 1 else ["the only kernel for shared micro-batches"]
    for name in KERNELS if context_ranks == 1 else ("varlen",):
        problem = _problem(name, config, device, dtype)
        hidden_size = getattr(config, "hidden_size", 0)
        if name == "fa4" and hidden_size < MIN_FLASH_HIDDEN_SIZE and flash_problem(device) is None:
            problem = f"{name} launches too slowly for a model of hidden size {hidden_size}"
        if problem is None:
            kernel = "torch's FlashAttention kernel" if name == "varlen" else "as accurate as torch's kernel here"
            return AttentionChoice(name, "; ".join([kernel, *passed_over]))
        passed_over.append(problem)
    no_kernel, no_sdpa = passed_over[-1], _problem("sdpa", config, device, dtype)
    return AttentionChoice("plain", no_sdpa) if no_sdpa else AttentionChoice("sdpa", no_kernel)


def _problem(name: Implementation, config: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a form other than plain does not support this model (None if it does)."""
    if getattr(config, "attn_logit_softcapping", None):
        return "its attention scores are soft-capped"
    if name == "sdpa":
        return None
    layers = layer_configs(config)
    # if heads differ by layer, check the widest
    if problem := varlen_problem(device, dtype, max(_head_dim(layer) or 0 for layer in layers) or None):
        return problem
    if getattr(config, "attention_dropout", 0.0):
        return f"the {name} kernel does not support attention dropout"
    if getattr(layers[0], "v_head_dim", None) is not None:
        return f"the {name} kernel needs keys and values of equal size"
    if name not in _PACKAGES:
        return None
    sizes = ("num_attention_heads", "num_key_value_heads", "head_dim")
    proofs = {tuple(getattr(layer, size, None) for size in sizes): layer for layer in layers}
    disproofs = (_disproof(name, layer, device, dtype) for layer in proofs.values())
    problem = cudnn_problem(device) if name == "cudnn" else flash_problem(device)
    return problem or next(filter(None, disproofs), None)


def _make_package(name: Implementation) -> Callable[..., Tensor]:
    return make_cudnn_attention() if name == "cudnn" else make_flash_attention()


def _disproof(name: Implementation, config: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """Compare a package's attention with torch's kernel; return why it is rejected, or None."""
    num_heads, size = getattr(config, "num_attention_heads", None), _head_dim(config)
    if num_heads is None or size is None:
        return f"{name} cannot be checked: the model's config does not name its heads"
    heads = (num_heads, getattr(config, "num_key_value_heads", None) or num_heads, size)
    window = getattr(config, "sliding_window", None)
    try:
        form, rival = _make_package(name), make_varlen_attention()
        problem = flash_disagreement(form, rival, heads=heads, window=window, device=device, dtype=dtype)
    except Exception as error:  # noqa: BLE001  (a package that compiles its kernels may raise anything; it is reported)
        problem = f"{type(error).__name__}: {first_line(error)}"
    return None if problem is None else f"{name} fails its check: {problem}"


def register(implementation: Implementation = "varlen") -> None:
    """Register our attention with transformers: varlen, sdpa, plain, and `implementation` if it is a package's.

    Safe to call again. Models select one by `attn_implementation`, so two models in one process may differ.
    """
    names: list[Implementation] = ["varlen", "sdpa", "plain", *[implementation][: implementation in _PACKAGES]]
    for name in names:
        _register(registered_name(name), _entry(name, *_form(name)), window_marker)


def _register(name: str, attention: Callable[..., Any], marker: Callable[..., Tensor | None]) -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, marker)


def register_over_ranks(implementation: Implementation, group: RankGroup) -> str:
    """Register varlen, sdpa or plain for models whose micro-batches the group's ranks share, and return its name.

    Layers get a share's keys as `context_keys` (`PackedBatch.keys`); a batch without them is computed as by the form
    itself. A layer with a window must pass it on, however short the share.
    """
    form, *variants = _form(implementation)
    shared = attention_over_ranks(form, group, is_varlen=implementation == "varlen")
    name = f"{registered_name(implementation)}_over_ranks"

    def marker(*_: Any, local_size: int | None = None, **__: Any) -> Tensor | None:
        return None if local_size is None else torch.empty(0)

    _register(name, _entry(implementation, shared, "keys", *variants), marker)
    return name


def _form(name: Implementation) -> tuple[Any, *tuple[str, ...]]:
    if name == "plain":
        return plain_attention, "shared", "sinks", "dropout", "softcap"
    if name == "sdpa":
        return sdpa_attention, "shared", "sinks", "dropout"
    return make_varlen_attention() if name == "varlen" else _make_package(name), "shared", "sinks"


def prepare(implementation: str, sizes: Collection[tuple[int, int]], num_boundaries: int) -> int:
    """Build cudnn's graphs ahead of time, see `prepare_cudnn_attention`; returns 0 for other implementations."""
    return prepare_cudnn_attention(sizes, num_boundaries) if implementation == "cudnn" else 0


def window_marker(*_: Any, local_size: int | None = None, kv_length: int = 0, **__: Any) -> Tensor | None:
    """Return no mask, since the documents' boundaries are enough.

    A layer with a window shorter than the batch gets an empty tensor, so that the attention can raise if the layer's
    arguments lack the window.
    """
    return torch.empty(0) if local_size is not None and kv_length > local_size else None


def _mask_error(module: nn.Module, mask: Tensor) -> PackingError:
    asked = "a custom mask" if mask.numel() else "a local window that only its mask sets"
    return PackingError(
        f"{type(module).__name__} uses {asked}, which packed attention does not support; "
        "set batch.micro_batch_tokens to at most the window, or choose a different model"
    )


def _entry(name: Implementation, form: Callable[..., Tensor], *variants: str) -> Callable[..., tuple[Tensor, None]]:
    """Wrap a form with these variants for transformers: (1, heads, T, size) in, (1, T, heads, size) out.

    Rows come as (B, heads, S, size), with an empty mask of four dimensions. Each is a document; without boundaries, as
    from a layer that does not pass them on, these are computed. Tensors are cast to the autocast dtype or the value's.
    """

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int | None = None,
        row_cu_seqlens: Tensor | None = None,
        max_row_length: int | None = None,
        shared_prefixes: SharedPrefixes | None = None,
        context_keys: KeyPieces | None = None,
        slot_reads: SlotReads | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        num_rows, row_length = query.shape[0], query.shape[2]
        if is_rows := attention_mask is not None and attention_mask.ndim == 4 and not attention_mask.numel():
            cu_seq_lens_q, max_length_q = row_cu_seqlens, max_row_length
            if cu_seq_lens_q is None or max_length_q is None:
                starts = torch.arange(num_rows + 1, dtype=torch.int32, device=query.device)
                cu_seq_lens_q, max_length_q = starts * row_length, row_length
        elif attention_mask is not None and (attention_mask.numel() or sliding_window is None):
            raise _mask_error(module, attention_mask)
        if num_rows != 1 and not is_rows:
            raise UsageError(f"packed attention got {num_rows} rows; expected one row of packed tokens")
        if cu_seq_lens_q is None or max_length_q is None:
            raise PackingError(
                f"{type(module).__name__} calls packed attention without document boundaries: to generate, load the "
                "model with sdpa; in training, its layers do not pass the boundaries on: choose a different model"
            )
        values: dict[str, Any] = {"softcap": softcap, "sinks": s_aux, "dropout": dropout or None}
        values |= {"shared": shared_prefixes, "keys": context_keys}
        options = {variant: setting for variant, setting in values.items() if setting is not None}
        if missing := [variant for variant in options if variant not in variants]:
            # not visible in the config when the attention was chosen
            lacks = ", ".join(missing)
            raise UsageError(f"packed attention: {name} lacks {lacks}", [Fix({"model.attention": "plain"})])
        dtype = autocast_dtype(value)
        tensors = [tensor.transpose(1, 2).flatten(0, 1).to(dtype) for tensor in (query, key, value)]
        documents: tuple[Any, ...] = (cu_seq_lens_q, max_length_q) if name in KERNELS else (cu_seq_lens_q,)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if slot_reads is not None:
            documents, options["use_kernel"] = slot_reads, name in KERNELS
        chosen: Callable[..., Tensor] = form if slot_reads is None else slot_attention
        output = chosen(*tensors, *documents, scale=scale, window=sliding_window, **options)
        return output.unflatten(0, (num_rows, row_length)), None

    return attention


def _head_dim(config: Any) -> int | None:
    if (head_dim := getattr(config, "head_dim", None)) is not None:
        return int(head_dim)
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    return hidden // heads if hidden and heads else None
