"""Where rows come from: a file, folder or glob on disk, or a hub data set, each with hashes of its content."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from flatout.config.schema import SourceConfig
from flatout.data.rows.archives import holds_rows, read_file
from flatout.data.rows.read import ROW_TYPES, BadRow, RawRow, most_rows, raise_error, row_type, table_rows, total_rows
from flatout.errors import DataError, Fix
from flatout.io.allowed import require_allowed
from flatout.io.durable_io import digest
from flatout.io.near_path import did_you_mean, expand_home, has_rows, unknown_user
from flatout.io.redact import redacted

if TYPE_CHECKING:
    from flatout.data.rows.remote import RemoteFile

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
# a name without an owner that ends as files do
_FILE_NAME = re.compile(r"^[^/]+\.[a-z]{2,8}$")
_SHARD = re.compile(r"(\w+)-\d{5}-of-\d{5}")
# split -> the words that stand for it in names of files and folders, as `datasets` reads them
_SPLITS = {
    "test": {"test", "tests", "testing", "testset", "eval", "evaluation", "evalset", "heldout", "holdout"},
    "validation": {"validation", "valid", "val", "dev", "devset"},
    "train": {"train", "training"},
}
_HELD_OUT = re.compile(r"(held|hold)[ _-]out", re.IGNORECASE)
# a folder with more is not a data set: a home folder, or a whole disk
_MAX_FILES = 100_000
# how many types of files that are not read are named
_MAX_TOLD = 4
_TYPES = ", ".join(row_type.removeprefix(".") for row_type in ROW_TYPES) + ", each also .xz, .gz, .bz2 or .zst"


@dataclass(frozen=True, slots=True)
class RowSource:
    """An opened source."""

    name: str
    files: dict[str, str]
    """Path -> xxh3-128 of its bytes, for fingerprints."""
    num_rows: int | None
    """Known without reading only for parquet files and what `datasets` has loaded."""
    read: Callable[[BadRow], Iterator[RawRow]]
    is_local: bool = True
    """Whether the rows are those of `files`, which are on this machine."""
    unread: Unread = field(default_factory=lambda: Unread("", "error"))
    address: str = ""
    """That of a set on the hub, with its commit."""
    held_out: str = ""
    """A sentence on files that are named for testing."""
    converter: str = ""
    """The file and function that made the rows."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Why it left rows out, in the last pass, and how many."""

    def about_rows(self) -> int | None:
        """Return about how many rows there are, by the first lines; None if only parsing them would tell."""
        is_lines = all(path.endswith((".jsonl", ".ndjson")) for path in self.files)
        if self.num_rows is not None or not (self.is_local and is_lines):
            return self.num_rows
        num_lines = 0
        for path in self.files:
            with Path(path).open("rb") as file:
                block, size_bytes = file.read(1 << 22), os.fstat(file.fileno()).st_size
            num_lines += round(block.count(b"\n") * size_bytes / max(len(block), 1))
        return num_lines

    def most_rows(self) -> int | None:
        """Return a number that the rows cannot exceed, from the files' lines; None if only parsing would tell.

        Reads text files once more.
        """
        if self.num_rows is not None or not self.is_local:
            return self.num_rows
        try:
            return total_rows(map(Path, self.files), most_rows)
        except DataError:  # the reader says what is wrong with it
            return None

    def notes(self) -> Iterator[str]:
        """Yield what a user should know of what was not read, one sentence each."""
        if said := self.unread.said():
            yield said
        if self.left_out:
            reasons = ", ".join(f"{number:,} {why}" for why, number in sorted(self.left_out.items()))
            yield f"{self.converter} left out {self.left_out.total():,} rows: {reasons}"

    def rows(self, bad_row: BadRow = raise_error, *, parse: bool = True) -> Iterator[RawRow]:
        """Yield every row in order, starting over at each call; `bad_row` gets the error of each row that has one.

        Without `parse`, lines of JSON are yielded as they are, and have their errors when `columns` is read. Raises
        DataError for unreadable files and for a source without any row.
        """
        num_bad, first, is_empty = 0, "", True

        def count_bad(error: DataError) -> None:
            nonlocal num_bad, first
            num_bad, first = num_bad + 1, first or error.text
            bad_row(error)

        for row in self.read(count_bad):
            try:
                raw = replace(row, content=row.columns) if parse else row
            except DataError as error:
                count_bad(error)
                continue
            is_empty = False
            yield raw
        if is_empty and num_bad:
            bad = f"all {num_bad} rows are bad; the first" if num_bad > 1 else "its only row is bad"
            raise DataError(f"{self.name}: no rows: {bad}: {first}")
        if is_empty:
            which = "the file is" if len(self.files) == 1 else "all of its files are"
            raise DataError(f"{self.name}: no rows: {which} empty; {_A_ROW}")


