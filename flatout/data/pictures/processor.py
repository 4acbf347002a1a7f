"""What a model's processor makes of a picture: the text that stands for it in a conversation, and its pixel values.

Both come from transformers' own processor. What stands for a picture depends on its size only, so it is taken from a
blank picture of that size, once a size; pixels are made as training goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from flatout.data.conversation import PICTURE, Conversation
from flatout.data.encode import Span
from flatout.data.loss_mask.mask import MaskedText
from flatout.data.pictures.read import PictureFile, decoded, is_transparent, read_picture, require_pillow
from flatout.data.templates.template import ChatTemplate
from flatout.errors import DataError, FlatoutError, reason_of
from flatout.io.durable_io import DurableIO
from flatout.io.hub import hub_file, is_folder
from flatout.io.json_file import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# the files that say how pictures become numbers
_FILES = ("processor_config.json", "preprocessor_config.json")
_SIZES_KEPT = 1 << 14
# what processors raise for a size
_REFUSALS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
# what a processor makes of texts
_TEXT_NAMES = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
# so many pictures of a process are compared with the blank ones of their size
_NUM_COMPARED = 4


class Standing(NamedTuple):
    """What a processor makes of every picture of one size: a text of so many tokens, and so many numbers."""

    text: str
    num_tokens: int
    num_values: int


class Picture(NamedTuple):
    """A picture of a sample."""

    file: PictureFile
    standing: Standing


def processor_files(name: str) -> list[Path]:
    """Return the files of a hub id's or folder's image processor; empty if it has none."""
    if is_folder(name):
        return [path for file in _FILES if (path := Path(name, file)).is_file()]
    paths = (hub_file(name, file, None) for file in _FILES)
    return [path for path in paths if path is not None]


def processor_digest(name: str) -> str:
    """Return xxh3 of what decides pixels and tokens of pictures; empty without a processor that is at hand."""
    files = list[Path]()
    with suppress(FlatoutError):  # texts need none, so a hub that does not answer stops no build of theirs
        files = processor_files(name)
    return xxhash.xxh3_128_hexdigest(b"\0".join(path.read_bytes() for path in files)) if files else ""


class PictureProcessor:
    """The `processor` of one model folder or hub id; `mark` is what a chat template writes for a picture."""

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Load the processor. Raises DataError if there is none, or if it does not say what it writes for a picture."""
        new_image = require_pillow().Image.new
        files = processor_files(name)
        if not files:
            raise DataError(
                f"{name!r} has no image processor ({' or '.join(_FILES)}), so its model reads none; choose a "
                "vision-language model, or give the source keys={images: ignored} if its texts stand alone"
            )
        self._name, self._file, self._tokenizer, num_tokens = name, files[0], tokenizer, len(tokenizer)
        try:
            self.processor = _load(name, files, tokenizer)
        except FlatoutError:
            raise
        except Exception as error:
            raise DataError(f"{files[0]}: transformers cannot make this processor: {reason_of(error)}") from error
        if len(tokenizer) != num_tokens:
            raise DataError(
                f"{name}: its processor adds tokens that tokenizer.json lacks; save the tokenizer with them"
            )
        mark = getattr(self.processor, "image_token", None)
        if not isinstance(mark, str):
            raise DataError(f"{name}: its processor does not name the token that stands for a picture")
        self.mark, own = mark, _picture_token(name, files)
        # some write the mark for a picture, and other tokens for its parts
        self.token_id = int(tokenizer.convert_tokens_to_ids(self.mark)) if own is None else own
        self._standing = lru_cache(_SIZES_KEPT)(lambda high, wide, mode: self._make(new_image(mode, (wide, high))))
        self._num_compared = 0

    def read(self, conversation: Conversation, media_root: Path | None) -> tuple[Picture, ...]:
        """Return the pictures of a conversation. Raises DataError as `read_picture` and `standing` do."""
        pictures = []
        for source in conversation.pictures:
            file = read_picture(source, conversation.origin, media_root)
            where = f"{conversation.origin}: {source.place}"
            standing = self.standing(file.height, file.width, where, has_alpha=file.has_alpha)
            if self._num_compared < _NUM_COMPARED:
                self._num_compared += 1
                self._require_same(file, standing, where)
            pictures.append(Picture(file, standing))
        return tuple(pictures)

    def standing(self, height: int, width: int, where: str = "a picture", *, has_alpha: bool = False) -> Standing:
        """Return what stands for a picture of this size. Raises DataError for one that the processor refuses."""
        try:
            standing = self._standing(height, width, "RGB")
        except _REFUSALS as error:
            raise DataError(
                f"{where}: the image processor refuses {height} x {width} pixels: {reason_of(error)}; crop or resize it"
            ) from None
        with suppress(*_REFUSALS):
            if not has_alpha or self._standing(height, width, "RGBA") == standing:
                return standing
        raise DataError(
            f"{where}: has transparent parts, which the image processor of {self._name} does not convert; save it on a "
            f"background, or set do_convert_rgb: true in {self._file.name}"
        )

    def _make(self, image: Any) -> Standing:
        made = self.processor(
            text=[self.mark], images=[image], return_tensors="np", return_text_replacement_offsets=True
        )
        if "text_replacement_offsets" not in made:
            raise DataError(
                f"{self._name}: its processor does not say what it writes for one picture; choose a different model"
            )
        (replaced,) = made["text_replacement_offsets"][0]
        ids = np.asarray(made["input_ids"][0])
        return Standing(
            replaced["replacement"], int((ids == self.token_id).sum()), np.asarray(made["pixel_values"]).size
        )

    def _require_same(self, file: PictureFile, standing: Standing, where: str) -> None:
        """Raise DataError if the processor makes of a picture something else than of a blank one of its size."""
        image = decoded(file.content)
        if (image.height, image.width) != (file.height, file.width) or self._make(image) != standing:
            raise DataError(f"{where}: the processor of {self._name} treats pictures of one size differently")

    def require_no_mark(self, texts: Iterable[str], where: str = "") -> None:
        """Raise DataError if a text holds the mark."""
        if any(self.mark in text for text in texts):
            raise DataError(f"{where}a text holds {self.mark}, the placeholder of an image; remove it")

    def rendered_prompt(
        self, template: ChatTemplate, messages: Sequence[dict[str, Any]], files: Sequence[bytes]
    ) -> str:
        """Return the text after which an answer begins, with what stands for the pictures of these files.

        Raises DataError if the template does not show each of them, or if a message holds the mark.
        """
        self.require_no_mark(message["content"] for message in messages)
        pieces = replace(template, mark=self.mark).render(messages, generation_prompt=True).split(PICTURE)
        if len(pieces) != len(files) + 1:
            raise DataError(
                f"the chat template shows {len(pieces) - 1} of {len(files)} pictures; use one of the model's family"
            )
        texts = [
            self.standing(image.height, image.width, f"picture {number}", has_alpha=is_transparent(image)).text
            for number, image in enumerate(map(decoded, files), start=1)
        ]
        return "".join(part for pair in zip(["", *texts], pieces, strict=True) for part in pair)

    def tokens_of(self, height: int, width: int) -> NDArray[np.int64]:
        """Return the ids that stand for a picture of this size."""
        return self._ids(self.standing(height, width).text)

    @cached_property
    def plain_ids(self) -> NDArray[np.int64]:
        return self._ids("what does this picture show? a red square, and two blue circles")

    def _ids(self, text: str) -> NDArray[np.int64]:
        return np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)

    def values_of(self, images: Sequence[Any]) -> dict[str, NDArray[Any]]:
        """Return what models read of images, which are Pillow's, as the whole processor passes it on."""
        made = self.processor(text=[self.mark * len(images)], images=list(images), return_tensors="np")
        return {name: np.asarray(values) for name, values in made.items() if name not in _TEXT_NAMES}


