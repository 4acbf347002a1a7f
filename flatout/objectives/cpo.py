"""Contrastive preference optimization (CPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from flatout.objectives.preference import Answers, Preference, minus_log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor


class CPO(Preference):
    """-log sigmoid(beta (s_c - s_r)) - w a_c (arXiv:2401.08417, eq. 5); s is an answer's log-probability.

    a_c is that of the chosen one per token, w is `sft_weight`.
    """

    name = "cpo"

    beta: float = Field(default=0.1, gt=0)
    """Scales the log-probabilities."""
    sft_weight: float = Field(default=1.0, ge=0)
    """Weight of the chosen answer's cross-entropy per token, which is a part of CPO."""

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        """See Preference."""
        return minus_log_sigmoid(self.beta * (chosen.logprob - rejected.logprob))

    def rewards(self, answers: Answers) -> Tensor:
        """Return beta s."""
        return self.beta * answers.logprob
