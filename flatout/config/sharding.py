"""Settings for sharding state over ranks and for communication."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from flatout.config.section import Section


class ShardingConfig(Section):
    """State sharded over ranks (strategy: zero1, zero2, zero3, fsdp, hsdp)."""

    reshard_after_forward: Literal["auto"] | bool = "auto"
    """Free a layer's gathered weights after its forward pass and gather them again for the backward pass: less memory,
    more communication. auto: false for zero1 and zero2; true for zero3, fsdp and hsdp, but false for full fine-tuning
    if memory allows."""
    prefetch: int = Field(default=1, ge=0)
    """Layers to gather ahead while an earlier one computes; each takes the memory of one layer's weights."""
    offload: bool = False
    """Keep weights, gradients and optimizer state in host memory, and update there."""
    replicas: int | None = Field(default=None, ge=1)
    """hsdp: number of copies of the state over all ranks; null: one per node."""


class CommConfig(Section):
    """Communication between ranks."""

    compress: Literal["none", "bf16"] = "none"
    """bf16: sum gradients over ranks in bf16, which halves the traffic and rounds the sums."""
