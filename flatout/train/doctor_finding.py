"""One line of `flatout doctor`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, what was found, and what to do about it. `where` is the node, empty for the only one."""

    what: str
    status: Literal["ok", "warn", "fail"]
    got: str
    do: str = ""
    where: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def ok(what: str, got: str) -> Finding:
    """Nothing to do."""
    return Finding(what, "ok", got)


def warn(what: str, got: str, do: str) -> Finding:
    """A run works, but worse than it could."""
    return Finding(what, "warn", got, do)


def fail(what: str, got: str, do: str) -> Finding:
    """A run would not work."""
    return Finding(what, "fail", got, do)
