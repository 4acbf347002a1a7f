"""The token store: one folder of flat arrays on disk, read by memory map, verified by hash."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from flatout.data.conversation import Origin
from flatout.errors import DataError

VERSION = 1
_MANIFEST = "manifest.json"
_HEADER_BYTES = 128
_TYPES = {
    "token_ids": np.dtype(np.int32),  # [all tokens]
    "trained": np.dtype(np.bool_),  # [all tokens]
    "offsets": np.dtype(np.int64),  # [N + 1]
    "num_labels": np.dtype(np.int64),  # [N]
    "hashes": np.dtype(np.uint64),  # [N] xxh3 of ids and mask
    "files": np.dtype(np.int32),  # [N] index into meta.files
    "rows": np.dtype(np.int64),  # [N] row in that file, from 1
}


@dataclass(frozen=True, slots=True)
class StoreMeta:
    """What a store was made from, and what became of the rows (`counts`, `lists` are in report.json)."""

    name: str
    fingerprint: str
    tokenizer: str
    tokenizer_digest: str
    template: str
    template_digest: str
    loss_type: str
    max_tokens: int | None
    vocabulary_size: int
    sources: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    max_token_id: int = 0
    end_of_turn: str = ""


@dataclass(frozen=True)
class TokenStore:
    """N tokenised samples, all in one stream.

    `token_ids` int32 [T] and `trained` bool [T] are memory maps; sample i is [offsets[i], offsets[i + 1]).
    `offsets` int64 [N + 1]; `num_labels` int64 [N] is the count of trained tokens; trained[offsets[i]] is False.
    """

    folder: Path
    token_ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
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

    def sample(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Token ids and label flags of one sample, views of the memory maps."""
        start, end = self.offsets[index], self.offsets[index + 1]
        return self.token_ids[start:end], self.trained[start:end]

    def origin(self, index: int) -> Origin:
        """The row that a sample came from, for messages."""
        return Origin(self.meta.files[self.files[index]], int(self.rows[index]))

    @classmethod
    def open(cls, folder: Path, *, verify: bool = True) -> TokenStore:
        """Open a finished store; `verify` also checks every file's xxh3 (seconds for billions of tokens).

        Raises DataError for a missing, incomplete, damaged or newer store.
        """
        manifest = _read_manifest(folder)
        arrays = {name: _open_array(folder, name, manifest["arrays"], verify) for name in _TYPES}
        known = {entry.name for entry in fields(StoreMeta)}
        raw: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in manifest["meta"].items()
        }
        if set(raw) != known:
            raise DataError(
                f"{folder / _MANIFEST}: keys {sorted(known ^ set(raw))} do not fit; build the data set again"
            )
        store = cls(folder=folder, meta=StoreMeta(**raw), **arrays)
        _check_sizes(store)
        return store


def read_report(folder: Path) -> dict[str, Any]:
    """report.json of a store: counts, and every row that was skipped, dropped or cut. Raises DataError."""
    try:
        report: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / 'report.json'}: cannot be read: {error}; build the data set again") from error
    return report


