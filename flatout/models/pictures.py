"""What a model's tower and positions need of the pictures of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from flatout.models.arch_quirks import picture_kinds
from flatout.models.packed import PackedBatch
from flatout.models.picture_check import require_picture_model


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
        positions: torch.Tensor = axes[:, 0]
        return positions
