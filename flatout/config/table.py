"""Tables of facts about settings, as YAML files in `tables/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

# libyaml's loader is ten times as fast where PyYAML was built with it
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_table(name: str) -> Any:
    """Return the content of `tables/NAME.yaml`."""
    text = (Path(__file__).parent / "tables" / f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, Loader=_LOADER)
