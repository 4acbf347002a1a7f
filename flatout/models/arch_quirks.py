"""Architectures that need special treatment, by model type: one entry in one of two tables."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

from flatout.errors import Fix, UsageError

# a recurrent or convolution state runs on from one packed document into the next
STATEFUL = frozenset({
    "bailing_hybrid", "falcon_mamba", "jamba", "kimi_linear", "mamba",
    "minimax", "qwen3_5", "qwen3_5_moe",
    "recurrent_gemma", "rwkv", "xlstm", "zamba",
})  # fmt: skip


class Hybrid(NamedTuple):
    """A hybrid that can be packed: the packages whose kernels keep documents apart, and its convolutions' width.

    `width` is the config's field for it. Without kernels transformers' convolution reads a few tokens back, so packed
    documents are that far apart, with masked tokens between them.
    """

    width: str
    packages: tuple[str, ...] = ()


# the delta rule takes `cu_seq_lens_q`; Mamba-2 takes `seq_idx`, in the convolution too; other recurrences take neither
_DELTA_RULE = Hybrid("linear_conv_kernel_dim", ("fla",))
_DISTRIBUTIONS = {"fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d"}
MAMBA2 = ("mamba_ssm", "causal_conv1d")
PACKED_HYBRIDS = {
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), Hybrid("conv_L_cache")),
    **dict.fromkeys(("olmo_hybrid", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), _DELTA_RULE),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "zamba2"), Hybrid("mamba_d_conv", MAMBA2)),
    **dict.fromkeys(("mamba2", "nemotron_h"), Hybrid("conv_kernel", MAMBA2)),
}
# the config field that logits are multiplied by; most architectures with such a field divide by it
LOGITS_MULTIPLIERS = {"hyperclovax": "logits_scaling"}
_LOGITS_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
_LOGITS_FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_LOGITS_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")

# vision-language models that do not scale their logits, though the config of their text part says so
UNSCALED_LOGITS = frozenset({"aya_vision", "cohere2_vision"})

# decoders that attend in both directions inside a picture: the argument that says which tokens are of one
ATTENDING = {"gemma3_text": "token_type_ids", "gemma4_text": "mm_token_type_ids"}

# fields of a config that limit how far back a token attends
WINDOW_FIELDS = ("sliding_window", "attention_chunk_size", "local_attention", "window_size")

# names of layer kinds in a config's `layer_types` that keep a state; full, sliding and chunked attention do not
_STATEFUL_LAYERS = ("linear", "mamba", "conv", "recurrent", "lightning", "kda", "delta")


class LayoutChoice(NamedTuple):
    """How documents share a micro-batch, and why."""

    layout: Literal["packed", "rows"]
    reason: str


def choose_layout(
    config: Any, setting: Literal["auto", "packed", "rows"], *, has_pictures: bool = False
) -> LayoutChoice:
    """Choose a model's layout from its config; `auto` packs unless packing is known to be inexact.

    The self-test at start-up proves the choice. Raises UsageError if `packed` is wanted and known to be inexact.
    """
    problem = packing_problem(config)
    if has_pictures and picture_kinds(config):
        problem = "it attends in both directions inside a picture"
    if setting == "packed" and problem is not None:
        raise UsageError(
            f"batch.layout: model type {config.model_type} cannot be trained on packed documents: {problem}",
            [Fix({"batch.layout": "auto"})],
        )
    if setting != "auto":
        return LayoutChoice(setting, "as configured")
    if problem is not None:
        return LayoutChoice("rows", problem)
    return LayoutChoice("packed", "without padding; the self-test proves that documents do not affect each other")


def packing_problem(config: Any) -> str | None:
    """Return why layers keep a state across packed documents; None if no table names this architecture, or none does.

    What is installed may keep the documents of a hybrid apart.
    """
    if (hybrid := PACKED_HYBRIDS.get(config.model_type)) is not None:
        missing = [_DISTRIBUTIONS[package] for package in hybrid.packages if find_spec(package) is None]
        return (
            f"its recurrent state leaks between packed documents without {' and '.join(missing)}" if missing else None
        )
    kinds = getattr(config, "layer_types", None) or ()
    stateful = sorted({kind for kind in kinds if is_stateful_kind(kind)})
    if config.model_type in STATEFUL:
        return "its recurrent or convolution state leaks from one packed document into the next"
    if stateful:
        return f"its {', '.join(stateful)} layers carry state from one packed document into the next"
    return None


def picture_kinds(config: Any) -> str | None:
    """Return the argument that tells a text model which tokens are of pictures; None if it is causal there too.

    Inside a picture it then attends in both directions.
    """
    if config.model_type == "gemma4_text" and config.use_bidirectional_attention != "vision":
        return None
    return ATTENDING.get(config.model_type)


def is_stateful_kind(kind: str) -> bool:
    """Whether an entry of a config's `layer_types` names layers that keep a state."""
    return any(part in kind for part in _STATEFUL_LAYERS)


