"""One GPU's memory at the peak of a step, from the model's shape and the settings, before any GPU is held."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from flatout.config.schema import Config, Recompute
from flatout.plan.cost import target_matcher
from flatout.plan.shape import Linear, ModelShape, num_lora_params, num_params
from flatout.plan.spread import ALONE, Spread

Precision = Literal["bf16", "fp16", "fp32", "fp64"]

_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}

# What arithmetic does not give, fitted to peaks measured on one H200 (torch 2.11, LoRA rank 16, bf16, 32 chat-like
# samples in one micro-batch; predicted beside measured in benchmarks/memory_points.py):
#   Qwen3-8B compiled 115.7 to 116.8 GiB at 21.0 k to 21.3 k tokens; memory budget 0.5: 69.2, 0.25: 46.2 GiB
#   at 17.4 k tokens bf16 97.9, fp8 91.4, NF4 with fp8 products 88.3 GiB; full with bf16 weights and 8-bit moments
#   115.1 at 16.8 k; Qwen3-1.7B full at 20.8 k tokens: fp32 masters 67.5, bf16 weights 58.5, fp8 products 53.7 GiB
#   Qwen3-0.6B compiled 26.4 GiB at 19.5 k and 28.3 GiB at 21.2 k tokens; eager 34.7 GiB at 19.5 k
# kept by layers that run eagerly, of what compiled ones keep (norms and rotations in fp32, unfused products)
EAGER_SHARE = 1.37
# kept by `partial`, of what lies beyond the layers' inputs
PARTIAL_SHARE = 0.47
# gradients of one layer that exist beside its activations, of those activations
BACKWARD_SHARE = 0.75
# bytes a token and hidden element around the last norm, which runs eagerly: fp32 input and output, 16-bit output
LAST_NORM_BYTES = 10
# bytes a parameter: 8-bit moments with a scale each 256, and 4-bit weights with two levels of scales
ADAM_8BIT_BYTES = 2.03
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
# layer inputs on the GPU while they are copied to the host or back
OFFLOAD_INPUTS = 3
# cuBLAS workspaces, batch tensors
CONSTANT_BYTES = 64 << 20


def head_tile_rows(recompute: Recompute) -> int:
    """Rows of logits that the loss head holds at a time: enough for full speed, or few where memory is short."""
    return {"layers": 512, "offload": 128}.get(recompute, 2048)


@dataclass(frozen=True, slots=True)
class MicroBatchSize:
    """What one forward pass holds."""

    num_tokens: int
    num_labels: int
    num_documents: int


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes allocated at the peak of one step on one rank.

    `activations_bytes` wait for the backward pass; `working_bytes` is the larger of what the head and what one layer's
    backward pass need for themselves. `in_turn`: gradients come only while activations go, so the larger of both
    counts. The CUDA context and the allocator's waste come on top.
    """

    weights_bytes: int
    adapter_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    working_bytes: int
    in_turn: bool = False

    @property
    def state_bytes(self) -> int:
        return self.weights_bytes + self.adapter_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        never_together = min(self.gradients_bytes, self.activations_bytes) if self.in_turn else 0
        return self.state_bytes + self.activations_bytes + self.working_bytes - never_together


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """The memory of a run as a function of its micro-batches.

    With e bytes an element of the precision (s of the hidden states: m under full's autocast), m = max(4, e) of master
    weights, fat = `activation_elements` * e + 4 a head (attention's log-sum) bytes a token and layer, D the hidden size
    and L the number of layers:

        weights      lora: e a parameter, or fp8 and nf4 for the blocks' linear layers (with `turned_weights` one byte
                     more for those that LoRA joins), without an untied embedding under offload; full: m, and e more
                     for autocast's copies when e < m (full.weights bf16: 2 and no copies)
        adapter      m + e an adapter parameter
        gradients    as wide as the trained weights; one tensor's only with full.update backward. Full fine-tuning makes
                     them while activations go, so in a step of one micro-batch only the larger of both counts
        optimizer    adamw 2 m, sgd m, adamw8bit 2.03 bytes a trained parameter
        activations  none: L fat a token; lean: the norms' outputs and the MLP's product less; partial: the inputs
                     L D s and 0.47 of the rest; layers: L D s;
                     offload: 3 D s; and 10 D a token around the last norm
        working      the head: `head_tile_rows` of logits and their gradient, the label rows and their gradient; or
                     the backward pass of one layer: 0.75 fat a token, what is computed again of it, and one weight
                     group unpacked (nf4) or transposed (fp8, unless it is kept so); whichever is larger

    State that `spread` cuts into n parts counts 1/n, or nothing where it waits on the host (`sharding.offload`). On top
    come what is whole for a while: gathered weights, of all layers or of those in flight, and of the embedding and
    head; gradients of two layers before they are summed, or all of them (zero1), which wait for activations to go as
    above. DeepSpeed's stages 1 and 3 keep their gradients' memory from step to step, stage 3 also buffers. Frozen
    weights, quantised or not, are cut where a layer's are freed after its pass, and whole where they would never be
    freed.

    Attention that writes its score matrix out (model.attention: plain) is not counted.
    """

    config: Config
    shape: ModelShape
    precision: Precision
    compiled: bool
    spread: Spread = ALONE
    turned_weights: bool = False

    def estimate(self, size: MicroBatchSize, recompute: Recompute, *, accumulates: bool = True) -> MemoryEstimate:
        """The peak with micro-batches of this size, of which a step has several when it `accumulates`."""
        num_base, num_adapter = num_params(self.shape), self._num_adapter_params
        is_lora = self.config.method == "lora"
        num_trained = num_adapter if is_lora else num_base
        moment = max(4, self._element)
        optimizer = {"adamw": 2.0 * moment, "adamw8bit": ADAM_8BIT_BYTES, "sgd": moment}
        one_at_a_time = self.config.full.update == "backward"
        num_gradients = self._num_largest_tensor if one_at_a_time else num_trained
        whole = MemoryEstimate(
            weights_bytes=self._frozen_bytes(num_base) - self._embedding_on_host_bytes(recompute)
            if is_lora
            else num_base * (self._trained_bytes + self._copies),
            adapter_bytes=num_adapter * (self._trained_bytes + self._copies),
            gradients_bytes=num_gradients * self._trained_bytes,
            optimizer_bytes=int(num_trained * optimizer[self.config.optim.name]),
            activations_bytes=self._kept_bytes(size, recompute),
            working_bytes=CONSTANT_BYTES
            + max(self._head_bytes(size, recompute), self._backward_bytes(size, recompute)),
            in_turn=not (is_lora or accumulates or self.spread.keeps_gradients),
        )
        return self._cut(whole) if self.spread.lockstep else whole

    def _cut(self, whole: MemoryEstimate) -> MemoryEstimate:
        """The same with state cut into parts, and what is gathered of it."""
        is_full = self.config.method == "full"
        part = 0.0 if self.spread.offload else 1 / self.spread.num_shards
        num_root = self.shape.vocab_size * self.shape.hidden_size * (1 if self.shape.tied else 2)
        num_in_flight = 2 + self.config.sharding.prefetch
        share = min(1.0, num_in_flight / self.shape.num_layers) if self.spread.frees_weights else 1.0
        num_blocks = num_params(self.shape) - num_root
        root = num_root * self._trained_bytes
        if is_full:
            weights = (root + num_blocks * self._trained_bytes) * part + num_blocks * self._element * share + root
        else:
            # frozen weights that are not freed stay whole
            blocks = self._frozen_bytes(num_params(self.shape)) - num_root * self._element
            weights = whole.weights_bytes - (blocks * (1 - part - share) if self.spread.frees_weights else 0)
        adapter = self._num_adapter_params * self._trained_bytes
        # summed in the trained weights' width, before which two layers' gradients wait in their own
        two_layers = (num_blocks if is_full else self._num_adapter_params) * 2 / self.shape.num_layers
        unsummed = two_layers * (self._element + self._trained_bytes) + (root if is_full else 0)
        late = self.spread.sums_late
        # DeepSpeed sums late ones where they are
        held = late + (0 if late and self.spread.keeps_gradients else part)
        return replace(
            whole,
            weights_bytes=int(weights),
            adapter_bytes=int(adapter * (part + share)),
            gradients_bytes=int(whole.gradients_bytes * held + (0 if late else unsummed)),
            optimizer_bytes=int(whole.optimizer_bytes * part),
            working_bytes=whole.working_bytes + self.spread.buffers_bytes,
        )

    def inputs_bytes(self, num_tokens: int) -> int:
        """All layers' inputs: what `layers` keeps, and what `offload` holds on the host."""
        return self.shape.num_layers * num_tokens * self.shape.hidden_size * self._stream_bytes

    @property
    def turnable_bytes(self) -> int:
        """A second, turned copy of all float8 weights that LoRA layers multiply joined; 0 where there are none."""
        if self.config.method == "full" or self.config.base.storage != "fp8" or not self._joins:
            return 0
        return sum(
            linear.num_in * linear.num_out
            for layer in range(self.shape.num_layers)
            for linear in self.shape.layer_linears(layer)
            if self._is_target(layer, linear)
        )

    @property
    def _joins(self) -> bool:
        """Whether LoRA layers of one input run as one product: `flatout.models.joined` says which do."""
        return not (self.spread.lockstep or self.config.lora.dropout or self.config.lora.dora)

    def _is_target(self, layer: int, linear: Linear) -> bool:
        name = f"{self.shape.family.layers_path}.{layer}.{linear.name}"
        return target_matcher(self.config.lora.targets)(name)

    @property
    def _element(self) -> int:
        return _ELEMENT_BYTES[self.precision]

    @property
    def _stream_bytes(self) -> int:
        """Bytes an element of the hidden states between layers: as wide as the embeddings' weights."""
        return self._element + (self._trained_bytes - self._element if self.config.method == "full" else 0)

    @property
    def _trained_bytes(self) -> int:
        """Bytes a trained weight, which its gradient has too."""
        bf16_alone = self.config.method == "full" and self.config.full.weights == "bf16"
        return self._element if bf16_alone else max(4, self._element)

    @property
    def _copies(self) -> int:
        """Bytes of the copy that computes, beside a wider trained weight."""
        return self._element if self._element < self._trained_bytes else 0

    @property
    def _num_adapter_params(self) -> int:
        if self.config.method == "full":
            return 0
        return num_lora_params(self.shape, self.config.lora.rank, target_matcher(self.config.lora.targets))

    @property
    def _num_largest_tensor(self) -> int:
        shape = self.shape
        return max(shape.vocab_size * shape.hidden_size, *(linear.num_params for linear in _linears(shape)))

    @property
    def _block_linears(self) -> list[Linear]:
        return [linear for layer in range(self.shape.num_layers) for linear in self.shape.layer_linears(layer)]

    def _frozen_bytes(self, num_base: int) -> int:
        if self.config.base.storage == "model":
            return num_base * self._element
        num_linear = sum(linear.num_in * linear.num_out for linear in self._block_linears)
        turned = self.turnable_bytes if self.turned_weights else 0
        return (num_base - num_linear) * self._element + self._quantised_bytes + turned

    @property
    def _quantised_bytes(self) -> int:
        """Bytes of the blocks' linear layers where they are stored quantised; 0 where not."""
        storage, linears = self.config.base.storage, self._block_linears
        num_linear = sum(linear.num_in * linear.num_out for linear in linears)
        by_storage = {"fp8": num_linear + 4 * sum(linear.num_out for linear in linears), "nf4": num_linear * NF4_BYTES}
        return int(by_storage.get(storage, 0))

    def _embedding_on_host_bytes(self, recompute: Recompute) -> int:
        # a tied one is the head as well, and a scaled one (Gemma's, always tied) is no plain lookup
        moves = recompute == "offload" and not self.shape.tied
        return self.shape.vocab_size * self.shape.hidden_size * self._element if moves else 0

    def _layer_bytes(self, num_tokens: int) -> float:
        """What one layer keeps for its backward pass when nothing is computed again."""
        elements = activation_elements(self.shape) + self._adapter_elements
        wider = 2 * self.shape.hidden_size * (self._stream_bytes - self._element)
        kept = num_tokens * (elements * self._element + wider + 4 * self.shape.num_heads)
        return kept if self.compiled else kept * EAGER_SHARE

    @property
    def _lean_elements(self) -> int:
        """Elements a token and layer that `lean` computes again: both norms' outputs and the MLP's product."""
        return self.shape.intermediate_size + 2 * self.shape.hidden_size

    @property
    def _adapter_elements(self) -> int:
        """Elements a token that dropout (each target's own input) and DoRA (both outputs of a target) keep more."""
        lora = self.config.lora
        if self.config.method == "full" or not (lora.dropout or lora.dora):
            return 0
        targets = [linear for linear in _linears(self.shape) if self._is_target(0, linear)]
        dropped = sum(linear.num_in for linear in targets) if lora.dropout else 0
        return dropped + (2 * sum(linear.num_out for linear in targets) if lora.dora else 0)

    def _kept_bytes(self, size: MicroBatchSize, recompute: Recompute) -> int:
        inputs = self.inputs_bytes(size.num_tokens)
        everything = self.shape.num_layers * self._layer_bytes(size.num_tokens)
        again = self._lean_elements * self._element
        kept = {
            "none": everything,
            "lean": everything - self.shape.num_layers * size.num_tokens * again,
            "partial": inputs + PARTIAL_SHARE * (everything - inputs),
            "layers": inputs,
            "offload": min(OFFLOAD_INPUTS, self.shape.num_layers) * inputs / self.shape.num_layers,
        }[recompute]
        return int(kept) + size.num_tokens * self.shape.hidden_size * LAST_NORM_BYTES

    def _head_bytes(self, size: MicroBatchSize, recompute: Recompute) -> int:
        rows = min(size.num_labels, head_tile_rows(recompute))
        # logits and their gradient, of one tile at a time
        logits = 2 * rows * self.shape.vocab_size * self._element
        states = 2 * size.num_labels * self.shape.hidden_size * self._element
        if self.config.method == "lora":
            return logits + states
        # the head's weight gradient is summed in fp32, over a copy of the weight or beside its own narrower result
        narrow = self._element if self._element < 4 else 0
        return logits + states + self.shape.vocab_size * self.shape.hidden_size * (4 + narrow)

    def _backward_bytes(self, size: MicroBatchSize, recompute: Recompute) -> int:
        again = {"none": 0.0, "lean": 0.0, "partial": 1 - PARTIAL_SHARE}.get(recompute, 1.0)
        layer = (BACKWARD_SHARE + again) * self._layer_bytes(size.num_tokens)
        # FlashAttention-2 sums the queries' gradient in fp32, each document's end rounded up to 128 rows
        rows = size.num_tokens + 128 * size.num_documents
        queries = rows * self.shape.num_heads * self.shape.head_dim * 4
        return int(max(layer, queries)) + self._weight_scratch_bytes()

    def _weight_scratch_bytes(self) -> int:
        storage = self.config.base.storage
        if storage == "model":
            return 0
        # linear layers that read the same input are unpacked as one group
        groups: dict[tuple[str, int], int] = {}
        for linear in _linears(self.shape):
            if self.turned_weights and self._is_target(0, linear):
                continue
            key = (linear.name.partition(".")[0], linear.num_in)
            groups[key] = groups.get(key, 0) + linear.num_in * linear.num_out
        largest = max(groups.values(), default=0)
        transposed = largest if self.config.base.computes_in_fp8 else 0
        return transposed + (largest * self._element if storage == "nf4" else 0)


def _linears(shape: ModelShape) -> tuple[Linear, ...]:
    return shape.layer_linears(0)


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
