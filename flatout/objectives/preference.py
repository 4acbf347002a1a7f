"""What losses over pairs of answers to one prompt have in common: the chosen answer first, the rejected one second."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from pydantic import Field

from flatout.config.objective import REFERENCE
from flatout.objectives.protocol import Metric, Objective

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.objectives.labels import LabelTokens


class Answers(NamedTuple):
    """One answer of each of U pairs: s, the sum of its log-probabilities, its n tokens, and s by the reference.

    All are (U,); `reference` is None for losses without one.
    """

    logprob: Tensor
    length: Tensor
    reference: Tensor | None = None

    @property
    def mean(self) -> Tensor:
        """a = s / n, the log-probability per token."""
        return self.logprob / self.length

    @property
    def ratio(self) -> Tensor:
        """d = s - s by the reference."""
        assert self.reference is not None
        return self.logprob - self.reference


class Preference(Objective):
    """A loss over pairs, divided by their number; the chosen answer's own log-likelihood may be part of it.

    A subclass gives the loss of each pair, and the reward by which answers are reported.
    """

    scope = "unit"
    unit_size = 2
    normalizer = "units"
    metrics: ClassVar[Mapping[str, Metric]] = {
        "rewards/chosen": Metric(),
        "rewards/rejected": Metric(),
        "rewards/margins": Metric(),
        "rewards/accuracies": Metric(),
        "logps/chosen": Metric(),
        "logps/rejected": Metric(),
        "nll": Metric("lower"),
    }

    sft_weight: float = Field(default=0.0, ge=0)
    """Weight of the chosen answer's cross-entropy per token, which is added to each pair's loss (TRL: rpo_alpha)."""

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        """Return the loss of each pair (U,), without the part that `sft_weight` adds."""
        raise NotImplementedError

    def rewards(self, answers: Answers) -> Tensor:
        """Return the reward of one answer of each pair (U,)."""
        raise NotImplementedError

    def __call__(self, labels: LabelTokens) -> Mapping[str, Tensor]:
        """Return the sums over pairs."""
        read = [labels.by_sample(labels.logprobs), labels.sample_lengths]
        read += [labels.column(REFERENCE)] if REFERENCE in self.columns else []
        pairs = [labels.by_unit(column) for column in read]
        chosen, rejected = (Answers(*(each[:, place] for each in pairs)) for place in (0, 1))
        losses, nll = self.losses(chosen, rejected), -chosen.mean
        losses = losses + self.sft_weight * nll if self.sft_weight else losses
        labels.each = losses
        first, second = self.rewards(chosen).detach(), self.rewards(rejected).detach()
        return {
            "loss": losses.sum(),
            "rewards/chosen": first.sum(),
            "rewards/rejected": second.sum(),
            "rewards/margins": (first - second).sum(),
            "rewards/accuracies": (first > second).sum(),
            "logps/chosen": chosen.logprob.sum(),
            "logps/rejected": rejected.logprob.sum(),
            "nll": nll.sum(),
        }


def minus_log_sigmoid(values: Tensor) -> Tensor:
    """Return -log sigmoid(values) = log(1 + exp(-values)), exact for large and small values."""
    return (-values).logaddexp(values.new_zeros(()))
