"""Reads rows from files: one strict reader per file type, all yielding the same form."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import re
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import PurePath
from typing import Any, BinaryIO, Literal, NoReturn, Protocol

from flatout.data.conversation import Origin
from flatout.errors import DataError, counted, first_line
from flatout.io.json_file import JSONSyntaxError, parse_json

BadRow = Callable[[DataError], None]


class DataFile(Protocol):
    """A file of rows: a Path, a member of an archive, or a file at an address. `str(file)` names it in messages."""

    @property
    def name(self) -> str:
        """The last part of its path; its endings say what the file holds."""

    def open(self, mode: Literal["rb"], /) -> io.BufferedReader:
        """Open it for reading from the start."""


def _unpack_zst(file: BinaryIO) -> BinaryIO:
    from pyarrow import CompressedInputStream, PythonFile  # lazy: importing pyarrow costs 0.1 s

    return io.BufferedReader(CompressedInputStream(PythonFile(file, "r"), "zstd"))


_UNPACKERS: dict[str, Callable[[BinaryIO], Any]] = {
    ".xz": lzma.open,
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".zst": _unpack_zst,
}
_TARS = {".tgz": ".gz", ".tbz2": ".bz2", ".txz": ".xz"}
ARCHIVES, TABLES = (".zip", ".tar"), (".parquet", ".arrow", ".feather")
_MAGIC = {
    b"\x1f\x8b": ".gz", b"BZh.1AY&SY": ".bz2", b"\xfd7zXZ\0": ".xz", b"\\x28\xb5\x2f\xfd": ".zst",
    b"PK\3\4": ".zip", b"PAR1": ".parquet",
}  # fmt: skip
# A row is in memory several times while it is read, and a list in a .json file is read as a whole.
MAX_ROW_BYTES, _MAX_JSON_BYTES = 64 << 20, 1 << 30
_FOOTERS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as read: its columns, or a line of JSON that is parsed where they are asked for.

    So lines go to other processes as they are, and are parsed there. `classes` are the names that a file has for the
    numbers of its columns, which stand in their place, in the order of the numbers.
    """

    origin: Origin
    content: dict[str, Any] | str
    classes: Mapping[str, Sequence[str]] | None = None

    @property
    def columns(self) -> dict[str, Any]:
        """Column name -> value, unchanged. Raises DataError for a line that is not an object in JSON."""
        if not isinstance(self.content, str):
            return self.content
        try:
            value = parse_json(self.content)
        except JSONSyntaxError as error:
            is_listed = error.at_second_value and self.content[error.column - 1 :].strip() == ","
            hint = "a comma follows the row; remove it, or write [ before all rows and ] behind them" * is_listed
            raise DataError(f"{self.origin}:{error.column}: {hint or error.what}") from None
        return _object(self.origin, value)


