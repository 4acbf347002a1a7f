"""Settings of how state is spread over ranks and how gradients travel."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from flatout.config.section import Section


class ShardingConfig(Section):
    """State cut into one part a rank (strategy: zero1, zero2, zero3, fsdp, hsdp)."""

    reshard_after_forward: Literal["auto"] | bool = "auto"
    """Free a layer's gathered weights after its forward pass and gather them again for the backward pass: less
    memory, more communication. auto: false for zero1 and zero2; true for zero3, fsdp and hsdp, but false for full
    fine-tuning that has the memory."""
    prefetch: int = Field(default=1, ge=0)
    """Layers whose weights are gathered while an earlier one computes; each holds one more layer's weights."""
    offload: bool = False
    """Weights, gradients and optimizer state wait in host memory, where the update is made too."""
    replicas: int | None = Field(default=None, ge=1)
    """hsdp: ranks hold this many copies of the state between them; null: one a node."""


class CommConfig(Section):
    """What ranks send to each other."""

    compress: Literal["none", "bf16"] = "none"
    """bf16: gradients are summed over ranks in bf16, which halves the traffic and rounds the sums."""
