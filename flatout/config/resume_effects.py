"""The effect of each changed setting on a run that resumes from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from flatout.config.table import read_table

Effect = Literal["numerics", "rounding", "harmless"]
"""See `tables/resume_effects.yaml`. A setting that is not there counts as numerics."""

RESUME_EFFECTS: Mapping[str, tuple[Effect, str]] = {
    name: (effect, why)
    for effect, reasons in read_table("resume_effects").items()
    for why, names in reasons.items()
    for name in names.split()
}
