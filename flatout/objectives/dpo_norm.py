"""Length-normalized direct preference optimization, as Tulu 3 was trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from flatout.config.objective import REFERENCE
from flatout.objectives.preference import Answers, Preference, minus_log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor


class DPONorm(Preference):
    """-log sigmoid(beta (d_c / n_c - d_r / n_r)) (arXiv:2411.15124, eq. 6); d is a log-ratio to the reference.

    n is the number of an answer's tokens.
    """

    name = "dpo_norm"
    columns = (REFERENCE,)

    beta: float = Field(default=5.0, gt=0)
    """How closely the model stays to the reference; per token, so it is larger than DPO's."""

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        """See Preference."""
        return minus_log_sigmoid(self.rewards(chosen) - self.rewards(rejected))

    def rewards(self, answers: Answers) -> Tensor:
        """Return beta d / n."""
        return self.beta * answers.ratio / answers.length
