"""Settings of the model: its weights, how frozen ones are stored, and its adapters."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from flatout.config.section import PathText, Section, Share


def model_section(value: Any) -> Any:
    """Return the section that a name is short for; any other value unchanged."""
    return {"name": str(value)} if isinstance(value, str | Path) else value


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
    """Dtype of forward and backward; auto: bf16 on GPUs that support it, else fp32. Trained weights are kept in fp32
    (fp64 with fp64), or in bf16 only with `full.weights: bf16`."""
    attention: Literal["auto", "fa4", "fa3", "cudnn", "varlen", "sdpa", "plain"] = "auto"
    """Attention over packed samples: fa4 or fa3 (FlashAttention packages), cudnn (nvidia-cudnn-frontend), varlen
    (torch's CUDA kernel), sdpa (exact, one document at a time), plain (unfused; the reference in tests); auto: the
    first that is available and passes the parity check."""

    experts: Literal["auto", "eager"] = "auto"
    """Routed experts: eager (transformers' own loop over experts; the reference); auto: grouped products, where the
    model has transformers' experts interface."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return model_section(value)


class BaseConfig(Section):
    """The frozen base weights (method: lora)."""

    storage: Literal["model", "fp8", "nf4"] = "model"
    """Storage format: model (model.precision), fp8 (e4m3, one scale per row), nf4 (4-bit, double quantized as in
    bitsandbytes; checkpoints already in this format load unchanged)."""
    compute: Literal["auto", "model", "fp8"] = "auto"
    """Precision of matmuls with these weights, forward and backward: model (model.precision) or fp8; auto: fp8 with
    fp8 storage, which requires it, else model."""

    @model_validator(mode="after")
    def _storage_has_these_products(self) -> Self:
        if self.storage == "model" and self.compute == "fp8":
            raise ValueError("compute fp8 needs storage fp8 or nf4")
        if self.storage == "fp8" and self.compute == "model":
            raise ValueError("storage fp8 supports only fp8 matmuls; set compute: auto, or storage: nf4")
        return self

    @property
    def computes_in_fp8(self) -> bool:
        """Whether the forward pass and the input gradient use fp8 products."""
        return self.compute == "fp8" or (self.compute == "auto" and self.storage == "fp8")


class FullConfig(Section):
    """Full fine-tuning (method: full)."""

    weights: Literal["fp32", "bf16"] = "fp32"
    """fp32 master weights, or bf16 only with stochastic rounding: a third of the memory of masters and copies."""
    compute: Literal["model", "fp8"] = "model"
    """fp8: run all linear layers except the head through torchao's Float8Linear (needs torchao and compile)."""
    update: Literal["step", "backward"] = "step"
    """backward: update each weight as soon as its gradient is ready, so gradients are never all in memory; needs
    one micro-batch per step and no clipping (optim.max_grad_norm: null)."""


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685), fp32 master weights, no bias."""

    rank: int = Field(default=16, ge=1)
    """Rank of the adapter; its memory grows linearly with the rank."""
    alpha: float = Field(default=32.0, gt=0)
    """Scales the adapter's output by alpha / rank (alpha / sqrt(rank) with rslora)."""
    dropout: Share = 0.0
    """Dropout on the adapter's input."""
    targets: str | list[str] = "all-linear"
    """all-linear (every linear layer except the head), modules such as [q_proj, v_proj], or one regex on full names."""
    rslora: bool = False
    """Rank-stabilized scaling (Kalajdzievski 2023, arXiv:2312.03732)."""
    dora: bool = False
    """Weight-decomposed adapters (Liu et al. 2024, arXiv:2402.09353); slower."""
    continue_from: Path | None = None
    """Start from the adapter in this folder (PEFT format) instead of a new one."""

    @model_validator(mode="after")
    def _targets_are_usable(self) -> Self:
        if isinstance(self.targets, str) and self.targets != "all-linear":
            try:
                re.compile(self.targets)
            except re.error as error:
                raise ValueError(f"targets is not a valid regular expression: {error}") from error
        if self.targets == []:
            raise ValueError("targets is empty; name modules or use all-linear")
        return self
