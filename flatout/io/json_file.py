"""Strict JSON (RFC 8259): errors have line and column, nothing is guessed or dropped; files of a bounded size."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections import Counter
from datetime import UTC, datetime
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from flatout.errors import CheckpointError, FlatoutError

MAX_JSON_BYTES = 64 * 2**20
_PART_BYTES = 1 << 18
T = TypeVar("T")
_adapter_of = cache(TypeAdapter)

# strings first, so that a NaN inside a string does not match
_NOT_NUMBER = re.compile(r'"(?:[^"\\]|\\.)*"|(-?(?:NaN|Infinity))', re.DOTALL)


class JSONSyntaxError(ValueError):
    """Invalid JSON: `line` and `column` count from 1, in characters; `what` is what was expected.

    `at_second_value` is True if a complete value precedes the error, as in JSON Lines.
    """

    def __init__(self, what: str, line: int, column: int, at_second_value: bool = False) -> None:
        super().__init__(f"{line}:{column}: {what}")
        self.what, self.line, self.column, self.at_second_value = what, line, column, at_second_value


class _RefusedError(Exception):
    """A value that Python's scanner accepts but RFC 8259 forbids or leaves undefined (NaN, a repeated key)."""


def _refuse(text: str) -> NoReturn:
    raise _RefusedError(text)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(unique := dict(pairs)) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        _refuse(json.dumps(next(key for key, count in counts.items() if count > 1), ensure_ascii=False))
    return unique


_DECODER = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_unique_keys)


def parse_json(content: str | bytes) -> Any:
    """Parse one JSON value from text or bytes.

    Raises JSONSyntaxError for bad syntax, NaN and Infinity, a repeated key in an object, an integer of more than 4,300
    digits, or nesting beyond the interpreter's limit (about 1,000); UnicodeDecodeError for bytes that are not text.
    """
    text = content.decode(json.detect_encoding(content)) if isinstance(content, bytes) else content
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        is_second = error.msg == "Extra data"
        raise JSONSyntaxError(_what_is_wrong(text, error), error.lineno, error.colno, is_second) from None
    except _RefusedError as refused:
        raise _refused_at(text, str(refused)) from None
    except RecursionError:
        raise JSONSyntaxError("nested too deeply", 1, 1) from None
    except ValueError as error:  # an integer with too many digits; Python reports no position
        raise JSONSyntaxError(str(error).split(";")[0].lower(), 1, 1) from None


def _what_is_wrong(text: str, error: json.JSONDecodeError) -> str:
    """Say what pydantic's parser expects: Python's has no word for a comma too much, or for a text that ends."""
    if text[error.pos : error.pos + 1] == "'":
        return "expected double quotes; single quotes are Python's, not JSON's"
    try:
        from_json(text, allow_inf_nan=False)
    except ValueError as said:
        what = str(said).partition(" at line ")[0].replace("`", "'")
        return what.replace("EOF", "the JSON ends").replace("expected ident", "expected value")
    return error.msg.lower()


def _refused_at(text: str, key: str) -> JSONSyntaxError:
    if key.startswith('"'):
        # the hook runs when the object closes and has no position; the key's second occurrence is close enough
        starts = [match.start() for match in re.finditer(re.escape(key) + r"\s*:", text)]
        position = starts[1] if len(starts) > 1 else 0
        what = f"key {key} is given twice in one object"
    else:
        position = next((match.start() for match in _NOT_NUMBER.finditer(text) if match[1]), 0)
        what = f"{key} is not valid JSON; write null or a number"
    line_start = text.rfind("\n", 0, position) + 1
    return JSONSyntaxError(what, text.count("\n", 0, position) + 1, position - line_start + 1)


def now_utc() -> str:
    """Return the current time as ISO 8601 in UTC, to the second: the format of times in files."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def encode_json(value: Any) -> bytes:
    """Render a JSON value as indented UTF-8 with a trailing newline. Raises ValueError for NaN and infinity."""
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def open_plain(path: Path) -> BufferedReader:
    """Open a regular file for reading. Raises OSError, also for a pipe or a device: reading one may never end."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(fd, "rb")


def read_json(path: Path, error: type[FlatoutError] = CheckpointError, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file of at most `max_bytes`. Raises `error` with the file and what is wrong with it."""
    try:
        with open_plain(path) as file:
            # by parts: one read would reserve `max_bytes` for the smallest file
            content, rest = bytearray(), max_bytes + 1
            while rest and (part := file.read(min(rest, _PART_BYTES))):
                content += part
                rest -= len(part)
        if len(content) > max_bytes:
            raise error(f"{path}: {path.stat().st_size:,} bytes of JSON exceed the limit of {max_bytes:,}")
        value = parse_json(bytes(content))
        # half of a surrogate pair is valid JSON, but cannot be encoded as UTF-8 again
        json.dumps(value, ensure_ascii=False).encode()
        return value
    except FileNotFoundError as cause:
        raise error(f"{path}: the file is missing") from cause
    except OSError as cause:
        raise error(f"{path}: cannot be read: {cause.strerror}") from cause
    except UnicodeDecodeError as cause:
        raise error(f"{path}: not readable as JSON: not UTF-8 from byte {cause.start} on; write it as UTF-8") from cause
    except UnicodeEncodeError as cause:
        raise error(f"{path}: not readable as JSON: it contains half of a surrogate pair") from cause
    except ValueError as cause:
        raise error(f"{path}: not readable as JSON: {cause}") from cause


def read_as(kind: type[T], path: Path, error: type[FlatoutError] = CheckpointError, **limits: int) -> T:
    """Read a JSON file as a dataclass. Raises `error` with the file, the field and what is wrong; see `read_json`."""
    return validated(kind, read_json(path, error, **limits), str(path), error)


def validated(kind: type[T], value: Any, where: str, error: type[FlatoutError] = CheckpointError) -> T:
    """Validate a JSON value as a dataclass. Raises `error` with `where`, the field and what is wrong."""
    adapter: TypeAdapter[T] = _adapter_of(kind)  # type: ignore[arg-type]  # a class is hashable
    try:
        # passed as JSON, since a strict one does not accept a dict for a dataclass
        return adapter.validate_json(json.dumps(value))
    except ValidationError as cause:
        first = cause.errors()[0]
        place = ": ".join(filter(None, (where, ".".join(map(str, first["loc"])))))
        raise error(f"{place}: {first['msg']}; found {first['input']!r:.200}") from cause
