"""Writes a token store shard by shard, so that a build that ends early goes on from its last finished shard."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
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
    Shard,
    check_column,
    check_prefixes,
    fingerprint,
    npy_header,
)
from flatout.data.pictures.changes import PICTURE_FILES, Files
from flatout.data.pictures.files import PictureFiles, picture_hashes
from flatout.data.token_store import MANIFEST, VERSION, StoreManifest, StoreMeta, replaced_dir
from flatout.data.workers import Chunk, TokenizedChunk
from flatout.errors import DataError, ResourceError
from flatout.io.durable_io import DurableIO
from flatout.io.json_file import open_plain

SHARD_TOKENS, _SHARD_SAMPLES = 1 << 21, 1 << 16
_SAMPLES_AT_ONCE = 1 << 21
_JOURNAL = "build.jsonl"
_SHARD = TypeAdapter(Shard)
State = Mapping[str, Any]
"""What a builder must know after a shard to go on from there, as JSON."""


class StoreWriter:
    """Appends samples to the columns of a store in its own folder; only the mask of the open shard is in memory."""

    def __init__(
        self,
        folder: Path,
        durable_io: DurableIO,
        num_ids: int,
        identity: State,
        restore: Callable[[State], None],
        columns: Mapping[str, Column] | None = None,
    ) -> None:
        """Go on with the shards in `folder` if they were begun with the same `identity`; otherwise begin anew.

        `restore` gets the state of each shard that is kept, in order. Token ids are below `num_ids`. `columns` are what
        the store has besides `COLUMNS`. Raises UsageError for one that `check_column` refuses.
        """
        self._folder, self._durable_io, self._open = folder, durable_io, ExitStack()
        small_ids = {"token_ids": Column("uint16", "token")} if num_ids <= 1 << 16 else {}
        self._extra = dict(columns or {})
        for name, column in self._extra.items():
            check_column(name, column)
        self._columns = COLUMNS | small_ids | self._extra
        self.shards: list[Shard] = []
        self._samples = self._tokens = self._max = 0  # of finished shards
        self._lengths = dict.fromkeys(self._columns, 0)
        facts = {"version": VERSION, "num_ids": num_ids, "identity": identity}
        begun = json.dumps(facts | {"columns": {k: asdict(v) for k, v in self._extra.items()}}, sort_keys=True)
        with durable_io.resource_errors("write", folder):
            size_bytes = self._resume(begun, restore)
            if not self.shards:
                durable_io.remove_tree(folder)
                durable_io.make_dir(folder)
            self._journal = self._file(_JOURNAL, size_bytes)
            self._files = {
                name: self._file(f"{name}.npy", HEADER_BYTES + self._lengths[name] * column.stored.itemsize)
                for name, column in self._columns.items()
            }
        self._begin_shard()
        if not self.shards:
            self._journal.write(begun.encode() + b"\n")
            self._write("offsets", np.zeros(1, np.int64))

    def _file(self, name: str, size_bytes: int) -> BinaryIO:
        """Open a file of that size for appending: what a broken write left behind it is cut off."""
        path = self._folder / name
        file = self._open.enter_context(self._durable_io.open_new(path, goes_on=path.exists()))
        file.truncate(size_bytes)
        file.seek(size_bytes)
        return file

    def _resume(self, begun: str, restore: Callable[[State], None]) -> int:
        """Take over the finished shards up to the first damaged one; return the bytes of the journal about them."""
        size_bytes = 0
        with suppress(OSError, ValueError, KeyError, ValidationError), ExitStack() as opened:
            journal = opened.enter_context(open_plain(self._folder / _JOURNAL))
            files = {name: opened.enter_context(open_plain(self._folder / f"{name}.npy")) for name in self._columns}
            for file in files.values():
                file.seek(HEADER_BYTES)
            for line in journal:
                if not line.endswith(b"\n") or (not size_bytes and line.decode().rstrip("\n") != begun):
                    break
                if size_bytes:
                    entry = json.loads(line)
                    shard = _SHARD.validate_json(json.dumps(entry["shard"]))
                    counts = {name: self._items(name, shard) for name in files}
                    sizes = {name: counts[name] * self._columns[name].stored.itemsize for name in files}
                    hashes = {name: xxhash.xxh3_128_hexdigest(file.read(sizes[name])) for name, file in files.items()}
                    if hashes != shard.xxh3:  # a power cut may lose what was written last
                        break
                    restore(entry["state"])
                    self._count(shard, counts, entry["max_token_id"])
                size_bytes += len(line)
        return size_bytes if self.shards else 0

    def _items(self, name: str, shard: Shard) -> int:
        return shard.num_values(self._columns[name]) + (name == "offsets" and not self.shards)

    def _count(self, shard: Shard, lengths: Mapping[str, int], max_token_id: int) -> None:
        self._lengths = {name: length + lengths[name] for name, length in self._lengths.items()}
        self._samples += shard.num_samples
        self._tokens += shard.num_tokens
        self._max = max(self._max, max_token_id)
        self.shards.append(shard)

    def _begin_shard(self) -> None:
        self._hashes = {name: xxhash.xxh3_128() for name in self._columns}
        self._masks: list[NDArray[np.bool_]] = []
        self._shard_samples = self._shard_tokens = self._shard_units = self._shard_max = 0
        self._shard_pictures = self._shard_bytes = 0
        self.pictures = PictureFiles(self._lengths.get("picture_bytes", 0))

    @property
    def is_full(self) -> bool:
        """Whether the open shard has as much as a shard should have."""
        return self._shard_tokens >= SHARD_TOKENS or self._shard_samples >= _SHARD_SAMPLES

    @property
    def num_samples(self) -> int:
        """Samples that were appended, by an earlier writer too."""
        return self._samples + self._shard_samples

    @property
    def own_columns(self) -> tuple[str, ...]:
        """The columns that the store has besides `COLUMNS`."""
        return tuple(self._extra)

    @property
    def max_token_id(self) -> int:
        """The largest token id of all samples."""
        return max(self._max, self._shard_max)

    @property
    def num_open_tokens(self) -> int:
        """Tokens in the open shard."""
        return self._shard_tokens

    def append(
        self,
        token_ids: NDArray[np.int32],
        loss_mask: NDArray[np.bool_],
        lengths: NDArray[np.int64],
        files: NDArray[np.int32],
        rows: NDArray[np.int64],
        units: NDArray[np.int64] | None = None,
        columns: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        """Append n samples given flat: ids and mask [sum(lengths)], the others [n].

        `units` are the sizes of whole units, in their order, which add up to n; by default each sample is one.
        `columns` has the values of every column of the store's own: [sum(lengths)], [n] or [number of units]. Raises
        DataError for values that do not fit the samples or the column, and for a declared prefix that they do not
        share.
        """
        columns, sizes = columns or {}, np.ones(len(lengths), np.int64) if units is None else units
        if columns.keys() != self._extra.keys():
            raise DataError(f"{self._folder}: columns {sorted(columns)} are given, but it has {sorted(self._extra)}")
        if (sizes < 1).any() or int(sizes.sum()) != len(lengths):
            raise DataError(
                f"{self._folder}: units of {sizes.tolist()[:8]} samples, each of at least 1; they must add up to the "
                f"{len(lengths)} samples given with them"
            )
        if not len(lengths):
            return
        counts = {"token": int(lengths.sum()), "sample": len(lengths), "unit": len(sizes)}
        counts |= {"picture": len(columns.get("picture_sizes", ())), "byte": len(columns.get("picture_bytes", ()))}
        own = {k: column.checked(k, columns[k], counts[column.per]) for k, column in self._extra.items()}
        ends = np.cumsum(lengths)
        starts = ends - lengths
        if PREFIX_TOKENS in own:
            check_prefixes(token_ids, loss_mask, np.append(starts, ends[-1]), sizes, own[PREFIX_TOKENS])
        unit_starts = np.zeros(len(lengths), np.bool_)
        unit_starts[np.cumsum(sizes) - sizes] = True
        pieces = zip(starts.tolist(), ends.tolist(), strict=True)
        digests = [
            xxhash.xxh3_64_intdigest(token_ids[a:b].tobytes() + loss_mask[a:b].tobytes() + pictures)
            for (a, b), pictures in zip(pieces, picture_hashes(own, len(lengths)), strict=True)
        ]
        largest = int(token_ids.max())
        if largest > np.iinfo(self._columns["token_ids"].stored).max:
            raise ValueError(f"token id {largest} is beyond the ids that the store was opened for")
        with self._durable_io.resource_errors("write", self._folder):
            offsets = ends + (self._tokens + self._shard_tokens)
            given: dict[str, NDArray[Any]] = {"token_ids": token_ids, "offsets": offsets, "files": files, "rows": rows}
            counted = {"num_labels": np.add.reduceat(loss_mask, starts, dtype=np.int64), "unit_starts": unit_starts}
            for name, values in {**given, **counted, "hashes": np.array(digests, np.uint64), **own}.items():
                self._write(name, values)
        self._shard_units += len(sizes)
        self._shard_pictures += counts["picture"]
        self._shard_bytes += counts["byte"]
        self._masks.append(loss_mask)
        self._shard_samples += len(lengths)
        self._shard_tokens += int(ends[-1])
        self._shard_max = max(self._shard_max, largest)

    def _write(self, name: str, values: NDArray[Any]) -> None:
        data = np.ascontiguousarray(values, dtype=self._columns[name].stored).tobytes()
        self._files[name].write(data)
        self._hashes[name].update(data)

    def close_shard(self, state: State) -> None:
        """Finish the open shard. A later writer of the same identity goes on behind it, from `state`.

        The system keeps what is written if this process is killed. After a power cut, the hashes tell what is left.
        """
        with self._durable_io.resource_errors("write", self._folder):
            mask = np.concatenate(self._masks) if self._masks else np.zeros(0, np.bool_)
            self._write("loss_mask", np.packbits(mask, bitorder="little"))
            hashes = {name: hasher.hexdigest() for name, hasher in self._hashes.items()}
            pictures = self._shard_pictures, self._shard_bytes
            shard = Shard(self._shard_samples, self._shard_tokens, hashes, self._shard_units, *pictures)
            entry = {"shard": asdict(shard), "max_token_id": self._shard_max, "state": state}
            for file in self._files.values():
                file.flush()
            self._journal.write(json.dumps(entry).encode() + b"\n")
            self._journal.flush()
        self._count(shard, {name: self._items(name, shard) for name in self._columns}, self._shard_max)
        self._begin_shard()

    def num_distinct(self) -> int:
        """Return how many different units there are, by the hashes of their samples; reads them a part at a time."""
        parts, num_found = max(1, -(-self.num_samples // _SAMPLES_AT_ONCE)), 0
        for part in range(parts):
            own = [np.zeros(0, np.uint64)]
            for hashes in self._unit_hashes():
                own.append(hashes[hashes % np.uint64(parts) == part])
            num_found += len(np.unique(np.concatenate(own)))
        return num_found

    def _unit_hashes(self) -> Iterator[NDArray[np.uint64]]:
        """Yield a hash of each unit, many at a time: that of its sample, or of those of its samples in their order."""
        pending, starts = np.zeros(0, np.uint64), np.zeros(0, np.bool_)
        with ExitStack() as opened:
            files = [opened.enter_context((self._folder / f"{n}.npy").open("rb")) for n in ("hashes", "unit_starts")]
            for name, file in zip(("hashes", "unit_starts"), files, strict=True):
                self._files[name].flush()
                file.seek(HEADER_BYTES)
            while block := files[0].read(8 * _SAMPLES_AT_ONCE):
                hashes = np.append(pending, np.frombuffer(block, np.uint64))
                starts = np.append(starts, np.frombuffer(files[1].read(len(block) // 8), np.bool_))
                first = np.flatnonzero(starts)
                whole = first[-1]  # the last unit may go on in the next block
                yield _combined(hashes[:whole], first[:-1])
                pending, starts = hashes[whole:], starts[whole:]
        if len(pending):
            yield _combined(pending, np.zeros(1, np.int64))

    def finish(self, meta: StoreMeta, report: Mapping[str, Any], picture_files: Files | None = None) -> None:
        """Write headers, report and manifest, and fsync everything. The folder can then be renamed."""
        if self._shard_samples or not self.shards:
            self.close_shard({})
        if self._extra.keys() >= PICTURES.keys() and not sum(shard.num_pictures for shard in self.shards):
            self._drop_columns(PICTURES)
        with self._durable_io.resource_errors("write", self._folder):
            for name, file in self._files.items():
                file.seek(0)
                file.write(npy_header(self._columns[name], self._lengths[name]))
        self.close()
        self._durable_io.write_json(self._folder / "report.json", report)
        if picture_files:
            self._durable_io.write_json(self._folder / PICTURE_FILES, picture_files)
        columns = {
            name: replace(column, fingerprint=fingerprint(name, column, self.shards), file=f"{name}.npy")
            for name, column in self._columns.items()
        }
        self._durable_io.write_json(
            self._folder / MANIFEST, asdict(StoreManifest(VERSION, meta, columns, tuple(self.shards)))
        )
        self._durable_io.remove_tree(self._folder / _JOURNAL)
        self._durable_io.sync_tree(self._folder)

    def _drop_columns(self, names: Iterable[str]) -> None:
        for name in names:
            self._files.pop(name).close()
            del self._columns[name]
            self._durable_io.remove_tree(self._folder / f"{name}.npy")
        columns = self._columns.keys()
        self.shards = [
            replace(shard, xxh3={name: value for name, value in shard.xxh3.items() if name in columns})
            for shard in self.shards
        ]

    def close(self) -> None:
        with self._durable_io.resource_errors("write", self._folder):
            self._open.close()


def _combined(hashes: NDArray[np.uint64], first: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a hash for each unit, which begins at `first`; of one sample, its own."""
    if not len(first):
        return np.zeros(0, np.uint64)
    places = np.arange(len(hashes)) - np.repeat(first, np.diff(np.append(first, len(hashes))))
    return np.add.reduceat(hashes * (2 * places.astype(np.uint64) + np.uint64(1)), first)


def append_chunk(writer: StoreWriter, chunk: Chunk, done: TokenizedChunk, files: dict[str, int]) -> None:
    """Append a chunk, and rows that are drawn more than once again."""
    if not len(done.lengths):
        return
    for copy in range(int(chunk.copies.max())):
        again = done if copy == 0 else done.of_rows(chunk.copies > copy)
        origins = [chunk.rows[row].origin for row in again.piece_row]
        file_ids = np.array([files.setdefault(origin.source, len(files)) for origin in origins], np.int32)
        rows = np.array([origin.row_number for origin in origins], np.int64)
        columns = {name: again.columns[name] for name in writer.own_columns if name in again.columns}
        if "picture_bytes" in writer.own_columns:
            columns |= writer.pictures.columns(again.pictures or [()] * len(again.lengths))
        writer.append(again.token_ids, again.loss_mask, again.lengths, file_ids, rows, again.unit_sizes, columns)


@contextmanager
def new_store(
    folder: Path,
    num_ids: int,
    identity: State | None = None,
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
