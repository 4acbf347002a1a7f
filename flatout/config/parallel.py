"""Settings of several ranks: strategies, sharding, communication, and recovery from lost ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from flatout.config.section import Section, first_given, refuse_unused
from flatout.errors import Fix, SettingError

StrategyName = Literal["single", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "deepspeed"]


MAX_GPUS = 1024


def gpu_list(value: Any) -> Any:
    """Return the GPUs that a number (how many) or a text such as 0,1 stands for; any other value unchanged."""
    if isinstance(value, str) and re.fullmatch(r" *\d+ *(, *\d+ *)*,?", value):
        numbers = [int(number) for number in value.split(",") if number.strip()]
        value = numbers if "," in value else numbers[0]
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= MAX_GPUS:
            fixes = Fix({"gpus": [0]}, "the first GPU only"), Fix({"device": "cpu"}, "none")
            raise SettingError(f"expected 1 to {MAX_GPUS:,} GPUs", *fixes)
        return list(range(value))
    if isinstance(value, float) and 1 <= value <= MAX_GPUS:
        raise SettingError("expected a whole number of GPUs", Fix({"gpus": int(value)}))
    if isinstance(value, list) and value and re.fullmatch(r"\d+([;: ]+\d+)+", str(value[0])):
        ids = [int(text) for text in re.split("[;: ]+", value[0])]
        raise SettingError("a GPU id is a number; separate ids by commas", Fix({"gpus": ids}))
    if isinstance(value, str):
        fixes = Fix({"gpus": 2}, "how many"), Fix({"gpus": [0, 1]}, "which")
        raise SettingError("expected a number of GPUs or a list of GPU ids", *fixes)
    if isinstance(value, list | tuple) and len({*map(str, value)}) < len(value):
        raise SettingError("a GPU is listed twice", Fix({"gpus": sorted({*value}, key=str)}))
    return value


_GPUS_SCHEMA = {
    "anyOf": [
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {"type": "integer", "minimum": 1},
    ]
}
GpuList = Annotated[
    list[Annotated[int, Field(ge=0)]], Field(min_length=1), BeforeValidator(gpu_list), WithJsonSchema(_GPUS_SCHEMA)
]
"""GPUs by number, or how many."""


@dataclass(frozen=True, slots=True)
class StrategyTraits:
    """What one strategy does."""

    class_path: str
    """Its module and class below flatout.parallel.strategies."""
    shards_state: bool = True
    """Gradients and optimizer state are sharded, so each pass needs every rank."""
    shards_weights: bool = False
    """Weights are sharded too, and gathered layer by layer."""
    sums_late: bool = False
    """Gradients are summed once per step, after its last micro-batch."""
    has_replicas: bool = False
    """Several groups of ranks each hold the whole state."""
    package: str | None = None
    """The package whose engine holds the state, by a file of its own; None: flatout does."""


STRATEGIES: Mapping[str, StrategyTraits] = MappingProxyType(
    {
        "single": StrategyTraits("protocol.Single", shards_state=False),
        "ddp": StrategyTraits("ddp.DDP", shards_state=False),
        "zero1": StrategyTraits("sharded.Sharded", sums_late=True),
        "zero2": StrategyTraits("sharded.Sharded"),
        "zero3": StrategyTraits("sharded.Sharded", shards_weights=True),
        "fsdp": StrategyTraits("sharded.Sharded", shards_weights=True),
        "hsdp": StrategyTraits("sharded.Sharded", shards_weights=True, has_replicas=True),
        # what it shards depends on its JSON, see flatout.config.deepspeed
        "deepspeed": StrategyTraits("deepspeed.DeepSpeed", package="deepspeed"),
    }
)


class ShardingConfig(Section):
    """State sharded over ranks (strategy: zero1, zero2, zero3, fsdp, hsdp)."""

    reshard_after_forward: Literal["auto"] | bool = "auto"
    """Free a layer's gathered weights after its forward pass and gather them again for the backward pass: less memory,
    more communication. auto: false for zero1 and zero2; true for zero3, fsdp and hsdp, but false for full fine-tuning
    if memory allows."""
    prefetch: int = Field(default=1, ge=0)
    """Layers to gather ahead of the one that computes; each needs the memory of one layer's weights."""
    offload: bool = False
    """Keep weights, gradients and optimizer state in host memory, and run the optimizer there."""
    replicas: int | None = Field(default=None, ge=1)
    """hsdp: number of replicas of the state over all ranks; null: one per node."""


