"""All settings of flatout, with types, defaults, help and checks; files, flags and errors use the same names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from flatout.config import deepspeed
from flatout.config.data import NAME_PATTERN, DataConfig, Name, SourceConfig
from flatout.config.folders import folder_problem
from flatout.config.model import BaseConfig, CompileMode, ExpertsConfig, FullConfig, LoraConfig, ModelConfig
from flatout.config.objective import OBJECTIVES, ObjectiveConfig, kind_of, with_trained_score
from flatout.config.optim import LR_OF_METHOD, OPTIMIZERS, OptimConfig, ScheduleConfig, lr_of
from flatout.config.parallel import (
    STRATEGIES,
    CommConfig,
    ContextConfig,
    FaultsConfig,
    GpuList,
    ShardingConfig,
    StrategyName,
    check_parallel,
)
from flatout.config.rollout import RolloutConfig
from flatout.config.section import PathText, Section, first_given, refuse_unused, require_regex, short_form
from flatout.config.shortcuts import expand
from flatout.config.table import RESUME_EFFECTS
from flatout.config.track import TrackConfig
from flatout.errors import Fix, SettingError

__all__ = [
    "NAME_PATTERN",
    "BaseConfig",
    "Config",
    "DataConfig",
    "ExpertsConfig",
    "FullConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
    "ScheduleConfig",
    "SourceConfig",
]

Every = Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)]
Recompute = Literal["none", "selective", "budget", "full", "offload"] | Annotated[int, Field(ge=1)]


class BatchConfig(Section):
    """The global batch. Splitting it into ranks and micro-batches does not change the numerics."""

    samples_per_step: int = Field(default=32, ge=1)
    """Samples (conversations) per optimizer step, over all ranks; pairs or groups if the data has them."""
    micro_batch_tokens: int | None = Field(default=None, ge=2)
    """Maximum tokens in one forward pass on one rank; the plan uses as few micro-batches as possible, of similar size.
    null: as many tokens as fit in `memory` (8,192 at most on a CPU)."""
    layout: Literal["auto", "packed", "rows"] = "auto"
    """packed: the samples of a micro-batch are concatenated without padding; rows: each sample is a row, padded to the
    longest of a few samples of similar length, which is exact for every causal model. auto: packed if a self-test
    shows that it is exact, otherwise rows."""
    share_prefix: Literal["auto", "on", "off"] = "auto"
    """Compute a shared prefix of samples in a micro-batch, such as a system prompt, once instead of once per sample.
    A prefix has at least 64 tokens and no labels. Loss and gradients are the same up to rounding. auto: if it is exact
    for the model, layout, dropout and objective, saves at least 5 % of the tokens, and CUDA graphs would not help
    more; on: whenever samples share a prefix, and an error if it is not exact; off: never."""
    epochs: float = Field(default=1.0, gt=0)
    """Passes over the data."""
    max_steps: int | None = Field(default=None, ge=1, le=10_000_000)
    """Stop after this many optimizer steps; overrides `epochs` and repeats the data as often as needed."""
    shuffle: bool = True
    """Shuffle samples in each epoch; the order depends only on (seed, epoch)."""


class EvalConfig(Section):
    """Evaluation: the same token-weighted loss, without dropout, on rows that are never trained on."""

    fraction: float = Field(default=0.0, ge=0.0, le=0.5)
    """Share of the data set held out for evaluation, drawn with `seed`."""
    split_by: Literal["auto", "row", "prompt"] = "auto"
    """What `fraction` keeps on one side. row: the samples of a row; prompt: also rows that are equal up to their first
    answer; auto: prompt for pairs and labeled answers, row for others."""
    data: str | list[str] | None = None
    """Name of a built data set to evaluate on instead of a held-out share, or several, such as [code, chats]. Metrics
    are recorded for each; the mean over all label tokens determines the best state."""
    every_steps: Every | None = None
    """Steps between evaluations, or a share of the run below 1; null: only before the first step and at the end."""
    patience: int | None = Field(default=None, ge=1)
    """Stop early after this many evaluations without a new best."""
    best: str = "loss"
    """The metric that determines the best state: loss, or another metric of the objective, such as token_accuracy."""
    min_delta: float = Field(default=0.0, ge=0)
    """Smallest improvement of the metric `best` that counts as a new best."""
    prompts: list[str] | PathText | None = None
    """Prompts that the model answers at each evaluation: a list, or a file (.txt with one prompt per line, or JSON or
    JSONL rows with `prompt` or `messages`); null: three rows of the evaluation set; []: none. All prompts are answered
    in one batch."""
    max_new_tokens: int = Field(default=64, ge=1, le=1024)
    """Maximum number of tokens in each of these answers."""
    temperature: float = Field(default=0.0, ge=0, le=100)
    """Sampling temperature of these answers, with random numbers from `seed`; 0: greedy decoding."""
    worst_samples: int = Field(default=8, ge=0, le=64)
    """How many samples with the greatest losses to record with their text at each evaluation; 0: none."""

    @field_validator("data")
    @classmethod
    def _data_has_names(cls, value: str | list[str] | None) -> str | list[str] | None:
        names = [value] if isinstance(value, str) else value
        if names is None:
            return None
        if not names or len(set(names)) < len(names):
            raise ValueError("expected at least one data set, each named once")
        if not all(re.fullmatch(NAME_PATTERN, name) for name in names):
            raise ValueError(f"string should match pattern '{NAME_PATTERN}'")
        return value if len(names) > 1 else names[0]

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if not self.fraction:
            refuse_unused(self, ("split_by",), "needs a share of the rows", Fix({"eval.fraction": 0.05}))
        if self.fraction and self.data:
            raise ValueError("fraction and data are both given; keep one: leave eval.fraction out")
        if self.patience and not self.every_steps:
            raise SettingError("patience needs every_steps", Fix({"eval.every_steps": 0.1}))
        if not (self.fraction or self.data):
            why, fix = "needs rows to evaluate on", Fix({"eval.fraction": 0.05}, "or eval.data, a data set")
            rest = ("every_steps", "patience", "best", "min_delta", "max_new_tokens", "temperature", "worst_samples")
            refuse_unused(self, rest, why, fix)
            if self.prompts:
                raise SettingError(f"prompts {why}", fix)
        if self.prompts == []:
            refuse_unused(self, ("max_new_tokens", "temperature"), "prompts: []")
        return self

    @property
    def data_names(self) -> list[str]:
        return [self.data] if isinstance(self.data, str) else self.data or []


class CheckpointConfig(Section):
    """Resumable checkpoints in `<run_dir>/checkpoints/step-N/`."""

    every_steps: Every | None = 500
    """Steps between saves, or a share of the run below 1; null: save only at the end and on a stop signal."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep besides the best one; the newest verified one is never deleted."""
    resume: Literal["auto", "never"] = "auto"
    """auto: resume from the newest valid checkpoint in the run folder; never: refuse a folder that has checkpoints."""
    mirror: str | None = None
    """Address in an object store, such as s3://bucket/run, to which each complete checkpoint is sent in the background,
    and from which a run whose disk was lost resumes."""
    asynchronous: Literal["auto"] | bool = "auto"
    """true: save in the background from a copy of the state in host memory; only the next update waits for the copy (on
    a CPU, training waits); auto: true on a GPU whose host has enough memory for the copy."""
    allow_change: list[str] = []
    """Settings that may differ from the checkpoint's although they change the numerics, such as optim.lr."""

    @field_validator("mirror")
    @classmethod
    def _mirror_is_an_address(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"(?!https?:|hf:)[a-z][a-z0-9]*://[^\s@?#]*[^\s@?#/]/?", value):
            text = "expected an address to write to, without a password, which clients read from the environment"
            raise SettingError(text, Fix({"checkpoint.mirror": "s3://bucket/run"}, "or gs://, az://, file:///folder"))
        return value and value.rstrip("/")


