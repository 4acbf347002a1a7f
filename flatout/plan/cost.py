"""What a sample costs in FLOPs: linear layers, attention and head, from the model's shape."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flatout.plan.shape import ModelShape

# backward of attention makes five matrix products where the forward makes two (Dao 2023, arXiv:2307.08691, section 3.1)
ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True, slots=True)
class CostModel:
    """FLOPs of one training sample of T tokens, n of them label tokens, forward and backward:

        flops = per_token * T + per_pair * pairs(T) + per_window_pair * pairs(T, window) + per_label * n

    `pairs(T)` = T (T + 1) / 2 counts the query-key pairs of causal attention; with a window w each query sees at most
    w keys, so `pairs(T, w)` = pairs(T) - pairs(T - w) for T > w. `useful` is the cost without recomputation, which
    utilization counts; None if nothing is recomputed. Ranks are balanced by these FLOPs.
    """

    per_token: float
    per_pair: float = 0.0
    per_window_pair: float = 0.0
    window: int = 0
    per_label: float = 0.0
    useful: CostModel | None = None

    def flops(self, num_tokens: ArrayLike, num_labels: ArrayLike) -> NDArray[np.float64]:
        """Return the FLOPs per sample, float64; `num_tokens` and `num_labels` are integer arrays of the same shape."""
        tokens = np.asarray(num_tokens, dtype=np.float64)
        pairs = tokens * (tokens + 1.0) / 2.0
        total = self.per_token * tokens + self.per_pair * pairs
        if self.per_window_pair:
            outside = np.maximum(tokens - self.window, 0.0)
            total += self.per_window_pair * (pairs - outside * (outside + 1.0) / 2.0)
        return np.asarray(total + self.per_label * np.asarray(num_labels, dtype=np.float64))


# every token costs the same: for runs whose model is unknown
COST_BY_TOKENS = CostModel(per_token=1.0)


def make_cost(
    shape: ModelShape,
    *,
    method: Literal["lora", "full"],
    lora_rank: int = 16,
    lora_targets: str | Sequence[str] = "all-linear",
    recompute: bool = False,
) -> CostModel:
    """Return the cost model of training this shape.

    With N the matrix entries that a token is multiplied by in the blocks, r-rank adapters of N_lora entries, V x H the
    head, and A = 2 heads (head_dim + value_head_dim) FLOPs per query-key pair and layer:

        LoRA    4 N + 6 N_lora per token, 3.5 A per pair, 4 V H per label token (frozen: forward and input gradient)
        full    6 N            per token, 3.5 A per pair, 6 V H per label token
        recompute (gradient checkpointing) adds one forward of the blocks: 2 N + 2 N_lora and A

    Norms, activations, the embedding lookup and DoRA's column norms are left out (under 1 %); latent attention is
    counted expanded to full heads, as transformers trains it. LoRA applies to linear layers, not to experts.
    """
    matrix = sum(layer.num_active_weights for layer in shape.layers)
    adapter = shape.num_lora_params(lora_rank, target_matcher(lora_targets)) if method == "lora" else 0
    again = 1 if recompute else 0
    trained = 6 if method == "full" else 4
    pair = 2.0 * shape.num_heads * (shape.head_dim + shape.value_head_dim) * (1.0 + ATTENTION_BACKWARD + again)
    useful = None
    if recompute:
        useful = make_cost(shape, method=method, lora_rank=lora_rank, lora_targets=lora_targets)
    return CostModel(
        per_token=float((trained + 2 * again) * matrix + (6 + 2 * again) * adapter),
        per_pair=pair * (shape.num_layers - shape.num_window_layers),
        per_window_pair=pair * shape.num_window_layers,
        window=shape.sliding_window or 0,
        per_label=float(trained * shape.vocab_size * shape.hidden_size),
        useful=useful,
    )


def target_matcher(targets: str | Sequence[str]) -> Callable[[str], bool]:
    """Return a predicate on full module names: `all-linear`, a regex for the full name, or a list of name endings."""
    if targets == "all-linear":
        return lambda name: True
    if isinstance(targets, str):
        pattern = re.compile(targets)
        return lambda name: pattern.fullmatch(name) is not None
    return lambda name: any(name == target or name.endswith(f".{target}") for target in targets)