class ContextConfig(Section):
    """Ranks that share the tokens of micro-batches (context parallelism)."""

    parallel: int = Field(default=1, ge=1)
    """Number of consecutive ranks that split the tokens of each micro-batch, so that longer documents fit. Must divide
    the number of ranks."""


class CommConfig(Section):
    """Communication between ranks."""

    compress: Literal["none", "bf16"] = "none"
    """bf16: all-reduce gradients in bf16, which halves the traffic and rounds the sums."""


class FaultsConfig(Section):
    """What to do when a rank dies or stops responding (several ranks only), and when the loss jumps."""

    max_restarts: int = Field(default=3, ge=0)
    """Number of times a run started with `gpus` or --nnodes restarts from the newest valid checkpoint; never after
    errors that a restart cannot fix."""
    hang_s: float = Field(default=60.0, ge=1.0, le=604800.0)
    """Seconds without a heartbeat after which a rank counts as lost."""
    stall_s: float = Field(default=1800.0, ge=1.0, le=604800.0)
    """Seconds without progress in a step after which the rank furthest behind counts as lost."""
    long_phase_s: float = Field(default=7200.0, ge=1.0, le=21600.0)
    """The same limit while a rank loads, samples, evaluates, saves or finishes, since others may wait long for it."""
    join_s: float = Field(default=900.0, ge=1.0, le=604800.0)
    """Seconds that ranks and nodes wait for each other at the start."""
    min_ranks: int | None = Field(default=None, ge=1)
    """Elastic: fewest ranks to continue with after the same rank was lost twice in a row; null: not elastic."""
    spike: Literal["off", "warn", "skip", "stop"] = "off"
    """What to do if a step's loss is far above the recent mean. warn: record an event, and its samples in
    spikes/step-N.json; skip: also skip its update; stop: end the run before its update."""
    spike_sigmas: float = Field(default=6.0, gt=0.0)
    """How many standard deviations over the mean of the last 128 losses a spike is."""

    @model_validator(mode="after")
    def _check_spike(self) -> Self:
        if self.spike == "off":
            refuse_unused(self, ("spike_sigmas",), "spike: off", Fix({"faults.spike": "warn"}, "or skip or stop"))
        return self


def check_parallel(config: Any) -> None:
    """Raise ValueError if a setting does not work with shared micro-batches, or with a package's own engine."""
    traits = STRATEGIES.get(config.strategy)  # None for auto
    has_engine = traits is not None and traits.package is not None
    if has_engine and config.faults.spike == "skip":
        where = f"strategy: {config.strategy}"
        fixes = (Fix({"faults.spike": how}) for how in ("stop", "warn"))
        raise SettingError(f"faults.spike: skip does not work with {where}", *fixes)
    num_ranks, num_gpus = config.context.parallel, len(config.gpus or ())
    reasons = {
        f"strategy: {config.strategy}": config.strategy == "single" or has_engine,
        f"{num_gpus} gpus, which it does not divide": num_gpus % num_ranks,
        f"experts.parallel: {config.experts.parallel}": config.experts.parallel > 1,
        "faults.min_ranks, which leaves out single ranks": config.faults.min_ranks is not None,
        "batch.layout: rows": config.batch.layout == "rows",
        "batch.share_prefix: on": config.batch.share_prefix == "on",
        "full.update: backward": config.full.update == "backward",
        "model.neftune_alpha, whose noise belongs to whole samples": config.model.neftune_alpha > 0,
        f"model.attention: {config.model.attention}": config.model.attention in ("fa4", "cudnn"),
    }
    if num_ranks > 1 and (why := first_given(reasons)):
        text = f"context.parallel: {num_ranks} does not work with {why}"
        raise SettingError(text, Fix({"context.parallel": 1}))