_A_ROW = 'write one row a line, such as {"instruction": "Say hi", "output": "Hi"}'


def open_source(source: SourceConfig, log: Callable[[str], None] = lambda _: None) -> RowSource:
    """Resolve a source to its files (or hub data set) and hash their content; no row is parsed yet.

    `~` is expanded. A folder stands for all data files below it, sorted by path, without hidden files and folders.
    Files at an address are known by what their store says of them, which `log` is told.
    Raises DataError if nothing is there, nothing in it holds rows, or the hub cannot provide it.
    """
    if "://" in source.path:
        from flatout.data.rows.remote import find_remote  # lazy: fsspec is for addresses only

        return _source_of(source, _found(redacted(source.path), find_remote(source, log)))
    if not (listing := _local_files_of(source)).files:
        return _open_hub(source, log)
    for setting, value in (("subset", source.subset), ("revision", source.revision)):
        if value is not None:
            said = f"{setting}: {value!r} is for hub ids, but these are local files; remove it"
            raise DataError(f"{source.path}: {said}")
    return _source_of(source, listing)


def local_source(source: SourceConfig) -> RowSource | None:
    """Return local files as `open_source` does, but not hashed (`files` is empty); None for a hub id or an address."""
    listing = Found({}) if "://" in source.path else _local_files_of(source)
    return _source_of(source, listing, is_hashed=False) if listing.files else None


def _local_files_of(source: SourceConfig) -> Found:
    """Return the local files of a source, none for a hub id. Raises DataError if they are not there."""
    listing = Found({}) if source.hub else _local_files(source.path)
    if not listing.files and (source.hub is False or (source.hub is None and _looks_local(source.path))):
        raise _nothing_found(source.path)
    return listing


def _source_of(source: SourceConfig, listing: Found, *, is_hashed: bool = True) -> RowSource:
    name, files, held_out = _of_split(source, listing)
    unread = Unread(redacted(source.path), source.unread_files, listing.others, len(files))
    digests, num_rows = (_digests(files), total_rows(files)) if is_hashed else ({}, None)
    return _opened(name, files, unread, files=digests, num_rows=num_rows, held_out=held_out)


def _opened(name: str, paths: Sequence[Path | RemoteFile], unread: Unread, **known: Any) -> RowSource:
    def read(bad_row: BadRow) -> Iterator[RawRow]:
        for file in paths:
            yield from read_file(file, bad_row, unread)
            if not isinstance(file, Path):
                file.check_unchanged()

    is_local = all(isinstance(file, Path) for file in paths)
    return RowSource(name, read=read, is_local=is_local, unread=unread, **known)


def _digests(files: Iterable[Path | RemoteFile]) -> dict[str, str]:
    return {str(file): _digest(file) if isinstance(file, Path) else file.digest() for file in files}


@dataclass(frozen=True, slots=True)
class Found:
    """The files of a source."""

    files: Mapping[Any, PurePath]
    """Data files (Path or RemoteFile), each with its path below the source."""
    others: Sequence[str] = ()
    """Those beside them whose types hold no rows."""


def _found(shown: str, files: Mapping[Any, PurePath]) -> Found:
    """Return the files of a folder or an address. Raises DataError if none of them has rows."""
    holds = {file: holds_rows(file.name) for file in files}
    listing = Found(
        {file: files[file] for file in files if holds[file]}, [str(one) for one in files if holds[one] is False]
    )
    if not listing.files:
        raise DataError(f"{shown}: no data files in this folder; known types: {_TYPES}")
    return listing


