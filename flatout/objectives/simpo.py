"""Simple preference optimization (SimPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from flatout.objectives.preference import Answers, Preference, minus_log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor


class SimPO(Preference):
    """-log sigmoid(beta (a_c - a_r) - gamma) (arXiv:2405.14734, eq. 6); a is a log-probability per token."""

    name = "simpo"

    beta: float = Field(default=2.0, gt=0)
    """The paper takes 2.0 to 2.5, much more than losses over whole answers do."""
    gamma: float = Field(default=1.0, ge=0)
    """The margin that beta (a_c - a_r) should have; the paper takes 0.3 to 1.6."""

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        """See Preference."""
        return minus_log_sigmoid(self.beta * (chosen.mean - rejected.mean) - self.gamma)

    def rewards(self, answers: Answers) -> Tensor:
        """Return beta a."""
        return self.beta * answers.mean
