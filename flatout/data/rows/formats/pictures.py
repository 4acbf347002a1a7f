"""Media of a row: pictures in typed parts, in a column `images` or `image`, and what stands for them in texts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import Any

from flatout.data.conversation import PICTURE, Message, PictureSource
from flatout.data.rows.formats.fields import FieldError, Row, kind

PICTURE_COLUMNS = ("images", "image")
"""Columns with the pictures of a row, in the order of its texts."""
PICTURED_FORMATS = ("messages", "sharegpt", "alpaca", "prompt_completion", "prompts")
"""Formats whose turns may hold pictures."""
MARK = "<image>"
"""What stands for a picture in the texts of LLaVA, LLaMA-Factory and ms-swift."""
PICTURE_PARTS = ("image", "image_url", "input_image")
"""Types of parts that are pictures: of Hugging Face and Anthropic, and of OpenAI's two interfaces."""
PICTURE_KEYS = {*PICTURE_PARTS, "path", "url", "base64", "source", "data", "media_type", "bytes"}
"""Keys of a part, or of an object, that say where its picture is."""
# settings of one picture that Qwen's tools read
_SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
WAITING = PictureSource("", "")
"""The picture of a part that only says that there is one: the next of the row's column."""
_MEDIA = re.compile(
    r"(?:(image|img|picture|photo|pixel|video|audio)s?)"
    r"(?:_(?:path|url|uri|file|filename|byte|base64|data|value)s?|_input)?",
    re.IGNORECASE,
)


@lru_cache(maxsize=4096)
def media_kind(name: str) -> str | None:
    """Return what a key or column of this name holds: "image", "video", "audio", or None for no media."""
    match = _MEDIA.fullmatch(name)
    return match and ("image" if match[1].lower() not in ("video", "audio") else match[1].lower())


def media_error(place: str, media: str) -> str:
    """Return why a row with media is refused."""
    return f"{place} holds {media}s, which cannot be trained on yet, so words would lose their meaning; remove the row"


def holds_something(value: object) -> bool:
    """Return whether a value is more than null, zero, an empty text, and lists or objects of these."""
    if isinstance(value, Mapping):
        return any(map(holds_something, value.values()))
    if isinstance(value, list | tuple):
        return any(map(holds_something, value))
    return not (value in (None, 0) or (isinstance(value, str | bytes) and value.strip() in ("", b"", "[]", "null")))


def is_picture_column(name: str) -> bool:
    """Whether a column of this name holds pictures, or says where they are: image, img, image_path, ..."""
    return media_kind(name) == "image" and not name.lower().startswith("pixel")


def picture_of_part(part: Mapping[str, Any], place: str) -> PictureSource:
    """Return the picture of a part, or WAITING. Raises FieldError for a picture that is given in no known way."""
    if sized := next((name for name in _SIZES if part.get(name) is not None), None):
        raise FieldError(
            f"{place}.{sized} sizes one picture; all are sized by the model's image processor: set it in "
            "preprocessor_config.json, and remove it from the row"
        )
    given = {name: value for name, value in part.items() if name in PICTURE_KEYS and value is not None}
    return picture_at(part, place) if given or "file_id" in part else WAITING


def picture_at(value: object, place: str) -> PictureSource:
    """Return the picture that a value is or says where to find; nested objects are searched by PICTURE_KEYS.

    Raises FieldError for another value.
    """
    if isinstance(value, Mapping):
        # the bytes of a file come first: the path beside them says where they once were
        given = (key for key in ("bytes", "base64", "data", *value) if key in PICTURE_KEYS - {"media_type"})
        if name := next((key for key in given if value.get(key) not in (None, "", b"")), None):
            content = value[name]
            if name in ("base64", "data") and isinstance(content, str) and not content.startswith("data:"):
                content = f"data:;base64,{content}"
            return picture_at(content, f"{place}.{name}")
        if value.get("file_id"):
            raise FieldError(f"{place}.file_id names a file at a service, which is not read; give its bytes or path")
        raise FieldError(f"{place} says not where its picture is; give one of image, path, url, base64, bytes")
    if isinstance(value, bytes) or (isinstance(value, str) and value.strip()):
        return PictureSource(value, place)
    raise FieldError(f"{place} is {kind(value)}, not a picture; give a path, a data URI, bytes, or an object of these")


def with_pictures(messages: Sequence[Message], row: Row) -> Sequence[Message]:
    """Return messages with the pictures of the row's column at their places.

    These are the parts that wait for one; else `<image>` in the texts of turns without loss; else, as TRL and ms-swift
    have it, before the first question. Raises FieldError unless there are as many places as pictures.
    """
    column, given = pictures_of(row)
    num_waiting = sum(picture is WAITING for message in messages for picture in message.pictures)
    names = _picture_columns(row)
    num_marks = sum(message.content.count(MARK) for message in messages) if not num_waiting else 0
    if not (given or num_waiting) and (not num_marks or row.columns.keys().isdisjoint(names)):
        return messages  # without the column, a mark is text
    if num_waiting and any(MARK in message.content for message in messages):
        raise FieldError(f"messages have both picture parts and {MARK} in their texts; keep one form")
    num_places = num_waiting or num_marks
    if num_places not in (0, len(given)):
        what = "picture parts without a picture" if num_waiting else MARK
        raise FieldError(f"{column} has {len(given)} pictures, but the turns have {num_places} {what}; give one each")
    if num_places:
        pictures = iter(given)
        return [_filled(message, pictures, column) for message in messages]
    first = next((k for k, message in enumerate(messages) if message.role == "user"), None)
    if first is None:
        raise FieldError(f"{column} has pictures, but no user turn is there to show them; add one")
    asked = messages[first]
    asked = replace(asked, content=PICTURE * len(given) + asked.content, pictures=tuple(given))
    return [*messages[:first], asked, *messages[first + 1 :]]


def _filled(message: Message, pictures: Iterator[PictureSource], column: str) -> Message:
    """Return a message with the next pictures where its parts wait for one, or its text has MARK."""
    if num_marks := message.content.count(MARK):
        if message.role == "assistant":
            raise FieldError(f"an assistant turn holds {MARK} of {column}, but a model writes no pictures; remove it")
        if message.silent or message.pictures:
            raise FieldError(f"a turn with ranges or parts holds {MARK} of {column}; give its pictures as parts")
        shown = tuple(islice(pictures, num_marks))
        return replace(message, content=message.content.replace(MARK, PICTURE), pictures=shown)
    if WAITING not in message.pictures:
        return message
    return replace(message, pictures=tuple(next(pictures) if one is WAITING else one for one in message.pictures))


def pictures_of(row: Row) -> tuple[str, list[PictureSource]]:
    """Return the user's name of the row's column of pictures, and these; a null or empty column has none."""
    columns = [name for name in _picture_columns(row) if holds_something(row.columns.get(name))]
    if len(columns) > 1:
        raise FieldError(f"{' and '.join(columns)} both hold pictures; keep one")
    if not columns:
        return row.name(PICTURE_COLUMNS[0]), []
    value = row.columns[columns[0]]
    values = value if isinstance(value, list | tuple) else [value]
    return columns[0], [picture_at(item, f"{columns[0]}[{index}]") for index, item in enumerate(values)]


def _picture_columns(row: Row) -> list[str]:
    names = [*map(row.name, PICTURE_COLUMNS), *filter(is_picture_column, row.columns)]
    return [name for name in dict.fromkeys(names) if name not in row.options.keys]