def _object(origin: Origin, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    kind = "a list" if isinstance(value, list) else "null" if value is None else type(value).__name__
    hint = "; a file with one list of rows has the ending .json" if isinstance(value, list) else ""
    raise DataError(f"{origin}: the row is {kind}, not an object of columns{hint}")


def raise_error(error: DataError) -> NoReturn:
    """Raise the error: the default for `bad_row`, so the first bad row stops the reading."""
    raise error


def row_type(file: DataFile | PurePath) -> str | None:
    """Return `.jsonl`, `.csv`, ... for a data file, compressed or not; None for a name that no file of rows has."""
    return _kind(file)[0]


def _kind(file: DataFile | PurePath) -> tuple[str | None, str]:
    """Return the type of a file's rows, and the ending of its compression ("" for none)."""
    suffixes = [suffix.lower() for suffix in PurePath(file.name).suffixes]
    if suffixes and suffixes[-1] in _TARS:
        suffixes[-1:] = [".tar", _TARS[suffixes[-1]]]
    packing = suffixes.pop() if suffixes and suffixes[-1] in _UNPACKERS else ""
    return (suffixes[-1] if suffixes and suffixes[-1] in ROW_TYPES else None), packing


def read_rows(file: DataFile, bad_row: BadRow = raise_error) -> Iterator[RawRow]:
    """Yield the rows of one file in order; rows count from 1 (JSON Lines: the line, blank ones counted but skipped).

    `bad_row` gets the DataError of a row that cannot be read; if it returns, reading continues after that row if the
    file type has a "next row" (JSON Lines). A file that cannot be read at all always raises DataError. For archives,
    see `archives.read_file`.
    """
    with unpacked(file) as (kind, content):
        yield from _READERS[kind](file, content, bad_row)


@contextmanager
def unpacked(file: DataFile) -> Iterator[tuple[str, BinaryIO]]:
    """Open a file for reading without its compression; yields the type of its rows too.

    Raises DataError for what is wrong with the file, also while it is read.
    """
    kind, packing = _kind(file)
    try:
        with file.open("rb") as packed:
            start = packed.peek(10)[:10]
            for magic, ending in _MAGIC.items():
                # as a pattern, since the fourth byte of a .bz2 file is its block size
                if re.match(magic, start, re.DOTALL) and ending != (packing or kind):
                    raise DataError(f"{file}: the content is {ending}, unlike the name; rename it to *{ending}")
            with _UNPACKERS[packing](packed) if packing else packed as content:
                yield kind or ".jsonl", content
    except (OSError, lzma.LZMAError, zlib.error, EOFError, zipfile.BadZipFile, tarfile.TarError) as error:
        # unpackers and pyarrow raise an OSError without errno for a damaged file
        if isinstance(error, OSError) and (error.errno is not None or not packing):
            raise DataError(f"{file}: cannot be read: {error.strerror or first_line(error)}") from error
        raise DataError(
            f"{file}: the {packing or kind} file is damaged or truncated ({first_line(error)}); copy it again"
        ) from error


def count_rows(file: DataFile) -> int | None:
    """Return the number of rows if the file's footer has it (parquet), else None."""
    if _kind(file) != (".parquet", ""):
        return None
    from pyarrow import ArrowException, parquet  # lazy: importing pyarrow costs 0.1 s

    try:
        with file.open("rb") as content:
            return int(parquet.read_metadata(content).num_rows)
    except (ArrowException, OSError) as error:
        raise DataError(f"{file}: not readable as parquet: {first_line(error)}") from error


def total_rows(files: Iterable[DataFile], count: Callable[[DataFile], int | None] = count_rows) -> int | None:
    """Return the rows of all files if `count` knows those of each, else None; asks for many footers at once."""
    with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
        counts = list(pool.map(count, files))
    return None if None in counts else sum(count or 0 for count in counts)


def most_rows(file: DataFile) -> int | None:
    """Return a number that the rows of a file cannot exceed; reads text. None if only parsing would tell."""
    kind = row_type(file)
    if kind == ".txt":
        return 1
    mark = {".jsonl": b"\n", ".ndjson": b"\n", ".csv": b"\n", ".tsv": b"\n", ".json": b"{"}.get(kind or "")
    if mark is None:
        return count_rows(file)
    with unpacked(file) as (_, content):
        if mark == b"\n" and content.read(1) == b"[":  # a list
            mark = b"{"
        return 1 + sum(int(block.count(mark)) for block in iter(lambda: content.read(1 << 22), b""))


def _decoded(raw: bytes, path: DataFile, line: int, line_start: int) -> str:
    """Return the text of bytes from `line_start` of the file, without the byte order mark that may start a file."""
    if line_start == 0 and (raw.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in raw[:4]):
        raise DataError(f"{path}:1: the file is UTF-16; convert it to UTF-8")
    try:
        text = raw.decode("utf-8")
        return text.removeprefix("\ufeff") if line_start == 0 else text
    except UnicodeDecodeError as error:
        at = line_start + error.start
        line += raw.count(b"\n", 0, error.start)
        bytes_text = raw[error.start : max(error.end, error.start + 1)].hex(" ")
        letter = raw[error.start : error.start + 1].decode("latin-1")
        if letter.isalpha():
            bytes_text += f": {letter!r} in Latin-1"
        raise DataError(
            f"{path}:{line}: invalid UTF-8 at byte {at} of the file (hex {bytes_text}); convert the file "
            "to UTF-8: iconv -f latin1 -t utf-8 OLD > NEW"
        ) from None


def _lines(path: DataFile, file: BinaryIO, bad_row: BadRow) -> Iterator[tuple[int, str]]:
    """Yield line numbers from 1 and lines. Only a newline ends a line: U+2028 and the like are text."""
    line_start = 0
    for number, raw in enumerate(iter(lambda: file.readline(MAX_ROW_BYTES + 1), b""), start=1):
        try:
            if len(raw) > MAX_ROW_BYTES:
                rest = raw
                while rest and not rest.endswith(b"\n"):
                    rest = file.readline(MAX_ROW_BYTES)
                    line_start += len(rest)
                raise DataError(f"{path}:{number}: the line is over {MAX_ROW_BYTES >> 20} MiB; split the row")
            line = _decoded(raw, path, number, line_start)
        except DataError as error:
            bad_row(error)
        else:
            yield number, line
        line_start += len(raw)


def _whole_text(path: DataFile, file: BinaryIO, max_bytes: int) -> str:
    raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise DataError(f"{path}: over {max_bytes >> 20} MiB in one piece; write it as JSON Lines, one row per line")
    return _decoded(raw, path, 1, 0)


def _rows_of_lines(path: DataFile, lines: Iterable[tuple[int, str]]) -> Iterator[RawRow]:
    name = str(path)
    for number, line in lines:
        if line.strip(" \t\r\n"):
            yield RawRow(Origin(name, number), line.rstrip("\r\n"))


def _read_jsonl(path: DataFile, file: BinaryIO, bad_row: BadRow) -> Iterator[RawRow]:
    """Read a row a line, or a list of rows, which is often named so."""
    lines = _lines(path, file, bad_row)
    first = next((one for one in lines if one[1].strip(" \t\r\n")), (0, ""))
    if first[1].strip() == "{":
        raise DataError(f"{path}:{first[0]}: the row goes on in the next line; write each row on one line")
    if first[1].lstrip()[:1] == "[":
        rest = [line for _, line in lines]
        try:
            yield from _listed(path, parse_json("\n" * (first[0] - 1) + first[1] + "".join(rest)), bad_row)
            return
        except JSONSyntaxError as error:
            if not error.at_second_value:
                raise DataError(f"{path}:{error.line}:{error.column}: {error.what}") from None
        lines = enumerate(rest, start=first[0] + 1)
    yield from _rows_of_lines(path, chain([first], lines))


def _read_json(path: DataFile, file: BinaryIO, bad_row: BadRow) -> Iterator[RawRow]:
    """Read a list of rows, {"data": [rows]}, or JSON Lines with the wrong file extension, which is common."""
    text = _whole_text(path, file, _MAX_JSON_BYTES)
    try:
        value = parse_json(text)
    except JSONSyntaxError as error:
        if not (error.at_second_value and text.lstrip()[:1] == "{"):
            raise DataError(f"{path}:{error.line}:{error.column}: {error.what}") from None
        return _rows_of_lines(path, enumerate(text.split("\n"), start=1))
    return _listed(path, value, bad_row)


def _listed(path: DataFile, value: Any, bad_row: BadRow) -> Iterator[RawRow]:
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    if not isinstance(value, list):
        got = f"an object with keys {', '.join(value)}" if isinstance(value, dict) else type(value).__name__
        raise DataError(f'{path}: expected a list of rows or {{"data": [rows]}}, found {got}')
    for number, row in enumerate(value, start=1):
        origin = Origin(str(path), number)
        try:
            yield RawRow(origin, _object(origin, row))
        except DataError as error:
            bad_row(error)


def _read_csv(path: DataFile, file: BinaryIO, bad_row: BadRow) -> Iterator[RawRow]:
    """Read a header line, then records; values are texts or null. Rows count records, not lines; .tsv has tabs."""
    delimiter = "\t" if row_type(path) == ".tsv" else ","
    old_limit = csv.field_size_limit(MAX_ROW_BYTES)  # 131,072 characters by default; the limit is global in csv
    try:
        # raise_error: after an undecodable line the reader could be inside a quoted field
        lines = (line for _, line in _lines(path, file, raise_error))
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        header = next(reader, None)
        if header is None:
            return
        if len(header) == 1 and (match := re.search(r"[;|,]" if delimiter == "\t" else r"[;|\t]", header[0])):
            raise DataError(
                f"{path}:1: the header separates columns with {match[0]!r}; save it with {delimiter!r} between columns"
            )
        twice = next((name for name, count in Counter(header).items() if count > 1), None)
        if twice is not None:
            raise DataError(f"{path}:1: column {twice!r} appears twice in the header")
        for number, fields in enumerate((fields for fields in reader if fields), start=1):
            if len(fields) == len(header):
                # what pandas writes for a missing value is not text
                values = [None if field in ("nan", "NaN") else field for field in fields]
                yield RawRow(Origin(str(path), number), dict(zip(header, values, strict=True)))
            else:
                where = f"{path}:{number} (line {reader.line_num})"
                advice = (
                    "quote text that has commas" if len(fields) > len(header) else "write a comma for each empty field"
                )
                text = f"{where}: {counted(len(fields), 'field')}, but the header has {len(header)}; {advice}"
                bad_row(DataError(text))
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num}: not readable as csv: {error}") from error
    finally:
        csv.field_size_limit(old_limit)


