"""An estimate of one GPU's memory from the model's shape, before any GPU is held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flatout.plan.cost import target_matcher
from flatout.plan.shape import ModelShape, num_lora_params, num_params

Precision = Literal["bf16", "fp16", "fp32", "fp64"]
Optimizer = Literal["adamw", "adamw8bit", "sgd"]

_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
# rows of logits that the loss head holds at a time
HEAD_TILE_ROWS = 2048


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes at the peak of one step on one rank, every rank holding all of the model.

    An estimate from shapes, not calibrated by a measured step; allocator waste, the CUDA context (about 0.5 GB) and
    attention that writes its score matrix out come on top.
    """

    weights_bytes: int
    adapter_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    head_bytes: int

    @property
    def total_bytes(self) -> int:
        parts = (self.weights_bytes, self.adapter_bytes, self.gradients_bytes, self.optimizer_bytes)
        return sum(parts) + self.activations_bytes + self.head_bytes


def estimate_memory(
    shape: ModelShape,
    *,
    method: Literal["lora", "full"],
    micro_batch_tokens: int,
    micro_batch_labels: int,
    precision: Precision = "bf16",
    optimizer: Optimizer = "adamw",
    lora_rank: int = 16,
    lora_targets: str | Sequence[str] = "all-linear",
    gradient_checkpointing: bool = False,
) -> MemoryEstimate:
    """Memory of training with micro-batches of this many tokens and label tokens.

    With e bytes an element of the precision and m = max(4, e) of the master weights:

        weights      lora: e a parameter; full: m, and e more for autocast's copies when e < m
        adapter      lora: m + e an adapter parameter
        gradients    m a trained parameter;  optimizer: adamw 2 m, sgd m, adamw8bit 2
        activations  `activation_elements` * e a token and layer, and 4 a head (attention's log-sum);
                     with checkpointing hidden_size * e a token and layer, and one layer in full
        head         min(labels, 2048) rows of logits in e bytes and of their gradient in 4
    """
    element = _ELEMENT_BYTES[precision]
    master = max(4, element)
    copies = element if element < master else 0
    num_base = num_params(shape)
    num_adapter = num_lora_params(shape, lora_rank, target_matcher(lora_targets)) if method == "lora" else 0
    num_trained = num_adapter or num_base
    state = {"adamw": 2 * master, "adamw8bit": 2, "sgd": master}[optimizer]
    layer_bytes = micro_batch_tokens * (activation_elements(shape) * element + 4 * shape.num_heads)
    if gradient_checkpointing:
        activations = shape.num_layers * micro_batch_tokens * shape.hidden_size * element + layer_bytes
    else:
        activations = shape.num_layers * layer_bytes
    return MemoryEstimate(
        weights_bytes=num_base * (element if method == "lora" else master + copies),
        adapter_bytes=num_adapter * (master + copies),
        gradients_bytes=num_trained * master,
        optimizer_bytes=num_trained * state,
        activations_bytes=activations,
        head_bytes=min(micro_batch_labels, HEAD_TILE_ROWS) * shape.vocab_size * (element + 4),
    )


def activation_elements(shape: ModelShape) -> int:
    """Elements a token and layer that autograd keeps for the backward pass of fused operations, averaged over layers.

    Two residuals and two norm outputs; queries, keys, values (queries and keys again where they are normalised) and
    the attention's output; gate, up and their product. Experts keep these for each expert of the token, and their
    input and output besides.
    """
    hidden, query, key = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    value, output = shape.num_kv_heads * shape.value_head_dim, shape.num_heads * shape.value_head_dim
    normed = query + key if shape.family.qk_norm != "none" else 0
    attention = 4 * hidden + query + key + value + normed + output
    inner = 3 if shape.family.gated else 2
    dense = inner * shape.intermediate_size
    experts = shape.experts_per_token * (inner * shape.expert_size + 2 * hidden) + inner * shape.shared_expert_size
    num_moe = len(shape.moe_layers)
    return attention + ((shape.num_layers - num_moe) * dense + num_moe * experts) // shape.num_layers
