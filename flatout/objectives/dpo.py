"""Direct preference optimization (DPO), also with labels that may be wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from flatout.config.objective import REFERENCE
from flatout.objectives.preference import Answers, Preference, minus_log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor


class DPO(Preference):
    """-log sigmoid(h), h = beta (d_c - d_r) (arXiv:2305.18290); d is an answer's log-ratio to the reference.

    With `label_smoothing` e: -(1 - e) log sigmoid(h) - e log sigmoid(-h), conservative DPO. With `robust`, that of
    arXiv:2403.00409: (-(1 - e) log sigmoid(h) + e log sigmoid(-h)) / (1 - 2 e), unbiased if a share e of the labels is
    wrong.
    """

    name = "dpo"
    columns = (REFERENCE,)

    beta: float = Field(default=0.1, gt=0)
    """How closely the model stays to the reference: more is closer."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """The share of pairs whose answers are taken to be the wrong way round."""
    robust: bool = False
    """Undo the bias of wrong labels, instead of trusting all of them less."""

    @model_validator(mode="after")
    def _robust_knows_a_share(self) -> Self:
        if self.robust and not self.label_smoothing:
            raise ValueError("robust has no effect without label_smoothing, the share of wrong labels")
        return self

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        """See Preference."""
        margins, e = self.beta * (chosen.ratio - rejected.ratio), self.label_smoothing
        if not e:
            return minus_log_sigmoid(margins)
        right, wrong = (1 - e) * minus_log_sigmoid(margins), e * minus_log_sigmoid(-margins)
        return (right - wrong) / (1 - 2 * e) if self.robust else right + wrong

    def rewards(self, answers: Answers) -> Tensor:
        """Return beta d."""
        return self.beta * answers.ratio
