"""Settings of the model: its weights, how frozen ones are stored, and its adapters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from flatout.config.section import PathText, Section, Share, refuse_unused, require_own_code, require_regex
from flatout.errors import Fix, SettingError

CompileMode: TypeAlias = Literal["auto", "off"]


class ModelConfig(Section):
    """The model: unmodified transformers code, safetensors weights only, never remote code.

    `model: Qwen/Qwen3-0.6B` is short for `model: {name: ...}`.
    """

    name: PathText
    """Hub id or folder of a causal language model."""
    revision: str | None = None
    """Commit or tag of a hub model."""
    init: Literal["pretrained", "random"] = "pretrained"
    """random: build the model from config.json and initialize it with `seed` (to train from scratch or test speed)."""
    precision: Literal["auto", "bf16", "fp16", "fp32", "fp64"] = "auto"
    """Dtype of the forward and backward pass; auto: bf16 on GPUs that support it, else fp32. Trained weights are fp32
    (fp64 with fp64), or bf16 only with `full.weights: bf16`."""
    attention: Literal["auto", "fa4", "cudnn", "varlen", "sdpa", "plain"] = "auto"
    """Attention over packed samples: fa4 (the FlashAttention-4 package), cudnn (nvidia-cudnn-frontend), varlen
    (torch's CUDA kernel), sdpa (exact, one document at a time), plain (unfused; the reference in tests); auto: the
    first that is available and passes the parity check."""

    experts: Literal["auto", "eager"] = "auto"
    """Routed experts: eager (transformers' own loop over experts; the reference); auto: grouped products, where the
    model has transformers' experts interface."""
    neftune_alpha: float = Field(default=0.0, ge=0, le=1e6)
    """NEFTune (Jain et al. 2023, arXiv:2310.05914): training adds uniform noise of at most alpha / sqrt(L * D) to the D
    values of each token's embedding, where L is the length of its own sample; 0: none. It differs by step and token,
    and is the same for any number of micro-batches and ranks."""
    freeze_vision_tower: bool = True
    """false: method: full also trains the vision tower, and lora.targets also match its layers."""
    freeze_projector: bool = True
    """false: the same for the projector, which maps the vision tower's features to the language model's width
    (LLaMA-Factory's freeze_multi_modal_projector)."""

    @property
    def trained_parts(self) -> frozenset[str]:
        """The parts that are trained beside the decoder of texts: vision_tower, projector."""
        frozen = {"vision_tower": self.freeze_vision_tower, "projector": self.freeze_projector}
        return frozenset(part for part, is_frozen in frozen.items() if not is_frozen)

    @classmethod
    def long_form(cls, value: Any) -> Any:
        return {"name": str(value)} if isinstance(value, str | Path) else value


class BaseConfig(Section):
    """The frozen base weights (method: lora)."""

    storage: Literal["model", "fp8", "nf4"] = "model"
    """Storage format: model (model.precision), fp8 (e4m3, one scale per row), nf4 (4-bit, double quantized as in
    bitsandbytes; checkpoints already in this format load unchanged)."""
    compute: Literal["auto", "model", "fp8"] = "auto"
    """Precision of matmuls with these weights in the forward pass and, unless `backward` is set, the backward pass:
    model (model.precision) or fp8; auto: fp8 with fp8 storage, which requires it, else model."""
    backward: Literal["same", "fp8"] = "same"
    """Precision of the matmuls that compute the gradient of a layer's input: same (as `compute`), or fp8 with a forward
    pass in model.precision. fp8 is faster, but rounds gradients. It needs storage: model and unsharded weights, and
    stores an fp8 copy of the decoder's linear layers (one more byte per weight); fused experts use
    model.precision."""

    @model_validator(mode="after")
    def _storage_has_these_products(self) -> Self:
        if self.storage == "model" and self.compute == "fp8":
            raise SettingError("compute fp8 needs storage fp8 or nf4", Fix({"base.storage": "fp8"}))
        if self.storage == "fp8" and self.compute == "model":
            fixes = Fix({"base.compute": "auto"}), Fix({"base.storage": "nf4"})
            raise SettingError("storage fp8 supports only fp8 matmuls", *fixes)
        if self.storage == "fp8" and self.backward == "fp8":
            raise ValueError("backward fp8 has no effect with storage fp8, whose matmuls are all fp8; leave it out")
        if self.storage == "nf4" and self.backward == "fp8":
            fix = Fix({"base.backward": "same", "base.compute": "fp8"}, "fp8 over nf4")
            raise SettingError("backward fp8 needs storage model", fix)
        return self

    @property
    def computes_in_fp8(self) -> bool:
        """Whether the forward pass and the input gradient use fp8 products."""
        return self.compute == "fp8" or (self.compute == "auto" and self.storage == "fp8")


class FullConfig(Section):
    """Full fine-tuning (method: full)."""

    weights: Literal["fp32", "bf16"] = "fp32"
    """fp32 master weights, or bf16 only with stochastic rounding: a third of the memory of masters and copies."""
    compute: Literal["model", "fp8", "fp8_rowwise"] = "model"
    """fp8_rowwise: outputs and input gradients of linear layers are fp8 matmuls with one scale per row; weight
    gradients use model.precision. fp8: all three with torchao's Float8Linear and one scale per tensor; sharded weights
    are gathered in fp8. On one H100, fp8 was no faster than bf16, and fp8_rowwise was 1.19 times as fast. With both,
    grouped experts use fp8_rowwise; routers, the head, and the first and last decoder layer use
    model.precision. Needs compile."""
    hidden_states: Literal["fp32", "model"] = "fp32"
    """Dtype of the hidden states between decoder layers. fp32: the dtype of the weights, as in transformers under
    torch.autocast; model: model.precision, which must be bf16; needs slightly less memory and time, but rounds more."""
    update: Literal["step", "backward"] = "step"
    """backward: update each weight as soon as its gradient is ready, so that not all gradients are in memory at once;
    needs one micro-batch per step and no clipping (optim.max_grad_norm: null)."""

    @model_validator(mode="after")
    def _hidden_states_have_a_choice(self) -> Self:
        if self.weights == "bf16" and self.hidden_states == "model":
            raise ValueError("hidden_states model has no effect with weights bf16, where all are bf16; leave it out")
        return self


class ExpertsConfig(Section):
    """Routed experts: their load, and ranks that share them. Routers train in full or by lora.modules_to_save."""

    balance_loss: Annotated[float, Field(ge=0)] | Literal["model"] | None = None
    """Factor of the load-balancing loss (arXiv:2101.03961), normalized over the step's tokens. model: the model's
    router_aux_loss_coef, as in TRL 1.15. null: the same, but only if its config sets output_router_logits, as in
    transformers; otherwise 0."""
    z_loss: float = Field(default=0.0, ge=0)
    """Factor of the router z-loss (arXiv:2202.08906), normalized over the step's tokens."""
    bias_update: float = Field(default=0.0, ge=0)
    """Update rate of the routers' correction biases, which balance the load without a loss (arXiv:2408.15664). For
    models that have them, such as DeepSeek-V3 (which used 0.001), and method: full. 0: no updates."""
    parallel: int = Field(default=1, ge=1)
    """Expert parallelism: the number of consecutive ranks that share each layer's fused experts. Each rank has an equal
    part of them, for the tokens of all. Must divide the number of ranks and the number of experts."""


ADAPTER_STARTS: Mapping[str, str] = MappingProxyType({"uniform": "starts.uniform", "gaussian": "starts.gaussian"})
"""What an adapter's A may begin with: a module and function below flatout.models.lora."""
if TYPE_CHECKING:
    AdapterStartName: TypeAlias = str
else:
    AdapterStartName = Literal[tuple(ADAPTER_STARTS)]


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685), fp32 master weights, no bias."""

    rank: int = Field(default=16, ge=1)
    """Rank of the adapter; its memory grows linearly with the rank."""
    alpha: float = Field(default=32.0, gt=0)
    """Scales the adapter's output by alpha / rank (alpha / sqrt(rank) with rslora)."""
    dropout: Share = 0.0
    """Dropout on the adapter's input."""
    targets: str | list[str] = "all-linear"
    """all-linear (every linear layer except the head), modules such as [q_proj, v_proj], or one regex on full names.
    Fused experts are named by their module or matrices, as in PEFT's target_parameters: [all-linear, experts]."""
    rslora: bool = False
    """Rank-stabilized scaling (Kalajdzievski 2023, arXiv:2312.03732)."""
    dora: bool = False
    """Weight-decomposed adapters (Liu et al. 2024, arXiv:2402.09353); slower."""
    layers: list[Annotated[int, Field(ge=0)]] | str | None = None
    """Decoder layers whose targets get adapters, counted from 0: a list such as [0, 1, 20], or ranges: "0-11, 20";
    null: all."""
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] = {}
    """Other ranks of some targets, by name ending or regex: {down_proj: 32}. The first that matches counts."""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Other alphas of some targets, written like `rank_pattern`."""
    modules_to_save: list[str] = []
    """Modules to train fully and save with the adapter, such as [embed_tokens, lm_head] or a norm."""
    keep_tied: bool = True
    """Whether tied embeddings and head stay one weight if `modules_to_save` has one of them (PEFT's
    ensure_weight_tying); false: only the listed ones are trained, as separate weights."""
    init: AdapterStartName = "uniform"
    """What A begins with; B begins with zeros, so a new adapter changes nothing. uniform: as PEFT; gaussian: normal
    values with standard deviation 1 / rank, as PEFT's init_lora_weights: gaussian."""
    init_path: PathText | None = None
    """A function in a file of your own instead, which runs as code: start.py:principal (docs/extending.md)."""
    continue_from: Path | None = None
    """Start from the adapter in this folder (PEFT format) instead of a new one."""

    @field_validator("targets", mode="before")
    @classmethod
    def _commas_make_a_list(cls, value: object) -> object:
        is_list = isinstance(value, str) and re.fullmatch(r"[\w.-]+( *, *[\w.-]+)+", value)
        return re.split(" *, *", value) if is_list and isinstance(value, str) else value

    @model_validator(mode="after")
    def _targets_are_usable(self) -> Self:
        if isinstance(self.targets, str):
            require_regex("targets", self.targets)
        if self.targets == []:
            raise ValueError("targets is empty; name modules or use all-linear")
        for pattern in (*self.rank_pattern, *self.alpha_pattern):
            require_regex(f"{pattern!r} of a pattern", pattern)
        if self.layer_indices == []:
            raise ValueError("layers is empty; list layers, or leave it out for all")
        if not (self.modules_to_save or self.keep_tied):
            raise ValueError("keep_tied has no effect without modules_to_save")
        return self

    @model_validator(mode="after")
    def _has_one_start(self) -> Self:
        if self.continue_from is not None:
            refuse_unused(self, ("init", "init_path"), "continue_from, whose folder has the adapter to start from")
        if self.init_path is not None:
            refuse_unused(self, ("init",), "init_path")
            require_own_code("init_path", self.init_path, "start.py:principal", kind="FUNCTION")
        return self

    @property
    def layer_indices(self) -> list[int] | None:
        """The indices of `layers`, ascending; None for all. Raises ValueError for text that is no list of ranges."""
        if not isinstance(self.layers, str):
            return None if self.layers is None else sorted(set(self.layers))
        indices: set[int] = set()
        for part in self.layers.split(","):
            match = re.fullmatch(r"\s*(\d{1,6})(?:\s*-\s*(\d{1,6}))?\s*", part)
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if first > last:
                raise ValueError(f'layers: {part!r} is neither a layer nor a range; write "0-11, 20"')
            indices |= set(range(first, last + 1))
        return sorted(indices)

    def has_layer(self, name: str, layers_path: str) -> bool:
        """Whether `layers` includes the module with this full name; `layers_path` is the list of decoder layers."""
        if (indices := self.layer_indices) is None:
            return True
        index = name.removeprefix(f"{layers_path}.").partition(".")[0]
        return name.startswith(f"{layers_path}.") and int(index) in indices

    def selects(self, target: str, name: str, *, of_experts: bool = False) -> bool:
        """Whether one entry of `targets` means the linear layer, or matrix of fused experts, with this full name."""
        if target == "all-linear":
            return not of_experts
        if isinstance(self.targets, str):
            return re.fullmatch(target, name) is not None
        whole = of_experts and f".{name.rpartition('.')[0]}".endswith(f".{target}")
        return whole or f".{name}".endswith(f".{target}")

    @property
    def listed_targets(self) -> list[str]:
        return [self.targets] if isinstance(self.targets, str) else self.targets

    def saves(self, name: str) -> bool:
        """Whether `modules_to_save` has the module with this full name, or one that it is part of."""
        return any(f".{wanted}." in f".{name}." for wanted in self.modules_to_save)

    def of_layer(self, name: str) -> LoraConfig:
        """The same settings with the rank and alpha of the layer with this full name."""
        patterns: dict[str, dict[str, Any]] = {"rank": self.rank_pattern, "alpha": self.alpha_pattern}
        ranks = {
            # as PEFT matches them
            field: next((own for key, own in pattern.items() if re.match(rf"(.*\.)?({key})$", name)), None)
            for field, pattern in patterns.items()
        }
        return self.model_copy(update={field: own for field, own in ranks.items() if own is not None})
