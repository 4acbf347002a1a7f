"""Cross-entropy of the next token, the loss of every run by default, and the same with a weight for each token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from flatout.objectives.protocol import Metric, Objective

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.objectives.loss_inputs import LabelTokens


class CrossEntropy(Objective):
    """The negative log-probability of each label token, divided by their number."""

    name = "cross_entropy"
    metrics: ClassVar[Mapping[str, Metric]] = {"token_accuracy": Metric(per="labels")}

    def __call__(self, tokens: LabelTokens) -> Mapping[str, Tensor]:
        """Return the sums; 0, still attached to the graph, for a batch without labels."""
        loss_sum, num_correct = tokens.cross_entropy()
        return {"loss": loss_sum, "token_accuracy": num_correct}


if TYPE_CHECKING:
    from torch import Tensor

    from flatout.objectives.loss_inputs import LabelTokens


class WeightedTokens(Objective):
    """The negative log-probability of each label token times its `weight`, divided by the sum of these weights."""

    name = "weighted_tokens"
    columns = ("weight",)
    normalizer = "weight"
    metrics: ClassVar[Mapping[str, Metric]] = {"token_accuracy": Metric(per="labels")}

    def __call__(self, tokens: LabelTokens) -> Mapping[str, Tensor]:
        weights = tokens.column("weight").to(tokens.logprobs.dtype)
        return {"loss": -(weights * tokens.logprobs).sum(), "token_accuracy": tokens.is_correct.sum()}
