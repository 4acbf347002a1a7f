"""Settings that few runs need, each with the reason why it exists; `flatout init --all` leaves them out."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flatout.config.table import read_table

ADVANCED: Mapping[str, str] = MappingProxyType(read_table("advanced"))