def loops_over_tokens(config: Any) -> bool:
    """Whether transformers may compute this model's recurrence by a Python loop, as it does without kernels for it.

    Kernels are only looked for where a table above names them.
    """
    if (hybrid := PACKED_HYBRIDS.get(config.model_type)) is not None:
        return hybrid is _DELTA_RULE and find_spec("fla") is None
    kinds = getattr(config, "layer_types", None) or ()
    return config.model_type in STATEFUL or any(is_stateful_kind(kind) and kind != "conv" for kind in kinds)


def sharing_problem(config: Any, longest: int) -> str | None:
    """Return why samples of up to `longest` tokens cannot share the rows of a common prefix; None if they can.

    A layer must see of a sample's earlier tokens what it would see of them in one document.
    """
    if problem := whole_document_problem(config):
        return problem
    for name in WINDOW_FIELDS:
        window = getattr(config, name, None)
        if isinstance(window, int) and 0 < window < longest:
            return f"{name} is {window:,}, and samples have up to {longest:,} tokens"
    return f"with {used[0]}, samples must have masks of their own" if (used := random_fields(config)) else None


def random_fields(config: Any) -> list[str]:
    """Return the fields by which training draws random numbers in a pass: dropout, and noise of routers."""
    # a classifier's dropout is not in a causal model
    values = {name: value for name, value in config.to_dict().items() if not name.startswith("classifier")}
    drawn = [name for name in values if re.search("dropout|pdrop|jitter|noise", name)]
    return [name for name in drawn if isinstance(values[name], float) and values[name]]


def whole_document_problem(config: Any) -> str | None:
    """Return why a token needs more of its document than the keys and values before it; None if it does not."""
    if packed_hybrid(config) != (0, ()) or packing_problem(config):
        return "its layers carry a recurrent or convolution state"
    if kinds := sorted(kind for kind in _rope_kinds(config) if kind == "longrope" or "dynamic" in kind):
        return f"rope {kinds[0]} depends on a document's length"
    return None


def _rope_kinds(config: Any) -> set[str]:
    rope = getattr(config, "rope_parameters", None) or {}
    layers = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return {str(layer["rope_type"]) for layer in layers if layer.get("rope_type")}


def packed_hybrid(config: Any) -> tuple[int, tuple[str, ...]]:
    """Return how many masked tokens must follow each packed document of a hybrid, and the packages that pack it.

    No convolution then reads into the next document; the packages' kernels keep a recurrence's documents apart. Other
    models need neither: 0 and ().
    """
    hybrid = PACKED_HYBRIDS.get(config.model_type)
    if hybrid is None:
        return 0, ()
    return int(getattr(config, hybrid.width)) - 1, hybrid.packages


def logits_scale(config: Any) -> float:
    """Return the factor from head output to logits (muP variants: Granite, Cohere, Falcon-H1, HyperCLOVA X)."""
    if (field := LOGITS_MULTIPLIERS.get(config.model_type)) is not None:
        return float(getattr(config, field))
    for field in (*_LOGITS_DIVISORS, *_LOGITS_FACTORS):
        if (value := getattr(config, field, None)) is not None:
            return 1.0 / float(value) if field in _LOGITS_DIVISORS else float(value)
    return 1.0


def logits_cap(config: Any) -> float | None:
    """Return the soft-cap of a model's logits (Gemma 2, Grok, xLSTM); None: they have none."""
    return next((float(cap) for field in _LOGITS_CAPS if (cap := getattr(config, field, None))), None)


def num_logits(config: Any) -> int | None:
    """Return how many of the head's outputs are logits, for a model that cuts padding off (Inkling); None: all."""
    cut = getattr(config, "unpadded_vocab_size", None)
    return cut if cut is not None and cut < config.vocab_size else None
