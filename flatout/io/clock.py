"""The format of times in files."""

from __future__ import annotations

from datetime import UTC, datetime


def now_utc() -> str:
    """Return the current time as ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
