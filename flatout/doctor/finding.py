"""One line of `flatout doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """What was checked, what was found, and what to do about it. `where` is the node, empty if there is only one."""

    status: Literal["ok", "warn", "fail"]
    what: str
    got: str
    do: str = ""
    where: str = ""


ok = partial(Finding, "ok")
# warn: a run works, but not as well as it could; fail: a run would not work
warn, fail = partial(Finding, "warn"), partial(Finding, "fail")
