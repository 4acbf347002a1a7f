"""Every setting of flatout: name, type, default, help and check in one place; one name serves file, flag and error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from flatout.config import deepspeed
from flatout.config.faults import FaultsConfig
from flatout.config.section import Section
from flatout.config.sharding import CommConfig, ShardingConfig

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Recompute = Literal["none", "lean", "partial", "layers", "offload"]
StrategyName = Literal["auto", "single", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "deepspeed"]
Format = Literal["auto", "alpaca", "sharegpt", "messages", "prompt_completion", "oasst", "text", "tokens"]


class SourceConfig(Section):
    """One source of training rows: a local path or a hub id."""

    path: str
    """A file, folder or glob (json, jsonl, csv, parquet, arrow, txt; also .xz or .gz), or a hub id such as org/set."""
    hub: bool | None = None
    """True: `path` is a hub id; False: a local path; null: a hub id unless something local has that name."""
    split: str = "train"
    """Split of a hub data set."""
    subset: str | None = None
    """Configuration name of a hub data set."""
    revision: str | None = None
    """Commit or tag of a hub data set; pin it to make the run repeatable."""
    format: Format = "auto"
    """Row format; auto detects it from the first row and says which one it took."""
    columns: dict[str, str] = {}
    """Renames columns before the format reads them, ours to yours, such as {instruction: question, output: answer}."""
    roles: dict[str, str] = {}
    """Extra role names, yours to ours, such as {Agent: assistant}."""
    system: str | None = None
    """System prompt for conversations that have none."""
    weight: float = Field(default=1.0, gt=0)
    """Share of this source in a mix; 2.0 draws every row twice, 0.5 half of the rows (chosen by `data.seed`)."""


class DataConfig(Section):
    """What to train on: a data set built before by name, or sources that are built on first use."""

    name: Name = "default"
    """Name in the registry `<root>/data_config.json`; also the folder under `<root>/built_dataset/`."""
    root: Path = Path("data")
    """Folder of the registry and of the built data sets."""
    sources: list[SourceConfig] = []
    """Empty: `name` must have been built by `flatout data build`."""
    tokenizer: str | None = None
    """Hub id or folder of the tokenizer; null: the model's."""
    template: str | None = None
    """Chat template: chatml, llama-3, qwen3, gemma, mistral, phi, zephyr, alpaca or a .jinja file; null: the
    tokenizer's own."""
    loss_type: Literal["response_only", "all"] = "response_only"
    """response_only: every assistant turn with its end-of-turn token; all: every token."""
    max_tokens: int | None = Field(default=2048, ge=2)
    """Longest sample in tokens; null: no limit."""
    too_long: Literal["error", "drop", "truncate", "split"] = "truncate"
    """What happens to samples over `max_tokens`; always counted and shown."""
    on_bad_row: Literal["error", "skip"] = "error"
    """error: the first bad rows stop the build with file, row and field; skip: left out, counted and listed."""
    num_samples: int | None = Field(default=None, ge=1)
    """Use only this many rows, drawn by `seed`; null: all."""
    shuffle: bool = True
    """Draw `num_samples` at random (by `seed`) instead of taking the first ones."""
    seed: int = Field(default=3407, ge=0)
    """Seed of drawing and mixing rows."""
    num_procs: int | None = Field(default=None, ge=1)
    """Processes that tokenise; null: one a core, 16 at most."""


class ModelConfig(Section):
    """The model: always unchanged transformers code, safetensors weights only, never remote code."""

    name: str
    """Hub id or folder of a causal language model."""
    revision: str | None = None
    """Commit or tag of a hub model."""
    init: Literal["pretrained", "random"] = "pretrained"
    """random: fresh weights from the folder's config.json, by `seed` (training from scratch, speed tests)."""
    precision: Literal["auto", "bf16", "fp16", "fp32", "fp64"] = "auto"
    """Arithmetic of forward and backward; auto: bf16 on GPUs that have it, else fp32. Trained weights are fp32
    masters (fp64 with fp64), or bf16 alone with `full.weights: bf16`."""
    attention: Literal["auto", "fa4", "fa3", "cudnn", "varlen", "sdpa", "plain"] = "auto"
    """Packed attention: fa4 or fa3 (FlashAttention packages), cudnn (nvidia-cudnn-frontend), varlen (torch's CUDA
    kernel), sdpa (exact, per document), plain (written out; the truth in tests); auto takes the first that is there
    and proves equal."""


