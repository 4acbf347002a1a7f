"""Rows out of files: one strict reader a file type, and one shape for what they yield."""

from __future__ import annotations

import csv
import gzip
import lzma
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from flatout.data.conversation import Origin
from flatout.data.strict_json import JSONSyntaxError, parse_json
from flatout.errors import DataError

BadRow = Callable[[DataError], None]
_UNPACKERS: dict[str, Callable[[Path], Any]] = {".xz": lzma.open, ".gz": gzip.open}
_BOM = b"\xef\xbb\xbf"
_WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as read: column name -> value, unchanged."""

    origin: Origin
    row: dict[str, Any]


def raise_error(error: DataError) -> NoReturn:
    """The default for `bad_row`: the first bad row stops the reading."""
    raise error


def row_type(path: Path) -> str | None:
    """`.jsonl`, `.csv`, ... of a data file, compressed or not; None for a file that holds no rows by its name."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _UNPACKERS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in _READERS else None


def read_rows(path: Path, bad_row: BadRow = raise_error) -> Iterator[RawRow]:
    """The rows of one file in order; rows count from 1 (JSON Lines: the line, blank lines counted but skipped).

    `bad_row` gets the DataError of a row that cannot be read; if it returns, reading goes on after that row, where
    the file type has a "next row" (JSON Lines). A file that cannot be read at all always raises DataError.
    """
    reader = _READERS[row_type(path) or ".jsonl"]
    with _opened(path) as file:
        yield from reader(path, file, bad_row)


