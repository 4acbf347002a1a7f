"""Rows inside of archives: data files in a .zip or .tar, and webdataset's shards, whose files are columns of rows."""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import PurePosixPath
from typing import IO, Any, BinaryIO, Literal

from flatout.data.conversation import Origin
from flatout.data.rows.read import (
    ARCHIVES,
    MAX_ROW_BYTES,
    TABLES,
    BadRow,
    DataFile,
    RawRow,
    raise_error,
    read_rows,
    row_type,
    unpacked,
)
from flatout.errors import DataError, first_line
from flatout.io.json_file import JSONSyntaxError, parse_json

Unread = Callable[[str], None]
"""Called with the name of a file that holds no rows which flatout reads; it may refuse it by a DataError."""

# what webdataset writes for one sample beside its text
_SAMPLE_TYPES = (".json", ".txt")
# files beside rows that say something about them, or read them
_ABOUT = {
    ".md", ".rst", ".py", ".ipynb", ".sh", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".bib", ".cff", ".lock", ".md5",
    ".sha256",
}  # fmt: skip
_ABOUT_NAMES = {
    "readme", "source", "sources", "version", "checksums", "sha256sums", "md5sums", "todo",
    "license", "licence", "notice", "copying", "authors", "changelog", "citation", "makefile",
}  # fmt: skip
# files that `datasets`, Spark and hub downloads put next to the rows
_DESCRIPTIONS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "_success", "_metadata"}


def holds_rows(name: str) -> bool | None:
    """Return whether a file holds rows by its name; None for a file about the rows, such as README.md."""
    path = PurePosixPath(name.lower())
    if path.name.startswith(".") or path.name in _DESCRIPTIONS:
        return None
    is_about = path.name.partition(".")[0] in _ABOUT_NAMES and path.suffix in ("", ".txt")
    if row_type(path) is not None and not is_about:
        return True
    return None if is_about or path.suffix in _ABOUT else False


@dataclass(frozen=True, slots=True)
class _Member:
    """A file in an archive."""

    archive: str
    path: str
    content: IO[bytes]

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    def __str__(self) -> str:
        return f"{self.archive}/{self.path}"

    def open(self, _: Literal["rb"]) -> io.BufferedReader:
        content = self.content
        if row_type(self) in TABLES and not isinstance(content, zipfile.ZipExtFile):
            # read from its end, which a stream cannot be
            content = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the reader)
            shutil.copyfileobj(self.content, content)
            content.seek(0)
        return io.BufferedReader(content)  # type: ignore[arg-type]  # files of zipfile and tarfile have readinto


def read_file(file: DataFile, bad_row: BadRow = raise_error, unread: Unread = lambda name: None) -> Iterator[RawRow]:
    """Yield the rows of a file, or of all files in an archive, in order. Raises as `read_rows`.

    Only tables in a .tar are unpacked, to a temporary file without a name. Rows are named by the archive and the file
    in it.
    """
    if row_type(file) not in ARCHIVES:
        yield from read_rows(file, bad_row)
        return
    try:
        with unpacked(file) as (kind, content):
            yield from (_read_zip if kind == ".zip" else _read_tar)(file, content, bad_row, unread)
    except (RuntimeError, NotImplementedError) as error:  # zipfile: a password, a rare compression
        raise DataError(f"{file}: cannot be unpacked ({first_line(error)}); unpack it and give its files") from error


def _is_read(archive: str, path: str, is_file: bool, unread: Unread) -> bool:
    """Return whether a member is read; hidden files and files about the rows are not, and need no word."""
    if any(part.startswith(".") for part in PurePosixPath(path).parts):
        return False
    has_rows = holds_rows(path) if is_file and row_type(PurePosixPath(path)) not in ARCHIVES else False
    if has_rows is False:
        unread(f"{archive}/{path}")
    return bool(has_rows)


def _read_zip(file: DataFile, content: BinaryIO, bad_row: BadRow, unread: Unread) -> Iterator[RawRow]:
    with zipfile.ZipFile(content) as archive:
        members = sorted((member for member in archive.infolist() if not member.is_dir()), key=lambda m: m.filename)
        for member in [one for one in members if _is_read(str(file), one.filename, True, unread)]:
            with archive.open(member) as opened:
                yield from read_rows(_Member(str(file), member.filename, opened), bad_row)


def _read_tar(file: DataFile, content: BinaryIO, bad_row: BadRow, unread: Unread) -> Iterator[RawRow]:
    """Read members in the order of the archive, which may be a stream.

    Consecutive .json (one object) and .txt files with one name up to the first dot are one row, as webdataset writes
    it: the object's columns, and `text`.
    """
    num_samples = 0
    with tarfile.open(fileobj=content, mode="r|") as archive:
        for key, parts in groupby(_parts(str(file), archive, unread), key=itemgetter(0)):
            if key is None:
                for _, member in parts:
                    yield from read_rows(member, bad_row)
                continue
            num_samples += 1
            origin, columns = Origin(str(file), num_samples), dict[str, Any]()
            for _, part in parts:
                if isinstance(part, dict) and (twice := columns.keys() & part.keys()):
                    part = DataError(f"{origin}: two files of sample {key} give column {min(twice)!r}")
                if isinstance(part, DataError):  # it is told once
                    bad_row(part)
                    break
                columns |= part
            else:
                if columns:
                    yield RawRow(origin, columns)


def _parts(file: str, archive: tarfile.TarFile, unread: Unread) -> Iterator[tuple[str | None, Any]]:
    """Yield the members that are read: a sample's name with columns or what is wrong, or None with a file of rows."""
    for info in archive:
        # what is neither a folder nor a file is a link or a device
        if info.isdir() or not _is_read(file, info.name, info.isfile(), unread):
            continue
        content = archive.extractfile(info)
        assert content is not None  # it is a file
        part = _part_of_sample(_Member(file, info.name, content), info.size)
        path = PurePosixPath(info.name)
        yield None if isinstance(part, _Member) else str(path.with_name(path.name.partition(".")[0])), part


def _part_of_sample(member: _Member, size: int) -> dict[str, Any] | DataError | _Member:
    """Return the columns that a file of a webdataset sample gives, what is wrong with it, or a file of rows itself."""
    kind = PurePosixPath(member.path).suffix.lower()
    if kind not in _SAMPLE_TYPES or size > MAX_ROW_BYTES:
        return member
    raw = member.content.read()
    try:
        text = raw.decode("utf-8-sig")
        if kind == ".txt":
            return {"text": text}
        value = parse_json(text)
    except UnicodeDecodeError as error:
        return DataError(f"{member}: invalid UTF-8 at byte {error.start}; convert the file to UTF-8")
    except JSONSyntaxError as error:
        if not error.at_second_value:
            return DataError(f"{member}:{error.line}:{error.column}: {error.what}")
        value = None  # JSON Lines
    if isinstance(value, dict) and not isinstance(value.get("data"), list):
        return value
    return replace(member, content=io.BytesIO(raw))
