"""Where rows come from: a file, folder or glob on disk, or a hub data set, each with stamps of its content."""

from __future__ import annotations

import difflib
import glob
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from flatout.config.schema import SourceConfig
from flatout.data.rows import ROW_TYPES, BadRow, RawRow, count_rows, raise_error, read_rows, row_type, table_rows
from flatout.errors import DataError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
# what `datasets` and hub downloads put beside the rows; never rows themselves
_DESCRIPTIONS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_TYPES = ", ".join(row_type.removeprefix(".") for row_type in ROW_TYPES)


@dataclass(frozen=True, slots=True)
class FileStamp:
    """One file's identity for fingerprints: size in bytes and the xxh3-128 digest of its bytes, in hex."""

    path: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class RowSource:
    """An opened source. `num_rows` is known without reading only for parquet files and hub data sets."""

    name: str
    files: tuple[FileStamp, ...]
    num_rows: int | None
    read: Callable[[BadRow], Iterator[RawRow]]

    def rows(self, bad_row: BadRow = raise_error) -> Iterator[RawRow]:
        """Every row in order, from the start at each call.

        `bad_row` gets the DataError of each row that cannot be read; the default raises it. Raises DataError for
        unreadable files and for a source without any row.
        """
        num_bad = 0

        def count_bad(error: DataError) -> None:
            nonlocal num_bad
            num_bad += 1
            bad_row(error)

        empty = True
        for row in self.read(count_bad):
            empty = False
            yield row
        if empty:
            why = f"all {num_bad} of its rows are bad" if num_bad else "every file of it is empty"
            raise DataError(f"{self.name}: no rows: {why}")


def open_source(source: SourceConfig) -> RowSource:
    """Resolve a source to its files (or hub data set) and stamp their content; no row is parsed yet.

    `~` is expanded. A folder stands for all data files below it, sorted by path, without hidden files and folders.
    Raises DataError when nothing is there, nothing in it holds rows, or the hub cannot give it.
    """
    files = [] if source.hub else _local_files(source.path)
    if files:
        return _open_files(source.path, files)
    if source.hub is False or (source.hub is None and _looks_local(source.path)):
        raise DataError(_nothing_found(source.path))
    return _open_hub(source)


def _looks_local(path: str) -> bool:
    return _HUB_ID.fullmatch(path) is None or row_type(Path(path)) is not None


def _local_files(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        return _folder_files(path)
    if path.exists():
        if row_type(path) is None:
            raise DataError(f"{path}: no data file by its name; known: {_TYPES}, each also .xz or .gz")
        return [path]
    # Path.glob takes no absolute patterns
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207
    return [file for file in matches if file.is_file() and row_type(file) is not None]


def _folder_files(folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").exists():
        splits = sorted(child.name for child in folder.iterdir() if child.is_dir())
        raise DataError(f"{folder} holds the splits {', '.join(splits)}; name one, such as {folder / splits[0]}")
    files: list[Path] = []
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        candidates = (Path(where) / name for name in names if not name.startswith(".") and name not in _DESCRIPTIONS)
        files += [path for path in candidates if row_type(path) is not None]
    if not files:
        raise DataError(f"{folder}: no data files in this folder; known: {_TYPES}, each also .xz or .gz")
    return sorted(files)


def _nothing_found(pattern: str) -> str:
    path = Path(pattern).expanduser()
    if glob.has_magic(pattern):
        return f"{pattern}: no data file matches; known: {_TYPES}, each also .xz or .gz"
    beside = [child.name for child in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=1)
    hint = f"did you mean {path.parent / near[0]}?" if near else "give a file, a folder, a glob or a hub id (org/set)"
    return f"{pattern}: no such file or folder; {hint}"


def _stamp(path: Path, shown: str) -> FileStamp:
    hasher = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            size_bytes = 0
            while block := file.read(1 << 22):
                size_bytes += len(block)
                hasher.update(block)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return FileStamp(shown, size_bytes, hasher.hexdigest())


def _open_files(name: str, files: list[Path]) -> RowSource:
    counts = [count_rows(file) for file in files]
    known = [count for count in counts if count is not None]

    def read(bad_row: BadRow) -> Iterator[RawRow]:
        for file in files:
            yield from read_rows(file, bad_row)

    num_rows = sum(known) if len(known) == len(files) else None
    return RowSource(name, tuple(_stamp(file, str(file)) for file in files), num_rows, read)


def _open_hub(source: SourceConfig) -> RowSource:
    import datasets  # lazy: a second to import, and local data does not need it

    name = f"{source.path}[{source.subset + '/' if source.subset else ''}{source.split}]"
    try:
        # rows only: `datasets` 4 and later runs no code of the data set's repository
        loaded: Any = datasets.load_dataset(
            source.path, source.subset, split=source.split, revision=source.revision, streaming=False
        )
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(_hub_failure(source, name, error)) from error
    stamps = tuple(
        _stamp(Path(entry["filename"]), f"{name}/{number}") for number, entry in enumerate(loaded.cache_files)
    )
    if not stamps:
        raise DataError(f"{name}: `datasets` kept this set in memory only; save it to a parquet file and name that")

    def read(bad_row: BadRow) -> Iterator[RawRow]:
        # as arrow tables: images and audio stay undecoded, and it is many times faster than row by row
        return table_rows(name, loaded.with_format("arrow").iter(batch_size=1024))

    return RowSource(name, stamps, int(loaded.num_rows), read)


def _hub_failure(source: SourceConfig, name: str, error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = " ".join(lines[:2]) or type(error).__name__
    return (
        f"hub data set {name} (revision {source.revision or 'main'}) cannot be loaded: {reason} "
        f"Nothing local has that name either; check path, subset, split and revision, and log in for a private set. "
        f"Offline: run `hf download {source.path} --repo-type dataset --local-dir DIR` where there is a network and "
        f"set path: DIR."
    )
