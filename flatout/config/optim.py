"""Settings of the optimizer and the learning rate schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, WithJsonSchema, model_validator

from flatout.config.objective import OBJECTIVES, class_of_kind
from flatout.config.section import PathText, Section, Share, refuse_unused, require_own_code
from flatout.errors import Fix

LR_OF_METHOD: Mapping[str, float] = {"lora": 2e-4, "full": 1e-5}
_LR_SCHEMA = {"anyOf": [{"enum": ["auto"]}, {"type": "number", "exclusiveMinimum": 0, "maximum": 1e30}]}
# a file that `flatout init` wrote leaves it to the method, which a person may change in it
_AUTO = Field(gt=0, le=1e30, json_schema_extra={"default": "auto"})


@dataclass(frozen=True, slots=True)
class OptimizerTraits:
    """What settings, plans and checkpoints know of an optimizer without making one."""

    moments: tuple[str, ...]
    """Keys of its state for tensors with one value per trained weight, in fp32 at least."""
    make: str = ""
    """Module and function below flatout.optim that makes it; empty for a class in a person's own file."""
    of_matrices: tuple[str, ...] = ()
    """The same for hidden matrices, if it updates them in another way."""
    of_rows_and_columns: tuple[str, ...] = ()
    """Keys of two tensors with one value per row and per column of a weight of two or more dimensions, in place of
    `moments`."""
    reads_whole: bool = False
    """Whether its update of a value reads the whole weight, so that no rank may hold only a shard of it."""
    counts_steps: bool = True
    """Whether its state has the number of updates as `step`."""
    unused: tuple[str, ...] = ()
    """Settings of this section that it does not read."""
    stores_8_bits: bool = False
    """Whether it stores moments in 8 bits where a weight's rows are whole blocks."""
    trains_bf16: bool = False
    """Whether it rounds updates of bf16 weights so that small ones are not lost."""
    is_flat: bool = False
    """Whether it updates adapters as one flat tensor, which keeps the addresses of gradients."""
    usual_lr: bool = True
    """Whether the usual learning rates, which are AdamW's, are usual for it."""
    lr_divisor: float = 1.0
    """What AdamW's learning rates are divided by to be usual for it."""
    beta2: float | None = None
    """The value of beta2 if it is not set; None: the field's default."""
    deepspeed: tuple[str, ...] = ()
    """Its names in a DeepSpeed JSON; empty: DeepSpeed does not run it."""

    @property
    def state_keys(self) -> set[str]:
        """All keys of its state for one weight."""
        return {*self.moments, *(("step",) if self.counts_steps else ())}

    @property
    def outgrows_8_bits(self) -> bool:
        """Whether its state is larger than moments in 8 bits."""
        return not (self.stores_8_bits or self.of_rows_and_columns)

    def state_shapes(self, shape: Sequence[int], *, is_matrix: bool = False) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its state for a weight of this shape, without `step`; `is_matrix`: a hidden matrix."""
        if self.of_rows_and_columns and len(shape) > 1:
            *outer, num_rows, num_columns = shape
            return dict(zip(self.of_rows_and_columns, ((*outer, num_rows), (*outer, num_columns)), strict=True))
        return dict.fromkeys((is_matrix and self.of_matrices) or self.moments, tuple(shape))


# a row is all that flatout knows of an optimizer; docs/extending.md says how to add one
OPTIMIZERS: Mapping[str, OptimizerTraits] = MappingProxyType(
    {
        "adamw": OptimizerTraits(
            ("exp_avg", "exp_avg_sq"), "torch_optimizers.adamw", trains_bf16=True, is_flat=True,
            deepspeed=("adam", "adamw"),
        ),
        "adamw8bit": OptimizerTraits(
            ("exp_avg", "exp_avg_sq"), "adamw_8bit.make", stores_8_bits=True, trains_bf16=True
        ),
        "sgd": OptimizerTraits(
            ("momentum_buffer",), "torch_optimizers.sgd", counts_steps=False, unused=("beta2", "eps"), is_flat=True,
            usual_lr=False, deepspeed=("sgd",),
        ),
        "muon": OptimizerTraits(
            ("exp_avg", "exp_avg_sq"), "muon.make", of_matrices=("momentum_buffer",), reads_whole=True
        ),
        "adafactor": OptimizerTraits(
            ("exp_avg_sq",), "adafactor.make", of_rows_and_columns=("exp_avg_sq_row", "exp_avg_sq_col"),
            reads_whole=True, unused=("beta1", "beta2", "eps"),
        ),
        "lion": OptimizerTraits(
            ("exp_avg",), "lion.make", counts_steps=False, unused=("eps",), is_flat=True, lr_divisor=4.0, beta2=0.99
        ),
    }
)  # fmt: skip
if TYPE_CHECKING:
    OptimizerName: TypeAlias = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]


class OptimConfig(Section):
    """The optimizer."""

    name: OptimizerName = "adamw"
    """adamw is fused on CUDA; adamw8bit stores its moments in 8 bits; muon orthogonalizes updates of hidden matrices;
    adafactor stores second moments by row and column; lion takes signs (docs/optimizers.md compares all)."""
    path: PathText | None = None
    """A class in a file of your own instead, which runs as code: lion.py:Lion (docs/extending.md)."""
    lr: Annotated[float, _AUTO, WithJsonSchema(_LR_SCHEMA)] = LR_OF_METHOD["lora"]
    """Peak learning rate; auto or unset: 2e-4 for method: lora, 1e-5 for method: full, and other rates for preference
    and policy losses, reward models and classifiers (docs/preference.md); a quarter of these for lion."""
    lr_ratio: float = Field(default=1.0, gt=0, le=1e6)
    """method: lora: B learns at this many times `lr` (LoRA+, Hayou et al. 2024, arXiv:2402.12354); so do trained
    weights with one dimension, such as DoRA's magnitudes, as in the paper's code and in PEFT."""
    beta1: Share = 0.9
    """Decay rate of the first moment (AdamW, also in muon, whose own momentum is 0.95); momentum (SGD); weight of the
    momentum in an update (lion)."""
    beta2: Share = 0.999
    """Decay rate of the second moment (AdamW); of the momentum (lion, 0.99 if unset)."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator (AdamW)."""
    weight_decay: float = Field(default=0.0, ge=0, le=1e6)
    """Decoupled weight decay (sgd adds it to the gradient); never applied to norms and biases."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Clip gradients to this global L2 norm; null: no clipping."""

    @model_validator(mode="before")
    @classmethod
    def _usual_beta2(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or (traits := OPTIMIZERS.get(str(values.get("name")))) is None:
            return values
        return values if traits.beta2 is None else {"beta2": traits.beta2, **values}

    @model_validator(mode="after")
    def _reads_what_is_set(self) -> Self:
        if self.path is None:
            refuse_unused(self, OPTIMIZERS[self.name].unused, f"optim.name: {self.name}, which does not read it")
        elif self.name != type(self).model_fields["name"].default:
            raise ValueError("name and path are both given; keep one")
        else:
            require_own_code("path", self.path, "lion.py:Lion")
        return self

    @property
    def traits(self) -> OptimizerTraits:
        """What is known of the optimizer; runs a person's own file. Raises UsageError for one that cannot be used."""
        if self.path is None:
            return OPTIMIZERS[self.name]
        traits: OptimizerTraits = import_module("flatout.optim.own").load_class(self).traits
        # what only flatout's own optimizers do, also where a class has the traits of one of them
        uniform = replace(traits, of_matrices=(), of_rows_and_columns=(), stores_8_bits=False)
        return replace(uniform, make="", is_flat=False, deepspeed=())


def lr_of(method: object, objective: str, optimizer: object) -> float | None:
    """Return the learning rate that stands for `auto`; None for an unknown method."""
    usual: Mapping[str, float] = class_of_kind(objective).usual_lr if objective in OBJECTIVES else LR_OF_METHOD
    lr, traits = usual.get(str(method)), OPTIMIZERS.get(str(optimizer))
    return lr / traits.lr_divisor if lr and traits else lr


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
