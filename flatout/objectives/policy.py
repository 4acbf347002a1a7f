"""Policy losses over answers that the model has sampled, each of whose tokens has an advantage."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, log
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from flatout.config.objective import ADVANTAGE, ANSWERS, POLICY_LOGPROB, REFERENCE_TOKENS, SAMPLER_LOGPROB
from flatout.config.section import refuse_unused
from flatout.errors import Fix, UsageError
from flatout.objectives.protocol import Metric, Objective

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.config.rollout import RolloutConfig
    from flatout.objectives.loss_inputs import LabelTokens

Baseline = Literal["mean_std", "mean", "leave_one_out", "batch_mean", "none"]
Ratio = Literal["clipped", "clipped_weight", "sequence", "none"]
NormalizeBy = Literal["tokens", "answers", "answers_longest"]
ClipLow = Annotated[float | None, Field(gt=0, le=1)]
ClipHigh = Annotated[float | None, Field(gt=0)]
Longest = Annotated[int | None, Field(ge=1)]

_CLIPS = ("clip_low", "clip_high", "clip_dual")
# the settings that a ratio does not read
_UNUSED: Mapping[str, tuple[str, ...]] = {"none": _CLIPS, "clipped_weight": _CLIPS[2:]}


class Policy(Objective):
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) of each sampled token, or what its settings make of it.

    A is the column `advantage`, r = exp(l - l_old), l the log-probability in softmax(logits / temperature), l_old the
    column `policy_logprob`, or `sampler_logprob` in a data set without it.
    """

    columns = (ADVANTAGE, SAMPLER_LOGPROB)
    usual_lr: ClassVar[Mapping[str, float]] = {"lora": 1e-5, "full": 1e-6}

    advantage: Baseline = "mean_std"
    """What a round makes of an answer's reward R: mean_std: (R - mean of its group) / standard deviation; mean: R -
    mean; leave_one_out: R - mean of the group's other answers; batch_mean: R - mean of the round; none: R."""
    ratio: Ratio = "clipped"
    """What weighs A: clipped: r, clipped (PPO); clipped_weight: -clip(r) A l without the gradient of clip(r);
    sequence: exp of an answer's mean of l - l_old, clipped; none: -A l."""
    normalize_by: NormalizeBy = "tokens"
    """What the sum over tokens becomes: tokens: their mean; answers: the mean over answers of the mean over an answer's
    tokens; answers_longest: the mean over answers of an answer's sum / `longest`."""
    longest: Longest = None
    """What an answer's sum is divided by; null: rollout.max_new_tokens, which runs without rounds lack."""
    clip_low: ClipLow = 0.2
    """How far below 1 a ratio counts; null: any."""
    clip_high: ClipHigh = 0.2
    """How far above 1 a ratio counts; null: any."""
    clip_dual: float | None = Field(default=None, gt=1)
    """Where A < 0, a ratio counts at most as this (arXiv:1912.09729, eq. 5); null: any."""
    kl: float = Field(default=0.0, ge=0)
    """Weight of (l - l_reference)^2 / 2, whose gradient is that of KL(model, reference) (arXiv:2510.01555)."""
    entropy: float = Field(default=0.0, ge=0)
    """Weight of the entropy of the distributions that tokens are drawn from, which the loss then keeps up."""
    temperature: float = Field(default=1.0, gt=0)
    """Of the distribution that the answers were drawn from."""

    @model_validator(mode="after")
    def _reads_what_is_set(self) -> Self:
        refuse_unused(self, _UNUSED.get(self.ratio, ()), f"ratio {self.ratio}")
        if self.normalize_by != "answers_longest":
            refuse_unused(self, ["longest"], f"normalize_by {self.normalize_by}")
        return self

    def for_run(self, rollout: RolloutConfig) -> Self:
        """Return the objective for the answers of a run's rounds, or for those of its data set.

        Raises UsageError for settings that do not fit them.
        """
        # rloo and reinforce have a length of their own: 1
        needs_longest = self.normalize_by == "answers_longest" and self.longest is None
        if rollout.rounds is None:
            if needs_longest:
                text = f"objective {self.name} divides by the tokens that an answer may have; set objective.longest"
                raise UsageError(text, [Fix({"objective.normalize_by": "tokens"})])
            return self
        if "temperature" in self.model_fields_set and self.temperature != rollout.temperature:
            text = (
                f"objective.temperature is {self.temperature}, but the answers are sampled with {rollout.temperature}"
            )
            raise UsageError(text, [Fix({"rollout.temperature": self.temperature})])
        is_of_round, group = self.advantage == "batch_mean", rollout.group
        if group * (rollout.prompts if is_of_round else 1) == 1 and self.advantage != "none":
            fixes = [Fix({"rollout.group": 8})] + [Fix({"objective.advantage": "batch_mean"})] * (not is_of_round)
            why = f"advantage {self.advantage} compares the answers of a {'round' if is_of_round else 'group'}"
            raise UsageError(f"rollout.group is 1, but {why}, of which one alone says nothing", fixes)
        longest = {"longest": rollout.max_new_tokens} if needs_longest else {}
        return self.model_copy(update={"temperature": rollout.temperature, **longest})

    @property
    def scope(self) -> Literal["token", "sample"]:  # type: ignore[override]  # by its settings
        return "sample" if self.ratio == "sequence" or self.normalize_by == "answers" else "token"

    @property
    def normalizer(self) -> str:  # type: ignore[override]  # by its settings
        return "labels" if self.normalize_by == "tokens" else ANSWERS

    @property
    def needed_columns(self) -> tuple[str, ...]:
        answers, reference = ANSWERS if self.normalizer == ANSWERS else "", REFERENCE_TOKENS if self.kl else ""
        return tuple(filter(None, (*self.columns, POLICY_LOGPROB, answers, reference)))

    @property
    def metrics(self) -> Mapping[str, Metric]:  # type: ignore[override]  # by its settings
        is_clipped, has_reference = self.ratio != "none", self.kl > 0
        means = ["kl/old", "mismatch/k1", "mismatch/k3", "mismatch/over_2x"] + ["kl/reference"] * has_reference
        means += ["clip_share/low", "clip_share/high"] * is_clipped
        largest = ["mismatch/max"] + ["ratio/max"] * is_clipped
        return {
            "entropy": Metric(per="labels"),
            **dict.fromkeys(means, Metric("lower", per="labels")),
            **dict.fromkeys(largest, Metric("lower", reduce="max")),
        }

    def __call__(self, tokens: LabelTokens) -> Mapping[str, Tensor]:
        # before log-probabilities, so that one pass of the head gives both
        entropies = tokens.entropy_at(self.temperature, with_graph=self.entropy > 0)
        logprobs, advantages = tokens.logprobs_at(self.temperature), tokens.column(ADVANTAGE)
        ratios = self._ratios(tokens, logprobs - tokens.column(POLICY_LOGPROB))
        losses = self._surrogates(logprobs, ratios, advantages)
        if self.kl:
            losses = losses + self.kl / 2 * (logprobs - tokens.column(REFERENCE_TOKENS)).square()
        if self.entropy:
            losses = losses - self.entropy * entropies
        if self.normalize_by == "answers":
            losses = losses / tokens.sample_lengths[tokens.batch.label_samples]
        figures = self._figures(tokens, logprobs.detach(), ratios.detach(), advantages)
        return {"loss": losses.sum() / (self.longest or 1), "entropy": entropies.sum(), **figures}

    def _ratios(self, tokens: LabelTokens, log_ratios: Tensor) -> Tensor:
        """Return r (L,), of `sequence` those of whole answers with the gradient of each token (GSPO-token)."""
        if self.ratio != "sequence":
            return log_ratios.exp()
        means = tokens.by_sample(log_ratios.detach()) / tokens.sample_lengths
        return (means[tokens.batch.label_samples] + (log_ratios - log_ratios.detach())).exp()

    def _surrogates(self, logprobs: Tensor, ratios: Tensor, advantages: Tensor) -> Tensor:
        """Return the loss of each token (L,) without its other terms."""
        if self.ratio == "none":
            return -advantages * logprobs
        clipped = ratios.clamp(*self._bounds)
        if self.ratio == "clipped_weight":
            return -clipped.detach() * advantages * logprobs
        losses = -(ratios * advantages).minimum(clipped * advantages)
        if self.clip_dual is None:
            return losses
        return losses.minimum(-self.clip_dual * advantages).where(advantages < 0, losses)

    def _figures(
        self, tokens: LabelTokens, logprobs: Tensor, ratios: Tensor, advantages: Tensor
    ) -> Mapping[str, Tensor]:
        """Return `metrics` but for the entropy, of tensors without gradient. KLs are Schulman's k1 and k3."""
        sampler = logprobs - tokens.column(SAMPLER_LOGPROB)
        figures = {
            "kl/old": _k3(logprobs - tokens.column(POLICY_LOGPROB)),
            "mismatch/k1": -sampler.sum(),
            "mismatch/k3": _k3(sampler),
            "mismatch/over_2x": (sampler.abs() > log(2)).sum(),
            "mismatch/max": sampler.abs().max().exp(),
        }
        if self.kl:
            figures["kl/reference"] = _k3(tokens.column(REFERENCE_TOKENS) - logprobs)
        if self.ratio != "none":
            low, high = self._bounds
            # a clipped weight counts whatever the advantage; a clipped ratio only where it would go on beyond the clip
            weighs = self.ratio == "clipped_weight"
            figures["ratio/max"] = ratios.max()
            figures["clip_share/low"] = ((ratios < low) & (weighs | (advantages < 0))).sum()
            figures["clip_share/high"] = ((ratios > high) & (weighs | (advantages > 0))).sum()
        return figures

    @property
    def _bounds(self) -> tuple[float, float]:
        low, high = (inf if clip is None else clip for clip in (self.clip_low, self.clip_high))
        return 1 - low, 1 + high