class Unread:
    """The files of a source whose types hold no rows that flatout reads: refused, or counted (`unread_files: skip`)."""

    def __init__(self, source: str, policy: str, names: Iterable[str] = (), num_read: int = 0) -> None:
        """Begin with the files beside `num_read` that are read. Raises DataError as a call does."""
        self._source, self._policy = source, policy
        # a second pass over an archive finds the same files
        self._names = dict.fromkeys(names)
        self._check(f" beside {num_read} that it reads")

    def __call__(self, name: str) -> None:
        """Count a file of an archive. Raises DataError unless such files are skipped."""
        self._names[name] = None
        self._check()

    def _check(self, beside: str = "") -> None:
        if self._names and self._policy == "error":
            raise DataError(
                f"{self._source}: {self.said('of types that flatout does not read' + beside)}; "
                "convert or remove them, or name the files to read (a glob such as DIR/**/*.jsonl); known types: "
                f"{_TYPES}",
                [Fix({"data.sources": [{"path": self._source, "unread_files": "skip"}]}, "leaves them out")],
            )

    def said(self, what: str = "are not read") -> str:
        """Say what was left out, with the types, each with its number of files and the first of them; "" for none."""
        if not self._names:
            return ""
        types: dict[str, list[str]] = {}
        for name in self._names:
            types.setdefault(PurePath(name).suffix.lower() or "no ending", []).append(PurePath(name).name)
        most = sorted(types.items(), key=lambda item: -len(item[1]))
        parts = [f"{len(names)} {suffix} ({names[0]})" for suffix, names in most[:_MAX_TOLD]]
        rest = f", and {len(most) - _MAX_TOLD} more types" if most[_MAX_TOLD:] else ""
        return f"{len(self._names)} file{'s' if len(self._names) > 1 else ''} {what}: {', '.join(parts)}{rest}"


def _local_files(pattern: str) -> Found:
    path = expand_home(pattern)
    if path.is_dir():
        files = dict[Path, PurePath]()
        for where, folders, names in os.walk(path):
            folders[:] = [folder for folder in folders if not folder.startswith(".")]
            files |= {file: file.relative_to(path) for file in map(Path(where).joinpath, names)}
            if len(files) > _MAX_FILES:
                raise DataError(f"{path}: over {_MAX_FILES:,} files in this folder; give a smaller one, or a glob")
        return _found(str(path), dict(sorted(files.items())))
    if path.exists():
        if row_type(path) is None:
            raise DataError(f"{path}: not a known file type; known types: {_TYPES}; save a table as .csv, text as .txt")
        return Found({path: Path(path.name)})
    # Path.glob does not accept absolute patterns
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207
    matches = [file for file in matches if file.is_file()]
    others = [str(file) for file in matches if holds_rows(file.name) is False]
    # names above the first wildcard are common to all
    top = Path(*takewhile(lambda part: not glob.has_magic(part), path.parts))
    return Found({file: file.relative_to(top) for file in matches if row_type(file) is not None}, others)


def _of_split(source: SourceConfig, listing: Found) -> tuple[str, list[Path | RemoteFile], str]:
    """Return the source's name, its files of the requested split, and a sentence on those named for testing.

    A split is read from the names below the source. Without `split`, these are the files named for training, or those
    that are not named for testing, or all if there are only others.
    """
    files = list(listing.files)
    for file in files:
        if isinstance(file, Path):  # a glob or a folder may hold links
            require_allowed(file)
    # `datasets` saved each split to its own folder
    saved = "://" not in source.path and (expand_home(source.path) / "dataset_dict.json").exists()
    splits = {file: path.parts[0] if saved else _split_of(path) for file, path in listing.files.items()}
    named = sorted({split for split in splits.values() if split})
    path, wanted = redacted(source.path), source.split or "train"
    many = f"[{len(files)} files]" if files[1:] else ""
    if wanted == "train" and (not named or (source.split is None and named == ["train"])):
        return path + many, files, ""
    chosen = [file for file, split in splits.items() if split == wanted]
    unnamed = [file for file, split in splits.items() if split is None]
    are_for_tests = all(_split_of(PurePath(name)) in ("test", "validation") for name in named)
    if source.split is None and not chosen:
        chosen = (unnamed if are_for_tests else []) or files * (len(named) == 1)
    if source.split is None and chosen == files:
        line = f"{listing.files[files[0]]}: its name says {named[0]}; its rows are read as any others"
        return path + many, files, line * are_for_tests
    if not chosen:
        there = f"the file names contain {', '.join(named)}" if named else "no file name contains a split"
        likely = sorted(named, key=lambda name: not name.startswith("train"))
        fixes = [Fix({"data.sources": [{"path": source.path, "split": name}]}, "for example") for name in likely[:1]]
        raise DataError(f"{source.path}: no files of split {wanted!r}: {there}", fixes)
    left = [str(listing.files[file]) for file in files if file not in chosen]
    line = f"{path}: {len(left)} of {len(files)} files are left out: {', '.join(left[:_MAX_TOLD])}"
    why = f"{line}{', ...' * bool(left[_MAX_TOLD:])}; name such a file, or set its split, to train on it"
    return f"{path}[{wanted}, {len(chosen)} of {len(files)} files]", chosen, why