def _read_text(path: DataFile, file: BinaryIO, bad_row: BadRow) -> Iterator[RawRow]:
    """Read the whole file as one document.

    No rule about line ends or blank lines fits prose, verse, code and dumps with one document per line, and a wrong
    rule cuts documents in two. Many documents in one file belong in JSON Lines with a column `text`.
    """
    text = _whole_text(path, file, MAX_ROW_BYTES)
    if text:
        yield RawRow(Origin(str(path), 1), {"text": text})


def _read_table(path: DataFile, file: BinaryIO, bad_row: BadRow) -> Iterator[RawRow]:
    """Read parquet, Arrow's file format (with a footer; Feather is its other name) or its stream format.

    `datasets` writes the stream format.
    """
    from pyarrow import ArrowException, ipc, parquet  # lazy: importing pyarrow costs 0.1 s

    kind = (row_type(path) or "").removeprefix(".")
    try:
        has_footer = kind != "parquet" and file.read(6) == b"ARROW1"
        file.seek(0)
        if kind == "parquet":
            batches = parquet.ParquetFile(file).iter_batches(batch_size=1024)
        elif has_footer:
            footed = ipc.open_file(file)
            batches = (footed.get_batch(i) for i in range(footed.num_record_batches))
        else:
            batches = ipc.open_stream(file)
        yield from table_rows(str(path), batches)
    except ArrowException as error:
        raise DataError(f"{path}: not readable as {kind}: {first_line(error)}") from error


