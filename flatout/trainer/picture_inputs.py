"""Pictures of samples as training goes: pixels and positions of each micro-batch, and what cannot be done with them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from xxhash import xxh3_128_hexdigest

from flatout.config.parallel import STRATEGIES
from flatout.config.schema import Config
from flatout.data.pictures.processor import PictureProcessor
from flatout.data.pictures.read import decoded, require_pillow
from flatout.data.pictures.show import picture_statistics, thumbnails
from flatout.data.token_store import TokenStore
from flatout.data.tokenizer import load_tokenizer
from flatout.errors import DataError, Fix, UsageError
from flatout.models.packed import PackedBatch
from flatout.models.pictures import PictureDocument, PicturePacker
from flatout.planner.parallel_layout import ParallelLayout
from flatout.planner.settings import PlanSettings
from flatout.planner.shape import ModelShape
from flatout.track.callback import Reporter

# micro-batches whose pictures are made at once; resizing and numpy let other threads run
_NUM_THREADS = 4
# sizes of the pictures of the self-test: their features lie in different grids
_PROBED = ((56, 84), (70, 42), (48, 48))
# of a recorded sample or prompt, so many pictures are recorded, and so many pixels high and wide
_MAX_RECORDED, _RECORDED_PIXELS = 4, 128
# small copies by the picture's hash, as each evaluation records many of the same
_MAX_COPIES = 256
_COPIES: dict[str, str] = {}


Made = Future[dict[str, NDArray[Any]]]


class PictureMaker(PicturePacker):
    """Makes what a model's tower reads of the pictures of micro-batches, ahead of time by threads of its own."""

    def __init__(self, processor: PictureProcessor, model: PreTrainedModel) -> None:
        """Raises UsageError for a model that reads no pictures, or other tokens than the processor writes."""
        super().__init__(processor, model)
        self._processor = processor
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="flatout-pictures")

    @classmethod
    def of(cls, store: TokenStore, model: PreTrainedModel) -> PictureMaker | None:
        """Return the maker of a store's pictures; None for one without. Raises DataError and UsageError."""
        return cls(processor_of(store), model) if store.num_pictures else None

    def begin(self, store: TokenStore, sample_ids: Sequence[int]) -> Made:
        """Start to make the pictures of a micro-batch's samples, for `add`."""
        return self._threads.submit(self._make, store, sample_ids)

    def _make(self, store: TokenStore, sample_ids: Sequence[int]) -> dict[str, NDArray[Any]]:
        files = [content for sample_id in sample_ids for content in store.pictures(sample_id)]
        return self._processor.values_of([decoded(content) for content in files]) if files else {}

    def add(
        self,
        batch: PackedBatch,
        store: TokenStore,
        sample_ids: Sequence[int],
        token_ids: Sequence[NDArray[Any]],
        made: Made | None = None,
    ) -> PackedBatch:
        """Return a batch of these samples, which share no prefix, with their pictures; `made` is from `begin`.

        Raises DataError.
        """
        files = [store.pictures(sample_id) for sample_id in sample_ids]
        if not any(files):
            return replace(batch, pictures={})
        for sample_id, ids in zip(sample_ids, token_ids, strict=True):
            picture_slice = slice(*store.picture_offsets[sample_id : sample_id + 2])
            expected = int(store.extra["picture_tokens"][picture_slice].sum())
            features = int((ids == self._processor.token_id).sum())
            if expected != features:
                where = store.origin(sample_id)
                raise DataError(f"{where}: its pictures need {expected} tokens, but it has {features}; rebuild the set")
        values = self._make(store, sample_ids) if made is None else made.result()
        return self.with_values(batch, values, [len(of_sample) for of_sample in files], token_ids)

    def probes(self, seed: int) -> list[PictureDocument]:
        """Return documents for the self-test: texts only, with one picture, and with two; the same for each seed."""
        random = np.random.default_rng(seed)
        pixels = [random.integers(0, 256, (*size, 3), np.uint8) for size in _PROBED]
        images = list(map(require_pillow().Image.fromarray, pixels))
        documents = []
        for pictures in ([], images[:1], images[1:], []):
            ids = [self._processor.tokens_of(image.height, image.width) for image in pictures]
            texts = iter(random.choice(self._processor.plain_ids, (len(pictures) + 1, 5)))
            parts = [next(texts), *(part for ids_of_picture in ids for part in (ids_of_picture, next(texts)))]
            token_ids = np.concatenate(parts).astype(np.int64)
            documents.append(PictureDocument(token_ids, pictures, self.inputs_of(token_ids, pictures)))
        return documents

    def inputs_of(self, token_ids: NDArray[np.int64], images: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Return the arguments of transformers' whole model for one document."""
        ids = torch.from_numpy(token_ids)[None]
        arguments = {"input_ids": ids}
        if images:
            values = self._processor.values_of(images)
            arguments |= {name: torch.from_numpy(array) for name, array in values.items()}
            kinds = "mm_token_type_ids" if self.has_axes else self.kinds
            if kinds is not None:
                arguments[kinds] = (ids == self._processor.token_id).int()
        return arguments

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


def with_pictures(shape: ModelShape, store: TokenStore, config: Config, reporter: Reporter) -> ModelShape:
    """Return the shape with what pictures need of memory and FLOPs, and report them; as it is without pictures.

    Raises UsageError for a trained tower whose layers are not known.
    """
    if not store.num_pictures:
        return shape
    for line in picture_statistics(store):
        reporter.stage("pictures", line)
    values, tokens = (_per_token(store, name) for name in ("picture_values", "picture_tokens"))
    tower, parts = shape.tower, config.model.trained_parts
    if parts and tower is None:
        raise UsageError(
            f"model.freeze_{min(parts)}: false: the memory for training the vision tower of model type "
            f"{shape.model_type} cannot be planned; leave the setting out"
        )
    if tower is not None and parts:
        # a backward pass of the inputs, and with method full one of the weights
        backward = 1 if config.method == "lora" else 2
        of_layers = backward if "vision_tower" in parts else 0
        of_tokens = backward if "projector" in parts else 1
        tower = replace(tower, layer_passes=1 + of_layers, token_passes=1 + of_tokens)
    return replace(shape, picture_values=values, picture_tokens=tokens, tower=tower)


def _per_token(store: TokenStore, name: str) -> float:
    """Return the largest sum of a column of pictures over a sample's own, for each of the sample's tokens."""
    ends = np.append(0, np.cumsum(store.extra[name]))[store.picture_offsets]
    return float((np.diff(ends) / store.lengths).max())


def tower_flops(shape: ModelShape, store: TokenStore) -> NDArray[np.float64] | None:
    """Return the FLOPs that the tower takes for each sample's pictures, float64 (N,); None without pictures."""
    if not store.num_pictures or shape.tower is None:
        return None
    flops = shape.tower.flops(store.extra["picture_values"], store.extra["picture_tokens"])
    return np.asarray(np.diff(np.append(0.0, np.cumsum(flops))[store.picture_offsets]))


def recorded(pictures: Sequence[bytes]) -> tuple[str, ...]:
    """Return what records keep of pictures: small copies of the first ones, as data URIs."""
    digests = [xxh3_128_hexdigest(content) for content in pictures[:_MAX_RECORDED]]
    for digest, content in zip(digests, pictures, strict=False):
        if digest not in _COPIES:
            [_COPIES[digest]] = thumbnails([content], _RECORDED_PIXELS)
    copies = tuple(_COPIES[digest] for digest in digests)
    while len(_COPIES) > _MAX_COPIES:
        del _COPIES[next(iter(_COPIES))]
    return copies


def processor_of(store: TokenStore) -> PictureProcessor:
    """Return the image processor that a store was built with. Raises DataError."""
    meta = store.meta
    return PictureProcessor(meta.tokenizer, load_tokenizer(meta.tokenizer, added=meta.added_tokens))


def require_trainable(settings: PlanSettings, store: TokenStore, layout: ParallelLayout) -> None:
    """Raise UsageError for settings that pictures, or training what reads them, do not go with yet."""
    parts = settings.trained_parts
    if not store.num_pictures:
        if parts:
            raise UsageError(
                f"model.freeze_{min(parts)}: false, but data set {store.meta.name!r} has no pictures to train it; "
                "leave the setting out"
            )
        return
    unproved = {
        f"full.compute: {settings.full.compute}": settings.full.compute != "model",
        f"base.backward: {settings.base.backward}": settings.base.backward != "same",
        f"strategy {layout.strategy}": STRATEGIES[layout.strategy].has_replicas,
    }
    for what, is_wanted in unproved.items():
        if parts and is_wanted:
            raise UsageError(f"model.freeze_{min(parts)}: false is not proved with {what}; leave one of them out")
    refused = [
        ("context.parallel", settings.context_ranks, settings.context_ranks > 1, 1),
        ("experts.parallel", settings.expert_ranks, settings.expert_ranks > 1, 1),
        ("strategy", layout.strategy, STRATEGIES[layout.strategy].package is not None, "ddp"),
    ]
    for setting, value, is_wanted, instead in refused:
        if is_wanted:
            raise UsageError(
                f"data set {store.meta.name!r} has pictures, which cannot be trained with {setting}={value} yet",
                [Fix({setting: instead})],
            )
