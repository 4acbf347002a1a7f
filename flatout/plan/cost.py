"""What a sample costs in FLOPs and in time: linear layers, attention and head, from the model's shape."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flatout.plan.shape import ModelShape, num_active_matrix_params, num_lora_params

# backward of attention makes five matrix products where the forward makes two (Dao 2023, arXiv:2307.08691, section 3.1)
ATTENTION_BACKWARD = 2.5
# seconds of an attention FLOP over those of a matrix product's. Measured on an H200 (Qwen3-8B, LoRA, chat lengths of 32
# to 2,048 tokens, 16.7 k tokens a step, forward and backward together): attention 260 TFLOP/s with FlashAttention-4 or
# cuDNN (150 with FlashAttention-2), bf16 products 690, fp8 products with their quantising 1,000. A precision that was
# not measured counts as 16 bit.
ATTENTION_SLOWDOWN_16BIT = 2.6
ATTENTION_SLOWDOWN_FP8 = 4.0


@dataclass(frozen=True, slots=True)
class CostModel:
    """FLOPs of one training sample of T tokens, n of them label tokens, forward and backward:

        flops = per_token * T + per_pair * pairs(T) + per_window_pair * pairs(T, window) + per_label * n

    `pairs(T)` = T (T + 1) / 2 counts the query-key pairs of causal attention; with a window w each query sees at most
    w keys, so `pairs(T, w)` = pairs(T) - pairs(T - w) for T > w. `useful` is the same training without anything
    computed twice: what utilisation counts (None: nothing is). `time` counts pairs `attention_slowdown` times: what
    ranks get equal shares of.
    """

    per_token: float
    per_pair: float = 0.0
    per_window_pair: float = 0.0
    window: int = 0
    per_label: float = 0.0
    useful: CostModel | None = None
    attention_slowdown: float = 1.0

    def flops(self, num_tokens: ArrayLike, num_labels: ArrayLike) -> NDArray[np.float64]:
        """FLOPs per sample, float64 of the inputs' shape; `num_tokens` and `num_labels` are integers of equal shape."""
        return self._sum(num_tokens, num_labels, 1.0)

    def time(self, num_tokens: ArrayLike, num_labels: ArrayLike) -> NDArray[np.float64]:
        """What `flops` gives, attention's FLOPs `attention_slowdown` times: proportional to seconds on a GPU."""
        return self._sum(num_tokens, num_labels, self.attention_slowdown)

    def _sum(self, num_tokens: ArrayLike, num_labels: ArrayLike, pair_weight: float) -> NDArray[np.float64]:
        tokens = np.asarray(num_tokens, dtype=np.float64)
        pairs = tokens * (tokens + 1.0) / 2.0
        total = self.per_token * tokens + pair_weight * self.per_pair * pairs
        if self.per_window_pair:
            outside = np.maximum(tokens - self.window, 0.0)
            total += pair_weight * self.per_window_pair * (pairs - outside * (outside + 1.0) / 2.0)
        return np.asarray(total + self.per_label * np.asarray(num_labels, dtype=np.float64))


# every token costs the same: for runs whose model is not known
COST_BY_TOKENS = CostModel(per_token=1.0)


def make_cost(
    shape: ModelShape,
    *,
    method: Literal["lora", "full"],
    lora_rank: int = 16,
    lora_targets: str | Sequence[str] = "all-linear",
    recompute: bool = False,
    fp8: bool = False,
) -> CostModel:
    """The cost model of training this shape.

    With N the matrix entries a token meets in the blocks, r-rank adapters of N_lora entries, V x H the head and
    A = 2 heads (head_dim + value_head_dim) FLOPs a query-key pair and layer:

        LoRA    4 N + 6 N_lora a token, 3.5 A a pair, 4 V H a label token (frozen: forward and input gradient only)
        full    6 N            a token, 3.5 A a pair, 6 V H a label token
        recompute (gradient checkpointing) adds one forward of the blocks: 2 N + 2 N_lora and A

    Norms, activations, the embedding lookup and DoRA's column norms are left out (under 1 %); latent attention is
    counted expanded to full heads, as transformers trains it. LoRA reaches linear layers, not experts. `fp8` says that
    the blocks' products run in float8, beside which attention is slower still.
    """
    matrix = num_active_matrix_params(shape)
    adapter = num_lora_params(shape, lora_rank, target_matcher(lora_targets)) if method == "lora" else 0
    again = 1 if recompute else 0
    trained = 6 if method == "full" else 4
    pair = 2.0 * shape.num_heads * (shape.head_dim + shape.value_head_dim) * (1.0 + ATTENTION_BACKWARD + again)
    useful = None
    if recompute:
        useful = make_cost(shape, method=method, lora_rank=lora_rank, lora_targets=lora_targets, fp8=fp8)
    return CostModel(
        per_token=float((trained + 2 * again) * matrix + (6 + 2 * again) * adapter),
        per_pair=pair * (shape.num_layers - shape.num_window_layers),
        per_window_pair=pair * shape.num_window_layers,
        window=shape.sliding_window or 0,
        per_label=float(trained * shape.vocab_size * shape.hidden_size),
        useful=useful,
        attention_slowdown=ATTENTION_SLOWDOWN_FP8 if fp8 else ATTENTION_SLOWDOWN_16BIT,
    )


def target_matcher(targets: str | Sequence[str]) -> Callable[[str], bool]:
    """Whether a full module name is a LoRA target: all-linear, one regex over full names, or names that end it."""
    if targets == "all-linear":
        return lambda name: True
    if isinstance(targets, str):
        pattern = re.compile(targets)
        return lambda name: pattern.fullmatch(name) is not None
    return lambda name: any(name == target or name.endswith(f".{target}") for target in targets)
