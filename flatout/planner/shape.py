"""The model sizes that planning needs. `flatout.trainer.model_shape` reads them from a model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flatout.errors import UsageError


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer inside a decoder layer: its name relative to that layer, input and output width."""

    name: str
    num_in: int
    num_out: int

    @property
    def num_weights(self) -> int:
        return self.num_in * self.num_out


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One decoder layer.

    `linears` are all plain linear layers, without routed experts' matrices. `num_active_weights` counts the matrix
    entries that one token is multiplied by, including those of its experts and the router. `mixer_elements` counts what
    one token saves for the backward pass in attention (queries, keys, values, output) or a recurrent mixer, and
    `mlp_elements` elsewhere: the outputs of the gate and up projections, their product, and the same for each of the
    token's experts with its input and output; of these, grouped products do not save
    `unsaved_elements`. `pair_width` is heads x (width of a query + width of a value), which a
    query-key pair is multiplied by; 0 without softmax attention. `has_window`: it attends to `sliding_window` tokens.
    """

    linears: tuple[Linear, ...]
    num_active_weights: int
    mixer_elements: int
    mlp_elements: int
    pair_width: int
    has_window: bool
    unsaved_elements: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the text part of a decoder-only model.

    `num_params` counts a tied embedding once, `num_tower_params` what is loaded but not used for text, such as a vision
    tower. `num_heads` and `head_dim`, the width of a query or key, are the largest over the layers, 0 if none has
    softmax attention. `max_positions` is the longest sequence that the model was made for; `has_position_table` means
    that it has no positions beyond that. `groups_experts`: flatout's grouped products can compute the experts.
    """

    model_type: str
    num_params: int
    num_tower_params: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    head_dim: int
    tied: bool
    sliding_window: int | None
    has_experts: bool
    max_positions: int | None
    has_position_table: bool
    layers_path: str
    layers: tuple[LayerShape, ...]
    groups_experts: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def targeted(self, targets: str | Sequence[str], num_layers: int | None = None) -> list[Linear]:
        """Return the linear layers of the first `num_layers` decoder layers (all by default) that LoRA targets.

        Targets are `all-linear`, a regex for the full module name, or a list of name endings.
        """
        linears = {
            f"{self.layers_path}.{index}.{linear.name}": linear
            for index, layer in enumerate(self.layers[:num_layers])
            for linear in layer.linears
        }
        if targets == "all-linear":
            return list(linears.values())
        if isinstance(targets, str):
            return [linear for name, linear in linears.items() if re.fullmatch(targets, name)]
        endings = tuple(f".{target}" for target in targets)
        return [linear for name, linear in linears.items() if f".{name}".endswith(endings)]

    def num_lora_params(self, rank: int, targets: str | Sequence[str]) -> int:
        """Count the parameters of LoRA's A (rank, in) and B (out, rank) on the targeted linear layers."""
        return sum(rank * (linear.num_in + linear.num_out) for linear in self.targeted(targets))


def check_positions(shape: ModelShape, longest_sample: int, *, origin: str) -> dict[str, Any]:
    """Return event facts about samples longer than a model's maximum position; empty if there are none.

    Rotary positions extend beyond it, but the model was not trained there. Raises UsageError if positions are a table.
    """
    limit = shape.max_positions
    if limit is None or longest_sample <= limit:
        return {}
    if shape.has_position_table:
        raise UsageError(
            f"{origin}: the model has {limit:,} positions, but the longest sample has {longest_sample:,} tokens; set "
            f"data.max_tokens: {limit} and rebuild the data"
        )
    what = "samples are longer than the model was trained for: lower data.max_tokens, unless this is intended"
    return {"longest_sample": longest_sample, "max_position_embeddings": limit, "what": what}
