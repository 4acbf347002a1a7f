"""Architectures that need special treatment, by model type: one entry in one of two tables."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

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


class LayoutChoice(NamedTuple):
    """How documents share a micro-batch, and why."""

    layout: Literal["packed", "rows"]
    reason: str


def choose_layout(config: Any, wanted: Literal["auto", "packed", "rows"]) -> LayoutChoice:
    """Choose a model's layout from its config; `auto` packs unless packing is known to be inexact.

    The self-test at start-up proves the choice. Raises UsageError if `packed` is wanted and known to be inexact.
    """
    problem = packing_problem(config)
    if wanted == "packed" and problem is not None:
        raise UsageError(
            f"batch.layout: model type {config.model_type} cannot be trained on packed documents: {problem}; set "
            "batch.layout: auto"
        )
    if wanted != "auto":
        return LayoutChoice(wanted, "as configured")
    if problem is not None:
        return LayoutChoice("rows", problem)
    return LayoutChoice("packed", "without padding; the self-test proves that documents do not affect each other")


def packing_problem(config: Any) -> str | None:
    """Return why layers keep a state across packed documents; None if no table names this architecture."""
    kinds = getattr(config, "layer_types", None) or ()
    stateful = sorted({kind for kind in kinds if any(part in kind for part in _STATEFUL_LAYERS)})
    if config.model_type in STATEFUL:
        return "its recurrent or convolution state leaks from one packed document into the next"
    if stateful:
        return f"its {', '.join(stateful)} layers carry state from one packed document into the next"
    return None


def logits_scale(config: Any) -> float:
    """Return the factor from head output to logits (muP variants: Granite, Cohere, MiniCPM3, HyperCLOVA X)."""
    if (field := LOGITS_MULTIPLIERS.get(config.model_type)) is not None:
        return float(getattr(config, field))
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        return 1.0 / float(divisor)
    if (factor := getattr(config, "logit_scale", None)) is not None:
        return float(factor)
    return 1.0
