"""The token store: columns of tokens and samples on disk in shards, memory-mapped, each shard verified by its hashes.

A column is one .npy file that all shards follow each other in, so that a store of any size is a handful of arrays. A
shard is a range of samples, with the hash of its range of every column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tokenize import TokenError
from typing import Annotated, Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from flatout.data.conversation import Origin
from flatout.data.templates.description import TemplateDescription
from flatout.environment import checks_again
from flatout.errors import CheckpointError, DataError, ResourceError
from flatout.io.json_file import encode_json, read_json
from flatout.io.kept_facts import find_facts, keep_facts

VERSION, OLD_VERSION = 3, 2
MANIFEST = "manifest.json"
_AGAIN = "rebuild the data set"
HEADER_BYTES = 128
_CHECKED = ConfigDict(strict=True, extra="forbid")


@with_config(_CHECKED)
@dataclass(frozen=True, slots=True)
class Column:
    """`dtype` is numpy's name of the values on disk, or `bits`: packed, the first in the lowest bit of a byte."""

    dtype: Literal["bits", "bool", "uint16", "int32", "int64", "uint64"]
    per: Literal["token", "sample"]

    @property
    def stored(self) -> np.dtype[Any]:
        """The type of the array in the file."""
        return np.dtype(np.uint8 if self.dtype == "bits" else self.dtype)


COLUMNS = {
    "token_ids": Column("int32", "token"),  # uint16 where every id fits
    "loss_mask": Column("bits", "token"),  # each shard begins with a whole byte
    "offsets": Column("int64", "sample"),  # where a sample ends; a 0 precedes the first
    "num_labels": Column("int64", "sample"),
    "hashes": Column("uint64", "sample"),  # xxh3 of ids (int32) and mask (bytes)
    "files": Column("int32", "sample"),  # index into meta.files
    "rows": Column("int64", "sample"),  # row in that file, from 1
}
"""What a store holds of every sample. The manifest records it, so that a store may have other columns too."""
MASK_RULES = 1
"""Version of the rules by which conversations become text and ranges with loss; raised when a row may get others."""
_OLD_COLUMNS = COLUMNS | {"loss_mask": Column("bool", "token")}


def _with_rules(fingerprint: str, mask_rules: int) -> str:
    return xxhash.xxh3_128_hexdigest(f"{fingerprint} {mask_rules}".encode()) if mask_rules else fingerprint


@with_config(_CHECKED)
@dataclass(frozen=True, slots=True)
class StoreMeta:
    """What a store was made from, and what happened to the rows (`counts`; the lists are in report.json).

    `template` is the chat template's name and `template_text` the text that rendered the conversations, byte for byte;
    both are empty if there was none; `template_facts` describe it. `end_of_turn` is what it writes behind an answer,
    and `stop_tokens` are what stops one. `settings` are the `data` settings that decide tokens. `mask_rules` is the
    version of the rules that chose what carries loss in conversations; 0 without any, and in stores of old.
    """

    name: str
    fingerprint: str
    tokenizer: str
    tokenizer_digest: str
    template: str
    template_text: str
    vocabulary_size: Annotated[int, Field(ge=0)]
    settings: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    max_token_id: Annotated[int, Field(ge=0)] = 0
    end_of_turn: str = ""
    template_facts: TemplateDescription | None = None
    mask_rules: Annotated[int, Field(ge=0)] = 0

    @property
    def stop_tokens(self) -> tuple[str, ...]:
        """The texts that end an answer, each one token of the tokenizer if it has it; stores of old know one."""
        if self.template_facts is None:
            return (self.end_of_turn,) if self.end_of_turn else ()
        return self.template_facts.stops

    @property
    def has_earlier_rules(self) -> bool:
        """Whether its conversations may have other labels today; a set without any has no template, and no rules."""
        return bool(self.template) and self.mask_rules != MASK_RULES

    def with_rules(self) -> StoreMeta:
        """Return the same for a set with conversations, whose fingerprint also depends on the rules of their mask."""
        return replace(self, mask_rules=MASK_RULES, fingerprint=_with_rules(self.fingerprint, MASK_RULES))

    def has_content(self, fingerprint: str) -> bool:
        """Whether it was made of the content that has this fingerprint, by whichever rules."""
        return self.fingerprint == _with_rules(fingerprint, self.mask_rules)

    @property
    def added_tokens(self) -> dict[str, bool]:
        """The tokens that were added to the tokenizer, and whether each is special."""
        ordinary, special = (self.settings.get(name, ()) for name in ("new_tokens", "new_special_tokens"))
        return {**dict.fromkeys(ordinary, False), **dict.fromkeys(special, True)}