class BaseConfig(Section):
    """The frozen weights under LoRA (method: lora)."""

    storage: Literal["model", "fp8", "nf4"] = "model"
    """How they are kept: model (in model.precision), fp8 (e4m3, one scale a row), nf4 (4 bit, double quantised as
    bitsandbytes does; checkpoints already in that form are read as they are)."""
    compute: Literal["auto", "model", "fp8"] = "auto"
    """Matrix products with them: model (in model.precision) or fp8 in both passes; auto: fp8 for fp8 storage, which has
    no other."""

    @model_validator(mode="after")
    def _storage_has_these_products(self) -> Self:
        if self.storage == "model" and self.compute == "fp8":
            raise ValueError("compute fp8 needs storage fp8 or nf4")
        if self.storage == "fp8" and self.compute == "model":
            raise ValueError("storage fp8 has only fp8 products; set compute auto, or storage nf4")
        return self

    @property
    def computes_in_fp8(self) -> bool:
        """Whether forward and input gradient use fp8 products."""
        return self.compute == "fp8" or (self.compute == "auto" and self.storage == "fp8")


class FullConfig(Section):
    """Full fine-tuning (method: full)."""

    weights: Literal["fp32", "bf16"] = "fp32"
    """fp32 masters, or bf16 alone, updated with stochastic rounding: a third of the memory of masters and copies."""
    compute: Literal["model", "fp8"] = "model"
    """fp8: all linear layers but the head through torchao's Float8Linear (needs torchao and compile)."""
    update: Literal["step", "backward"] = "step"
    """backward: each weight is updated as soon as its gradient is there, so gradients never exist together; needs
    one micro-batch a step and no clipping (optim.max_grad_norm: null)."""


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685), fp32 master weights, no bias."""

    rank: int = Field(default=16, ge=1)
    """Width of the adapter; memory grows linearly with it."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale: the adapter's output is multiplied by alpha / rank (alpha / sqrt(rank) with rslora)."""
    dropout: Share = 0.0
    """Dropout on the adapter's input."""
    targets: str | list[str] = "all-linear"
    """all-linear (every linear layer but the head), module names such as [q_proj, v_proj], or one regex over
    full names."""
    rslora: bool = False
    """Rank-stabilised scale (Kalajdzievski 2023, arXiv:2312.03732)."""
    dora: bool = False
    """Weight-decomposed adapters (Liu et al. 2024, arXiv:2402.09353); slower."""
    continue_from: Path | None = None
    """Start from this adapter folder (PEFT format) instead of from zero."""

    @model_validator(mode="after")
    def _targets_are_usable(self) -> Self:
        if isinstance(self.targets, str) and self.targets != "all-linear":
            try:
                re.compile(self.targets)
            except re.error as error:
                raise ValueError(f"targets is no regular expression: {error}") from error
        if self.targets == []:
            raise ValueError("targets is empty; name modules or use all-linear")
        return self


class BatchConfig(Section):
    """The global batch. Ranks and micro-batches divide it; they never change the maths."""

    samples_per_step: int = Field(default=32, ge=1)
    """Samples (conversations) of one optimizer step, over all ranks."""
    micro_batch_tokens: int | None = Field(default=None, ge=2)
    """Most tokens of one forward pass on one rank; the plan uses as few and as equal micro-batches as fit. null: as
    many as `memory` holds (8,192 on a CPU)."""
    epochs: float = Field(default=1.0, gt=0)
    """Passes over the data."""
    max_steps: int | None = Field(default=None, ge=1)
    """Stop after this many optimizer steps; overrides `epochs`, running as many passes as needed."""
    shuffle: bool = True
    """A new order each epoch, a pure function of (seed, epoch)."""


class OptimConfig(Section):
    """The optimizer."""

    name: Literal["adamw", "adamw8bit", "sgd"] = "adamw"
    """adamw is fused on CUDA; adamw8bit keeps its moments in 8 bits."""
    lr: float = Field(default=2e-4, gt=0)
    """Peak learning rate."""
    beta1: Share = 0.9
    """Decay of the gradient's running mean (AdamW); momentum (SGD)."""
    beta2: Share = 0.999
    """Decay of the squared gradient's running mean (AdamW)."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator (AdamW)."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay; never on norms and biases."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Clip gradients to this global L2 norm; null: never clip."""


