"""The token store: a folder of flat arrays on disk, memory-mapped and verified by hash."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tokenize import TokenError
from typing import Annotated, Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from flatout.data.conversation import Origin
from flatout.data.templates.description import TemplateDescription
from flatout.errors import DataError
from flatout.io.durable_io import DurableIO
from flatout.io.json_file import encode_json, read_json

VERSION = 2
_MANIFEST = "manifest.json"
_AGAIN = "rebuild the data set"
_HEADER_BYTES = 128
_TYPES = {
    "token_ids": np.dtype(np.int32),  # [all tokens]
    "loss_mask": np.dtype(np.bool_),  # [all tokens]
    "offsets": np.dtype(np.int64),  # [N + 1]
    "num_labels": np.dtype(np.int64),  # [N]
    "hashes": np.dtype(np.uint64),  # [N] xxh3 of ids and mask
    "files": np.dtype(np.int32),  # [N] index into meta.files
    "rows": np.dtype(np.int64),  # [N] row in that file, from 1
}

_CHECKED = ConfigDict(strict=True, extra="forbid")


@with_config(_CHECKED)
@dataclass(frozen=True, slots=True)
class StoreMeta:
    """What a store was made from, and what happened to the rows (`counts`; the lists are in report.json).

    `template` is the chat template's name and `template_text` the text that rendered the conversations, byte for byte;
    both are empty if there was none; `template_facts` describe it. `end_of_turn` is what it writes behind an answer,
    and `stop_tokens` are what stops one. `settings` are the `data` settings that decide tokens.
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

    @property
    def stop_tokens(self) -> tuple[str, ...]:
        """The texts that end an answer, each one token of the tokenizer if it has it; stores of old know one."""
        if self.template_facts is None:
            return (self.end_of_turn,) if self.end_of_turn else ()
        return self.template_facts.stops

    @property
    def added_tokens(self) -> dict[str, bool]:
        """The tokens that were added to the tokenizer, and whether each is special."""
        ordinary, special = (self.settings.get(name, ()) for name in ("new_tokens", "new_special_tokens"))
        return {**dict.fromkeys(ordinary, False), **dict.fromkeys(special, True)}


@with_config(_CHECKED)
@dataclass(frozen=True, slots=True)
class _ArrayFacts:
    length: Annotated[int, Field(ge=0)]
    xxh3_128: str


@with_config(_CHECKED)
@dataclass(frozen=True, slots=True)
class _Manifest:
    version: int
    meta: StoreMeta
    arrays: Mapping[str, _ArrayFacts]


@dataclass(frozen=True)
class TokenStore:
    """N tokenized samples in one stream.

    `token_ids` int32 [T] and `loss_mask` bool [T] are memory maps; sample i is [offsets[i], offsets[i + 1]). `offsets`
    int64 [N + 1]; `num_labels` int64 [N] counts the tokens that carry loss; loss_mask[offsets[i]] is False.
    """

    folder: Path
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    num_labels: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    files: NDArray[np.int32]
    rows: NDArray[np.int64]
    meta: StoreMeta

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
        """Return token ids and loss mask of one sample, as views of the memory maps."""
        start, end = self.offsets[index], self.offsets[index + 1]
        return self.token_ids[start:end], self.loss_mask[start:end]

    def origin(self, index: int) -> Origin:
        """Return the row that a sample came from, for messages."""
        return Origin(self.meta.files[self.files[index]], int(self.rows[index]))

    @classmethod
    def open(cls, folder: Path, *, verify: bool = True) -> TokenStore:
        """Open a finished store; `verify` also checks every file's xxh3 (seconds for billions of tokens).

        Raises DataError for a missing, incomplete, damaged or newer store.
        """
        path = folder / _MANIFEST
        if not path.exists():
            raise DataError(f"{folder} is not a built data set ({_MANIFEST} is missing); run flatout data build")
        raw = read_json(path, DataError)
        version = raw.get("version") if isinstance(raw, dict) else None
        if version != VERSION:
            raise DataError(f"{path}: found format version {version}, but this flatout reads {VERSION}; {_AGAIN}")
        try:
            manifest = TypeAdapter(_Manifest).validate_json(encode_json(raw))
        except ValidationError as error:
            first = error.errors()[0]
            field_name = ".".join(str(part) for part in first["loc"])
            raise DataError(f"{path}: {field_name}: {first['msg'].lower()}; {_AGAIN}") from None
        arrays = {name: _open_array(folder, name, manifest.arrays, verify) for name in _TYPES}
        store = cls(folder=folder, meta=manifest.meta, **arrays)
        per_sample = {len(arrays[name]) for name in ("num_labels", "hashes", "files", "rows")}
        fits = per_sample == {len(store.offsets) - 1} and len(store.token_ids) == len(store.loss_mask)
        if fits and store.num_samples:
            ends = int(store.offsets[0]) == 0 and int(store.offsets[-1]) == len(store.token_ids)
            in_range = bool(store.files.min() >= 0 and store.files.max() < len(store.meta.files))
            fits = ends and in_range and bool((store.lengths > 0).all())
        if not fits:
            raise DataError(f"{folder}: the arrays have inconsistent lengths; {_AGAIN}")
        return store


