"""The objective as a setting: a kind that flatout has, or a class in a person's own file."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from pydantic import ConfigDict, model_validator

from flatout.config.section import PathText, Section, require_own_code
from flatout.errors import Fix, SettingError, UsageError

REFERENCE = "reference_logprob"
"""The column, per sample, of the log-probability of its label tokens by the reference. No data set holds it by this
name: a run computes it before its first step for an objective that names it."""
UNDESIRABLE = "undesirable"
"""The column, per sample, that is 1 where `label` is 0 and 0 where it is 1. No data set holds it: it is made of `label`
for an objective that names it."""
# columns of a store of rollouts. Per token, of label tokens; log-probabilities are of softmax(logits / temperature):
ADVANTAGE = "advantage"
SAMPLER_LOGPROB = "sampler_logprob"
"""Of each token in the distribution that it was drawn from."""
POLICY_LOGPROB = "policy_logprob"
"""By the trained model at the start of the round, to which ratios are taken; that of the sampler in sets without it."""
REFERENCE_TOKENS = "reference_token_logprob"
"""By the reference model, for an objective with `kl`."""
ANSWERS = "answers"
"""Per sample: for how many answers of its round it counts, as groups that were dropped count too; 1 in sets without."""
REWARD = "reward"
"""The column, per sample, of the total reward of an answer."""
# a reference that follows the model, by the names that other trainers have for it
MOVING = {"update_every", "sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha"}
NO_MOVING = (
    "a reference that follows the model is not supported, as its log-probabilities are computed once before step 0; "
    "remove it, or start another run from the adapter of this one"
)

# methods of other trainers, some of whose names are near to one of ours; the first train on answers of the model itself
_ROLLOUTS = frozenset({"ppo", "async_grpo", "reinforce_plus_plus", "remax", "online_dpo", "nash_md", "xpo"})
_OF_OTHERS = _ROLLOUTS | {"gkd", "bco", "prm", "alignprop"}
# kind -> module and class below flatout.objectives, whose fields are the kind's settings
OBJECTIVES: Mapping[str, str] = MappingProxyType(
    {
        "cross_entropy": "cross_entropy.CrossEntropy",
        "weighted_tokens": "cross_entropy.WeightedTokens",
        "dpo": "preference.DPO",
        "ipo": "preference.IPO",
        "dpo_norm": "preference.DPONorm",
        "orpo": "preference.ORPO",
        "simpo": "preference.SimPO",
        "cpo": "preference.CPO",
        "reward": "reward.Reward",
        "kto": "kto.KTO",
        "classify": "reward.Classify",
        "grpo": "policy.GRPO",
        "dr_grpo": "policy.DrGRPO",
        "dapo": "policy.DAPO",
        "gspo": "policy.GSPO",
        "cispo": "policy.CISPO",
        "rloo": "policy.RLOO",
        "reinforce": "policy.Reinforce",
    }
)


def kind_of(value: Any) -> str:
    """Return the kind that a value of the section names; empty for none."""
    if isinstance(value, str):
        return value
    kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
    return kind if isinstance(kind, str) else ""


def class_of_kind(kind: str) -> Any:
    """Return the class of a kind of OBJECTIVES."""
    module, name = OBJECTIVES[kind].split(".")
    return getattr(import_module(f"flatout.objectives.{module}"), name)


def with_trained_score(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a run's settings in which LoRA also trains the new `score` of an objective that reads scores, in full."""
    kind = kind_of(values.get("objective"))
    if values.get("method", "lora") != "lora" or kind not in OBJECTIVES or class_of_kind(kind).reads != "scores":
        return values
    lora = values.get("lora", {})
    given = lora.model_dump(exclude_unset=True) if isinstance(lora, Section) else lora
    saved = given.get("modules_to_save", []) if isinstance(given, Mapping) else None
    if not isinstance(saved, list) or "score" in saved:
        return values
    return {**values, "lora": {**given, "modules_to_save": [*saved, "score"]}}


class ReferenceConfig(Section):
    """What answers are compared with. It does not move during a run."""

    adapter: Path | None = None
    """Folder of the reference adapter (PEFT format), with the same rank and targets as the trained one; null: the model
    at step 0, which is the base model or the adapter of `lora.continue_from`."""

    @model_validator(mode="before")
    @classmethod
    def _does_not_move(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and (moving := sorted(MOVING & set(value))):
            raise ValueError(f"{moving[0]}: {NO_MOVING}")
        return value


class ObjectiveConfig(Section):
    """The loss and its parameters; `objective: NAME` is short for `objective: {kind: NAME}`."""

    model_config = ConfigDict(extra="allow")

    kind: str = "cross_entropy"
    """cross_entropy, which has `label_smoothing` and `z_loss` (docs/objectives.md); weighted_tokens (each token's loss
    times its value in the data set's column `weight`); on pairs of answers: dpo, ipo, dpo_norm, orpo, simpo, cpo; on
    labeled answers: kto; these have parameters such as `beta` (docs/preference.md); reward: a model that scores
    answers; classify: a text classifier; on answers of the model itself: grpo, dr_grpo, dapo, gspo, cispo, rloo,
    reinforce (docs/policy-losses.md)."""
    path: PathText | None = None
    """A class in a file of your own instead, which runs as code: my_loss.py:MyLoss."""
    reference: ReferenceConfig = ReferenceConfig()

    @classmethod
    def long_form(cls, value: Any) -> Any:
        """Return the section that a kind or FILE.py:CLASS stands for. Raises UsageError for an object in memory."""
        if isinstance(value, str):
            return {"path" if ".py:" in value else "kind": value}
        if value is None or isinstance(value, Mapping | ObjectiveConfig):
            return value
        name = getattr(value, "__name__", type(value).__name__)
        raise UsageError(
            f"objective: expected a setting, got the object {name}, which other ranks and a resumed run would lack; "
            "put the class in a file of its own",
            [Fix({"objective.path": f"FILE.py:{name}"}, "with its fields beside path")],
        )

    @model_validator(mode="after")
    def _fields_are_those_of_the_kind(self) -> Self:
        if self.path is not None:
            if "kind" in self.model_fields_set and self.kind != type(self).model_fields["kind"].default:
                raise ValueError("kind and path are both given; keep one")
            require_own_code("path", self.path, "my_loss.py:MyLoss")
            return self
        if self.kind not in OBJECTIVES:
            names = ", ".join(OBJECTIVES).replace(",", " (ordinary fine-tuning),", 1)
            if (other := self.kind.lower().replace("-", "_")) in _OF_OTHERS:
                near, why, hint = ["dpo"], "for rows with chosen and rejected answers", "is not offered"
                near, why = (["grpo"], "for answers of the model itself") if other in _ROLLOUTS else (near, why)
            else:
                near, why = difflib.get_close_matches(self.kind.lower(), OBJECTIVES, n=1), ""
                hint = "is unknown"
            fixes = [Fix({"objective": kind}, why) for kind in near]
            raise SettingError(f"kind {self.kind!r} {hint}; known: {names}, or objective.path, your own loss", *fixes)
        class_of_kind(self.kind).of(self.fields)
        return self

    @property
    def fields(self) -> dict[str, Any]:
        return dict(self.model_extra or {})