def _split_of(path: PurePath) -> str | None:
    """Return the split that a path names, such as `train_sft` for `train_sft-00000-of-00002`."""
    spaced = _HELD_OUT.sub(r"\1out", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", "/".join(path.parts))).lower()
    words = set(re.split(r"[^a-z]+", spaced))
    split = next((split for split, names in _SPLITS.items() if words & names), None)
    shard = _SHARD.match(path.name) if split else None
    return shard[1] if shard and _split_of(PurePath(shard[1])) else split


def require_local(pattern: str) -> None:
    """Raise DataError if a path that is no hub id and no data set's name has no file, folder or glob's match."""
    is_local = _looks_local(pattern) and "://" not in pattern and re.fullmatch(r"[\w-]+", pattern) is None
    if is_local and not glob.glob(str(expand_home(pattern)), recursive=True):  # noqa: PTH207
        raise _nothing_found(pattern)


def _looks_local(path: str) -> bool:
    is_id = _HUB_ID.fullmatch(path) is not None and _FILE_NAME.search(path) is None
    return not is_id or row_type(Path(path)) is not None


def _nothing_found(pattern: str) -> DataError:
    """Return the error on data that is not there, with what is near, or the files of rows beside it."""
    path = expand_home(pattern)
    parts = [part.strip() for part in pattern.split(",")]
    if parts[1:] and all(glob.glob(str(expand_home(part))) for part in parts):  # noqa: PTH207
        return DataError(f"{pattern}: no such file; several files are a list", [Fix({"data": parts})])
    user, said = unknown_user(pattern), "no such file or folder"
    if glob.has_magic(pattern):
        said = "no data file matches"
    elif user:
        path, said = Path(path.name), user
    elif path.is_symlink():
        said = f"a link to {path.readlink()}, which does not exist; fix the link, or name the file itself"
        return DataError(f"{pattern}: {said}")
    elif near := did_you_mean(pattern):
        return DataError(f"{pattern}: {said}{near}")
    folder = path.parent
    there = [child for child in folder.iterdir() if row_type(child) and has_rows(child)] if folder.is_dir() else []
    there.sort(key=lambda child: (child.suffix != path.suffix, child.suffix != ".jsonl", child.name))
    if not there:
        return DataError(f"{pattern}: {said}; give a file, a folder, a glob or a hub id (org/set)")
    listed = ", ".join(map(str, there[:4]))
    return DataError(f"{pattern}: {said}; files here include {listed}", [Fix({"data": str(there[0])}, "for example")])


def _digest(path: Path) -> str:
    try:
        return digest(path).xxh3
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _open_hub(source: SourceConfig, log: Callable[[str], None]) -> RowSource:
    from flatout.data.rows.remote import find_hub_set  # lazy, as are its libraries

    hub_set = find_hub_set(source, log)
    if hub_set.loaded is None:
        unread, files = Unread(redacted(source.path), source.unread_files), _digests(hub_set.files)
        known = {"files": files, "num_rows": hub_set.num_rows, "address": hub_set.address}
        return _opened(hub_set.name, hub_set.files, unread, **known)
    cached = enumerate(Path(file["filename"]) for file in hub_set.loaded.cache_files)
    digests = {f"{hub_set.name}/{number}": _digest(path) for number, path in cached}

    def read(bad_row: BadRow) -> Iterator[RawRow]:
        # as arrow tables: images and audio stay undecoded, and it is many times faster than reading row by row
        tables = hub_set.loaded.with_format("arrow").iter(batch_size=1024)
        return table_rows(hub_set.name, tables, hub_set.loaded.features.to_dict())

    return RowSource(hub_set.name, digests, hub_set.num_rows, read, address=hub_set.address)