class StoreWriter:
    """Appends samples to the arrays of a store in a folder of its own; nothing is kept in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = {name: (folder / f"{name}.npy").open("wb") for name in _TYPES}
        self._hashes = {name: xxhash.xxh3_128() for name in _TYPES}
        self._lengths = dict.fromkeys(_TYPES, 0)
        for file in self._files.values():
            file.write(bytes(_HEADER_BYTES))
        self._append("offsets", np.zeros(1, np.int64))
        self.num_tokens = 0
        self.max_token_id = 0

    @property
    def num_samples(self) -> int:
        """Samples written so far."""
        return self._lengths["num_labels"]

    def append(
        self,
        token_ids: NDArray[np.int32],
        trained: NDArray[np.bool_],
        lengths: NDArray[np.int64],
        files: NDArray[np.int32],
        rows: NDArray[np.int64],
    ) -> NDArray[np.uint64]:
        """Add n samples given flat: ids and flags [sum(lengths)], the others [n]. Returns their hashes [n]."""
        if not len(lengths):
            return np.zeros(0, np.uint64)
        ends = np.cumsum(lengths)
        starts = ends - lengths
        hashes = np.array([_hash(token_ids[a:b], trained[a:b]) for a, b in zip(starts, ends, strict=True)], np.uint64)
        self._append("token_ids", token_ids)
        self._append("trained", trained)
        self._append("offsets", ends + self.num_tokens)
        self._append("num_labels", np.add.reduceat(trained, starts, dtype=np.int64))
        self._append("hashes", hashes)
        self._append("files", files)
        self._append("rows", rows)
        self.num_tokens += int(ends[-1])
        self.max_token_id = max(self.max_token_id, int(token_ids.max()))
        return hashes

    def finish(self, meta: StoreMeta, report: Mapping[str, Any]) -> None:
        """Write headers, report and manifest, and fsync everything. The folder can then be renamed."""
        arrays = {}
        for name, file in self._files.items():
            file.seek(0)
            file.write(_header(_TYPES[name], self._lengths[name]))
            _sync(file)
            file.close()
            arrays[name] = {"length": self._lengths[name], "xxh3_128": self._hashes[name].hexdigest()}
        _write_json(self._folder / "report.json", report)
        _write_json(self._folder / _MANIFEST, {"version": VERSION, "meta": asdict(meta), "arrays": arrays})
        sync_folder(self._folder)

    def close(self) -> None:
        """Close the files, finished or not."""
        for file in self._files.values():
            file.close()

    def _append(self, name: str, values: NDArray[Any]) -> None:
        data = np.ascontiguousarray(values, dtype=_TYPES[name]).tobytes()
        self._files[name].write(data)
        self._hashes[name].update(data)
        self._lengths[name] += len(values)


@contextmanager
def new_store(folder: Path) -> Iterator[StoreWriter]:
    """A writer into a folder beside `folder`, which takes its place by one rename once all is on disk.

    On an error nothing is left behind and an older store at `folder` stays. The caller holds the lock.
    """
    temporary = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    writer = StoreWriter(temporary)
    try:
        yield writer
    except BaseException:
        writer.close()
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that its names survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash(token_ids: NDArray[np.int32], trained: NDArray[np.bool_]) -> int:
    return xxhash.xxh3_64_intdigest(token_ids.tobytes() + trained.tobytes())


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with path.open("wb") as file:
        file.write(json.dumps(value, ensure_ascii=False, indent=1).encode("utf-8"))
        _sync(file)


def _header(dtype: np.dtype[Any], length: int) -> bytes:
    """A .npy header of fixed size, so that it can be written after the data (format 1.0 of numpy.lib.format)."""
    text = repr({"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)})
    body = text.encode("latin1").ljust(_HEADER_BYTES - 11) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / _MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["version"]
    except FileNotFoundError as error:
        raise DataError(f"{folder} holds no built data set ({_MANIFEST} is missing); run flatout data build") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: cannot be read: {error}; build the data set again") from error
    if version != VERSION:
        raise DataError(f"{path}: format version {version}, this flatout reads {VERSION}; build the data set again")
    return manifest


def _open_array(folder: Path, name: str, entries: Mapping[str, Any], verify: bool) -> NDArray[Any]:
    path = folder / f"{name}.npy"
    try:
        entry = entries[name]
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise DataError(f"{path}: damaged or missing: {error}; build the data set again") from error
    if array.dtype != _TYPES[name] or array.shape != (entry["length"],):
        raise DataError(
            f"{path}: holds {array.dtype} {array.shape}, expected {_TYPES[name]} ({entry['length']},); "
            "build the data set again"
        )
    if verify and xxhash.xxh3_128_hexdigest(array.view(np.uint8).data) != entry["xxh3_128"]:
        raise DataError(f"{path}: the content does not fit its hash (damaged file); build the data set again")
    return array


def _check_sizes(store: TokenStore) -> None:
    num_tokens = int(store.offsets[-1]) if len(store.offsets) else -1
    per_sample = {len(store.offsets) - 1, len(store.num_labels), len(store.hashes), len(store.files), len(store.rows)}
    if len(per_sample) != 1 or {num_tokens, len(store.token_ids)} != {len(store.trained)}:
        raise DataError(f"{store.folder}: the arrays do not fit together; build the data set again")
