"""JSON files: written without NaN, read with a bounded size, no repeated keys and no constants outside JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from flatout.errors import CheckpointError, FlatoutError
from flatout.io.strict_json import parse_json

MAX_JSON_BYTES = 64 * 2**20
T = TypeVar("T")


def encode_json(value: Any) -> bytes:
    """Render a JSON value as indented UTF-8 with a trailing newline. Raises ValueError for NaN and infinity."""
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_json(path: Path, error: type[FlatoutError] = CheckpointError, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file of at most `max_bytes`. Raises `error` with the file and what is wrong with it."""
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise error(f"{path}: {path.stat().st_size:,} bytes of JSON is over the limit of {max_bytes:,}")
        value = parse_json(content)
        # half of a surrogate pair is valid JSON, but cannot be encoded as UTF-8 again
        json.dumps(value, ensure_ascii=False).encode()
        return value
    except FileNotFoundError as cause:
        raise error(f"{path}: the file is missing") from cause
    except OSError as cause:
        raise error(f"{path}: cannot be read: {cause.strerror}") from cause
    except UnicodeDecodeError as cause:
        raise error(f"{path}: not readable as JSON: no text from byte {cause.start} on; write it as UTF-8") from cause
    except UnicodeEncodeError as cause:
        raise error(f"{path}: not readable as JSON: it holds half of a surrogate pair, which is no text") from cause
    except ValueError as cause:
        raise error(f"{path}: not readable as JSON: {cause}") from cause


def validated(adapter: TypeAdapter[T], value: Any, where: str, error: type[FlatoutError] = CheckpointError) -> T:
    """Validate a JSON value with `adapter`. Raises `error` with `where`, the field and what is wrong."""
    try:
        # passed as JSON, since a strict adapter does not accept a dict for a dataclass
        return adapter.validate_json(json.dumps(value))
    except ValidationError as cause:
        first = cause.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise error(f"{where}: {field}: {first['msg']}; found {first['input']!r:.200}") from cause
