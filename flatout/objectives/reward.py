"""Losses over scores of texts: reward models (Bradley and Terry) and classification."""

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


if TYPE_CHECKING:
    from torch import Tensor

    from flatout.objectives.loss_inputs import SampleScores


class Classify(Objective):
    """-log softmax(scores)[label] of each sample, divided by the number of samples.

    With `label_smoothing` e, the label has the probability 1 - e + e / K, and each of the other K - 1 labels e / K.
    """

    name = "classify"
    reads = "scores"
    row_format = "classify"
    scope = "sample"
    columns = ("class",)
    normalizer = "samples"
    usual_lr: ClassVar[Mapping[str, float]] = {"lora": 2e-4, "full": 2e-5}
    metrics: ClassVar[Mapping[str, Metric]] = {"accuracy": Metric()}

    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """The share of the probability that is spread over all labels."""

    def __call__(self, samples: SampleScores) -> Mapping[str, Tensor]:
        labels = samples.column("class").long()
        losses, e = samples.cross_entropy(labels), self.label_smoothing
        losses = (1 - e) * losses - e * samples.scores.log_softmax(-1).mean(-1) if e else losses
        samples.example_losses = losses
        return {
            "loss": losses.sum(),
            "accuracy": (samples.scores.argmax(-1) == labels).sum(),
        }
