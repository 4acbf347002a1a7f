"""Rounds: the model answers prompts, rewards score the answers, and steps learn from them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from flatout.config.rewards import RewardList
from flatout.config.section import Section, refuse_unused
from flatout.errors import Fix, SettingError


class RolloutConfig(Section):
    """Rounds of a policy: sample answers to prompts, score them, and train on them for some steps."""

    rounds: int | None = Field(default=None, ge=1, le=1_000_000)
    """How many rounds; null: none, as the data set has answers already."""
    prompts: int = Field(default=32, ge=1)
    """Prompts of a round, over all ranks."""
    group: int = Field(default=8, ge=1, le=4096)
    """Answers to each prompt, which are compared with one another."""
    steps: int = Field(default=1, ge=1)
    """Optimizer steps of a round, each on an equal share of its prompts."""
    max_new_tokens: int = Field(default=512, ge=1, le=1 << 20)
    """Most tokens of an answer."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Leave out longer prompts; null: only those that leave the model no positions for an answer."""
    temperature: float = Field(default=1.0, ge=1e-3, le=100)
    """Logits are divided by it, in sampling and in the loss."""
    too_long: Literal["keep", "mask"] = "keep"
    """Answers that reach max_new_tokens. keep: train on them as they are scored; mask: score them, and learn nothing
    from them (DAPO's overlong filtering, arXiv:2503.14476)."""
    rewards: RewardList = []
    """What scores answers: the sum of these, each by its weight."""
    max_mismatch: float = Field(default=0.1, gt=0)
    """Stop where the first step of a round has a greater mismatch/k3: its answers are not those of its weights."""
    keep: int | None = Field(default=None, ge=1)
    """Rounds whose answers stay in the run folder, the newest; null: all, so that any step can be replayed."""

    @model_validator(mode="after")
    def _has_rounds_and_rewards(self) -> Self:
        if self.rounds is None:
            refuse_unused(self, tuple(type(self).model_fields), "needs rounds", Fix({"rollout.rounds": 100}))
            return self
        if not self.rewards:
            raise SettingError(
                "rewards is empty, and nothing scores the answers", Fix({"rollout.rewards": ["rewards.py:correct"]})
            )
        if self.steps > self.prompts:
            text = f"steps is {self.steps}, but a round has {self.prompts} prompts, and a step takes one at least"
            raise SettingError(text, Fix({"rollout.steps": 1}))
        return self
