"""Cross-entropy of the next token, the loss of every run by default, and the same with a weight for each token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from flatout.objectives.protocol import Metric, Objective

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.objectives.loss_inputs import LabelTokens


class CrossEntropy(Objective):
    """The negative log-probability of each label token, divided by their number.

    With `label_smoothing` e and `z_loss` z, a label token with logits u of V tokens has the loss

        -(1 - e) log p(label) - e / V * sum over v of log p(v) + z * logsumexp(u)^2

    as torch's `cross_entropy` smooths labels, and with the z-loss of PaLM (arXiv:2204.02311, section 5). The plain
    cross-entropy is then a metric, and the loss of evaluations.
    """

    name = "cross_entropy"

    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    z_loss: float = Field(default=0.0, ge=0, le=1e6)

    @property
    def metrics(self) -> Mapping[str, Metric]:  # type: ignore[override]  # by its settings
        plain = {"cross_entropy": Metric("lower")} if self._is_regularized else {}
        return {"token_accuracy": Metric(per="labels"), **plain}

    @property
    def _is_regularized(self) -> bool:
        return self.label_smoothing > 0 or self.z_loss > 0

    def __call__(self, tokens: LabelTokens) -> Mapping[str, Tensor]:
        """Return the sums; 0, still attached to the graph, for a batch without labels."""
        if not self._is_regularized:
            loss_sum, num_correct = tokens.cross_entropy()
            return {"loss": loss_sum, "token_accuracy": num_correct}
        loss_sum, plain_sum, num_correct = tokens.regularized_cross_entropy(self.label_smoothing, self.z_loss)
        return {"loss": loss_sum, "token_accuracy": num_correct, "cross_entropy": plain_sum}


class WeightedTokens(Objective):
    """The negative log-probability of each label token times its `weight`, divided by the sum of these weights."""

    name = "weighted_tokens"
    columns = ("weight",)
    normalizer = "weight"
    metrics: ClassVar[Mapping[str, Metric]] = {"token_accuracy": Metric(per="labels")}

    def __call__(self, tokens: LabelTokens) -> Mapping[str, Tensor]:
        weights = tokens.column("weight").to(tokens.logprobs.dtype)
        return {"loss": -(weights * tokens.logprobs).sum(), "token_accuracy": tokens.is_correct.sum()}
