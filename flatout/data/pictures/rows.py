"""The pictures of a conversation, as its tokens need them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.data.conversation import PICTURE, Conversation
from flatout.data.loss_mask.mask import MaskedText
from flatout.data.pictures.processor import Picture, PictureProcessor
from flatout.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RowPictures:
    """Reads the pictures of rows with the processor that comes with a tokenizer, which the first of them loads."""

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase, media_root: Path | None) -> None:
        self._name, self._tokenizer, self._media_root = name, tokenizer, media_root

    @cached_property
    def _processor(self) -> PictureProcessor:
        return PictureProcessor(self._name, self._tokenizer)

    def mark(self, sample: Conversation) -> str:
        """Return what a chat template writes for a picture; empty for a conversation without any.

        Raises DataError if there is no processor, or if a text holds the mark.
        """
        if not sample.pictures:
            return ""
        try:
            mark = self._processor.mark
        except DataError as error:
            raise DataError(f"{sample.origin}: {sample.pictures[0].place} is a picture, but {error.text}") from None
        if any(mark in message.content for message in sample.messages):
            raise DataError(f"{sample.origin}: a text holds {mark}, the placeholder of an image; remove it")
        return mark

    def of(self, sample: Conversation, texts: Sequence[MaskedText]) -> list[tuple[Picture, str, bool]]:
        """Return a conversation's pictures, each with what stands for it, and whether it has transparent parts.

        `texts` are what the template made of it. Raises DataError if it drops one, and for one that is no good.
        """
        if not (num_pictures := len(sample.pictures)):
            return []
        if (num_shown := texts[-1].text.count(PICTURE) if texts else 0) != num_pictures:
            raise DataError(
                f"{sample.origin}: the chat template shows {num_shown} of {num_pictures} pictures; choose one of the "
                "model's family (data.template)"
            )
        return self._processor.read(sample, self._media_root)
