"""What a sample costs in FLOPs: linear layers, attention and head, from the model's shape."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flatout.config.schema import Recompute
from flatout.planner.settings import PlanSettings
from flatout.planner.shape import ModelShape

# backward of attention makes five matrix products where the forward makes two (Dao 2023, arXiv:2307.08691, section 3.1)
ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True, slots=True)
class CostModel:
    """FLOPs of one training sample of T tokens, n of them label tokens, forward and backward:

        flops = per_token * T + per_pair * pairs(T) + per_window_pair * pairs(T, window) + per_label * n

    `pairs(T)` = T (T + 1) / 2 counts the query-key pairs of causal attention; with a window w each query sees at most
    w keys, so `pairs(T, w)` = pairs(T) - pairs(T - w) for T > w. `useful` is the cost without recomputation, which
    utilization counts; None if nothing is recomputed. `forward` is that of a pass without gradients; None: unknown.
    Ranks are balanced by these FLOPs.
    """

    per_token: float
    per_pair: float = 0.0
    per_window_pair: float = 0.0
    window: int = 0
    per_label: float = 0.0
    useful: CostModel | None = None
    forward: CostModel | None = None

    def flops(self, num_tokens: ArrayLike, num_label_tokens: ArrayLike) -> NDArray[np.float64]:
        """Return the FLOPs per sample, float64; both counts are integer arrays of the same shape."""
        tokens = np.asarray(num_tokens, dtype=np.float64)
        pairs = tokens * (tokens + 1.0) / 2.0
        total = self.per_token * tokens + self.per_pair * pairs
        if self.per_window_pair:
            outside = np.maximum(tokens - self.window, 0.0)
            total += self.per_window_pair * (pairs - outside * (outside + 1.0) / 2.0)
        return np.asarray(total + self.per_label * np.asarray(num_label_tokens, dtype=np.float64))


# every token costs the same: for runs whose model is unknown
COST_BY_TOKENS = CostModel(per_token=1.0)


def make_cost(settings: PlanSettings, shape: ModelShape, recompute: Recompute = "none") -> CostModel:
    """Return the cost model of training this shape.

    With N the matrix entries that a token is multiplied by in the blocks, r-rank adapters of N_lora entries, V x H the
    head, and A = 2 heads (head_dim + value_head_dim) FLOPs per query-key pair of a layer (0 without softmax attention):

        LoRA    4 N + 6 N_lora per token, 3.5 A per pair, 4 V H per label token (frozen: forward and input gradient)
        full    6 N            per token, 3.5 A per pair, 6 V H per label token
        a head in lora.modules_to_save counts as in full; the weight gradients of other such modules are left out
        recompute (gradient checkpointing) adds one forward of the layers that do: 2 N + 2 N_lora and A
        forward 2 N + 2 N_lora per token, A per pair, 2 V H per label token

    Norms, activations, the embedding lookup and DoRA's column norms are left out (under 1 %); latent attention is
    counted expanded to full heads, as transformers trains it. Of experts, N and N_lora count those of one token.
    """
    is_full = settings.method == "full"
    matrix = sum(layer.num_active_weights for layer in shape.layers)
    adapter = 0 if is_full else shape.num_lora_params(settings.lora, used=True)
    again = shape.num_recomputed(recompute) / shape.num_layers
    trained = 6 if is_full else 4

    def cost(of_matrix: float, of_adapter: float, pair: float, of_head: int) -> CostModel:
        return CostModel(
            per_token=float(of_matrix * matrix + of_adapter * adapter),
            per_pair=pair * sum(layer.pair_width for layer in shape.layers if not layer.has_window),
            per_window_pair=pair * sum(layer.pair_width for layer in shape.layers if layer.has_window),
            window=shape.sliding_window or 0,
            per_label=float(of_head * shape.num_head_rows * shape.hidden_size),
        )

    head = 6 if shape.trains_head(settings.lora) else trained
    step_cost = cost(trained + 2 * again, 6 + 2 * again, 2.0 * (1.0 + ATTENTION_BACKWARD + again), head)
    return replace(step_cost, useful=make_cost(settings, shape) if again else None, forward=cost(2, 2, 2.0, 2))
