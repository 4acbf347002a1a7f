"""Texts as people may see them: without passwords and tokens of URLs, without control characters, in 80 columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

WIDTH = 80
# a URL that was turned into a path has only one of its two slashes
_USER = re.compile(r"(?<=:/)(/?)[^/\s]+(?=@)")
_QUERY = re.compile(r"([?&][^=&\s]*(?:token|key|secret|signature|sig|password|credential)[^=&\s]*=)[^&\s\"']+", re.I)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# variables whose values are secrets, by their names
_SECRET_VARIABLE = re.compile(r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH)(_|$)", re.I)
# a shorter value, such as "true", could be a part of anything
_MIN_SECRET = 6


def printable(text: str) -> str:
    """Escape control characters except tab and newline, so that data cannot control a terminal."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def rows(pairs: Iterable[tuple[str, str]], name_width: int = 18) -> str:
    """Format one line per pair, names in a column of `name_width`; long texts wrap within their column.

    Words are never broken, so that a long path can still be copied.
    """
    wrapper = textwrap.TextWrapper(
        WIDTH, subsequent_indent=" " * name_width, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.fill(printable(f"{name:<{name_width - 1}} {text}")) for name, text in pairs)


def wrapped(text: str, stream: TextIO) -> str:
    """Return a text in 80 columns if `stream` is a terminal, without breaking words; programs get it as it is."""
    if not stream.isatty():
        return text
    wrapper = textwrap.TextWrapper(WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrapper.fill(line) if len(line) > WIDTH else line for line in text.split("\n"))


def cleaned(value: Any) -> Any:
    """Return a JSON value from a file with every text of it, names of fields too, as `printable` has it."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {cleaned(key): cleaned(part) for key, part in value.items()}
    return [cleaned(part) for part in value] if isinstance(value, list | tuple) else value


def redacted(value: Any, secrets: Sequence[str] = ()) -> Any:
    """Return a JSON value with `secrets`, and the user part and secret query values of every URL, replaced by ***."""
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, "***")
        return _QUERY.sub(r"\1***", _USER.sub(r"\1***", value))
    if isinstance(value, Mapping):
        return {redacted(key, secrets): redacted(part, secrets) for key, part in value.items()}
    return [redacted(part, secrets) for part in value] if isinstance(value, list | tuple) else value


def secrets_of(env: Mapping[str, str]) -> list[str]:
    """Return the values of variables whose names end in _TOKEN, _API_KEY and the like, longest first."""
    secrets = {text for name, text in env.items() if _SECRET_VARIABLE.search(name) and len(text) >= _MIN_SECRET}
    return sorted(secrets, key=len, reverse=True)
