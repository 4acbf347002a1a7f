"""Writes a token store shard by shard, so that a build that ends early goes on from its last finished shard."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from flatout.data.columns import (
    COLUMNS,
    HEADER_BYTES,
    PICTURES,
    PREFIX_TOKENS,
    Column,
    Layout,
    Per,
    Shard,
    check_column,
    check_prefixes,
    fingerprint,
    npy_header,
)
from flatout.data.pictures.files import PICTURE_FILES, Files, PictureFiles, picture_hashes
from flatout.data.token_store import MANIFEST, VERSION, StoreManifest, StoreMeta, replaced_dir
from flatout.data.tokenizer import tokenizer_facts
from flatout.data.workers import Chunk, TokenizedChunk
from flatout.errors import DataError, ResourceError
from flatout.io.durable_io import DurableIO
from flatout.io.json_file import open_plain

SHARD_TOKENS, _SHARD_SAMPLES = 1 << 21, 1 << 16
_JOURNAL = "build.jsonl"
_SHARD = TypeAdapter(Shard)
State = Sequence[Mapping[str, Any]]
"""What a builder must know of a shard to go on behind it, as JSON."""


class _ColumnFile:
    """The file of a column that is written, after room for its header."""

    def __init__(self, column: Column, file: BinaryIO, num_values: int) -> None:
        """Go on behind `num_values`; what a broken write left behind them is cut off."""
        self.column, self.num_values, self._file, self._hash = column, num_values, file, xxhash.xxh3_128()
        _cut(file, HEADER_BYTES + num_values * column.stored.itemsize)

    def write(self, values: NDArray[Any]) -> None:
        data = np.ascontiguousarray(values, dtype=self.column.stored).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self.num_values += len(values)

    def end_shard(self) -> str:
        """Return the hash of what was written since the last call, which the system has now."""
        self._file.flush()
        done, self._hash = self._hash.hexdigest(), xxhash.xxh3_128()
        return done

    def read(self, path: Path) -> NDArray[Any]:
        """Return all values that were written; the file is at `path`."""
        self._file.flush()
        return np.fromfile(path, self.column.stored, self.num_values, offset=HEADER_BYTES)

    def write_header(self) -> None:
        self._file.seek(0)
        self._file.write(npy_header(self.column, self.num_values))


def _cut(file: BinaryIO, size_bytes: int) -> None:
    file.truncate(size_bytes)
    file.seek(size_bytes)


class StoreWriter:
    """Appends samples to the columns of a store in its own folder; only the mask of the open shard is in memory."""

    def __init__(
        self,
        folder: Path,
        durable_io: DurableIO,
        num_ids: int,
        identity: Mapping[str, Any],
        restore: Callable[[State], None],
        columns: Mapping[str, Column] | None = None,
    ) -> None:
        """Go on with the shards in `folder` if they were begun with the same `identity`; otherwise begin anew.

        `restore` gets the state of each shard that is kept, in order. Token ids are below `num_ids`. `columns` are what
        the store has besides `COLUMNS`. Raises UsageError for one that `check_column` refuses.
        """
        self._folder, self._durable_io, self._open = folder, durable_io, ExitStack()
        small_ids = {"token_ids": Column("uint16", "token")} if num_ids <= 1 << 16 else {}
        self.own_columns = {name: check_column(name, column) for name, column in (columns or {}).items()}
        every = COLUMNS | small_ids | self.own_columns
        self.shards: list[Shard] = []
        self.num_samples = self._num_tokens = self.max_token_id = 0
        facts = {"version": VERSION, "num_ids": num_ids, "identity": identity}
        begun = json.dumps(facts | {"columns": {k: asdict(v) for k, v in self.own_columns.items()}}, sort_keys=True)
        with durable_io.resource_errors("write", folder):
            size_bytes = self._resume(begun, every, restore)
            if not self.shards:
                durable_io.remove_tree(folder)
                durable_io.make_dir(folder)
            self._journal = self._file(_JOURNAL)
            _cut(self._journal, size_bytes)
            lengths = Layout(every, self.shards)
            self._files = {
                name: _ColumnFile(column, self._file(f"{name}.npy"), lengths.items(name).stop * bool(self.shards))
                for name, column in every.items()
            }
        self._begin_shard()
        if not self.shards:
            self._journal.write(begun.encode() + b"\n")
            self._files["offsets"].write(np.zeros(1, np.int64))

    def _file(self, name: str) -> BinaryIO:
        path = self._folder / name
        return self._open.enter_context(self._durable_io.open_new(path, goes_on=path.exists()))

    def _resume(self, begun: str, columns: Mapping[str, Column], restore: Callable[[State], None]) -> int:
        """Take over the finished shards up to the first damaged one; return the bytes of the journal about them."""
        size_bytes = 0
        with suppress(OSError, ValueError, KeyError, ValidationError), ExitStack() as opened:
            journal = opened.enter_context(open_plain(self._folder / _JOURNAL))
            files = {name: opened.enter_context(open_plain(self._folder / f"{name}.npy")) for name in columns}
            for file in files.values():
                file.seek(HEADER_BYTES)
            for line in journal:
                if not line.endswith(b"\n") or (not size_bytes and line.decode().rstrip("\n") != begun):
                    break
                if size_bytes:
                    entry = json.loads(line)
                    shard = _SHARD.validate_json(json.dumps(entry["shard"]))
                    counts = {name: shard.num_values(column) for name, column in columns.items()}
                    counts["offsets"] += not self.shards
                    sizes = {name: count * columns[name].stored.itemsize for name, count in counts.items()}
                    hashes = {name: xxhash.xxh3_128_hexdigest(file.read(sizes[name])) for name, file in files.items()}
                    if hashes != shard.xxh3:  # a power cut may lose what was written last
                        break
                    restore(entry["state"])
                    self.shards.append(shard)
                    self.num_samples += shard.num_samples
                    self._num_tokens += shard.num_tokens
                    self.max_token_id = max(self.max_token_id, entry["max_token_id"])
                size_bytes += len(line)
        return size_bytes if self.shards else 0

    def _begin_shard(self) -> None:
        self._masks: list[NDArray[np.bool_]] = []
        self._counts = Counter[Per]()
        written = self._files.get("picture_bytes")
        self.pictures = PictureFiles(written.num_values if written else 0)

    @property
    def is_full(self) -> bool:
        """Whether the open shard has as much as a shard should have."""
        return self._counts["token"] >= SHARD_TOKENS or self._counts["sample"] >= _SHARD_SAMPLES

    @property
    def num_open_tokens(self) -> int:
        """Tokens in the open shard."""
        return self._counts["token"]

    def append(
        self,
        token_ids: NDArray[np.int32],
        loss_mask: NDArray[np.bool_],
        lengths: NDArray[np.int64],
        files: NDArray[np.int32],
        rows: NDArray[np.int64],
        units: NDArray[np.int64] | None = None,
        columns: Mapping[str, NDArray[Any]] = MappingProxyType({}),
    ) -> None:
        """Append n samples given flat: ids and mask [sum(lengths)], the others [n].

        `units` are the sizes of whole units, in their order, which add up to n; by default each sample is one.
        `columns` has the values of every column of the store's own: [sum(lengths)], [n] or [number of units]. Raises
        DataError for values that do not fit the samples or the column, and for a declared prefix that they do not
        share.
        """
        sizes = np.ones(len(lengths), np.int64) if units is None else units
        if columns.keys() != self.own_columns.keys():
            raise DataError(
                f"{self._folder}: columns {sorted(columns)} are given, but it has {sorted(self.own_columns)}"
            )
        if (sizes < 1).any() or int(sizes.sum()) != len(lengths):
            raise DataError(
                f"{self._folder}: units of {sizes.tolist()[:8]} samples, each of at least 1; they must add up to the "
                f"{len(lengths)} samples given with them"
            )
        if not len(lengths):
            return
        counts: dict[Per, int] = {"token": int(lengths.sum()), "sample": len(lengths), "unit": len(sizes)}
        counts |= {"picture": len(columns.get("picture_sizes", ())), "byte": len(columns.get("picture_bytes", ()))}
        own = {
            name: column.checked(name, columns[name], counts[column.per]) for name, column in self.own_columns.items()
        }
        ends = np.cumsum(lengths)
        starts = ends - lengths
        if PREFIX_TOKENS in own:
            check_prefixes(token_ids, loss_mask, np.append(starts, ends[-1]), sizes, own[PREFIX_TOKENS])
        unit_starts = np.zeros(len(lengths), np.bool_)
        unit_starts[np.cumsum(sizes) - sizes] = True
        largest = int(token_ids.max())
        if largest > np.iinfo(self._files["token_ids"].column.stored).max:
            raise ValueError(f"token id {largest} is beyond the ids that the store was opened for")
        given: dict[str, NDArray[Any]] = {
            "token_ids": token_ids,
            "offsets": ends + self._num_tokens,
            "num_labels": np.add.reduceat(loss_mask, starts, dtype=np.int64),
            "hashes": _hashes_of(token_ids, loss_mask, ends, own),
            "files": files,
            "rows": rows,
            "unit_starts": unit_starts,
        }
        with self._durable_io.resource_errors("write", self._folder):
            for name, values in {**given, **own}.items():
                self._files[name].write(values)
        self._counts.update(counts)
        self._masks.append(loss_mask)
        self.num_samples += len(lengths)
        self._num_tokens += int(ends[-1])
        self.max_token_id = max(self.max_token_id, largest)

    def close_shard(self, state: State) -> None:
        """Finish the open shard. A later writer of the same identity goes on behind it, from `state`.

        The system keeps what is written if this process is killed. After a power cut, the hashes tell what is left.
        """
        counts = self._counts
        with self._durable_io.resource_errors("write", self._folder):
            mask = np.concatenate([np.zeros(0, np.bool_), *self._masks])
            self._files["loss_mask"].write(np.packbits(mask, bitorder="little"))
            hashes = {name: file.end_shard() for name, file in self._files.items()}
            shard = Shard(counts["sample"], counts["token"], hashes, counts["unit"], counts["picture"], counts["byte"])
            entry = {"shard": asdict(shard), "max_token_id": self.max_token_id, "state": state}
            self._journal.write(json.dumps(entry).encode() + b"\n")
            self._journal.flush()
        self.shards.append(shard)
        self._begin_shard()

    def num_distinct(self) -> int:
        """Return how many different units there are, by the hashes of their samples."""
        hashes, starts = (self._files[name].read(self._folder / f"{name}.npy") for name in ("hashes", "unit_starts"))
        first = np.flatnonzero(starts)
        if len(first) < len(hashes):  # of samples by their place in the unit
            places = np.arange(len(hashes)) - np.repeat(first, np.diff(np.append(first, len(hashes))))
            hashes = np.add.reduceat(hashes * (2 * places.astype(np.uint64) + np.uint64(1)), first)
        hashes.sort()
        return int(np.count_nonzero(hashes[1:] != hashes[:-1])) + bool(len(hashes))

    def finish(
        self, meta: StoreMeta, report: Mapping[str, Any] = MappingProxyType({}), picture_files: Files | None = None
    ) -> None:
        """Write headers, report and manifest, and fsync everything. The folder can then be renamed.

        What `meta` leaves empty is filled: the tokenizer's digest and size, the largest id, and a fingerprint of the
        content. Raises DataError for a tokenizer that cannot be loaded.
        """
        if self._counts or not self.shards:
            self.close_shard([])
        gone = PICTURES.keys() & self._files.keys() if not sum(shard.num_pictures for shard in self.shards) else ()
        with self._durable_io.resource_errors("write", self._folder):
            for file in self._files.values():
                file.write_header()
        self.close()
        for name in (_JOURNAL, *(f"{name}.npy" for name in gone)):
            self._durable_io.remove_tree(self._folder / name)
        shards = tuple(shard.without(gone) for shard in self.shards)
        columns = {
            name: replace(file.column, fingerprint=fingerprint(name, file.column, shards), file=f"{name}.npy")
            for name, file in self._files.items()
            if name not in gone
        }
        if not meta.tokenizer_digest:
            facts = tokenizer_facts(meta.tokenizer)
            meta = replace(meta, tokenizer_digest=facts.digest, vocabulary_size=facts.num_tokens)
        if not meta.fingerprint:
            content = " ".join(column.fingerprint for _, column in sorted(columns.items()))
            mark = xxhash.xxh3_128_hexdigest(f"{meta.tokenizer_digest} {content}".encode())
            meta = replace(meta, fingerprint=mark, max_token_id=self.max_token_id, files=meta.files or (meta.name,))
        self._durable_io.write_json(self._folder / "report.json", dict(report))
        if picture_files:
            self._durable_io.write_json(self._folder / PICTURE_FILES, picture_files)
        self._durable_io.write_json(self._folder / MANIFEST, asdict(StoreManifest(VERSION, meta, columns, shards)))
        self._durable_io.sync_tree(self._folder)

    def close(self) -> None:
        with self._durable_io.resource_errors("write", self._folder):
            self._open.close()


def _hashes_of(
    token_ids: NDArray[np.int32], loss_mask: NDArray[np.bool_], ends: NDArray[np.int64], columns: Mapping[str, Any]
) -> NDArray[np.uint64]:
    """Return the hash of each sample: of its tokens, its loss mask and its pictures."""
    pieces = pairwise([0, *ends.tolist()])
    pictures = picture_hashes(columns, len(ends))
    return np.array(
        [
            xxhash.xxh3_64_intdigest(token_ids[start:end].tobytes() + loss_mask[start:end].tobytes() + own)
            for (start, end), own in zip(pieces, pictures, strict=True)
        ],
        np.uint64,
    )


def append_chunk(writer: StoreWriter, chunk: Chunk, done: TokenizedChunk, files: dict[str, int]) -> None:
    """Append a chunk, and rows that are drawn more than once again; `files` numbers the files of rows."""
    if not len(done.lengths):
        return
    for copy in range(int(chunk.copies.max())):
        again = done if copy == 0 else done.of_rows(chunk.copies > copy)
        origins = [chunk.rows[row].origin for row in again.sample_row]
        file_ids = np.array([files.setdefault(origin.source, len(files)) for origin in origins], np.int32)
        rows = np.array([origin.row_number for origin in origins], np.int64)
        columns = {name: values for name, values in again.columns.items() if name in writer.own_columns}
        if "picture_bytes" in writer.own_columns:
            columns |= writer.pictures.columns(again.pictures or [()] * len(again.lengths))
        writer.append(again.token_ids, again.loss_mask, again.lengths, file_ids, rows, again.unit_sizes, columns)


@contextmanager
def new_store(
    folder: Path,
    num_ids: int,
    identity: Mapping[str, Any] | None = None,
    restore: Callable[[State], None] = lambda _: None,
    columns: Mapping[str, Column] | None = None,
) -> Iterator[StoreWriter]:
    """Yield a writer into a folder next to `folder`, which replaces it by a rename once everything is on disk.

    On an error an older store at `folder` is kept. Finished shards stay for the next writer with an equal `identity`,
    which gets their states by `restore`; with None, nothing stays. `columns` are those that the store has besides
    `COLUMNS`. The caller holds the lock. Raises ResourceError if the disk is full or cannot be written.
    """
    durable_io, old = DurableIO(), replaced_dir(folder)
    new = folder.with_name(f".{folder.name}.tmp")
    if identity is None or new.is_symlink():
        durable_io.remove_tree(new)
    writer = None
    try:
        with closing(StoreWriter(new, durable_io, num_ids, identity or {}, restore, columns)) as writer:
            yield writer
    except BaseException:
        if identity is None or writer is None or not writer.shards:
            with suppress(ResourceError):  # the first failure is the one to report
                durable_io.remove_tree(new)
        raise
    durable_io.remove_tree(old)
    if folder.exists():
        durable_io.rename(folder, old)
    durable_io.rename(new, folder)
    for path in sorted(old.iterdir()) if old.is_dir() else ():
        if path.suffix != ".npy" and path.name not in (MANIFEST, "report.json"):  # a person's
            durable_io.rename(path, folder / path.name)
    durable_io.remove_tree(old)
