"""The model sizes that planning needs. `flatout.trainer.model_shape` reads them from a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flatout.config.schema import LoraConfig, Recompute
from flatout.errors import Fix, UsageError

# bytes for each number of a picture: in fp32, of the micro-batch and of those prefetched
_VALUE_BYTES = 3 * 4
# the same for what a block of a tower holds whose layers are not known: 28 elements in 16 bit of each of a patch's D
# channels (D = 1,152, patches of 2 x 3 x 16 x 16), as one that rotates queries and keys in fp32 may have
_UNKNOWN_BYTES = 48


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer inside a decoder layer, or a matrix of its fused experts."""

    name: str
    """Its name relative to the decoder layer."""
    num_in: int
    num_out: int
    num_experts: int = 1
    """How many experts have such a matrix."""
    num_used: int = 1
    """How many of them a token uses."""

    @property
    def num_weights(self) -> int:
        return self.num_in * self.num_out


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One decoder layer."""

    linears: tuple[Linear, ...]
    """All plain linear layers."""
    num_active_weights: int
    """Matrix entries that one token is multiplied by, those of its experts and the router included."""
    mixer_elements: int
    """What one token saves for the backward pass in attention (queries, keys, values, output) or a recurrent mixer."""
    mlp_elements: int
    """What it saves elsewhere: the outputs of the gate and up projections, their product, and the same for each of the
    token's experts with its input and output."""
    pair_width: int
    """Heads x (width of a query + width of a value), which a query-key pair is multiplied by; 0 without softmax
    attention."""
    has_window: bool
    """Whether it attends to `sliding_window` tokens."""
    unsaved_elements: int = 0
    """Those of `mlp_elements` that grouped products do not save."""
    experts: tuple[Linear, ...] = ()
    """The matrices of fused experts that can have adapters."""
    key_width: int = 0
    """The width of a token's keys and values."""