class ScheduleConfig(Section):
    """The learning rate over the run."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "linear"
    """Shape after the warm-up; wsd holds the peak, then decays linearly over the last `decay_ratio` of the run."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Steps of linear warm-up; give this or `warmup_ratio`."""
    warmup_ratio: Share | None = None
    """Warm-up as a share of all steps; 0.03 when neither is given."""
    min_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """Floor of the decay, as a share of the peak."""
    decay_ratio: float = Field(default=0.1, gt=0.0, le=1.0)
    """wsd: share of the run that decays."""

    @model_validator(mode="after")
    def _one_warmup(self) -> Self:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError("warmup_steps and warmup_ratio are both given; keep one")
        return self


class EvalConfig(Section):
    """Evaluation: the same token-weighted loss, without dropout, on rows never trained on."""

    fraction: Share = 0.0
    """Share of the data set held out for evaluation, chosen by `seed`."""
    data: Name | None = None
    """Name of a built data set to evaluate on instead of a held-out share."""
    every_steps: int | None = Field(default=None, ge=1)
    """Evaluate after every so many steps; null: only at the end."""
    patience: int | None = Field(default=None, ge=1)
    """Stop early after so many evaluations without a new best loss."""
    min_delta: float = Field(default=0.0, ge=0)
    """How much lower a loss must be to count as a new best."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.fraction and self.data:
            raise ValueError("fraction and data are both given; keep one")
        if self.patience and not self.every_steps:
            raise ValueError("patience needs every_steps")
        return self

    @property
    def enabled(self) -> bool:
        return bool(self.fraction or self.data)


class CheckpointConfig(Section):
    """Resumable checkpoints in `<run_dir>/checkpoints/step-N/`."""

    every_steps: int | None = Field(default=500, ge=1)
    """Save after every so many steps; null: only at the end and when asked to stop."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints to keep, besides the best one; the newest verified one is never deleted."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on from the newest valid checkpoint of the run folder; never: refuse a folder that has some."""
    asynchronous: Literal["auto"] | bool = "auto"
    """true: a save runs beside training, from a copy of the state in host memory, for which only the next update waits
    (on the CPU: training); auto: true on a GPU whose host has room for that."""
    allow_change: list[str] = []
    """Settings that may differ from the checkpoint's though they change the maths, such as optim.lr."""


