"""Pictures of a row: typed parts, a column `images` or `image`, and the marks in texts that stand for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from flatout.data.conversation import PICTURE, Message, PictureSource
from flatout.data.rows.formats.fields import FieldError, Row, kind
from flatout.data.rows.formats.turn_flags import holds_something, media_kind

PICTURE_COLUMNS = ("images", "image")
"""Columns with the pictures of a row, in the order of its texts."""
PICTURED_FORMATS = ("messages", "sharegpt", "alpaca", "prompt_completion")
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
        said = ((name, content) for name, content in value.items() if content not in (None, "", b""))
        given = [one for one in said if one[0] in PICTURE_KEYS - {"media_type"}]
        # the bytes of a file come first: the path beside them says where they once were
        order = ("bytes", "base64", "data")
        given.sort(key=lambda item: order.index(item[0]) if item[0] in order else len(order))
        for name, content in given:
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
        raise FieldError(
            f"{column} has {len(given)} pictures, but the turns have {num_places} {what}; give one for each"
        )
    numbers, placed = count(), list[Message]()
    first = next((k for k, message in enumerate(messages) if message.role == "user"), -1)
    if not num_places and first < 0:
        raise FieldError(f"{column} has pictures, but no user turn is there to show them; add one")
    for index, message in enumerate(messages):
        if num_marks and MARK in message.content:
            num_in_text = message.content.count(MARK)
            placed.append(_replaced(message, [given[next(numbers)] for _ in range(num_in_text)], column))
        elif num_waiting:
            filled = [given[next(numbers)] if picture is WAITING else picture for picture in message.pictures]
            placed.append(replace(message, pictures=tuple(filled)))
        elif not num_places and index == first:
            placed.append(replace(message, content=PICTURE * len(given) + message.content, pictures=tuple(given)))
        else:
            placed.append(message)
    return placed


def _replaced(message: Message, pictures: Sequence[PictureSource], column: str) -> Message:
    if message.role == "assistant":
        raise FieldError(f"an assistant turn holds {MARK} of {column}, but a model writes no pictures; remove it")
    if message.silent or message.pictures:
        raise FieldError(
            f"a turn with ranges of loss or with parts holds {MARK} of {column}; give its pictures as parts"
        )
    return replace(message, content=message.content.replace(MARK, PICTURE), pictures=tuple(pictures))


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
    """Return the user's names of the columns that may hold pictures, each once."""
    names = [*map(row.name, PICTURE_COLUMNS), *filter(is_picture_column, row.columns)]
    return [name for name in dict.fromkeys(names) if name not in row.options.keys]
