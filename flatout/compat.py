"""The modules that flatout-migrate has for the import names of other trainers, such as `flatout.compat.unsloth`."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

from flatout.errors import install_beside

__path__: list[str] = []
if not (_found := entry_points(group="flatout.compat")):
    raise ImportError(f"{__name__} is in flatout-migrate, which is not installed: {install_beside('migrate')}")
for _one in _found:
    sys.modules[f"{__name__}.{_one.name}"] = globals()[_one.name] = _one.load()