def _picture_token(name: str, files: Sequence[Path]) -> int | None:
    """Return the token that a model puts the features of pictures in place of; None if it has no config.json."""
    from transformers import AutoConfig

    config = files[0].with_name("config.json") if is_folder(name) else hub_file(name, "config.json", None)
    if config is None or not config.is_file():
        return None
    try:
        model_config = AutoConfig.from_pretrained(config.parent, trust_remote_code=False)
    except Exception as error:
        raise DataError(f"{config}: transformers rejects it: {reason_of(error)}") from error
    token_id = getattr(model_config, "image_token_id", getattr(model_config, "image_token_index", None))
    return token_id if isinstance(token_id, int) else None


def expanded(masked: MaskedText, texts: Sequence[str]) -> MaskedText:
    """Return a rendered conversation with what stands for its pictures in their places, which never carries loss."""
    pieces = masked.text.split(PICTURE)
    parts, cuts, position = [pieces[0]], list[tuple[int, int]](), len(pieces[0])
    for text, piece in zip(texts, pieces[1:], strict=True):
        parts += [text, piece]
        cuts.append((position, len(text)))
        position += 1 + len(piece)

    def moved(place: int) -> int:
        return place + sum(length - 1 for at, length in cuts if at < place)

    def without_pictures(span: Span) -> list[Span]:
        inside = [at for at, _ in cuts if span[0] <= at < span[1]]
        edges = [span[0], *(edge for at in inside for edge in (at, at + 1)), span[1]]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return [(moved(start), moved(end)) for start, end in pairs if start < end]

    spans = tuple(part for span in masked.spans for part in without_pictures(span))
    typed = tuple((moved(start), moved(end)) for start, end in masked.typed)
    return replace(masked, text="".join(parts), spans=spans, typed=typed)


def _load(name: str, files: Sequence[Path], tokenizer: PreTrainedTokenizerBase) -> Any:
    """Make the processor of a model without its part for videos, with the backend that computes equally everywhere."""
    import transformers  # lazy: image processors take half a second
    from transformers import AutoImageProcessor

    settings = dict[str, Any]()
    for file in reversed(files):
        settings |= read_json(file, DataError)
    made_of = settings.get("processor_class")
    if made_of is None:
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

        kind = read_json(files[0].with_name("config.json"), DataError).get("model_type")
        made_of = PROCESSOR_MAPPING_NAMES.get(kind)
    processor_class = getattr(transformers, str(made_of), None)
    if processor_class is None:
        raise DataError(f"{files[0]}: processor_class is {made_of!r}, which the installed transformers does not have")
    source = files[0].parent
    images = AutoImageProcessor.from_pretrained(source, backend="pil", trust_remote_code=False)
    fields, _ = processor_class.get_processor_dict(source)
    parts = {"image_processor": images, "tokenizer": tokenizer}
    own = {"files": tuple(files), "__doc__": processor_class.__doc__}
    of_pictures: Any = type(processor_class.__name__, (_WithoutVideos, processor_class), own)
    return of_pictures.from_args_and_dict([parts.get(part) for part in processor_class.get_attributes()], fields)


class _WithoutVideos:
    """What makes a processor of transformers' accept that it has no part for videos, which would need torchvision."""

    files: tuple[Path, ...] = ()
    tokenizer: Any

    def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
        checked: Any = super()
        return None if argument is None else checked.check_argument_for_proper_class(name, argument)

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> None:
        """Write the tokenizer, and the files of the model that this processor was made of."""
        self.tokenizer.save_pretrained(save_directory, **options)
        for path in self.files:
            DurableIO().write_bytes(Path(save_directory, path.name), path.read_bytes())