def table_rows(source: str, batches: Iterable[Any], features: Mapping[str, Any] | None = None) -> Iterator[RawRow]:
    """Yield the rows of arrow tables or record batches; `source` names them in messages. Null columns become None.

    A null inside a column counts as an absent key: arrow gives every object of a column the keys of all of them.
    Numbers of a ClassLabel become its names: of `features`, or of those that `datasets` writes into the schema.
    """
    from pyarrow import types  # lazy: importing pyarrow costs 0.1 s

    number = 0
    for batch in batches:
        nested = [field.name for field in batch.schema if types.is_nested(field.type)]
        classes = _classes(_features(batch.schema.metadata) if features is None else features)
        for row in batch.to_pylist():
            number += 1
            changed = {name: _without_nulls(row[name]) for name in nested}
            changed |= {name: _class_name(row[name], names) for name, names in classes.items() if name in row}
            yield RawRow(Origin(source, number), row | changed, classes or None)


def _features(metadata: Mapping[bytes, bytes] | None) -> Any:
    try:
        return parse_json((metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, LookupError, TypeError):  # not what `datasets` writes
        return {}


def _classes(features: Any) -> dict[str, list[str]]:
    given = features.items() if isinstance(features, Mapping) else ()
    labels = {name: one for name, one in given if isinstance(one, Mapping) and one.get("_type") == "ClassLabel"}
    return {name: [*map(str, one["names"])] for name, one in labels.items() if isinstance(one.get("names"), list)}


def _class_name(value: Any, names: Sequence[str]) -> Any:
    if not isinstance(value, int) or not -1 <= value < len(names):
        return value
    return [*names, None][value]  # -1 stands for none


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


_READERS: dict[str, Callable[[DataFile, BinaryIO, BadRow], Iterator[RawRow]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_table,
    ".arrow": _read_table,
    ".feather": _read_table,
    ".txt": _read_text,
}
ROW_TYPES: tuple[str, ...] = (*_READERS, *ARCHIVES)
