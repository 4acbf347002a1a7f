"""Losses over pairs of answers to one prompt: the chosen answer first, the rejected one second."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from pydantic import Field, model_validator

from flatout.config.objective import REFERENCE
from flatout.errors import UsageError
from flatout.objectives.protocol import Metric, Objective

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.objectives.loss_inputs import LabelTokens

# a log-probability per token is at most this, as the odds of certainty are infinite
_MOST_MEAN = -1e-7


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
        if self.reference is None:
            raise ValueError(f"`ratio` needs the reference; set columns = ({REFERENCE!r},)")
        return self.logprob - self.reference


class Preference(Objective):
    """A loss over pairs, divided by their number; the chosen answer's own log-likelihood may be part of it.

    A subclass gives the loss of each pair, and the reward by which answers are reported.
    """

    scope = "unit"
    unit_size = 2
    normalizer = "units"
    usual_lr: ClassVar[Mapping[str, float]] = {"lora": 5e-6, "full": 5e-7}
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
        raise NotImplementedError(f"{type(self).__name__} has no losses(chosen, rejected)")

    def rewards(self, answers: Answers) -> Tensor:
        """Return the reward of one answer of each pair (U,)."""
        raise NotImplementedError(f"{type(self).__name__} has no rewards(answers)")

    def __call__(self, tokens: LabelTokens) -> Mapping[str, Tensor]:
        """Return the sums over pairs."""
        read = [tokens.by_sample(tokens.logprobs), tokens.sample_lengths]
        read += [tokens.column(REFERENCE)] if REFERENCE in self.columns else []
        pairs = [tokens.by_unit(column) for column in read]
        chosen, rejected = (Answers(*(by_unit[:, index] for by_unit in pairs)) for index in (0, 1))
        losses, nll = self._of_pairs("losses", chosen, rejected), -chosen.mean
        losses = losses + self.sft_weight * nll if self.sft_weight else losses
        tokens.example_losses = losses
        first, second = (self._of_pairs("rewards", answers).detach() for answers in (chosen, rejected))
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

    def _of_pairs(self, what: str, *answers: Answers) -> Tensor:
        """Return what the method `what` computes. Raises UsageError unless it has a value for each pair."""
        values: Tensor = getattr(self, what)(*answers)
        shape, expected = getattr(values, "shape", None), tuple(answers[0].length.shape)
        if shape != expected:
            got = f"a {type(values).__name__}" if shape is None else f"a tensor of shape {tuple(shape)}"
            raise UsageError(f"objective {self.name}: {what} returned {got}; expected {expected}, one for each pair")
        return values


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
        margins, e = self.beta * (chosen.ratio - rejected.ratio), self.label_smoothing
        if not e:
            return minus_log_sigmoid(margins)
        right, wrong = (1 - e) * minus_log_sigmoid(margins), e * minus_log_sigmoid(-margins)
        return (right - wrong) / (1 - 2 * e) if self.robust else right + wrong

    def rewards(self, answers: Answers) -> Tensor:
        return self.beta * answers.ratio


class IPO(Preference):
    """(d_c / n_c - d_r / n_r - 1 / (2 beta))^2 (arXiv:2310.12036, eq. 17); d is a log-ratio to the reference.

    The log-ratios are those per token, n tokens in an answer, as the paper's authors meant and TRL computes them.
    """

    name = "ipo"
    columns = (REFERENCE,)

    beta: float = Field(default=0.1, gt=0)
    """The paper's tau: the margin per token becomes 1 / (2 beta)."""

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        margins = chosen.ratio / chosen.length - rejected.ratio / rejected.length
        return (margins - 0.5 / self.beta).square()

    def rewards(self, answers: Answers) -> Tensor:
        """Return beta d / n, as the loss compares answers."""
        return self.beta * answers.ratio / answers.length


class DPONorm(Preference):
    """-log sigmoid(beta (d_c / n_c - d_r / n_r)) (arXiv:2411.15124, eq. 6); d is a log-ratio to the reference.

    n is the number of an answer's tokens.
    """

    name = "dpo_norm"
    columns = (REFERENCE,)

    beta: float = Field(default=5.0, gt=0)
    """How closely the model stays to the reference; per token, so it is larger than DPO's."""

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        return minus_log_sigmoid(self.rewards(chosen) - self.rewards(rejected))

    def rewards(self, answers: Answers) -> Tensor:
        return self.beta * answers.ratio / answers.length


class ORPO(Preference):
    """-w a_c - beta log sigmoid(log odds(a_c) - log odds(a_r)), log odds(a) = a - log(1 - exp a)   (arXiv:2403.07691).

    a_c and a_r are the answers' log-probabilities per token, w is `sft_weight`.
    """

    name = "orpo"
    usual_lr: ClassVar[Mapping[str, float]] = {"lora": 5e-5, "full": 5e-6}

    beta: float = Field(default=0.1, gt=0)
    """The paper's lambda."""
    sft_weight: float = Field(default=1.0, ge=0)
    """Weight of the chosen answer's cross-entropy per token, which is a part of ORPO."""

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        return self.beta * minus_log_sigmoid(_log_odds(chosen.mean) - _log_odds(rejected.mean))

    def rewards(self, answers: Answers) -> Tensor:
        return self.beta * answers.mean


class SimPO(Preference):
    """-log sigmoid(beta (a_c - a_r) - gamma) (arXiv:2405.14734, eq. 6); a is a log-probability per token."""

    name = "simpo"
    usual_lr: ClassVar[Mapping[str, float]] = {"lora": 1e-5, "full": 1e-6}

    beta: float = Field(default=2.0, gt=0)
    """The paper takes 2.0 to 2.5, much more than losses over whole answers do."""
    gamma: float = Field(default=1.0, ge=0)
    """The margin that beta (a_c - a_r) should have; the paper takes 0.3 to 1.6."""

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        return minus_log_sigmoid(self.beta * (chosen.mean - rejected.mean) - self.gamma)

    def rewards(self, answers: Answers) -> Tensor:
        return self.beta * answers.mean


class CPO(Preference):
    """-log sigmoid(beta (s_c - s_r)) - w a_c (arXiv:2401.08417, eq. 5); s is an answer's log-probability.

    a_c is that of the chosen one per token, w is `sft_weight`.
    """

    name = "cpo"
    usual_lr: ClassVar[Mapping[str, float]] = {"lora": 1e-5, "full": 1e-6}

    beta: float = Field(default=0.1, gt=0)
    """Scales the log-probabilities."""
    sft_weight: float = Field(default=1.0, ge=0)
    """Weight of the chosen answer's cross-entropy per token, which is a part of CPO."""

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        return minus_log_sigmoid(self.beta * (chosen.logprob - rejected.logprob))

    def rewards(self, answers: Answers) -> Tensor:
        return self.beta * answers.logprob


def minus_log_sigmoid(values: Tensor) -> Tensor:
    """Return -log sigmoid(values) = log(1 + exp(-values)), exact for large and small values."""
    return (-values).logaddexp(values.new_zeros(()))


def _log_odds(mean: Tensor) -> Tensor:
    mean = mean.clamp(max=_MOST_MEAN)
    # log(1 - exp a) by expm1, as 1 - exp(a) would be 0 near certainty
    return mean - (-mean.expm1()).log()
