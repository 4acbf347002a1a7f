"""A check at start-up that pictures change only the tokens that follow them in their own document."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from flatout.errors import Fix, PackingError, UsageError, first_line
from flatout.kernels.attention.flash import varlen_problem
from flatout.kernels.attention.tower import TOWER, register_tower
from flatout.models.arch_quirks import ATTENDING, picture_kinds
from flatout.models.blocks import TRANSFORMERS_ATTENTION, attention_of_parts, hidden_states, picture_token
from flatout.models.load.model import LoadedModel
from flatout.models.packed import PackedBatch, flatten_samples
from flatout.models.probe import MODEL_ERRORS, has_experts, relative_error, widened
from flatout.models.selftest import OFF_WIDTH, tolerance_of, transformers_attention

_OTHERWISE = Fix({}, "choose a different model, or train on rows without pictures")


class PictureDocument(NamedTuple):
    """A document of the check: token ids (n,), its images, and the arguments of transformers' whole model for it."""

    token_ids: NDArray[np.int64]
    images: Sequence[Any]
    inputs: dict[str, torch.Tensor]


Pack = Callable[[PackedBatch, Sequence[Any], Sequence[int], Sequence[NDArray[Any]]], PackedBatch]
"""Adds images to a batch: the batch, the images, how many of them each document has, and the documents' ids."""


def require_picture_model(model: PreTrainedModel, token_id: int) -> None:
    """Raise UsageError unless a model reads pictures where a processor writes the token `token_id`."""
    kind, text = model.config.model_type, model.config.get_text_config()
    if not hasattr(model.base_model, "get_image_features"):
        raise UsageError(f"the data has pictures, but model type {kind} reads none; choose a vision-language model")
    reads = {"token_type_ids", "mm_token_type_ids"} & set(inspect.signature(model.base_model.forward).parameters)
    if reads and not (hasattr(model.base_model, "get_rope_index") or text.model_type in ATTENDING):
        raise UsageError(
            f"the data has pictures, and model type {kind} attends in both directions in more than pictures, which is "
            "not built; choose a different model, or train on rows without pictures"
        )
    if (model_token := picture_token(model)) != token_id:
        raise UsageError(
            f"the data has pictures at token {token_id}, but this model reads them at {model_token}; build the set "
            "with the model's own tokenizer"
        )


def check_pictures(loaded: LoadedModel, documents: Sequence[PictureDocument], others: Sequence[PictureDocument],
                   pack: Pack) -> str:  # fmt: skip
    """Check pictures in the layout of a run; return a line for the console.

    Checks that (1) the hidden states of documents together equal those of each alone, from transformers' whole model
    with its own attention and positions, within 1e-10 (fp64), 1e-4 (fp32), or three times the difference of
    transformers' two attentions in 16 bit; (2) other texts and pictures in every second document, which are those of
    `others`, change none of the rest. Raises PackingError with the model type if not.
    """
    model, kind = loaded.model, loaded.model.config.model_type
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(model.device.type, dtype=loaded.dtype, enabled=loaded.autocast):
            difference, leak, tolerance = _measure(loaded, documents, others, pack)
    except torch.OutOfMemoryError:
        raise
    except MODEL_ERRORS as error:
        raise PackingError(
            f"model type {kind} fails on {_layout(loaded)} documents with pictures ({type(error).__name__}: "
            f"{first_line(error)})",
            [_OTHERWISE],
        ) from error
    finally:
        model.train(was_training)
    for value, what in ((difference, "differ from those of single documents"), (leak, "change with other documents")):
        if not value <= tolerance:
            raise PackingError(
                f"model type {kind}: hidden states of {_layout(loaded)} documents with pictures {what} by {value:.1e} "
                f"(limit {tolerance:.1e})",
                [_OTHERWISE],
            )
    return f"pictures: {_layout(loaded)} = alone within {difference:.1e}, no leak between documents"


