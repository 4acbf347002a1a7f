"""The energy of profiled steps, by the counter of a GPU's driver."""

from __future__ import annotations

from dataclasses import dataclass

# the counter moves about this often on data-center GPUs; benchmarks/joules.py prints the period it finds
COUNTER_PERIOD_S = 0.1


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules that one GPU, memory and board included, used in `wall_s` seconds for its share of `num_tokens` tokens.

    `uncertainty` is relative: the counter may lag by its period at both ends of the window.
    """

    joules: float
    wall_s: float
    num_steps: int
    num_tokens: float

    @property
    def watts(self) -> float:
        """The mean power."""
        return self.joules / self.wall_s

    @property
    def uncertainty(self) -> float:
        """The largest relative error that the counter's period causes."""
        return COUNTER_PERIOD_S / self.wall_s

    @property
    def line(self) -> str:
        return (
            f"energy: {self.joules / self.num_steps:,.1f} J a step, {self.joules / self.num_tokens * 1e3:,.2f} mJ a "
            f"token, {self.watts:,.0f} W on average; {self.joules:,.1f} J in {self.wall_s:.2f} s, within "
            f"{self.uncertainty:.0%}; one GPU, idle power included"
        )
