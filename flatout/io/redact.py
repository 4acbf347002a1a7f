"""Remove passwords and tokens from URLs before they are written or shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# a URL that was turned into a path has only one of its two slashes
_USER = re.compile(r"(?<=:/)(/?)[^/\s]+(?=@)")
_QUERY = re.compile(r"([?&][^=&\s]*(?:token|key|secret|signature|sig|password|credential)[^=&\s]*=)[^&\s\"']+", re.I)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Escape control characters except tab and newline, so that data cannot control a terminal."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def redacted(value: Any) -> Any:
    """Return a JSON value with the user part and secret query values of every URL replaced by ***."""
    if isinstance(value, str):
        return _QUERY.sub(r"\1***", _USER.sub(r"\1***", value))
    if isinstance(value, Mapping):
        return {redacted(key): redacted(part) for key, part in value.items()}
    return [redacted(part) for part in value] if isinstance(value, list | tuple) else value