class Config(Section):
    """The configuration of a run."""

    name: Name = "run"
    """Name of the run."""
    run_dir: Path | None = None
    """Folder for all files that the run writes; null: runs/<name>."""
    seed: int = Field(default=42, ge=0)
    """Seed of initial weights, sample order, dropout and noise: the same seed gives the same run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if available, else the CPU."""
    gpus: GpuList | None = None
    """GPUs to train on, one process each, such as 0,1, or how many; with device: cpu, CPU processes. null: one process,
    or the ranks that a launcher started."""
    method: Literal["lora", "full"] = "lora"
    """lora trains adapters on frozen weights; full trains the weights."""
    deterministic: bool = False
    """Make CUDA runs bitwise reproducible (deterministic kernels, slower attention backward); CPU runs always are."""
    freeze: list[str] = []
    """method: full: regexes on the names of parameters to freeze."""
    compile: CompileMode = "auto"
    """auto: on CUDA, compile each decoder layer as a graph if its gradients match eager."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """auto: use CUDA graphs for models so small that the host cannot launch kernels fast enough."""
    memory: Literal["auto"] | Annotated[float, Field(gt=0)] = "auto"
    """Memory budget in GiB, of a GPU or of a process on the CPU; auto: the memory free at the start."""
    recompute: Literal["auto"] | Recompute = "auto"
    """Activation checkpointing: which activations are recomputed in the backward pass. none; selective (norm outputs
    and the MLP's product, hardly slower); budget (chosen by the compiler, down to half of the memory); a number of
    layers (the first ones as full, the others as budget); full (all except each layer's input); offload (full, with
    these inputs in CPU memory). auto: the fastest that fits in `memory`."""
    strategy: Literal["auto", StrategyName] = "auto"
    """How the training state is distributed over ranks: ddp (replicated), zero1 (optimizer state is sharded), zero2
    (gradients too), zero3 or fsdp (weights too), hsdp (fsdp within groups that are replicas), deepspeed; auto: ddp if
    the state fits, else fsdp or hsdp."""
    deepspeed: Annotated[dict[str, Any], Path] | None = None
    """For strategy: deepspeed: path of a DeepSpeed JSON, or its content; null: {zero_optimization: {stage: 2}}.
    flatout's settings replace "auto" and fill in what is missing."""
    log_every_steps: Every = 1
    """Steps between lines in metrics.jsonl, or a share of the run below 1. Unless it is 1, the console prints each of
    them; with 1 about 20 per run."""
    model: Annotated[ModelConfig, short_form({"type": "string"})]
    data: Annotated[DataConfig, short_form({"type": "string"}, {"type": "array"})] = DataConfig()
    lora: LoraConfig = LoraConfig()
    base: BaseConfig = BaseConfig()
    full: FullConfig = FullConfig()
    experts: ExpertsConfig = ExpertsConfig()
    batch: BatchConfig = BatchConfig()
    objective: Annotated[ObjectiveConfig, short_form({"type": "string"})] = ObjectiveConfig()
    rollout: RolloutConfig = RolloutConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    sharding: ShardingConfig = ShardingConfig()
    context: ContextConfig = ContextConfig()
    comm: CommConfig = CommConfig()
    faults: FaultsConfig = FaultsConfig()
    track: Annotated[TrackConfig, short_form({"type": "string"}, {"type": "array"})] = TrackConfig()

    if TYPE_CHECKING:
        # what editors complete: sections, their short forms, and the keywords of SHORTCUTS
        def __init__(
            self,
            *,
            model: ModelConfig | Mapping[str, Any] | str,
            data: DataConfig | Mapping[str, Any] | str | list[str] = ...,
            name: str = ...,
            run_dir: Path | str | None = ...,
            gpus: list[int] | int | str | None = ...,
            device: Literal["auto", "cpu", "cuda"] = ...,
            method: Literal["lora", "full"] = ...,
            rank: int = ...,
            alpha: float = ...,
            dropout: float = ...,
            targets: str | list[str] = ...,
            storage: Literal["model", "fp8", "nf4"] = ...,
            lr: float = ...,
            weight_decay: float = ...,
            epochs: float = ...,
            max_steps: int | None = ...,
            samples_per_step: int = ...,
            micro_batch_tokens: int | None = ...,
            max_tokens: int | None = ...,
            loss_type: Literal["response_only", "all"] = ...,
            **sections: Any,
        ) -> None: ...

    @model_validator(mode="before")
    @classmethod
    def _lr_of_the_method(cls, values: Any) -> Any:
        """Replace a missing or `auto` optim.lr by its number, so that shown and saved settings contain it.

        The same holds for the `score` that LoRA trains for an objective.
        """
        if not isinstance(values, Mapping):
            return values
        values = with_trained_score(values)
        given = values.get("optim", {})
        optimizer = given.name if isinstance(given, OptimConfig) else isinstance(given, Mapping) and given.get("name")
        lr = lr_of(values.get("method", "lora"), kind_of(values.get("objective")), optimizer)
        if isinstance(given, OptimConfig) and "lr" not in given.model_fields_set:
            return {**values, "optim": given.model_copy(update={"lr": lr})}
        if isinstance(given, Mapping) and given.get("lr", "auto") == "auto":
            # an unknown method is told by its own check
            return {**values, "optim": {**given, "lr": lr or LR_OF_METHOD["lora"]}}
        return values

    # pydantic calls it before the one above
    @model_validator(mode="before")
    @classmethod
    def _expand_shortcuts(cls, values: Any, info: ValidationInfo) -> Any:
        """Accept the keywords of SHORTCUTS, except from files, where a setting has one name."""
        is_file = info.context is not None and info.context.get("is_file")
        return values if is_file or not isinstance(values, Mapping) else expand(values)

    @model_validator(mode="after")
    def _sections_belong_to_the_method(self) -> Self:
        for section, given in ({"lora": self.lora, "base": self.base} if self.method == "full" else {}).items():
            if changed := given.model_dump(exclude_defaults=True):
                text = f"{section} is only for method: lora, as full trains the weights themselves"
                raise SettingError(f"{text}; leave {section}.{min(changed)} out", Fix({"method": "lora"}))
        alone = self.lora.dropout or self.lora.dora
        if self.base.storage == "nf4" and self.base.computes_in_fp8 and alone:
            text = "base.compute: fp8 over nf4 fuses layers, which lora.dropout and lora.dora do not allow"
            raise SettingError(text, Fix({"base.compute": "model"}))
        if self.method == "lora" and self.full != FullConfig():
            name = min(self.full.model_fields_set, default="weights")
            raise SettingError(f"full is only for method: full; leave full.{name} out", Fix({"method": "full"}))
        if self.method == "lora" and self.experts.bias_update:
            why = "as an adapter's file has no place for a router's bias"
            raise ValueError(f"experts.bias_update is only for method: full, {why}")
        if self.method == "full" and self.optim.lr_ratio != 1:
            text = "optim.lr_ratio is only for method: lora, as full has no B; leave it out"
            raise SettingError(text, Fix({"method": "lora"}))
        if self.full.update == "backward" and self.optim.max_grad_norm is not None:
            text = "full.update: backward never holds all gradients, so it cannot clip"
            raise SettingError(text, Fix({"optim.max_grad_norm": None}))
        if self.freeze and self.method != "full":
            text = "freeze is only for method: full, as lora freezes all base weights"
            raise SettingError(text, Fix({"method": "full"}))
        return self

    @model_validator(mode="after")
    def _names_are_usable(self) -> Self:
        for pattern in self.freeze:
            require_regex(f"freeze: {pattern!r}", pattern)
        known = {"data", "model", *RESUME_EFFECTS, *(name.partition(".")[0] for name in RESUME_EFFECTS)}
        known |= {f"objective.{name}" for name in self.objective.fields}
        if unknown := sorted(set(self.checkpoint.allow_change) - known):
            raise ValueError(f"checkpoint.allow_change: {unknown[0]!r} is not a setting; name one such as optim.lr")
        return self

    @model_validator(mode="after")
    def _run_has_a_folder_of_its_own(self) -> Self:
        """Refuse the model's or the data's folder as run_dir: a run writes, renames and removes files there."""
        sources = [source.path for source in self.data.sources]
        if problem := folder_problem(self.folder, self.data.root, self.model.name, sources):
            raise problem
        return self

    @model_validator(mode="after")
    def _strategy_is_usable(self) -> Self:
        traits = STRATEGIES.get(self.strategy)  # None for auto
        shards = traits is not None and traits.shards_state
        if shards and (why := self.reason_against_sharding):
            raise SettingError(f"strategy: {self.strategy} does not work with {why}", Fix({"strategy": "ddp"}))
        if self.sharding.replicas is not None and not (traits and traits.has_replicas):
            text = f"sharding.replicas is only for strategy: hsdp; got strategy: {self.strategy}"
            raise SettingError(text, Fix({"strategy": "hsdp"}))
        deepspeed.check(self)
        check_parallel(self)
        if traits and not shards:
            why = f"strategy: {self.strategy}, which does not shard state"
            refuse_unused(self.sharding, ("reshard_after_forward", "prefetch"), why, path="sharding.")
        if self.strategy == "single" and self.comm != CommConfig():
            raise ValueError("comm.compress has no effect with strategy: single, which does not communicate")
        if self.sharding.offload and not shards:
            text = f"sharding.offload needs a strategy that shards, not {self.strategy}"
            raise SettingError(text, Fix({"strategy": "fsdp"}))
        return self

    @model_validator(mode="after")
    def _rounds_decide_steps(self) -> Self:
        if self.rollout.rounds is None:
            return self
        why = "rollout.rounds: the settings of `rollout` say which samples a step has"
        refuse_unused(self.batch, ("samples_per_step", "epochs", "max_steps", "shuffle"), why, path="batch.")
        why = "rollout.rounds, which answers prompts that eval.fraction holds out"
        unread = ("data", "split_by", "best", "min_delta", "worst_samples", "max_new_tokens", "temperature")
        refuse_unused(self.eval, unread, why, path="eval.")
        traits, shared = STRATEGIES.get(self.strategy), max(self.context.parallel, self.experts.parallel)
        if shared > 1 or (traits is not None and traits.package):
            raise SettingError(
                "rollout.rounds needs whole weights on every rank, to sample with", Fix({"strategy": "ddp"})
            )
        return self

    @model_validator(mode="after")
    def _experts_can_be_shared(self) -> Self:
        num_ranks = self.experts.parallel
        if num_ranks > 1 and (why := self._reason_against_sharing_experts):
            text = f"experts.parallel: {num_ranks} does not work with {why}"
            raise SettingError(text, Fix({"experts.parallel": 1}))
        return self

    @property
    def _reason_against_sharing_experts(self) -> str | None:
        """The setting that needs all experts on every rank, or passes of different sizes, or None."""
        num_gpus, traits = len(self.gpus or ()), STRATEGIES.get(self.strategy)
        optimizer = OPTIMIZERS[self.optim.name]
        has_all = self.strategy == "single" or (traits is not None and bool(traits.has_replicas or traits.package))
        return first_given(
            {
                f"strategy: {self.strategy}": has_all,
                f"{num_gpus} gpus, which it does not divide": num_gpus % self.experts.parallel,
                "model.experts: eager": self.model.experts == "eager",
                "model.precision: fp16": self.model.precision == "fp16",
                "base.backward: fp8": self.base.backward == "fp8",
                "batch.layout: rows": self.batch.layout == "rows",
                "faults.min_ranks, which leaves out single ranks": self.faults.min_ranks is not None,
                f"optim.name: {self.optim.name}": optimizer.stores_8_bits or optimizer.reads_whole,
                "optim.path": self.optim.path is not None,
                "full.weights: bf16": self.full.weights == "bf16",
                "full.update: backward": self.full.update == "backward",
                "sharding.offload": self.sharding.offload,
            }
        )

    @property
    def reason_against_sharding(self) -> str | None:
        """The setting that needs unsharded weights or optimizer state on every rank, or None."""
        name = self.optim.name
        return first_given(
            {
                "model.precision: fp16, whose loss scaling needs unsharded gradients": self.model.precision == "fp16",
                "base.compute: fp8 over nf4, which fuses layers": (self.base.storage, self.base.compute)
                == ("nf4", "fp8"),
                "base.backward: fp8, which copies whole weights": self.base.backward == "fp8",
                "full.update: backward": self.full.update == "backward",
                f"optim.name: {name}, whose update reads whole weights": OPTIMIZERS[name].reads_whole,
            }
        )

    @property
    def computes_in_fp8(self) -> bool:
        """Whether products of the decoder layers run in fp8, of both passes or only of the backward pass."""
        return self.base.computes_in_fp8 or self.base.backward == "fp8" or self.full.compute != "model"

    @property
    def wanted_device(self) -> Literal["auto", "cpu", "cuda"]:
        """`device`, but cuda instead of auto if `gpus` is set: a run that names GPUs never falls back to the CPU."""
        return "cuda" if self.gpus is not None and self.device == "auto" else self.device

    @property
    def learns_from_answers(self) -> bool:
        """Whether it samples answers, or its loss is known to be over sampled ones."""
        return self.rollout.rounds is not None or OBJECTIVES.get(self.objective.kind, "").startswith("policy.")

    @property
    def folder(self) -> Path:
        return self.run_dir or Path("runs") / self.name
