"""What the keys of a turn beside its text mean: which characters carry loss, what is not read, what must be told."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from functools import lru_cache
from typing import Any

from flatout.data.rows.formats.advice import advised
from flatout.data.rows.formats.fields import FieldError, SourceOptions, flag_at, kind, list_at, object_at
from flatout.errors import Fix

Span = tuple[int, int]
TRAIN_KEYS = (
    "train", "training", "trainable", "loss", "loss_weight", "loss_scale", "loss_mask", "step_loss_mask", "weight"
)  # fmt: skip
"""Flags of a turn that are true where it carries loss: Axolotl's, tinker's, ms-swift's, LLaMA-Factory's, OpenAI's."""
_MEANINGS = dict.fromkeys(TRAIN_KEYS, "train") | dict.fromkeys(("train_detail", "training_detail"), "train_detail")
# whole numbers under these names say where a turn stands, so 0 and 1 are no flags
_NUMBERING = re.compile(
    r"(?:.*_)?(?:id|ids|index|idx|turn|step|position|order|rank|round|time|timestamp|date|num|number)"
)
# a documented fact about a tool's result, which says nothing about loss
_FACTS = {"is_error"}
_MEDIA = re.compile(
    r"(?:(image|img|picture|photo|pixel|video|audio)s?)"
    r"(?:_(?:path|url|uri|file|filename|byte|base64|data|value)s?|_input)?",
    re.IGNORECASE,
)


@lru_cache(maxsize=4096)
def media_kind(name: str) -> str | None:
    """Return what a key or column of this name holds: "image", "video", "audio", or None for no media."""
    match = _MEDIA.fullmatch(name)
    if match is None:
        return None
    named = match[1].lower()
    return named if named in ("video", "audio") else "image"


def media_error(place: str, media: str) -> str:
    """Return why a row with media is refused."""
    return (
        f"{place} holds {media}s, which cannot be trained on yet, so its words would lose their meaning; remove the row"
    )


def holds_something(value: object) -> bool:
    """Return whether a value is more than null, zero, an empty text, and lists or objects of these."""
    if isinstance(value, Mapping):
        return any(map(holds_something, value.values()))
    if isinstance(value, list | tuple):
        return any(map(holds_something, value))
    return not (value in (None, 0) or (isinstance(value, str | bytes) and value.strip() in ("", b"", "[]", "null")))


def turn_flags(
    turn: Mapping[str, Any], place: str, options: SourceOptions, read: Container[str], remarks: dict[str, None]
) -> tuple[bool | None, list[tuple[Span, bool]] | None]:
    """Read the keys of a turn, a part or a segment that are not in `read`.

    Returns whether it carries loss (None: not said) and its character ranges with their flags (None: not given). A key
    that is not known goes into `remarks` as `key:NAME`. Raises FieldError for media, for flags that differ, and for an
    unknown key whose value is true, false, 0 or 1, as it may be a flag.
    """
    flags, ranges, unclear = dict[str, bool](), None, list[str]()
    for key, value in turn.items():
        if value is None or key in read:
            continue
        meaning, here = options.keys.get(key) or _MEANINGS.get(key), f"{place}.{key}"
        if meaning == "train_detail":
            ranges = _ranges(value, here)
        elif meaning == "train" or meaning == "masked":
            flags[key] = flag_at(value, here) == (meaning == "train")
        else:
            if meaning is None and (media := media_kind(key)) and holds_something(value):
                raise FieldError(media_error(here, media))
            if meaning is None and _may_be_flag(key, value):
                unclear.append(key)
            remarks[f"key:{key if key.isprintable() and len(key) < 100 else ascii(key)[:100]}"] = None
    if unclear:
        whys = {"ignored": "says nothing of loss", "train": "true: loss", "masked": "true: no loss"}
        ways = (Fix({"keys": dict.fromkeys(unclear, says)}, why) for says, why in whys.items())
        end, fixes = advised(options, *ways)
        value = kind(turn[unclear[0]])
        raise FieldError(f"{place}.{unclear[0]} is {value}, which may say whether the turn carries loss{end}", fixes)
    if len(set(flags.values())) > 1:
        raise FieldError(f"{place} has {' and '.join(flags)} with different values; keep one")
    return next(iter(flags.values()), None), ranges


def _may_be_flag(key: str, value: object) -> bool:
    if isinstance(value, bool) or (isinstance(value, str) and value.lower() in ("true", "false")):
        return key not in _FACTS
    return isinstance(value, int | float) and value in (0, 1) and not _NUMBERING.fullmatch(key)


def _ranges(value: object, place: str) -> list[tuple[Span, bool]]:
    """Read Axolotl's ranges: begin_offset and end_offset of characters, both included, and train."""
    ranges = []
    for index, item in enumerate(list_at(value, place)):
        here = f"{place}[{index}]"
        detail = object_at(item, here)
        for name in ("begin_offset", "end_offset"):
            if type(detail.get(name)) is not int:
                raise FieldError(f"{here}.{name} is {kind(detail.get(name))}, not an integer")
        span = detail["begin_offset"], detail["end_offset"] + 1
        ranges.append((span, flag_at(detail.get("train"), f"{here}.train")))
    return ranges


def silent_spans(ranges: Sequence[tuple[Span, bool]], text: str, place: str) -> tuple[Span, ...]:
    """Return the characters of `text` outside the ranges that carry loss, ascending. Raises FieldError if they overlap
    or go beyond the text.
    """
    silent, end = list[Span](), 0
    for (first, after), trained in sorted(ranges):
        if first < end or after <= first:
            raise FieldError(
                f"{place}: the range {first} to {after - 1} is empty or overlaps another; correct the offsets"
            )
        if after > len(text):
            raise FieldError(
                f"{place}: end_offset {after - 1} is beyond the text, whose last character has offset {len(text) - 1} "
                "(end_offset is included)"
            )
        if trained:
            silent += [(end, first)] if end < first else []
        else:
            silent.append((end, after))
        end = after
    silent += [(end, len(text))] if end < len(text) else []
    joined = list[Span]()
    for span in silent:
        joined[-1:] = [(joined[-1][0], span[1])] if joined and joined[-1][1] == span[0] else [*joined[-1:], span]
    return tuple(joined)
