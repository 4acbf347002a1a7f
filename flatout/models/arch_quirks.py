"""Architectures that need special treatment, by model type: one entry in one of two tables."""

from __future__ import annotations

from typing import Any

from flatout.errors import UsageError

# a recurrent or convolution state runs on from one packed document into the next
STATEFUL = frozenset({
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba",
    "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text",
    "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2",
})  # fmt: skip
# the config field that logits are multiplied by; most architectures with such a field divide by it
LOGITS_MULTIPLIERS = {"hyperclovax": "logits_scaling"}

# names of layer kinds in a config's `layer_types` that keep a state; full, sliding and chunked attention do not
_STATEFUL_LAYERS = ("linear", "mamba", "conv", "recurrent", "lightning", "kda", "delta")


def check_packable(config: Any) -> None:
    """Raise UsageError for architectures whose layers keep a state across packed documents.

    The self-test checks those that no table names.
    """
    kinds = getattr(config, "layer_types", None) or ()
    stateful = sorted({kind for kind in kinds if any(part in kind for part in _STATEFUL_LAYERS)})
    if config.model_type in STATEFUL:
        reason = "its recurrent or convolution state leaks from one packed document into the next"
    elif stateful:
        reason = f"its {', '.join(stateful)} layers carry state from one packed document into the next"
    else:
        return
    raise UsageError(
        f"model type {config.model_type} cannot be trained on packed documents: {reason}; "
        "choose a model with only softmax attention layers"
    )


def logits_scale(config: Any) -> float:
    """Return the factor from head output to logits (muP variants: Granite, Cohere, MiniCPM3, HyperCLOVA X)."""
    if (field := LOGITS_MULTIPLIERS.get(config.model_type)) is not None:
        return float(getattr(config, field))
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        return 1.0 / float(divisor)
    if (factor := getattr(config, "logit_scale", None)) is not None:
        return float(factor)
    return 1.0
