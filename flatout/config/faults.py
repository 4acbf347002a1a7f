"""Settings for recovery from lost ranks."""

from __future__ import annotations

from pydantic import Field

from flatout.config.section import Section


class FaultsConfig(Section):
    """What to do when a rank dies or stops responding (several ranks only)."""

    max_restarts: int = Field(default=3, ge=0)
    """Number of times a run started with `gpus` or --nnodes restarts from the newest valid checkpoint; never after
    errors that a restart cannot fix."""
    hang_s: float = Field(default=60.0, ge=1.0)
    """Seconds without a heartbeat after which a rank counts as lost."""
    stall_s: float = Field(default=1800.0, ge=1.0)
    """Seconds without progress in a step after which the rank furthest behind counts as lost."""
    long_phase_s: float = Field(default=7200.0, ge=1.0, le=21600.0)
    """The same limit while a rank loads, evaluates, saves or finishes, which can take long while the others wait."""
    join_s: float = Field(default=900.0, ge=1.0)
    """Seconds that ranks and nodes wait for missing ones at the start."""
    min_ranks: int | None = Field(default=None, ge=1)
    """Elastic: fewest ranks to continue with after the same rank was lost twice in a row; null: never with fewer."""