def _k3(log_ratios: Tensor) -> Tensor:
    """Return the sum of exp(x) - 1 - x: for x = log(p / q) at draws from q, an estimate of KL(q, p) of each draw."""
    return (log_ratios.expm1() - log_ratios).sum()


class GRPO(Policy):
    """Group relative policy optimization (arXiv:2402.03300, eq. 3), without its KL term unless `kl` is set."""

    name = "grpo"
    normalize_by: NormalizeBy = "answers"


class DrGRPO(Policy):
    """GRPO without the bias of lengths and of easy or hard prompts (arXiv:2503.20783, section 3.2)."""

    name = "dr_grpo"
    advantage: Baseline = "mean"
    normalize_by: NormalizeBy = "answers_longest"


class DAPO(Policy):
    """GRPO per token, with room for unlikely tokens to rise, of groups with a signal (arXiv:2503.14476, eq. 8)."""

    name = "dapo"
    clip_high: ClipHigh = 0.28


class GSPO(Policy):
    """Group sequence policy optimization, by its token form (arXiv:2507.18071, eq. 13 and 14)."""

    name = "gspo"
    ratio: Ratio = "sequence"
    normalize_by: NormalizeBy = "answers"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4


class CISPO(Policy):
    """Clipped importance weights, so that each token keeps a gradient (arXiv:2506.13585, eq. 4).

    A weight is at most 5, as arXiv:2510.13786 takes; the paper names no value.
    """

    name = "cispo"
    ratio: Ratio = "clipped_weight"
    clip_low: ClipLow = None
    clip_high: ClipHigh = 4.0


class RLOO(Policy):
    """REINFORCE of whole answers, with the other answers' mean as the baseline (arXiv:2402.14740, eq. 8)."""

    name = "rloo"
    advantage: Baseline = "leave_one_out"
    ratio: Ratio = "none"
    normalize_by: NormalizeBy = "answers_longest"
    longest: Longest = 1


class Reinforce(Policy):
    """REINFORCE of whole answers, with the round's mean as the baseline (doi:10.1007/BF00992696)."""

    name = "reinforce"
    advantage: Baseline = "batch_mean"
    ratio: Ratio = "none"
    normalize_by: NormalizeBy = "answers_longest"
    longest: Longest = 1
