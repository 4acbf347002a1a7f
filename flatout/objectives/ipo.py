"""Identity preference optimization (IPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from flatout.config.objective import REFERENCE
from flatout.objectives.preference import Answers, Preference

if TYPE_CHECKING:
    from torch import Tensor


class IPO(Preference):
    """(d_c / n_c - d_r / n_r - 1 / (2 beta))^2 (arXiv:2310.12036, eq. 17); d is a log-ratio to the reference.

    The log-ratios are those per token, n tokens in an answer, as the paper's authors meant and TRL computes them.
    """

    name = "ipo"
    columns = (REFERENCE,)

    beta: float = Field(default=0.1, gt=0)
    """The paper's tau: the margin per token becomes 1 / (2 beta)."""

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        """See Preference."""
        margins = chosen.ratio / chosen.length - rejected.ratio / rejected.length
        return (margins - 0.5 / self.beta).square()

    def rewards(self, answers: Answers) -> Tensor:
        """Return beta d / n, as the loss compares answers."""
        return self.beta * answers.ratio / answers.length
