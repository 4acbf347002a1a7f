"""Files that are written from a template of the package: every value that is put in has the form of one language."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def render(template: Path, write: Callable[[Any], str] = str, **facts: Any) -> str:
    """Return a Jinja template filled with `facts`, each value written by `write`, such as json.dumps for YAML."""
    from jinja2 import Environment, StrictUndefined  # lazy: few commands write such files

    environment = Environment(trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined, finalize=write)
    return environment.from_string(template.read_text(encoding="utf-8")).render(facts)
