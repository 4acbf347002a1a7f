"""Kahneman-Tversky optimization (KTO): answers with labels instead of pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from flatout.config.objective import REFERENCE, UNDESIRABLE
from flatout.objectives.protocol import Metric, Objective

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.objectives.loss_inputs import LabelTokens

# desirable_weight * desirable answers / (undesirable_weight * undesirable answers), by the paper
LEAST_RATIO, MOST_RATIO = 1.0, 4 / 3


class KTO(Objective):
    """w_d sigmoid(beta (z - d)) of a desirable answer, w_u sigmoid(beta (d - z)) of another (arXiv:2402.01306, eq. 8).

    d is an answer's log-ratio to the reference. z is the mean of d over all prompts of the global step, each with the
    answer to another prompt, or 0 if that is negative. It has no gradient.
    """

    name = "kto"
    row_format = "kto"
    scope = "unit"
    unit_size = 1
    columns = (REFERENCE, "label", UNDESIRABLE)
    normalizer = "units"
    usual_lr: ClassVar[Mapping[str, float]] = {"lora": 1e-5, "full": 1e-6}
    estimates = ("kl",)
    metrics: ClassVar[Mapping[str, Metric]] = {
        "rewards/chosen": Metric(per="label"),
        "rewards/rejected": Metric(per=UNDESIRABLE),
        "rewards/margins": Metric(difference=("rewards/chosen", "rewards/rejected")),
        "logps/chosen": Metric(per="label"),
        "logps/rejected": Metric(per=UNDESIRABLE),
        "kl": Metric("lower"),
    }

    beta: float = Field(default=0.1, gt=0)
    """How closely the model stays to the reference: more is closer."""
    desirable_weight: float = Field(default=1.0, gt=0)
    """Weight of answers whose label is true."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """Weight of answers whose label is false."""

    def estimate(self, tokens: LabelTokens) -> Mapping[str, Tensor]:
        """Return the sum of d over KL pairs: prompts with the answers to other ones."""
        return {"kl": (tokens.by_sample(tokens.logprobs) - tokens.column(REFERENCE)).sum()}

    def __call__(self, tokens: LabelTokens) -> Mapping[str, Tensor]:
        logprobs = tokens.by_sample(tokens.logprobs)
        ratios, desirable = logprobs - tokens.column(REFERENCE), tokens.column("label").bool()
        kl = tokens.estimates["kl"].to(ratios.dtype).clamp(min=0)
        weights = ratios.new_full((), self.undesirable_weight).where(~desirable, self.desirable_weight)
        losses = weights * (self.beta * (kl - ratios).where(desirable, ratios - kl)).sigmoid()
        tokens.example_losses = tokens.by_unit(losses)[:, 0]
        rewards = self.beta * ratios.detach()
        return {
            "loss": losses.sum(),
            "rewards/chosen": rewards.where(desirable, 0).sum(),
            "rewards/rejected": rewards.where(~desirable, 0).sum(),
            "logps/chosen": logprobs.where(desirable, 0).sum(),
            "logps/rejected": logprobs.where(~desirable, 0).sum(),
            "kl": kl * len(ratios),
        }

    def notes(self, totals: Mapping[str, float]) -> Iterator[str]:
        """Tell of a data set with one label only, and of weights outside the paper's range."""
        num_desirable, num_undesirable = int(totals["label"]), int(totals[UNDESIRABLE])
        if not (num_desirable and num_undesirable):
            only_kind = "desirable, so nothing says what to avoid" if num_desirable else "undesirable"
            yield f"all {num_desirable + num_undesirable:,} answers are {only_kind}; KTO is meant for both labels"
            return
        ratio = self.desirable_weight * num_desirable / (self.undesirable_weight * num_undesirable)
        if not LEAST_RATIO * 0.99 <= ratio <= MOST_RATIO * 1.01:
            balance = self.undesirable_weight * num_undesirable / num_desirable
            yield (
                f"desirable_weight x {num_desirable:,} desirable answers is {ratio:.2f} times undesirable_weight x "
                f"{num_undesirable:,} undesirable ones; the paper takes 1 to 1.33, such as desirable_weight "
                f"{balance:.3g} to {balance * MOST_RATIO:.3g}"
            )
