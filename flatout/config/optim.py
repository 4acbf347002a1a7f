"""Settings of the optimizer and the learning rate schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, WithJsonSchema, model_validator

from flatout.config.objective import OBJECTIVES, class_of_kind
from flatout.config.section import Section, Share, refuse_unused
from flatout.errors import Fix

LR_OF_METHOD: Mapping[str, float] = {"lora": 2e-4, "full": 1e-5}
_LR_SCHEMA = {"anyOf": [{"enum": ["auto"]}, {"type": "number", "exclusiveMinimum": 0, "maximum": 1e30}]}
# a file that `flatout init` wrote leaves it to the method, which a person may change in it
_AUTO = Field(gt=0, le=1e30, json_schema_extra={"default": "auto"})


class OptimConfig(Section):
    """The optimizer."""

    name: Literal["adamw", "adamw8bit", "sgd"] = "adamw"
    """adamw is fused on CUDA; adamw8bit stores its moments in 8 bits."""
    lr: Annotated[float, _AUTO, WithJsonSchema(_LR_SCHEMA)] = LR_OF_METHOD["lora"]
    """Peak learning rate; auto or unset: 2e-4 for method: lora, 1e-5 for method: full, and other rates for preference
    losses, reward models and classifiers (docs/preference.md)."""
    beta1: Share = 0.9
    """Decay rate of the first moment (AdamW); momentum (SGD)."""
    beta2: Share = 0.999
    """Decay rate of the second moment (AdamW)."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator (AdamW)."""
    weight_decay: float = Field(default=0.0, ge=0, le=1e6)
    """Decoupled weight decay; never applied to norms and biases."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Clip gradients to this global L2 norm; null: no clipping."""

    @model_validator(mode="after")
    def _sgd_has_no_second_moment(self) -> Self:
        if self.name == "sgd":
            refuse_unused(self, ("beta2", "eps"), "optim.name: sgd, which has no second moment")
        return self


def lr_of(method: object, objective: str) -> float | None:
    """Return the learning rate that stands for `auto`; None for an unknown method."""
    usual: Mapping[str, float] = class_of_kind(objective).usual_lr if objective in OBJECTIVES else LR_OF_METHOD
    return usual.get(str(method))


class ScheduleConfig(Section):
    """The learning rate schedule."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "linear"
    """Shape after the warm-up; wsd holds the peak, then decays linearly over the last `decay_ratio` of the run."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Steps of linear warm-up; set this or `warmup_ratio`."""
    warmup_ratio: Share | None = None
    """Warm-up as a share of all steps; 0.03 when neither is given."""
    min_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """Final learning rate of the decay, as a share of the peak."""
    decay_ratio: float = Field(default=0.1, gt=0.0, le=1.0)
    """wsd: share of the run over which the learning rate decays."""

    @model_validator(mode="after")
    def _one_warmup(self) -> Self:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError("warmup_steps and warmup_ratio are both given; keep one: leave schedule.warmup_ratio out")
        if self.kind != "wsd":
            refuse_unused(self, ("decay_ratio",), f"schedule.kind: {self.kind}", Fix({"schedule.kind": "wsd"}))
        if self.kind == "constant":
            refuse_unused(self, ("min_lr_ratio",), "schedule.kind: constant, which never decays")
        return self