def _open_array(folder: Path, name: str, facts: Mapping[str, _ArrayFacts], verify: bool) -> NDArray[Any]:
    path, dtype = folder / f"{name}.npy", _TYPES[name]
    try:
        expected = facts[name]
        array: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        raise DataError(f"{path}: damaged or missing: {error.strerror}; {_AGAIN}") from error
    except (ValueError, KeyError, EOFError, OverflowError, SyntaxError, TokenError) as error:
        raise DataError(f"{path}: damaged or missing: {error}; {_AGAIN}") from error
    if array.dtype != dtype or array.shape != (expected.length,):
        raise DataError(f"{path}: found {array.dtype} {array.shape}, expected {dtype} ({expected.length},); {_AGAIN}")
    if verify and xxhash.xxh3_128_hexdigest(array.view(np.uint8).data) != expected.xxh3_128:
        raise DataError(f"{path}: the content does not match its hash (damaged file); {_AGAIN}")
    return array


class StoreWriter:
    """Appends samples to the arrays of a store in its own folder; nothing is kept in memory."""

    def __init__(self, folder: Path, durable_io: DurableIO) -> None:
        self._folder, self._durable_io, self._open = folder, durable_io, ExitStack()
        self._files = {name: self._open.enter_context(durable_io.open_new(folder / f"{name}.npy")) for name in _TYPES}
        self._hashes = {name: xxhash.xxh3_128() for name in _TYPES}
        self._lengths = dict.fromkeys(_TYPES, 0)
        self.num_samples = self.num_tokens = self.max_token_id = 0
        for file in self._files.values():
            file.write(bytes(_HEADER_BYTES))  # buffered: write errors show up with the first samples
        self._append({"offsets": np.zeros(1, np.int64)})

    def append(
        self,
        token_ids: NDArray[np.int32],
        loss_mask: NDArray[np.bool_],
        lengths: NDArray[np.int64],
        files: NDArray[np.int32],
        rows: NDArray[np.int64],
    ) -> NDArray[np.uint64]:
        """Append n samples given flat: ids and mask [sum(lengths)], the others [n]. Returns their hashes [n]."""
        if not len(lengths):
            return np.zeros(0, np.uint64)
        ends = np.cumsum(lengths)
        starts = ends - lengths
        pieces = [(token_ids[a:b], loss_mask[a:b]) for a, b in zip(starts, ends, strict=True)]
        digests = [xxhash.xxh3_64_intdigest(ids.tobytes() + mask.tobytes()) for ids, mask in pieces]
        hashes = np.array(digests, np.uint64)
        arrays = {
            "token_ids": token_ids,
            "loss_mask": loss_mask,
            "offsets": ends + self.num_tokens,
            "num_labels": np.add.reduceat(loss_mask, starts, dtype=np.int64),
            "hashes": hashes,
            "files": files,
            "rows": rows,
        }
        with self._durable_io.resource_errors("write", self._folder):
            self._append(arrays)
        self.num_samples += len(lengths)
        self.num_tokens += int(ends[-1])
        self.max_token_id = max(self.max_token_id, int(token_ids.max()))
        return hashes

    def _append(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        for name, values in arrays.items():
            data = np.ascontiguousarray(values, dtype=_TYPES[name]).tobytes()
            self._files[name].write(data)
            self._hashes[name].update(data)
            self._lengths[name] += len(values)

    def finish(self, meta: StoreMeta, report: Mapping[str, Any]) -> None:
        """Write headers, report and manifest, and fsync everything. The folder can then be renamed."""
        arrays = {}
        with self._durable_io.resource_errors("write", self._folder):
            for name, file in self._files.items():
                # a .npy header (numpy.lib.format 1.0) of fixed size, so that it can be written after the data
                descr = np.lib.format.dtype_to_descr(_TYPES[name])
                text = repr({"descr": descr, "fortran_order": False, "shape": (self._lengths[name],)})
                body = text.encode("latin1").ljust(_HEADER_BYTES - 11) + b"\n"
                file.seek(0)
                file.write(b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body)
                arrays[name] = {"length": self._lengths[name], "xxh3_128": self._hashes[name].hexdigest()}
        self.close()
        self._durable_io.write_json(self._folder / "report.json", report)
        manifest = {"version": VERSION, "meta": asdict(meta), "arrays": arrays}
        self._durable_io.write_json(self._folder / _MANIFEST, manifest)
        self._durable_io.sync_tree(self._folder)

    def close(self) -> None:
        """Close the files, finished or not."""
        with self._durable_io.resource_errors("write", self._folder):
            self._open.close()


@contextmanager
def new_store(folder: Path) -> Iterator[StoreWriter]:
    """Yield a writer into a folder next to `folder`, which replaces it by a rename once everything is on disk.

    On an error nothing is left behind and an older store at `folder` is kept. The caller holds the lock. Raises
    ResourceError if the disk is full or cannot be written.
    """
    durable_io, old = DurableIO(), folder.with_name(f".{folder.name}.old")
    with durable_io.replace_dir(folder, aside=old) as temporary:
        with closing(StoreWriter(temporary, durable_io)) as writer:
            yield writer
        durable_io.remove_tree(old)
    durable_io.remove_tree(old)
