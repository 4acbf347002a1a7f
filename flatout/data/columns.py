"""The columns of a token store: what each holds, where the shards of a column lie in its file, and their hashes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, with_config

from flatout.config.objective import ADVANTAGE, REFERENCE, REWARD, SAMPLER_LOGPROB
from flatout.errors import DataError, UsageError

CHECKED = ConfigDict(strict=True, extra="forbid")
Per = Literal["token", "sample", "unit", "picture", "byte"]


@with_config(CHECKED)
@dataclass(frozen=True, slots=True)
class Column:
    """A named array of a data set: a value for each token, sample, unit or picture, or the bytes of pictures.

    `dtype` is numpy's name of the values on disk, or `bits`: packed, the first in the lowest bit of a byte. `meaning`
    says what a value is. `fingerprint` (32 hex digits) identifies the content, and `file` holds it; both are empty
    before the column is written. NaN stands for a value that is missing, which only a `partial` column may have.
    """

    dtype: Literal["bits", "bool", "int8", "uint8", "uint16", "int32", "int64", "uint64", "float32", "float64"]
    per: Per
    meaning: str = ""
    fingerprint: str = ""
    file: Annotated[str, Field(pattern=r"^([a-z0-9_-]+\.npy)?$")] = ""
    partial: bool = False

    @property
    def stored(self) -> np.dtype[Any]:
        """The type of the array in the file."""
        return np.dtype(np.uint8 if self.dtype == "bits" else self.dtype)

    def checked(self, name: str, values: NDArray[Any], count: int) -> NDArray[Any]:
        """Return `count` values in the type on disk. Raises DataError for other ones, and for values not finite."""
        if values.shape != (count,):
            raise DataError(
                f"column {name!r} has values of shape {list(values.shape)}; expected one for each {self.per}: [{count}]"
            )
        stored = np.ascontiguousarray(values, dtype=self.stored)
        there = stored[~np.isnan(stored)] if self.partial else stored
        fits = np.can_cast(values.dtype, self.stored, "same_kind") and bool(np.isfinite(there).all())
        if not fits or (self.stored.kind in "biu" and not np.array_equal(stored, values)):
            raise DataError(f"column {name!r} has {values.dtype} values; expected finite values of type {self.dtype}")
        return stored


COLUMNS = {
    "token_ids": Column("int32", "token", "token ids"),  # uint16 where every id fits
    "loss_mask": Column("bits", "token", "whether a token carries loss"),  # each shard begins with a whole byte
    "offsets": Column("int64", "sample", "where a sample ends; a 0 precedes the first"),
    "num_labels": Column("int64", "sample", "tokens that carry loss"),
    "hashes": Column("uint64", "sample", "xxh3 of token ids (int32) and loss mask (bytes)"),
    "files": Column("int32", "sample", "index into meta.files"),
    "rows": Column("int64", "sample", "row in that file, from 1"),
    "unit_starts": Column("bool", "sample", "whether a sample begins a unit"),
}
"""What every new store holds. The manifest records it, with the columns that a store has besides."""
PREFIX_TOKENS = "prefix_tokens"
"""The column per unit, of integers, that declares how many tokens its samples begin with in common."""
JUDGEMENTS = {
    PREFIX_TOKENS: Column("int32", "unit", "tokens that the answers begin with in common"),
    "margin": Column("float32", "unit", "by how much a pair's first answer is better"),
    "label": Column("int8", "sample", "1: an answer to be learnt, 0: one to avoid"),
    "class": Column("int32", "sample", "the number of a text's label among those of the set, from 0"),
    ADVANTAGE: Column("float32", "token", "advantage of a sampled token, 0 elsewhere"),
    SAMPLER_LOGPROB: Column("float32", "token", "log-probability of a sampled token as it was drawn, 0 elsewhere"),
    REWARD: Column("float32", "sample", "total reward of an answer"),
}
"""Columns that rows of compared, labelled or sampled answers, and labelled texts, fill."""
PICTURES = {
    "num_pictures": Column("int32", "sample", "pictures of a sample"),
    "picture_heights": Column("int32", "picture", "rows of pixels, as the picture is shown"),
    "picture_widths": Column("int32", "picture", "pixels of a row, as the picture is shown"),
    "picture_tokens": Column("int32", "picture", "tokens that stand for the picture"),
    "picture_values": Column("int64", "picture", "numbers that the image processor makes of the picture"),
    "picture_hashes": Column("uint64", "picture", "xxh3 of the picture's file"),
    "picture_starts": Column("int64", "picture", "where its file begins in picture_bytes"),
    "picture_sizes": Column("int64", "picture", "bytes of its file"),
    "picture_bytes": Column("uint8", "byte", "the files of pictures, each once in a shard"),
}
"""Columns of a set with pictures."""
_TYPES = ("bool", "int8", "uint8", "uint16", "int32", "int64", "uint64", "float32", "float64")
_NAME = re.compile("[a-z][a-z0-9_]*")
HEADER_BYTES = 128


@with_config(CHECKED)
@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive samples; `xxh3` is the hash (32 hex digits) of their bytes in each column.

    `num_pictures` and `num_bytes` are those of PICTURES.
    """

    num_samples: Annotated[int, Field(ge=0)]
    num_tokens: Annotated[int, Field(ge=0)]
    xxh3: Mapping[str, str]
    num_units: Annotated[int, Field(ge=0)]
    num_pictures: Annotated[int, Field(ge=0)] = 0
    num_bytes: Annotated[int, Field(ge=0)] = 0

    def without(self, names: Collection[str]) -> Shard:
        return replace(self, xxh3={name: own for name, own in self.xxh3.items() if name not in names})

    def num_values(self, column: Column) -> int:
        """Return how many values of its file a column has in this shard, without the 0 that precedes `offsets`."""
        if column.per == "token":
            return -(-self.num_tokens // 8) if column.dtype == "bits" else self.num_tokens
        if column.per in ("picture", "byte"):
            return self.num_pictures if column.per == "picture" else self.num_bytes
        return self.num_samples if column.per == "sample" else self.num_units


def fingerprint(name: str, column: Column, shards: Sequence[Shard]) -> str:
    """Return what identifies the content of a column: a hash over its type and those of its shards."""
    facts = [column.dtype, column.per, *(shard.xxh3.get(name, "") for shard in shards)]
    return xxhash.xxh3_128_hexdigest(" ".join(facts).encode())


def check_column(name: str, column: Column) -> Column:
    """Return a column that a store may have besides `COLUMNS`. Raises UsageError for another."""
    if not _NAME.fullmatch(name) or name in COLUMNS:
        raise UsageError(
            f"a column cannot be called {name!r}: take lower case, digits and _, and none of {', '.join(COLUMNS)}"
        )
    if name == REFERENCE:
        raise UsageError(f"column {name}: runs compute it; give yours another name, such as ref_logprob")
    if column.dtype not in _TYPES:
        raise UsageError(f"column {name}: type {column.dtype}, expected one of {', '.join(_TYPES)}")
    if not column.meaning:
        raise UsageError(f"column {name}: say in `meaning` what its values are")
    if name == PREFIX_TOKENS and (column.per != "unit" or column.stored.kind not in "iu"):
        raise UsageError(f"column {name}: expected integers per unit, got {column.dtype} per {column.per}")
    return column


def check_prefixes(
    token_ids: NDArray[Any],
    loss_mask: NDArray[np.bool_] | LossMask,
    offsets: NDArray[np.int64],
    sizes: NDArray[np.int64],
    prefixes: NDArray[Any],
) -> None:
    """Raise DataError if the samples of a unit do not begin with the tokens that are declared, without a label.

    A label right after the prefix is predicted from its last token, so it must not be there either.
    """
    ends = np.cumsum(sizes)
    for unit in np.flatnonzero(prefixes).tolist():
        num_tokens = int(prefixes[unit])
        starts = offsets[ends[unit] - sizes[unit] : ends[unit]].tolist()
        stops = offsets[ends[unit] - sizes[unit] + 1 : ends[unit] + 1].tolist()
        first = np.asarray(token_ids[starts[0] : starts[0] + num_tokens])
        for start, stop in zip(starts, stops, strict=True):
            is_equal = np.array_equal(np.asarray(token_ids[start : start + num_tokens]), first)
            if not 0 < num_tokens < stop - start or not is_equal or loss_mask[start : start + num_tokens + 1].any():
                raise DataError(
                    f"{PREFIX_TOKENS} of unit {unit} is {num_tokens}, but its samples do not begin with that many "
                    "equal tokens that predict no label; declare what they share, or 0"
                )


class Layout:
    """Where the shards of a column lie in its file."""

    def __init__(self, columns: Mapping[str, Column], shards: Sequence[Shard]) -> None:
        """`columns` and `shards` are those of the manifest."""
        self._columns, self.shards = columns, shards
        self._starts: dict[tuple[str, bool], NDArray[np.int64]] = {}
        self.samples, self.tokens, self.mask_bytes = (
            self._starts_of(COLUMNS[name]) for name in ("num_labels", "token_ids", "loss_mask")
        )

    def _starts_of(self, column: Column) -> NDArray[np.int64]:
        key = (column.per, column.dtype == "bits")
        if key not in self._starts:
            counts = [shard.num_values(column) for shard in self.shards]
            self._starts[key] = np.cumsum([0, *counts], dtype=np.int64)
        return self._starts[key]

    def items(self, name: str, shard: int | None = None) -> slice:
        """Return the range of items of one shard, or of all, in the file of a column."""
        starts = self._starts_of(self._columns[name])
        first, last = (0, len(self.shards)) if shard is None else (shard, shard + 1)
        before = int(name == "offsets")
        return slice(int(starts[first]) + before * (first > 0), int(starts[last]) + before)


class LossMask:
    """A mask that is stored as bits, read as bool [T] by a slice or by an integer or boolean array of indices."""

    dtype = np.dtype(np.bool_)

    def __init__(self, stored: NDArray[np.uint8], layout: Layout) -> None:
        """`stored` has the shards one after the other, each from a whole byte on."""
        self._stored, self._starts = stored, layout.tokens
        # what to add to the index of a token of each shard for the index of its bit
        self._shifts = 8 * layout.mask_bytes[:-1] - layout.tokens[:-1]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _bits(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        shards = np.searchsorted(self._starts[1:-1], tokens, side="right") if len(self._shifts) > 1 else 0
        return np.asarray(tokens + self._shifts[shards])

    def __getitem__(self, where: slice | NDArray[Any]) -> NDArray[np.bool_]:
        if isinstance(where, slice):
            start, stop, step = where.indices(len(self))
            first, last = (int(bit) for bit in self._bits(np.array([start, max(start, stop - 1)])))
            if step != 1 or last - first != stop - 1 - start:  # of several shards, or empty
                return self[np.arange(start, stop, step)]
            bits = np.unpackbits(self._stored[first >> 3 : (last >> 3) + 1], bitorder="little")
            return bits[first & 7 :][: stop - start].view(np.bool_)
        places = np.flatnonzero(where) if where.dtype == np.bool_ else where
        at = self._bits(places)
        return np.asarray((self._stored[at >> 3] >> (at & 7).astype(np.uint8)) & 1).astype(np.bool_)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return all of it in memory, a byte for each token."""
        return self[:].astype(np.bool_ if dtype is None else dtype)


def npy_header(column: Column, length: int) -> bytes:
    """Return a .npy header (numpy.lib.format 1.0) of fixed size, so that it can be written after the data."""
    descr = np.lib.format.dtype_to_descr(column.stored)
    text = repr({"descr": descr, "fortran_order": False, "shape": (length,)})
    body = text.encode("latin1").ljust(HEADER_BYTES - 11) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body