@dataclass(frozen=True, slots=True)
class TowerShape:
    """The part of a model that makes tokens of pictures."""

    patch_values: int
    """Numbers of a patch."""
    per_patch: int
    """Matrix entries of the layers that a patch is multiplied by."""
    per_token: int
    """Matrix entries that a token is multiplied by in what projects it."""
    pair_width: int
    """Heads x (query + value) of all layers without windows."""
    width: int
    """Channels of a patch."""
    mlp_width: int
    num_layers: int
    rotates: bool
    """Whether queries and keys turn in fp32."""
    feature_width: int
    """Elements of a token's features."""
    projected_width: int
    """Elements that the projection of a token reads and writes."""
    image_patches: int | None = None
    """Pictures are cut into images of at most so many patches, which see each other; None: they are not cut."""
    num_trained: int = 0
    """Parameters of the parts that are not frozen."""
    layer_passes: int = 1
    """Time of the layers in a step, in forward passes."""
    token_passes: int = 1
    """The same of what projects patches."""

    def flops(self, num_values: ArrayLike, num_tokens: ArrayLike) -> NDArray[np.float64]:
        """Return the FLOPs of each picture's passes, forward and backward, of so many numbers and tokens."""
        patches = np.asarray(num_values, np.float64) / self.patch_values
        pairs = self.pair_width * patches * np.minimum(patches, self.image_patches or np.inf)
        if self.layer_passes > 1:  # attention has no weights: gradients of both factors, for adapters too
            pairs = 3 * pairs
        of_tokens = self.token_passes * self.per_token * np.asarray(num_tokens)
        return np.asarray(2.0 * (self.layer_passes * self.per_patch * patches + pairs + of_tokens))

    def pass_bytes(self, num_patches: float, num_tokens: float, compute: int, hidden: int) -> tuple[float, float]:
        """Return the bytes that stay until the decoder's backward pass ends, and what a pass holds beside them.

        Elements have `compute` bytes, those of residuals and norms `hidden`. Features stay, and of trained layers the
        inputs and the last output: the rest is computed again. A forward pass holds embeddings, last states, residual
        and norm, and the larger of attention (query, key, value, output; copies in fp32 to rotate) and MLP; a layer's
        backward pass what it computed again, and gradients of the larger of the two.
        """
        saved, wider = num_tokens * self.feature_width, hidden - compute
        if self.token_passes > 1:
            saved += num_tokens * self.projected_width
        if self.layer_passes == 1:
            attention = (15 if self.rotates else 5) * self.width
            held = (4 * self.width + max(attention, 2 * self.mlp_width)) * compute + 3 * self.width * wider
            return saved * compute, num_patches * held
        held = max(22 * self.width if self.rotates else 0, 10 * self.width + 3 * self.mlp_width)
        inputs = num_patches * (self.num_layers + 1) * self.width
        return saved * compute + inputs * hidden, num_patches * (held * compute + 5 * self.width * wider)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the text part of a decoder-only model."""

    model_type: str
    num_params: int
    """A tied embedding counts once."""
    num_tower_params: int
    """What is loaded but not used for text, such as a vision tower."""
    hidden_size: int
    vocab_size: int
    num_heads: int
    head_dim: int
    """The width of a query or key; both are the largest over the layers, 0 if none has softmax attention."""
    tied: bool
    sliding_window: int | None
    has_experts: bool
    max_positions: int | None
    """The longest sequence that the model was made for."""
    has_position_table: bool
    """Whether it has no positions beyond that."""
    layers_path: str
    layers: tuple[LayerShape, ...]
    groups_experts: bool = False
    """Whether flatout's grouped products can compute the experts."""
    embedding: str = ""
    head: str = ""
    """Full names."""
    modules: tuple[tuple[str, int], ...] = ()
    """All modules by full name, with the number of parameters that each holds itself."""
    outer_linears: tuple[Linear, ...] = ()
    """By full name, those that text passes through outside layers and head."""
    num_logits: int | None = None
    """The tokens that a model predicts if it cuts the padding of `vocab_size` off its logits; None: all."""
    scores: bool = False
    """Whether it has a few scores of a text in place of logits over the vocabulary."""
    picture_values: float = 0.0
    """The most that a sample of the data has of its pictures' numbers for each of its tokens."""
    picture_tokens: float = 0.0
    """The largest share of a sample's tokens that are its pictures'."""
    tower: TowerShape | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def picture_bytes(self, num_tokens: int, compute: int, hidden: int, pass_bytes: int) -> tuple[int, int]:
        """Return a micro-batch's bytes for pictures: activations, and what a pass holds beside them.

        The tower's pass first fills the `pass_bytes` of the decoder's.
        """
        values, tower = num_tokens * self.picture_values, self.tower
        if tower is None:
            return 0, int(values * (_VALUE_BYTES + _UNKNOWN_BYTES))
        patches, tokens = values / tower.patch_values, num_tokens * self.picture_tokens
        saved, held = tower.pass_bytes(patches, tokens, compute, hidden)
        return int(saved), int(values * _VALUE_BYTES + max(0, held - pass_bytes))

    @property
    def num_head_rows(self) -> int:
        """The rows of the matrix that label tokens are multiplied by."""
        return 0 if self.scores else self.vocab_size

    def num_recomputed(self, recompute: Recompute) -> int:
        """Return how many decoder layers compute everything again at a recompute level."""
        if isinstance(recompute, int):
            return min(recompute, self.num_layers)
        return self.num_layers if recompute in ("full", "offload") else 0

    def targeted(self, lora: LoraConfig, *, of_experts: bool = False) -> dict[str, Linear]:
        """Return the linear layers that LoRA targets, or the experts' matrices, by full name."""
        linears = {
            f"{self.layers_path}.{index}.{linear.name}": linear
            for index, layer in enumerate(self.layers)
            for linear in (layer.experts if of_experts else layer.linears)
        }
        if not of_experts:
            linears |= {linear.name: linear for linear in self.outer_linears}
        return {
            name: linear
            for name, linear in linears.items()
            if any(lora.selects(target, name, of_experts=of_experts) for target in lora.listed_targets)
            and lora.has_layer(name, self.layers_path)
            and not lora.saves(name)
        }

    def num_lora_params(self, lora: LoraConfig, *, used: bool = False, of_experts: bool = False) -> int:
        """Count the parameters of LoRA's A (rank, in) and B (out, rank).

        With `used` only those that one token uses, with `of_experts` only those of experts.
        """
        targets = self.targeted(lora, of_experts=True) | ({} if of_experts else self.targeted(lora))
        return sum(
            lora.of_layer(name).rank
            * (linear.num_in + linear.num_out)
            * (linear.num_used if used else linear.num_experts)
            for name, linear in targets.items()
        )

    def num_saved_params(self, lora: LoraConfig) -> int:
        """Count the parameters of `lora.modules_to_save`."""
        ends = (self.embedding, self.head)
        saved = {name: count for name, count in self.modules if lora.saves(name)}
        if self.tied and lora.keep_tied and saved.keys() & set(ends):
            saved = {name: count for name, count in saved.items() if name not in ends}
            return self.vocab_size * self.hidden_size + sum(saved.values())
        return sum(saved.values())

    def trains_head(self, lora: LoraConfig) -> bool:
        """Whether `lora.modules_to_save` has the head, or the embedding that it is tied to."""
        return lora.saves(self.head) or (self.tied and lora.keep_tied and lora.saves(self.embedding))

    @property
    def num_expert_weights(self) -> int:
        """The parameters of all fused experts."""
        return sum(matrix.num_experts * matrix.num_weights for layer in self.layers for matrix in layer.experts)

    def on_one_of(self, num_ranks: int) -> ModelShape:
        """Return the shape of what one of `num_ranks` ranks that share the experts holds, per token of its own.

        It has 1 / num_ranks of the experts. Their rows have room for all slots of all ranks, as any expert may be
        chosen by every token, and the ranks' tokens are gathered before the experts.
        """
        if num_ranks == 1:
            return self
        layers = []
        for layer in self.layers:
            used = sum(matrix.num_used * matrix.num_weights for matrix in layer.experts) // self.hidden_size
            used += max((2 * matrix.num_used * self.hidden_size for matrix in layer.experts), default=0)
            gathered = num_ranks * self.hidden_size if layer.experts else 0
            experts = (replace(matrix, num_experts=matrix.num_experts // num_ranks) for matrix in layer.experts)
            layers.append(
                replace(
                    layer,
                    mlp_elements=layer.mlp_elements + (num_ranks - 1) * used + gathered,
                    unsaved_elements=num_ranks * layer.unsaved_elements,
                    experts=tuple(experts),
                )
            )
        num_away = self.num_expert_weights // num_ranks * (num_ranks - 1)
        return replace(self, num_params=self.num_params - num_away, layers=tuple(layers))

    @property
    def without_experts(self) -> ModelShape:
        """The shape without fused experts, for sizes of weights alone."""
        layers = tuple(replace(layer, experts=()) for layer in self.layers)
        return replace(self, num_params=self.num_params - self.num_expert_weights, layers=layers)

    def with_scores(self, num_scores: int) -> ModelShape:
        """Return the shape of a model that scores with so many scores of a text."""
        scored = dict(self.modules)
        before, scored["score"] = scored["score"], num_scores * self.hidden_size
        return replace(self, num_params=self.num_params + scored["score"] - before, modules=tuple(scored.items()))

    def with_rows(self, num_rows: int) -> ModelShape:
        """Return the shape with at least so many rows in embedding and head."""
        more = max(0, num_rows - self.vocab_size)
        num_ends = 1 if self.tied else 2
        ends = (self.embedding, self.head)
        return replace(
            self,
            vocab_size=self.vocab_size + more,
            num_params=self.num_params + more * self.hidden_size * num_ends,
            modules=tuple((name, num + (more * self.hidden_size if name in ends else 0)) for name, num in self.modules),
        )


def check_expert_ranks(shape: ModelShape, expert_ranks: int, num_ranks: int) -> None:
    """Raise UsageError unless groups of `expert_ranks` (experts.parallel) can share each layer's experts."""
    counts = {matrices.num_experts for layer in shape.layers for matrices in layer.experts}
    if expert_ranks == 1:
        return
    if num_ranks % expert_ranks:
        why = f"it must divide the number of ranks, which is {num_ranks} (gpus, or --ranks of flatout plan)"
    elif not shape.groups_experts or not counts:
        obstacle = "has no experts" if not shape.has_experts else "computes its experts by its own code"
        why = f"model type {shape.model_type} {obstacle}"
    elif odd := [count for count in counts if count % expert_ranks]:
        why = f"it must divide the number of experts; model type {shape.model_type} has {odd[0]}"
    else:
        return
    raise UsageError(f"experts.parallel: {expert_ranks}: {why}", [Fix({"experts.parallel": 1})])


def check_positions(shape: ModelShape, longest_sample: int, *, origin: str) -> dict[str, Any]:
    """Return event facts about samples longer than a model's maximum position; empty if there are none.

    Rotary positions extend beyond it, but the model was not trained there. Raises UsageError if positions are a table.
    """
    limit = shape.max_positions
    if limit is None or longest_sample <= limit:
        return {}
    if shape.has_position_table:
        raise UsageError(
            f"{origin}: the model has {limit:,} positions, but the longest sample has {longest_sample:,} tokens",
            [Fix({"data.max_tokens": limit}, "rebuild the data")],
        )
    what = "samples are longer than the model was trained for: lower data.max_tokens, unless this is intended"
    return {"longest_sample": longest_sample, "max_position_embeddings": limit, "what": what}
