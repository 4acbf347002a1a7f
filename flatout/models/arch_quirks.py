"""Architectures that need special treatment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flatout.errors import UsageError


@dataclass(frozen=True, slots=True)
class ArchQuirks:
    """How an architecture differs from the common case.

    `refused`: why packing cannot be exact. `sinks`: attention has sink logits. `logits_multiplier`: the config field
    that logits are multiplied by; most architectures with such a field divide by it.
    """

    refused: str | None = None
    sinks: bool = False
    logits_multiplier: str | None = None


_STATE = ArchQuirks(refused="its recurrent or convolution state runs on from one packed document into the next")
_SINKS = ArchQuirks(sinks=True)

ARCH_QUIRKS: Mapping[str, ArchQuirks] = {
    **dict.fromkeys(
        (
            "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba",
            "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_text",
            "qwen3_5_moe_text", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2",
        ),
        _STATE,
    ),
    **dict.fromkeys(("flint", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash"), _SINKS),
    "openai_privacy_filter": _SINKS,
    "hyperclovax": ArchQuirks(logits_multiplier="logits_scaling"),
}  # fmt: skip

# names of layer kinds in a config's `layer_types` that keep a state; full, sliding and chunked attention do not
_STATEFUL_LAYERS = ("linear", "mamba", "conv", "recurrent", "lightning", "kda", "delta")


def quirks_of(config: Any) -> ArchQuirks:
    """Return the quirks of a config's model type; none for unknown ones, which the self-test checks.

    Raises UsageError for architectures whose layers keep a state across packed documents.
    """
    family = ARCH_QUIRKS.get(config.model_type, ArchQuirks())
    kinds = getattr(config, "layer_types", None) or ()
    stateful = sorted({kind for kind in kinds if any(part in kind for part in _STATEFUL_LAYERS)})
    refused = family.refused
    if refused is None and stateful:
        refused = f"its {', '.join(stateful)} layers carry a state from one packed document into the next"
    if refused is not None:
        raise UsageError(
            f"model type {config.model_type} cannot be trained on packed documents: {refused}; "
            "choose a model whose layers are all softmax attention"
        )
    return family


def logits_scale(config: Any) -> float:
    """Return the factor from head output to logits (muP variants: Granite, Cohere, MiniCPM3, HyperCLOVA X)."""
    multiplier = ARCH_QUIRKS.get(config.model_type, ArchQuirks()).logits_multiplier
    if multiplier is not None:
        return float(getattr(config, multiplier))
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        return 1.0 / float(divisor)
    if (factor := getattr(config, "logit_scale", None)) is not None:
        return float(factor)
    return 1.0
