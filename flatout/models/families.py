"""What an architecture needs beyond the common road: one row, and only where something differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from flatout.errors import UsageError


@dataclass(frozen=True, slots=True)
class Family:
    """`refused`: why packing cannot be exact. `sinks`: attention has sink logits. `logits_multiplier`: the config
    field that multiplies the logits, where transformers multiplies and others with that field divide."""

    refused: str | None = None
    sinks: bool = False
    logits_multiplier: str | None = None


_STATE = Family(refused="its recurrent or convolution state runs on from one packed document into the next")
_SINKS = Family(sinks=True)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "jamba", "kimi_linear", "lfm2", "lfm2_moe",
                "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_text",
                "qwen3_5_moe_text", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2",
            ),
            _STATE,
        ),
        "gpt_oss": _SINKS,
        "openai_privacy_filter": _SINKS,
        "hyperclovax": Family(logits_multiplier="logits_scaling"),
    }
)  # fmt: skip

# names of layer kinds in a config's `layer_types` that keep a state; full, sliding and chunked attention do not
_STATEFUL_LAYERS = ("linear", "mamba", "conv", "recurrent", "lightning", "kda", "delta")


def family_of(config: Any) -> Family:
    """The row of a transformers config's model type; the common row for unknown ones (the self-test judges them).

    Raises UsageError for architectures whose layers keep a state across packed documents.
    """
    family = FAMILIES.get(config.model_type, Family())
    refused = family.refused
    stateful = {
        kind for kind in getattr(config, "layer_types", None) or () if any(part in kind for part in _STATEFUL_LAYERS)
    }
    if refused is None and stateful:
        refused = f"its {', '.join(sorted(stateful))} layers carry a state from one packed document into the next"
    if refused is not None:
        raise UsageError(
            f"model type {config.model_type} cannot be trained on packed documents: {refused}; "
            "choose a model whose layers are all softmax attention"
        )
    return family


def logits_scale(config: Any) -> float:
    """The factor between the head's product and the logits (muP variants: Granite, Cohere, MiniCPM3, HyperCLOVA X)."""
    multiplier = FAMILIES.get(config.model_type, Family()).logits_multiplier
    if multiplier is not None:
        return float(getattr(config, multiplier))
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        return 1.0 / float(divisor)
    if (factor := getattr(config, "logit_scale", None)) is not None:
        return float(factor)
    return 1.0
