"""Tables of facts about settings, as YAML files in `tables/`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

# libyaml's loader is ten times as fast where PyYAML was built with it
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Effect = Literal["numerics", "rounding", "harmless"]
"""Of a changed setting on a run that resumes: see `tables/resume_effects.yaml`."""


def read_table(name: str) -> Any:
    """Return the content of `tables/NAME.yaml`."""
    text = (Path(__file__).parent / "tables" / f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, Loader=_LOADER)


RESUME_EFFECTS: Mapping[str, tuple[Effect, str]] = {
    name: (effect, why)
    for effect, reasons in read_table("resume_effects").items()
    for why, names in reasons.items()
    for name in names.split()
}
"""The effect of each setting, and why. A setting that is not there counts as numerics."""