class Config(Section):
    """A whole run."""

    name: Name = "run"
    """Name of the run."""
    run_dir: Path | None = None
    """Folder of everything the run writes; null: runs/<name>."""
    seed: int = Field(default=42, ge=0)
    """Seed of weights, order and dropout: the same seed gives the same run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU when there is one."""
    gpus: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """GPUs to train on, one process each, such as [0, 1]; with device: cpu that many CPU processes. null: one process,
    or the ranks that a launcher made."""
    method: Literal["lora", "full"] = "lora"
    """lora trains adapters on frozen weights; full trains the weights."""
    deterministic: bool = False
    """Bit-equal runs on CUDA too (deterministic kernels, slower backward of attention); on CPU runs always are."""
    freeze: list[str] = []
    """full: regexes over parameter names that stay frozen."""
    compile: Literal["auto", "off"] = "auto"
    """auto: on CUDA, every decoder layer becomes one compiled graph where its gradients prove equal to eager ones."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """auto: models so small that the host cannot launch fast enough run as recorded CUDA graphs."""
    memory: Literal["auto"] | Annotated[float, Field(gt=0)] = "auto"
    """GiB of GPU memory that training may plan with; auto: what is free at the start."""
    recompute: Literal["auto", Recompute] = "auto"
    """Activations computed again in the backward pass instead of kept: none; lean (norms' outputs and the MLP's
    product, hardly slower); partial (the compiler's choice, down to half of the memory); layers (all but each layer's
    input); offload (those inputs wait in host memory). auto: the first that fits `memory`."""
    strategy: StrategyName = "auto"
    """How several ranks share the work: ddp (each holds all), zero1 (optimizer state cut into one part a rank), zero2
    (gradients too), zero3 or fsdp (weights too), hsdp (fsdp in groups that are replicas), deepspeed; auto: ddp where
    the state fits, else fsdp or hsdp."""
    deepspeed: dict[str, Any] | None = None
    """strategy: deepspeed: path of a DeepSpeed JSON, or its content here; null: {zero_optimization: {stage: 2}}. Our
    settings fill its "auto" and what it leaves out."""
    log_every_steps: int = Field(default=1, ge=1)
    """Steps between two lines of the console and of metrics.jsonl."""
    model: ModelConfig
    data: DataConfig = DataConfig()
    lora: LoraConfig = LoraConfig()
    base: BaseConfig = BaseConfig()
    full: FullConfig = FullConfig()
    batch: BatchConfig = BatchConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    sharding: ShardingConfig = ShardingConfig()
    comm: CommConfig = CommConfig()
    faults: FaultsConfig = FaultsConfig()

    @field_validator("gpus")
    @classmethod
    def _gpus_are_unique(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and len(set(value)) < len(value):
            raise ValueError("a GPU is named twice; name each once")
        return value

    @field_validator("compile", "cuda_graphs", mode="before")
    @classmethod
    def _yaml_off(cls, value: object) -> object:
        # YAML reads a bare `off` as false
        return "off" if value is False else value

    @model_validator(mode="after")
    def _sections_belong_to_the_method(self) -> Self:
        if self.method == "full" and self.base != BaseConfig():
            raise ValueError("base is only for method: lora; full trains the weights themselves")
        alone = self.lora.dropout or self.lora.dora
        if self.base.storage == "nf4" and self.base.computes_in_fp8 and alone:
            raise ValueError(
                "base.compute: fp8 over nf4 multiplies layers together, which lora.dropout and lora.dora keep apart; "
                "set base.compute: model"
            )
        if self.method == "lora" and self.full != FullConfig():
            raise ValueError("full is only for method: full")
        if self.full.update == "backward" and self.optim.max_grad_norm is not None:
            raise ValueError(
                "full.update: backward never holds all gradients, so it cannot clip; set optim.max_grad_norm: null"
            )
        return self

    @model_validator(mode="after")
    def _freeze_is_usable(self) -> Self:
        if self.freeze and self.method != "full":
            raise ValueError("freeze is only for method: full; lora already freezes every base weight")
        for pattern in self.freeze:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"freeze: {pattern!r} is no regular expression: {error}") from error
        return self

    @model_validator(mode="after")
    def _strategy_is_usable(self) -> Self:
        shards = self.strategy not in ("auto", "single", "ddp")
        if shards and (why := self.reason_against_sharding):
            raise ValueError(f"strategy: {self.strategy} does not work with {why}; change that or set strategy: ddp")
        if self.sharding.replicas is not None and self.strategy != "hsdp":
            raise ValueError(f"sharding.replicas is only for strategy: hsdp; got strategy: {self.strategy}")
        if self.strategy == "deepspeed" or self.deepspeed is not None:
            deepspeed.check(self)
        if self.sharding.offload and not shards:
            raise ValueError(f"sharding.offload needs strategy: zero2, zero3, fsdp or hsdp; got {self.strategy}")
        return self

    @property
    def reason_against_sharding(self) -> str | None:
        """The setting that needs whole weights or whole optimizer state on every rank; None where none does."""
        if self.model.precision == "fp16":
            return "model.precision: fp16, whose loss scaling looks at whole gradients"
        if self.base.storage == "nf4" and self.base.compute == "fp8":
            return "base.compute: fp8 over nf4, which multiplies layers together"
        if self.optim.name == "adamw8bit" or self.full.weights == "bf16":
            return "adamw8bit and full.weights: bf16, whose updates are made over whole tensors"
        if self.full.compute == "fp8" or self.full.update == "backward":
            return "full.compute: fp8 and full.update: backward"
        return None

    @property
    def computes_in_fp8(self) -> bool:
        """Whether the blocks' products run in float8: over a quantised base, or those of full fine-tuning."""
        return self.base.computes_in_fp8 or self.full.compute == "fp8"

    @property
    def wanted_device(self) -> Literal["auto", "cpu", "cuda"]:
        """`device`; a run that names GPUs never falls back to the CPU by itself."""
        return "cuda" if self.gpus is not None and self.device == "auto" else self.device

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.run_dir or Path("runs") / self.name
