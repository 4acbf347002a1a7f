"""What a model's tower and positions need of the pictures of a batch, and a check at start-up that they are right."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from flatout.errors import Fix, PackingError, UsageError
from flatout.kernels.attention.flash import varlen_problem
from flatout.kernels.attention.tower import TOWER, register_tower
from flatout.models.arch_quirks import ATTENDING, picture_kinds
from flatout.models.blocks import attention_of_parts, hidden_states, picture_token
from flatout.models.load.model import LoadedModel
from flatout.models.packed import PackedBatch, flatten_samples
from flatout.models.probe import checking, has_experts, relative_error, widened
from flatout.models.selftest import OFF_WIDTH, by_attention, tolerance_of

_OTHERWISE = Fix({}, "choose a different model, or train on rows without pictures")


class ImageReader(Protocol):
    """An image processor: `token_id` stands for pictures in texts."""

    token_id: int

    def values_of(self, images: Sequence[Any]) -> dict[str, NDArray[Any]]:
        """Return what models read of images, which are Pillow's."""


class PicturePacker:
    """Adds images to batches: what the tower reads, and positions by the model's own rule.

    `kinds` is the argument that says which tokens are of pictures; None for a model that is causal there too.
    """

    def __init__(self, reader: ImageReader, model: PreTrainedModel) -> None:
        """Raises UsageError for a model that reads no pictures, or other tokens than the processor writes."""
        require_picture_model(model, reader.token_id)
        self._reader = reader
        self._arguments = set(inspect.signature(model.base_model.get_image_features).parameters)
        self._positions = getattr(model.base_model, "get_rope_index", None)
        self.kinds = picture_kinds(model.config.get_text_config())

    @property
    def token_id(self) -> int:
        """The token that stands for pictures."""
        return self._reader.token_id

    @property
    def has_axes(self) -> bool:
        """Whether the model counts positions in time, height and width."""
        return self._positions is not None

    def with_images(
        self, batch: PackedBatch, images: Sequence[Any], counts: Sequence[int], token_ids: Sequence[NDArray[Any]]
    ) -> PackedBatch:
        """Return a batch with images, of which each sample has `counts`; `token_ids` are the samples' own."""
        return self.with_values(batch, self._reader.values_of(images), counts, token_ids)

    def with_values(
        self,
        batch: PackedBatch,
        values: Mapping[str, NDArray[Any]],
        counts: Sequence[int],
        token_ids: Sequence[NDArray[Any]],
    ) -> PackedBatch:
        """Return what `with_images` does, of what the processor made of the images."""
        arguments = {name: torch.from_numpy(array) for name, array in values.items() if name in self._arguments}
        axes = None
        if self.has_axes:
            axes = batch.position_ids.expand(3, -1).clone()
            grids = arguments["image_grid_thw"].split(list(counts))
            starts = batch.cu_seqlens[: len(counts)].tolist()
            for start, ids, grid in zip(starts, token_ids, grids, strict=True):
                if len(grid):
                    axes[:, start : start + len(ids)] = self._axes(torch.from_numpy(ids.astype(np.int64)), grid)
        return replace(batch, pictures=arguments, axes=axes)

    def _axes(self, token_ids: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        """Return the positions (3, n) of one document, by the model's own rule."""
        kinds = (token_ids == self._reader.token_id).int()
        assert self._positions is not None
        axes, _ = self._positions(token_ids[None], mm_token_type_ids=kinds[None], image_grid_thw=grid)
        return axes[:, 0]


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


def check_pictures(
    loaded: LoadedModel, documents: Sequence[PictureDocument], others: Sequence[PictureDocument], pack: Pack
) -> str:
    """Check pictures in the layout of a run; return a line for the console.

    Checks that (1) the hidden states of documents together equal those of each alone, from transformers' whole model
    with its own attention and positions, within 1e-10 (fp64), 1e-4 (fp32), or three times the difference of
    transformers' two attentions in 16 bit; (2) other texts and pictures in every second document, which are those of
    `others`, change none of the rest. Raises PackingError with the model type if not.
    """
    kind, what = loaded.model.config.model_type, f"{_layout(loaded)} documents with pictures"
    with checking(loaded, PackingError, what, _OTHERWISE), torch.no_grad():
        difference, leak, tolerance = _measure(loaded, documents, others, pack)
    for value, does in ((difference, "differ from those of single documents"), (leak, "change with other documents")):
        if not value <= tolerance:
            raise PackingError(
                f"model type {kind}: hidden states of {what} {does} by {value:.1e} (limit {tolerance:.1e})",
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
    separate = by_attention(model, lambda: torch.cat([_single_document_states(model, each) for each in documents]))
    trusted = next(iter(separate))

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