def count_rows(path: Path) -> int | None:
    """The number of rows where the file's footer says it (parquet); else None."""
    if path.suffix.lower() != ".parquet":
        return None
    from pyarrow import ArrowException, parquet  # lazy: importing pyarrow costs 0.1 s

    try:
        return int(parquet.read_metadata(path).num_rows)
    except (ArrowException, OSError) as error:
        raise DataError(f"{path}: not readable as parquet: {_first_line(error)}") from error


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, unpacked; what goes wrong with file or packing becomes a DataError with the path."""
    try:
        with _UNPACKERS.get(path.suffix.lower(), Path.open)(path, mode="rb") as file:
            yield file
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(
            f"{path}: the {path.suffix} file is damaged or cut short ({_first_line(error)}); copy it again"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or _first_line(error)}") from error


def _decoded(raw: bytes, path: Path, line: int, line_start: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if line_start == 0 and raw.startswith(_WIDE_BOMS):
            raise DataError(f"{path}:1: the file is UTF-16; convert it to UTF-8") from None
        at = line_start + error.start
        line += raw.count(b"\n", 0, error.start)
        found = raw[error.start : max(error.end, error.start + 1)].hex(" ")
        raise DataError(
            f"{path}:{line}: invalid UTF-8 at byte {at} of the file (hex {found}); convert the file to UTF-8"
        ) from None


def _lines(path: Path, file: BinaryIO, bad_row: BadRow) -> Iterator[tuple[int, str]]:
    """Line numbers from 1 and lines with their ends. Only \\n ends a line: U+2028 and friends are text."""
    line_start = 0
    for number, raw in enumerate(file, start=1):
        text_start = len(_BOM) if number == 1 and raw.startswith(_BOM) else 0
        try:
            line = _decoded(raw[text_start:], path, number, line_start + text_start)
        except DataError as error:
            bad_row(error)
        else:
            yield number, line
        line_start += len(raw)


def _whole_text(path: Path, file: BinaryIO) -> str:
    raw = file.read()
    start = len(_BOM) if raw.startswith(_BOM) else 0
    return _decoded(raw[start:], path, 1, start)


def _row_of(value: Any, origin: Origin) -> RawRow:
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else "null" if value is None else type(value).__name__
        raise DataError(f"{origin}: the row is {kind}, not an object of columns")
    return RawRow(origin, value)


def _jsonl_rows(path: Path, lines: Iterable[tuple[int, str]], bad_row: BadRow) -> Iterator[RawRow]:
    for number, line in lines:
        if not line.strip(" \t\r\n"):
            continue
        try:
            row = _row_of(parse_json(line.rstrip("\r\n")), Origin(str(path), number))
        except JSONSyntaxError as error:
            bad_row(DataError(f"{path}:{number}:{error.column}: {error.what}"))
        except DataError as error:
            bad_row(error)
        else:
            yield row


def _read_jsonl(path: Path, file: BinaryIO, bad_row: BadRow) -> Iterator[RawRow]:
    return _jsonl_rows(path, _lines(path, file, bad_row), bad_row)


def _read_json(path: Path, file: BinaryIO, bad_row: BadRow) -> Iterator[RawRow]:
    """A list of rows, {"data": [rows]}, or JSON Lines under the wrong name, which is common."""
    text = _whole_text(path, file)
    try:
        value = parse_json(text)
    except JSONSyntaxError as error:
        if not (error.at_second_value and text.lstrip()[:1] == "{"):
            raise DataError(f"{path}:{error.line}:{error.column}: {error.what}") from None
        yield from _jsonl_rows(path, enumerate(text.split("\n"), start=1), bad_row)
        return
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    if not isinstance(value, list):
        found = f"an object with keys {', '.join(value)}" if isinstance(value, dict) else type(value).__name__
        raise DataError(f'{path}: expected a list of rows or {{"data": [rows]}}, found {found}')
    for number, row in enumerate(value, start=1):
        try:
            raw = _row_of(row, Origin(str(path), number))
        except DataError as error:
            bad_row(error)
        else:
            yield raw


def _read_csv(path: Path, file: BinaryIO, bad_row: BadRow) -> Iterator[RawRow]:
    """A header line, then records; every value is text. Rows count records, not lines: a field may hold line ends."""
    old_limit = csv.field_size_limit(sys.maxsize)  # 131,072 characters by default; one limit for the whole module
    try:
        # an undecodable line would leave the reader inside a quoted field, so it always stops
        reader = csv.reader((line for _, line in _lines(path, file, raise_error)), strict=True)
        header = next(reader, None)
        if header is None:
            return
        twice = next((name for name in header if header.count(name) > 1), None)
        if twice is not None:
            raise DataError(f"{path}:1: column {twice!r} is in the header twice")
        for number, fields in enumerate((fields for fields in reader if fields), start=1):
            if len(fields) == len(header):
                yield RawRow(Origin(str(path), number), dict(zip(header, fields, strict=True)))
            else:
                where = f"{path}:{number} (line {reader.line_num})"
                bad_row(DataError(f"{where}: {len(fields)} fields, the header has {len(header)}; quote commas in text"))
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num}: not readable as csv: {error}") from error
    finally:
        csv.field_size_limit(old_limit)


def _read_text(path: Path, file: BinaryIO, bad_row: BadRow) -> Iterator[RawRow]:
    """One file is one document.

    No rule about line ends or blank lines fits prose, verse, code and one-document-a-line dumps alike, and a wrong
    one cuts documents in two. Many documents in one file belong into JSON Lines with a column `text`.
    """
    text = _whole_text(path, file)
    if text:
        yield RawRow(Origin(str(path), 1), {"text": text})


def _read_parquet(path: Path, file: BinaryIO, bad_row: BadRow) -> Iterator[RawRow]:
    from pyarrow import ArrowException, parquet  # lazy: importing pyarrow costs 0.1 s

    try:
        yield from table_rows(str(path), parquet.ParquetFile(file).iter_batches(batch_size=1024))
    except ArrowException as error:
        raise DataError(f"{path}: not readable as parquet: {_first_line(error)}") from error


def _read_arrow(path: Path, file: BinaryIO, bad_row: BadRow) -> Iterator[RawRow]:
    """Arrow's file format (with a footer) and its stream format (what `datasets` writes)."""
    from pyarrow import ArrowException, ipc  # lazy: importing pyarrow costs 0.1 s

    has_footer = file.read(6) == b"ARROW1"
    file.seek(0)
    try:
        if has_footer:
            footed = ipc.open_file(file)
            yield from table_rows(str(path), (footed.get_batch(i) for i in range(footed.num_record_batches)))
        else:
            yield from table_rows(str(path), ipc.open_stream(file))
    except ArrowException as error:
        raise DataError(f"{path}: not readable as arrow: {_first_line(error)}") from error


def table_rows(source: str, batches: Iterable[Any]) -> Iterator[RawRow]:
    """Rows of arrow tables or record batches; `source` names them in messages. A null column value becomes None."""
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield RawRow(Origin(source, number), row)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


_READERS: dict[str, Callable[[Path, BinaryIO, BadRow], Iterator[RawRow]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".txt": _read_text,
}
ROW_TYPES: tuple[str, ...] = tuple(_READERS)
