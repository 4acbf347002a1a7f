"""Classification of texts: the cross-entropy of each text's label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from flatout.objectives.protocol import Metric, Objective

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
