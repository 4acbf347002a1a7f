"""The token store: columns of tokens and samples on disk in shards, memory-mapped, each shard verified by its hashes.

A column is one .npy file that all shards follow each other in, so that a store of any size is a handful of arrays. A
shard is a range of samples, with the hash of its range of every column. Consecutive samples are a unit, such as the
two answers of a pair; most stores have units of one.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tokenize import TokenError
from typing import Annotated, Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import Field, with_config

from flatout.data.columns import CHECKED, COLUMNS, Column, Layout, LossMask, Shard, fingerprint
from flatout.data.conversation import Origin
from flatout.data.templates.description import TemplateDescription
from flatout.errors import DataError, Fix, reason_of
from flatout.io.allowed import require_allowed
from flatout.io.json_file import open_plain, read_json, validated

VERSION = 4
MANIFEST = "manifest.json"
_AGAIN = (Fix({}, "rebuild the data set"),)
# two renames take far less
_REPLACED_WITHIN_S, _LOOK_S = 5.0, 0.01
MASK_RULES = 2
"""Version of the rules by which conversations become text and ranges with loss; raised when a row may get others."""
_FILLED_BY = {
    "advantage": "give answers that a model has sampled, with rewards: rows of format=rollouts (docs/data.md)",
    "label": "write rows with prompt, completion and label (true or false)",
    "class": "build it from rows with format=classify",
    "margin": "build it from pairs that all have a margin or scores",
}


def with_mask_rules(fingerprint: str, mask_rules: int) -> str:
    """Return the fingerprint of a store whose content has this one, and whose mask is by these rules (0: by none)."""
    return xxhash.xxh3_128_hexdigest(f"{fingerprint} {mask_rules}".encode()) if mask_rules else fingerprint


@with_config(CHECKED)
@dataclass(frozen=True, slots=True)
class StoreMeta:
    """What a store was made from, and what happened to the rows (`counts`; the lists are in report.json).

    `template` is the chat template's name and `template_text` the text that rendered the conversations, byte for byte;
    both are empty if there was none; `template_facts` describe it. `end_of_turn` is what it writes behind an answer,
    and `stop_tokens` are what stops one. `settings` are the `data` settings that decide tokens. `mask_rules` is the
    version of the rules that chose what carries loss in conversations; 0 without any. `labels` are those that the
    column `class` numbers. `processor` identifies the image processor of a set with pictures.

    Who writes a store of their own gives `name` and `tokenizer`: the writer adds what it knows.
    """

    name: str
    fingerprint: str = ""
    tokenizer: str = ""
    tokenizer_digest: str = ""
    template: str = ""
    template_text: str = ""
    vocabulary_size: Annotated[int, Field(ge=0)] = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    max_token_id: Annotated[int, Field(ge=0)] = 0
    end_of_turn: str = ""
    template_facts: TemplateDescription | None = None
    mask_rules: Annotated[int, Field(ge=0)] = 0
    labels: tuple[str, ...] = ()
    processor: str = ""

    @property
    def limits(self) -> str:
        """What carries loss and the longest sample, for people; empty for a store that was not built from rows."""
        known = self.settings.get
        return f"loss on {known('loss_type')}; max_tokens {known('max_tokens')}; " if self.settings else ""

    @property
    def stop_tokens(self) -> tuple[str, ...]:
        """The texts that end an answer, each one token of the tokenizer if it has it; none without conversations."""
        return () if self.template_facts is None else self.template_facts.stops

    @property
    def has_earlier_rules(self) -> bool:
        """Whether its conversations may have other labels today; a set without any has no template, and no rules."""
        return bool(self.template) and self.mask_rules != MASK_RULES

    @property
    def added_tokens(self) -> dict[str, bool]:
        """The tokens that were added to the tokenizer, and whether each is special."""
        ordinary, special = (self.settings.get(name, ()) for name in ("new_tokens", "new_special_tokens"))
        return {**dict.fromkeys(ordinary, False), **dict.fromkeys(special, True)}


@with_config(CHECKED)
@dataclass(frozen=True, slots=True)
class StoreManifest:
    """What a store is: its columns, and its shards."""

    version: int
    meta: StoreMeta
    columns: Mapping[Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$")], Column]
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class TokenSample:
    """One sample of n tokens: `token_ids` int32 (n,), `loss_mask` bool (n,), and the columns that were asked for.

    A column per token is (n,); one per sample or unit is a value without dimensions.
    """

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def pair(self) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """The token ids and the loss mask."""
        return self.token_ids, self.loss_mask


@dataclass(frozen=True)
class TokenStore:
    """N tokenized samples in one stream.

    `token_ids` int32 or uint16 [T] and `loss_mask` bool [T] stay on disk; sample i is [offsets[i], offsets[i + 1]).
    `offsets` int64 [N + 1]; `num_label_tokens` int64 [N], in files `num_labels`; loss_mask[offsets[i]] is False.
    `unit_starts` bool [N] marks the first sample of each unit; None: each sample is a unit. `columns` describes all
    columns, and `extra` has those besides, by name, on disk.
    """

    folder: Path
    token_ids: NDArray[np.int32] | NDArray[np.uint16]
    loss_mask: NDArray[np.bool_] | LossMask
    offsets: NDArray[np.int64]
    num_label_tokens: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    files: NDArray[np.int32]
    rows: NDArray[np.int64]
    meta: StoreMeta
    check: ShardCheck | None = None
    unit_starts: NDArray[np.bool_] | None = None
    columns: Mapping[str, Column] = field(default_factory=dict)
    extra: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.num_label_tokens)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, int64 [N]."""
        return np.diff(self.offsets)

    @property
    def row_keys(self) -> NDArray[np.int64]:
        """One number per source row of the samples, int64 [N]: windows and copies of a row share it."""
        return self.files.astype(np.int64) << 40 | self.rows

    @cached_property
    def unit_offsets(self) -> NDArray[np.int64] | None:
        """Where units begin, and N: int64 [U + 1]; None where each sample is a unit."""
        if self.unit_starts is None or self.unit_starts.all():
            return None
        return np.append(np.flatnonzero(self.unit_starts), self.num_samples)

    def units_of(self, sample_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the unit of each of these samples, int64."""
        if self.unit_offsets is None:
            return sample_ids
        return np.searchsorted(self.unit_offsets, sample_ids, side="right") - 1

    def require_columns(self, names: Collection[str], who: str) -> None:
        """Raise DataError if the store lacks one of these columns, which `who` needs."""
        for name in names:
            if name not in self.extra:
                raise DataError(
                    f"{self.folder}: data set {self.meta.name!r} has no column {name!r}, which {who} needs; "
                    f"{_FILLED_BY.get(name, 'write it with flatout.data.add_column')}, or train "
                    f"without {who}"
                )

    def sample(self, index: int, columns: Collection[str] = ()) -> TokenSample:
        """Return one sample with some of the columns of `extra`; raises DataError if the sample's shard is damaged."""
        if self.check is not None:
            self.check(index)
        start, end = self.offsets[index], self.offsets[index + 1]
        ids, loss_mask = self.token_ids[start:end].astype(np.int32, copy=False), self.loss_mask[start:end]
        if not columns:
            return TokenSample(ids, loss_mask)
        unit = int(self.units_of(np.array([index]))[0])
        where: dict[str, Any] = {"token": slice(start, end), "sample": index, "unit": unit}
        values = {name: np.asarray(self.extra[name][where[self.columns[name].per]]) for name in columns}
        return TokenSample(ids, loss_mask, values)

    def label_places(self, sample_ids: Sequence[int]) -> list[NDArray[np.int64]]:
        """Return where each sample's label tokens are among the tokens of all these samples, in their order."""
        lengths = self.lengths[list(sample_ids)]
        # a first token is never predicted
        own = (np.flatnonzero(self.sample(index).loss_mask[1:]) + 1 for index in sample_ids)
        return [start + places for start, places in zip(np.cumsum(lengths) - lengths, own, strict=True)]

    @cached_property
    def picture_offsets(self) -> NDArray[np.int64]:
        """Where the pictures of each sample begin among all, and their number: int64 [N + 1]; zeros without any."""
        counts = self.extra.get("num_pictures", np.zeros(self.num_samples, np.int64))
        return np.append(0, np.cumsum(counts, dtype=np.int64))

    @property
    def num_pictures(self) -> int:
        return int(self.picture_offsets[-1])

    def pictures(self, index: int) -> list[bytes]:
        """Return the files of a sample's pictures, in their order. Raises DataError if its shard is damaged."""
        if self.check is not None:
            self.check(index)
        own = slice(*self.picture_offsets[index : index + 2])
        places = zip(self.extra["picture_starts"][own], self.extra["picture_sizes"][own], strict=True)
        return [self.extra["picture_bytes"][start : start + size].tobytes() for start, size in places]

    def origin(self, index: int) -> Origin:
        """Return the row that a sample came from, for messages."""
        return Origin(self.meta.files[self.files[index]], int(self.rows[index]))

    @classmethod
    def open(cls, folder: Path, *, verify: bool = True) -> TokenStore:
        """Open a finished store.

        `verify` checks the hashes of what is known of each sample now, and those of tokens shard by shard when `sample`
        first reads one. What was opened stays readable when another process replaces the store.
        Raises DataError for a missing, incomplete, damaged or newer store.
        """
        require_allowed(folder)
        until_s = time.monotonic() + _REPLACED_WITHIN_S
        while True:
            before = _inodes(folder)
            try:
                store = cls._open(folder, read_manifest(folder), verify)
                if _inodes(folder) == before:
                    return store
            except (DataError, FileNotFoundError):
                # another process may have replaced a column or the store since, or is about to
                is_between = not folder.exists() and replaced_dir(folder).exists() and time.monotonic() < until_s
                if _inodes(folder) == before and not is_between:
                    raise
                time.sleep(_LOOK_S)

    @classmethod
    def _open(cls, folder: Path, manifest: StoreManifest, verify: bool) -> TokenStore:
        layout = Layout(manifest.columns, manifest.shards)
        arrays = {name: _open_array(folder, name, manifest.columns, layout) for name in manifest.columns}
        check = ShardCheck(folder, manifest.columns, layout, dict(arrays)) if verify else None
        known: dict[str, Any] = {name: arrays.pop(name) for name in COLUMNS if name in arrays}
        known |= {"loss_mask": LossMask(known["loss_mask"], layout), "num_label_tokens": known.pop("num_labels")}
        store = cls(folder=folder, meta=manifest.meta, check=check, columns=manifest.columns, extra=arrays, **known)
        fits = int(store.offsets[0]) == 0 and int(store.offsets[-1]) == len(store.token_ids)
        if store.unit_starts is not None and store.num_samples:
            num_units = sum(shard.num_units for shard in manifest.shards)
            fits &= bool(store.unit_starts[0]) and int(np.count_nonzero(store.unit_starts)) == num_units
        if fits and store.num_samples and verify:
            in_range = bool(store.files.min() >= 0 and store.files.max() < len(store.meta.files))
            fits = in_range and bool((store.lengths > 0).all())
        if not fits:
            raise DataError(f"{folder}: the arrays have inconsistent lengths", _AGAIN)
        return store


class ShardCheck:
    """Checks hashes of shards once."""

    def __init__(
        self, folder: Path, columns: Mapping[str, Column], layout: Layout, arrays: Mapping[str, NDArray[Any]]
    ) -> None:
        """Check the columns that hold a value a sample. Raises DataError."""
        self._folder, self._columns, self._layout, self._arrays = folder, columns, layout, arrays
        self._left = set(range(len(layout.shards)))
        for shard in sorted(self._left):
            self._verify(shard, ("sample", "unit", "picture"))

    def __call__(self, sample: int) -> None:
        """Check the tokens of the shard that holds a sample. Raises DataError."""
        if not self._left:
            return
        shard = int(np.searchsorted(self._layout.samples[1:], sample, side="right"))
        if shard not in self._left:
            return
        self._verify(shard, ("token", "byte"))
        self._left.discard(shard)  # another thread may have been as fast

    def _verify(self, shard: int, per: Collection[str]) -> None:
        expected = self._layout.shards[shard].xxh3
        for name, column in self._columns.items():
            if column.per not in per:
                continue
            part = self._arrays[name][self._layout.items(name, shard)]
            if xxhash.xxh3_128_hexdigest(part.view(np.uint8).data) != expected.get(name):
                first, last = (int(sample) for sample in self._layout.samples[shard : shard + 2])
                where = f"{self._folder / column.file}: shard {shard} (samples {first + 1:,} to {last:,})"
                raise DataError(f"{where}: the content does not match its hash (damaged file)", _AGAIN)


def replaced_dir(folder: Path) -> Path:
    """Return where a builder moves the store in a folder before it renames the new one to that folder."""
    return folder.with_name(f".{folder.name}.old")


def _inodes(folder: Path) -> tuple[int, int] | None:
    """Return what identifies a store's folder and manifest, which are renamed into place; None while one is missing."""
    with suppress(OSError):
        return folder.stat().st_ino, (folder / MANIFEST).stat().st_ino
    return None


def read_manifest(folder: Path) -> StoreManifest:
    """Read the manifest of a store. Raises DataError, also for one of another version."""
    path = folder / MANIFEST
    if not path.exists():
        raise DataError(f"{folder} is not a built data set ({MANIFEST} is missing); run flatout data build")
    raw = read_json(path, DataError)
    version = raw.get("version") if isinstance(raw, dict) else None
    if version != VERSION:
        raise DataError(f"{path}: found format version {version}, but this flatout reads {VERSION}", _AGAIN)
    try:
        manifest = validated(StoreManifest, raw, str(path), DataError)
    except DataError as error:
        raise DataError(error.text, _AGAIN) from error
    if missing := COLUMNS.keys() - manifest.columns.keys():
        raise DataError(f"{path}: columns: {min(missing)} is missing", _AGAIN)
    for name, column in manifest.columns.items():
        mark = fingerprint(name, column, manifest.shards)
        if column.fingerprint != mark:
            said = f"found {column.fingerprint}, but its shards give {mark}"
            raise DataError(f"{path}: columns.{name}.fingerprint: {said}", _AGAIN)
    return manifest


def _open_array(folder: Path, name: str, columns: Mapping[str, Column], layout: Layout) -> NDArray[Any]:
    path, dtype, length = folder / columns[name].file, columns[name].stored, layout.items(name).stop
    try:
        open_plain(path).close()
        array: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, KeyError, EOFError, OverflowError, SyntaxError, TokenError) as error:
        raise DataError(f"{path}: damaged or missing: {reason_of(error)}", _AGAIN) from error
    if array.dtype != dtype or array.shape != (length,):
        raise DataError(f"{path}: found {array.dtype} {array.shape}, expected {dtype} ({length},)", _AGAIN)
    return array
