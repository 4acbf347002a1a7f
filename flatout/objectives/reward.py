"""Reward models: a score for each answer, by which the chosen one is the better of a pair (Bradley and Terry)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from flatout.objectives.preference import minus_log_sigmoid
from flatout.objectives.protocol import Metric, Objective

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.objectives.loss_inputs import SampleScores


class Reward(Objective):
    """-log sigmoid(r_c - r_r - m) + k (r_c + r_r)^2, divided by the number of pairs; r is the score of an answer.

    m is 0, or the pair's `margin` (arXiv:2307.09288, eq. 2). The second term keeps scores around 0 (arXiv:2312.09244).
    """

    name = "reward"
    reads = "scores"
    scope = "unit"
    unit_size = 2
    normalizer = "units"
    usual_lr: ClassVar[Mapping[str, float]] = {"lora": 1e-4, "full": 1e-5}
    metrics: ClassVar[Mapping[str, Metric]] = {
        "accuracy": Metric(),
        "margin": Metric(),
        "mean_reward": Metric(per="samples"),
    }

    margin: bool = False
    """Whether the chosen answer's score should be ahead by the data set's column `margin`, instead of by anything."""
    centering: float = Field(default=0.0, ge=0)
    """k, which keeps scores around 0 (TRL: center_rewards_coefficient); 0.01 in the paper."""

    @property
    def needed_columns(self) -> tuple[str, ...]:
        return ("margin",) if self.margin else ()

    def __call__(self, pairs: SampleScores) -> Mapping[str, Tensor]:
        scores = pairs.by_unit(pairs.scores[:, 0])
        chosen, rejected = scores[:, 0], scores[:, 1]
        ahead = chosen - rejected
        losses = minus_log_sigmoid(ahead - pairs.column("margin").to(ahead.dtype) if self.margin else ahead)
        if self.centering:
            losses = losses + self.centering * (chosen + rejected).square()
        pairs.example_losses = losses
        return {
            "loss": losses.sum(),
            "accuracy": (ahead > 0).sum(),
            "margin": ahead.sum(),
            "mean_reward": scores.sum(),
        }
