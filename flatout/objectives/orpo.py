"""Odds ratio preference optimization (ORPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from flatout.objectives.preference import Answers, Preference, minus_log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor

# a log-probability per token is at most this, as the odds of certainty are infinite
_MOST_MEAN = -1e-7


class ORPO(Preference):
    """-w a_c - beta log sigmoid(log odds(a_c) - log odds(a_r)), log odds(a) = a - log(1 - exp a)   (arXiv:2403.07691).

    a_c and a_r are the answers' log-probabilities per token, w is `sft_weight`.
    """

    name = "orpo"

    beta: float = Field(default=0.1, gt=0)
    """The paper's lambda."""
    sft_weight: float = Field(default=1.0, ge=0)
    """Weight of the chosen answer's cross-entropy per token, which is a part of ORPO."""

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        """See Preference."""
        return self.beta * minus_log_sigmoid(_log_odds(chosen.mean) - _log_odds(rejected.mean))

    def rewards(self, answers: Answers) -> Tensor:
        """Return beta a."""
        return self.beta * answers.mean


def _log_odds(mean: Tensor) -> Tensor:
    mean = mean.clamp(max=_MOST_MEAN)
    # log(1 - exp a) by expm1, as 1 - exp(a) would be 0 near certainty
    return mean - (-mean.expm1()).log()