def _measure(
    loaded: LoadedModel, documents: Sequence[PictureDocument], others: Sequence[PictureDocument], pack: Pack
) -> tuple[float, float, float]:
    """Return the error against documents alone, how far other documents change the rest, and the tolerance."""
    model, experts = loaded.model, has_experts(loaded.model)
    lengths = [len(document.token_ids) for document in documents]
    ours = _together(loaded, documents, pack)
    separate = dict[str, torch.Tensor]()
    for name in TRANSFORMERS_ATTENTION:
        with transformers_attention(model, name) as usable:
            if usable:
                separate[name] = torch.cat([_single_document_states(model, document) for document in documents])
    if not separate:
        raise ValueError("its attention does not go through transformers' attention interface")
    trusted = "sdpa" if "sdpa" in separate else "eager"

    def noise() -> float:
        return relative_error(separate["eager"], separate[trusted], experts, lengths)

    tolerance = max(tolerance_of(trusted, loaded.dtype, noise), OFF_WIDTH)
    error = relative_error(ours, separate[trusted], experts, lengths)
    leaks = []
    for parity in (0, 1):
        mixed = [documents[k] if k % 2 == parity else others[k] for k in range(len(documents))]
        pairs = zip(_together(loaded, mixed, pack).split(lengths), ours.split(lengths), strict=True)
        of_parity = [pair for k, pair in enumerate(pairs) if k % 2 == parity]
        leaks += [relative_error(now, before, experts, [len(now)]) for now, before in of_parity]
    return error, max(leaks), tolerance


def batch_of(documents: Sequence[PictureDocument], pack: Pack, *, is_padded: bool) -> PackedBatch:
    """Return documents in one batch, with loss on every token that may have it."""
    row_length = max(len(ids) for ids, *_ in documents) if is_padded else None
    batch = flatten_samples([(ids, np.arange(len(ids)) > 0) for ids, *_ in documents], row_length=row_length)
    images, ids = [image for document in documents for image in document.images], [ids for ids, *_ in documents]
    return pack(batch, images, [len(document.images) for document in documents], ids)


def _together(loaded: LoadedModel, documents: Sequence[PictureDocument], pack: Pack) -> torch.Tensor:
    lengths = [len(document.token_ids) for document in documents]
    batch = batch_of(documents, pack, is_padded=loaded.is_padded).to(loaded.model.device)
    states = widened(hidden_states(loaded.model, batch))
    starts = batch.cu_seqlens[: len(lengths)].tolist()
    return torch.cat([states[start : start + length] for start, length in zip(starts, lengths, strict=True)])


def _single_document_states(model: PreTrainedModel, document: PictureDocument) -> torch.Tensor:
    arguments = {name: values.to(model.device) for name, values in document.inputs.items()}
    return widened(model.base_model(**arguments, use_cache=False).last_hidden_state[0])


def _layout(loaded: LoadedModel) -> str:
    return "padded" if loaded.is_padded else "packed"


def read_with_own_attention(model: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Let a tower's patches see all of their picture, by `TOWER` where it can; what is neither it nor text, by sdpa.

    `dtype` is that of the passes, in which queries come: weights may be fp32 masters under autocast.

    A decoder that attends in both directions inside a picture uses transformers' attention; return whether it does.
    """
    config, text = model.config, model.config.get_text_config()
    attention, with_text = attention_of_parts(model), picture_kinds(text) is not None
    for name in attention.keys() - {""}:
        if with_text or getattr(config, name) is not text:
            attention[name] = TOWER if _takes_boundaries(model, getattr(config, name), dtype) else "sdpa"
    register_tower()
    try:
        model.set_attn_implementation(attention)
    except ValueError:  # a tower without it
        model.set_attn_implementation({name: "eager" if kind == "sdpa" else kind for name, kind in attention.items()})
    return with_text


def _takes_boundaries(model: PreTrainedModel, config: Any, dtype: torch.dtype) -> bool:
    """Whether the layers of a part get all pictures of a batch at once, and a GPU has a kernel for them."""
    layers = [
        module for module in model.modules()
        if getattr(module, "config", None) is config and "cu_seqlens" in inspect.signature(module.forward).parameters
    ]  # fmt: skip
    if not layers:
        return False
    device = next(layers[0].parameters()).device
    return varlen_problem(device, dtype, getattr(layers[0], "head_dim", None)) is None
