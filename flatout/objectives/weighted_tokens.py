"""Cross-entropy in which each token has a weight of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from flatout.objectives.protocol import Metric, Objective

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
