"""Settings of what happens when a rank is lost."""

from __future__ import annotations

from pydantic import Field

from flatout.config.section import Section


class FaultsConfig(Section):
    """What happens when a rank dies or stops answering (several ranks only)."""

    max_restarts: int = Field(default=3, ge=0)
    """Times a run started by `gpus` or --nnodes goes on by itself from the newest valid checkpoint; never after errors
    that a restart cannot cure."""
    hang_s: float = Field(default=60.0, ge=1.0)
    """Seconds of silence after which a rank counts as lost."""
    stall_s: float = Field(default=1800.0, ge=1.0)
    """Seconds without a finished step, evaluation or save after which the rank furthest behind counts as lost."""
    min_ranks: int | None = Field(default=None, ge=1)
    """Elastic: fewest ranks to go on with when the same one was lost twice running; null: never with fewer."""