@with_config(_CHECKED)
@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive samples; `xxh3` is the hash (32 hex digits) of their bytes in each column."""

    num_samples: Annotated[int, Field(ge=0)]
    num_tokens: Annotated[int, Field(ge=0)]
    xxh3: Mapping[str, str]


@with_config(_CHECKED)
@dataclass(frozen=True, slots=True)
class _Manifest:
    version: int
    meta: StoreMeta
    columns: Mapping[Annotated[str, Field(pattern="^[a-z_]+$")], Column]
    shards: tuple[Shard, ...]


@with_config(_CHECKED)
@dataclass(frozen=True, slots=True)
class _OldArray:
    length: Annotated[int, Field(ge=0)]
    xxh3_128: str


@with_config(_CHECKED)
@dataclass(frozen=True, slots=True)
class _OldManifest:
    version: int
    meta: StoreMeta
    arrays: Mapping[str, _OldArray]


class Layout:
    """Where the shards of a column lie in its file."""

    def __init__(self, columns: Mapping[str, Column], shards: Sequence[Shard]) -> None:
        """`columns` and `shards` are those of the manifest."""
        self._columns, self.shards = columns, shards
        counts = [(shard.num_samples, shard.num_tokens, -(-shard.num_tokens // 8)) for shard in shards]
        starts = np.cumsum([(0, 0, 0), *counts], axis=0, dtype=np.int64)
        self.samples, self.tokens, self.mask_bytes = starts.T

    def items(self, name: str, shard: int | None = None) -> slice:
        """Return the range of items of one shard, or of all, in the file of a column."""
        column = self._columns[name]
        starts = self.samples if column.per == "sample" else self.mask_bytes if column.dtype == "bits" else self.tokens
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


@dataclass(frozen=True)
class TokenStore:
    """N tokenized samples in one stream.

    `token_ids` int32 or uint16 [T] and `loss_mask` bool [T] stay on disk; sample i is [offsets[i], offsets[i + 1]).
    `offsets` int64 [N + 1]; `num_labels` int64 [N] counts the tokens that carry loss; loss_mask[offsets[i]] is False.
    """

    folder: Path
    token_ids: NDArray[np.int32] | NDArray[np.uint16]
    loss_mask: NDArray[np.bool_] | LossMask
    offsets: NDArray[np.int64]
    num_labels: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    files: NDArray[np.int32]
    rows: NDArray[np.int64]
    meta: StoreMeta
    check: ShardCheck | None = None

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.num_labels)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, int64 [N]."""
        return np.diff(self.offsets)

    @property
    def row_keys(self) -> NDArray[np.int64]:
        """One number per source row of the samples, int64 [N]: windows and copies of a row share it."""
        return self.files.astype(np.int64) << 40 | self.rows

    def sample(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return token ids and loss mask of one sample; raises DataError if the sample's shard is damaged."""
        if self.check is not None:
            self.check(index)
        start, end = self.offsets[index], self.offsets[index + 1]
        return self.token_ids[start:end].astype(np.int32, copy=False), self.loss_mask[start:end]

    def origin(self, index: int) -> Origin:
        """Return the row that a sample came from, for messages."""
        return Origin(self.meta.files[self.files[index]], int(self.rows[index]))

    @classmethod
    def open(cls, folder: Path, *, verify: bool = True) -> TokenStore:
        """Open a finished store.

        `verify` checks the hashes of what is known of each sample now, and those of tokens shard by shard when `sample`
        first reads one. A store whose every shard was found whole is not hashed again while its files are the same.
        Raises DataError for a missing, incomplete, damaged or newer store.
        """
        manifest = _read_manifest(folder)
        layout = Layout(manifest.columns, manifest.shards)
        arrays = {name: _open_array(folder, name, manifest.columns, layout) for name in manifest.columns}
        check = ShardCheck(folder, manifest.columns, layout, arrays) if verify else None
        known: dict[str, Any] = {name: arrays[name] for name in COLUMNS}
        if manifest.columns["loss_mask"].dtype == "bits":
            known["loss_mask"] = LossMask(arrays["loss_mask"], layout)
        store = cls(folder=folder, meta=manifest.meta, check=check, **known)
        fits = int(store.offsets[0]) == 0 and int(store.offsets[-1]) == len(store.token_ids)
        if fits and store.num_samples and verify:
            in_range = bool(store.files.min() >= 0 and store.files.max() < len(store.meta.files))
            fits = in_range and bool((store.lengths > 0).all())
        if not fits:
            raise DataError(f"{folder}: the arrays have inconsistent lengths; {_AGAIN}")
        return store


class ShardCheck:
    """Checks hashes of shards once; a store that was found whole is remembered, by its files' sizes and times."""

    def __init__(
        self, folder: Path, columns: Mapping[str, Column], layout: Layout, arrays: Mapping[str, NDArray[Any]]
    ) -> None:
        """Check the columns that hold a value a sample. Raises DataError."""
        self._folder, self._columns, self._layout, self._arrays = folder, columns, layout, arrays
        self._left = set(range(len(layout.shards)))
        try:
            if not checks_again() and find_facts("tokens", self._key):
                self._left.clear()
        except CheckpointError:  # a damaged file of the cache: the store is hashed again
            pass
        for shard in sorted(self._left):
            self._verify(shard, "sample")

    @cached_property
    def _key(self) -> dict[str, Any]:
        files = {}
        for name in (MANIFEST, *(f"{name}.npy" for name in self._columns)):
            facts = (self._folder / name).stat()
            files[name] = [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]
        return {"store": str(self._folder.resolve()), "files": files}

    def __call__(self, sample: int) -> None:
        """Check the tokens of the shard that holds a sample. Raises DataError."""
        if not self._left:
            return
        shard = int(np.searchsorted(self._layout.samples[1:], sample, side="right"))
        if shard not in self._left:
            return
        self._verify(shard, "token")
        self._left.discard(shard)  # another thread may have been as fast
        if not self._left:
            with suppress(ResourceError):  # no cache: the next start hashes them again
                keep_facts("tokens", self._key, {"shards": len(self._layout.shards)})

    def _verify(self, shard: int, per: str) -> None:
        expected = self._layout.shards[shard].xxh3
        for name, column in self._columns.items():
            if column.per != per:
                continue
            part = self._arrays[name][self._layout.items(name, shard)]
            if xxhash.xxh3_128_hexdigest(part.view(np.uint8).data) != expected.get(name):
                first, last = (int(sample) for sample in self._layout.samples[shard : shard + 2])
                raise DataError(
                    f"{self._folder / name}.npy: shard {shard} (samples {first + 1:,} to {last:,}): the content does "
                    f"not match its hash (damaged file); {_AGAIN}"
                )


def _read_manifest(folder: Path) -> _Manifest:
    path = folder / MANIFEST
    if not path.exists():
        raise DataError(f"{folder} is not a built data set ({MANIFEST} is missing); run flatout data build")
    raw = read_json(path, DataError)
    version = raw.get("version") if isinstance(raw, dict) else None
    if version not in (VERSION, OLD_VERSION):
        raise DataError(f"{path}: found format version {version}, but this flatout reads {VERSION}; {_AGAIN}")
    adapter: TypeAdapter[Any] = TypeAdapter(_Manifest if version == VERSION else _OldManifest)
    try:
        found = adapter.validate_json(encode_json(raw))
    except ValidationError as error:
        first = error.errors()[0]
        field_name = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{path}: {field_name}: {first['msg'].lower()}; {_AGAIN}") from None
    if version == OLD_VERSION:  # as a store of one shard, which is what it is
        hashes = {name: facts.xxh3_128 for name, facts in found.arrays.items()}
        length = {name: facts.length for name, facts in found.arrays.items()}
        shard = Shard(length.get("num_labels", 0), length.get("token_ids", 0), hashes)
        found = _Manifest(VERSION, found.meta, _OLD_COLUMNS, (shard,))
    manifest: _Manifest = found
    if missing := COLUMNS.keys() - manifest.columns.keys():
        raise DataError(f"{path}: columns: {min(missing)} is missing; {_AGAIN}")
    return manifest


def _open_array(folder: Path, name: str, columns: Mapping[str, Column], layout: Layout) -> NDArray[Any]:
    path, dtype, length = folder / f"{name}.npy", columns[name].stored, layout.items(name).stop
    try:
        array: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        raise DataError(f"{path}: damaged or missing: {error.strerror}; {_AGAIN}") from error
    except (ValueError, KeyError, EOFError, OverflowError, SyntaxError, TokenError) as error:
        raise DataError(f"{path}: damaged or missing: {error}; {_AGAIN}") from error
    if array.dtype != dtype or array.shape != (length,):
        raise DataError(f"{path}: found {array.dtype} {array.shape}, expected {dtype} ({length},); {_AGAIN}")
    return array
