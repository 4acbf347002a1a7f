"""Estimate one GPU's peak memory in a step from the model's shape and the settings; needs no GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from flatout.config.schema import Recompute
from flatout.planner.memory.sizes import Correction, MemoryEstimate, MicroBatchSize, Widths
from flatout.planner.parallel_layout import SINGLE_RANK, ParallelLayout
from flatout.planner.settings import PlanSettings
from flatout.planner.shape import LayerShape, Linear, ModelShape

Precision = Literal["bf16", "fp16", "fp32", "fp64"]

# Constants of the memory model, fitted to peaks measured on one H200.
#
# Measured with torch 2.11, LoRA rank 16, bf16, up to 32 chat-like samples in one micro-batch (131 k: one document);
# `benchmarks/throughput.py --rows memory` compares predictions with measurements:
#
#     Qwen3-8B compiled 115.7 to 116.8 GiB at 21.0 k to 21.3 k tokens; memory budget 0.5: 69.2, 0.25: 46.2 GiB
#     at 17.4 k tokens bf16 97.9, fp8 91.4, NF4 with fp8 products 88.3, recompute offload 18.4 GiB;
#     recompute full 21.7 at 12.5 k, 74.7 at 131 k; trained whole with bf16 weights and 8-bit moments 115.1 at 16.8 k;
#     Qwen3-1.7B trained whole at 20.8 k tokens: fp32 masters 67.5, bf16 weights 58.5, fp8 products 53.7 GiB
#     Qwen3-30B-A3B at 20.8 k tokens 119.7 GiB, with adapters of experts 130.2; NF4, recompute full, 8-bit moments 23.1
#     Qwen3-0.6B compiled 26.4 GiB at 19.5 k and 28.3 GiB at 21.2 k tokens; eager 34.7 GiB at 19.5 k
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
# activations of eager layers, relative to compiled ones (norms and rotations in fp32, unfused products)
EAGER_SHARE = 1.37
# share of the activations beyond the layers' inputs that `budget` keeps
BUDGET_SHARE = 0.49
# one layer's activation gradients that coexist with its activations, relative to those
BACKWARD_SHARE = 0.38
# bytes per token and hidden element around the last norm, which runs eagerly: fp32 input and output, 16-bit output
LAST_NORM_BYTES = 10
# bytes per parameter: 8-bit moments with one scale per 256, and 4-bit weights with two levels of scales
ADAM_8BIT_BYTES = 2.03
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
# values that share a scale of 8-bit moments: a divisor of the last dimension in this range (see `optim.adamw_8bit`)
ADAM_8BIT_BLOCKS = range(64, 257)
# On a CPU: what a process holds beside its tensors, how much more than tensors these take, and how much more those of
# less than `HEAP_BLOCK_BYTES`, between which glibc's heap has holes. Where layers recompute, holes were twice the
# tensors, so blocks of `MAPPED_BLOCK_BYTES` are mapped. Resident and planned GiB of 30 layers of 576 (LoRA, fp32): 6.3
# and 6.3 at 2,016 tokens, 15.2 and 14.3 at 8,064; full 1.6 and 1.5, 2.3 and 2.4, where the heap took 2.6, 5.4 to 7.7
PROCESS_BYTES, CPU_SHARE, HEAP_SHARE = int(0.45 * 2**30), 0.2, 0.7
HEAP_BLOCK_BYTES, MAPPED_BLOCK_BYTES = 32 << 20, 1 << 20
# layer inputs on the GPU while they are copied to the host or back
OFFLOAD_INPUTS = 3
# cuBLAS workspaces, batch tensors
CONSTANT_BYTES = 64 << 20
# rows of logits that the loss head holds at a time: enough for full speed, fewer if memory is short
HEAD_TILE_ROWS = {"none": 2048, "selective": 2048, "budget": 2048, "full": 512, "offload": 128}


def head_tile_rows(recompute: Recompute) -> int:
    """Return the rows of logits that the loss head holds at a time at a recompute level."""
    return HEAD_TILE_ROWS["full" if isinstance(recompute, int) else recompute]


@dataclass(frozen=True)  # without slots, for cached properties
class MemoryModel:
    """The memory of a run as a function of its micro-batches.

    Let e be the bytes per element of the precision (s of the hidden states, m with full.hidden_states fp32),
    m = max(4, e) those of master weights, fat = `activation_elements` * e + 4 per head (attention's log-sum-exp) the
    bytes per token and layer, D the hidden size and L the number of layers:

        weights      lora: e per parameter, or fp8 and nf4 for the blocks' linear layers (with base.backward fp8
                     one more byte for all of these layers), without an untied embedding under offload; full: m, plus e
                     for autocast's copies when e < m (full.weights bf16: 2 and no copies)
        adapter      m + e per adapter parameter; those of experts have a copy only from forward to backward pass
        gradients    as wide as the trained weights; with full.update backward, of one tensor only. In full fine-tuning
                     they replace activations, so in a step of one micro-batch only the larger of the two counts
        optimizer    adamw 2 m, sgd m, adamw8bit 2.03 bytes per trained parameter (LoRA: as adamw for B, whose rows are
                     shorter than a block); others by the shapes of the weights (`OptimizerTraits.state_shapes`)
        activations  none: L fat per token; selective: without the norms' outputs and the MLP's product; budget: the
                     inputs L D s and 0.49 of the rest; full: L D s; offload: 3 D s; N: N D s, and the other layers as
                     with budget (as with none if they are not compiled)
        working      the larger of: the head's `head_tile_rows` of logits, which their gradient replaces, label rows and
                     their gradient, and 10 D per token around the last norm; and the backward pass of one layer: 0.38
                     fat per token, the recomputed share of it, and one weight group unpacked (nf4) or transposed (fp8)

    State that `parallel_layout` splits into n shards counts 1/n, or nothing if it is kept on the host
    (`sharding.offload`). Unsharded temporaries are added: gathered weights, of all layers or of those in flight, and of
    the embedding and head; gradients of two layers before they are summed, or of all layers (zero1), which replace
    activations as above. DeepSpeed's stages 1 and 3 keep their gradients' memory between steps, stage 3 also buffers.
    Frozen weights, quantized or not, are sharded if each layer's are freed after its pass, and otherwise whole.
    With `expert_ranks` N, `shape` is that of one rank (`ModelShape.on_one_of`): 1/N of the experts, no more sharded.
    With `context_ranks` N, a rank holds 1/N of a micro-batch's tokens, and in the backward pass of attention, when the
    MLP's activations are freed, the keys and values of all: gathered, picked, and with gradients in each query head.
    Attention that materializes its score matrix (model.attention: plain) is not counted. `corrections` are those of the
    device by `kind_of_pass`.
    """

    settings: PlanSettings
    shape: ModelShape
    precision: Precision
    compiled: bool
    parallel_layout: ParallelLayout = SINGLE_RANK
    corrections: Mapping[str, Correction] = field(default_factory=dict)
    on_cpu: bool = False

    @property
    def widths(self) -> Widths:
        """Bytes per element; with `full.hidden_states` fp32, hidden states are as wide as trained weights."""
        is_full, compute = self.settings.method == "full", ELEMENT_BYTES[self.precision]
        is_wide = is_full and self.settings.full.hidden_states == "fp32"
        trained = compute if is_full and self.settings.full.weights == "bf16" else max(4, compute)
        return Widths(compute, trained, compute if compute < trained else 0, trained if is_wide else compute)

    @property
    def num_rows(self) -> int:
        """The rows of new tokens that LoRA trains; none if embedding and head are trained in full."""
        lora, shape = self.settings.lora, self.shape
        is_whole = lora.saves(shape.embedding) and shape.trains_head(lora)
        return 0 if self.settings.method == "full" or is_whole else self.settings.num_new_tokens

    @cached_property
    def num_adapter(self) -> int:
        """The parameters that LoRA trains, those of `modules_to_save` and of new tokens included."""
        rows = self.num_rows * self.shape.hidden_size * (1 if self.shape.tied else 2)
        return self.shape.num_lora_params(self.settings.lora) + self.shape.num_saved_params(self.settings.lora) + rows

    @cached_property
    def _num_8bit_adapter(self) -> int:
        """The parameters of A, and of experts' B (out, rank, experts), whose rows are whole blocks of 8-bit moments."""

        def of_blocks(count: int, row: int) -> int:
            return count if any(row % size == 0 for size in ADAM_8BIT_BLOCKS) else 0

        lora, num_elements = self.settings.lora, 0
        for of_experts in (False, True):
            for name, linear in self.shape.targeted(lora, of_experts=of_experts).items():
                rank = lora.of_layer(name).rank
                num_elements += of_blocks(rank * linear.num_experts * linear.num_in, linear.num_in)
                row = linear.num_experts if of_experts else rank
                num_elements += of_blocks(rank * linear.num_experts * linear.num_out, row)
        return num_elements

    @cached_property
    def _optimizer_bytes(self) -> int:
        """The bytes of the optimizer's state; of parameters whose shape is not known, as of vectors."""
        traits, is_lora = self.settings.optimizer, self.settings.method == "lora"
        num_trained, moment = self.num_adapter if is_lora else self.shape.num_params, max(4, self.widths.compute)
        if traits.stores_8_bits:
            num_8bit = self._num_8bit_adapter if is_lora else num_trained
            return int(num_8bit * ADAM_8BIT_BYTES + (num_trained - num_8bit) * len(traits.moments) * moment)
        num_elements = num_trained * len(traits.moments)
        for shape, is_matrix in self._trained_shapes():
            sizes = map(math.prod, traits.state_shapes(shape, is_matrix=is_matrix).values())
            num_elements += sum(sizes) - math.prod(shape) * len(traits.moments)
        return num_elements * moment

    def _trained_shapes(self) -> Iterator[tuple[tuple[int, ...], bool]]:
        """Yield the shapes of trained weights, and which are hidden matrices (`models.lora.layer.hidden_matrices`)."""
        shape, lora, is_lora = self.shape, self.settings.lora, self.settings.method == "lora"
        end = (shape.vocab_size, shape.hidden_size)
        num_ends = 1 if shape.tied or shape.scores else 2
        if not is_lora:
            for layer in shape.layers:
                yield from (((linear.num_out, linear.num_in), True) for linear in layer.linears)
                yield from (((one.num_experts, one.num_out, one.num_in), False) for one in layer.experts)
            yield from [(end, False)] * num_ends
            return
        for name, linear in shape.targeted(lora).items():
            rank = lora.of_layer(name).rank
            yield from (((rank, linear.num_in), True), ((linear.num_out, rank), True))
        for name, one in shape.targeted(lora, of_experts=True).items():
            rank = lora.of_layer(name).rank
            yield from (((rank * one.num_experts, one.num_in), False), ((one.num_out, rank, one.num_experts), False))
        num_saved = sum(map(lora.saves, (shape.embedding, shape.head)))
        yield from [(end, False)] * (min(1, num_saved) if shape.tied and lora.keep_tied else num_saved)
        if self.num_rows:
            yield from [((self.settings.num_new_tokens, shape.hidden_size), False)] * num_ends

    def inputs_bytes(self, num_tokens: int) -> int:
        """Return the bytes of all layers' inputs: `full` keeps them, and `offload` moves them to the host."""
        own_tokens = -(-num_tokens // self.parallel_layout.context_ranks)
        return self.shape.num_layers * own_tokens * self.shape.hidden_size * self.widths.hidden

    def kind_of_pass(self, recompute: Recompute) -> str:
        """Name what decides a pass's temporaries: a measured pass corrects only its own kind."""
        layout, how = self.parallel_layout, "compiled" if self.compiled else "eager"
        level = "layers" if isinstance(recompute, int) else recompute
        parts = [level, how, self.precision, layout.strategy, self.settings.batch.layout]
        parts += [f"experts/{layout.expert_ranks}"] * (layout.expert_ranks > 1)
        return " ".join([*parts, *[f"context/{layout.context_ranks}"] * (layout.context_ranks > 1)])

    def estimate(self, size: MicroBatchSize, recompute: Recompute, *, accumulates: bool = True) -> MemoryEstimate:
        """Estimate the peak with micro-batches of this size; a step has several of them if it `accumulates`."""
        fitted = self.fitted_estimate(size, recompute, accumulates)
        measured = self.correction_of(recompute)
        activations, working = measured.of(fitted.activations_bytes, fitted.working_bytes)
        beside = self.settings.reward_models_bytes
        of_tensors = replace(fitted, activations_bytes=activations, working_bytes=working, reward_models_bytes=beside)
        process = self._process_bytes(of_tensors, size.num_tokens, recompute) if self.on_cpu else 0
        return replace(of_tensors, process_bytes=process)

    def correction_of(self, recompute: Recompute) -> Correction:
        """Return what passes have measured at this level, or until then the most per token of another level.

        Otherwise a level that nobody has measured would look better than one that takes more than its constants say.
        """
        kind = self.kind_of_pass(recompute)
        alike = [one.scale for name, one in self.corrections.items() if name.split()[1:] == kind.split()[1:]]
        return self.corrections.get(kind) or Correction(max(alike, default=1.0))

    def _process_bytes(self, estimate: MemoryEstimate, num_tokens: int, recompute: Recompute) -> int:
        """Return what a process on the CPU holds beside the tensors of an estimate."""
        # an MLP's tensors are the widest: gate, up and their product
        width = sum(layer.mlp_elements for layer in self.shape.layers) / (3 * self.shape.num_layers)
        block_bytes = MAPPED_BLOCK_BYTES if self.shape.num_recomputed(recompute) else HEAP_BLOCK_BYTES
        heap_bytes = estimate.activations_bytes * (num_tokens * width * self.widths.compute < block_bytes)
        return PROCESS_BYTES + int(CPU_SHARE * estimate.total_bytes + HEAP_SHARE * heap_bytes)

    def fitted_estimate(self, size: MicroBatchSize, recompute: Recompute, accumulates: bool) -> MemoryEstimate:
        """Return `estimate` by the fitted constants alone, without what was measured on the device."""
        if self.parallel_layout.context_ranks > 1:
            return self._of_a_share(size, recompute, accumulates)
        if self.parallel_layout.shards_state and self.parallel_layout.expert_ranks > 1:
            return self._beside_experts(size, recompute, accumulates)
        shape, width, lora, is_lora = self.shape, self.widths, self.settings.lora, self.settings.method == "lora"
        num_base, num_adapter = shape.num_params, self.num_adapter if is_lora else 0
        num_gradients = num_adapter if is_lora else num_base
        embedding = shape.vocab_size * shape.hidden_size
        if self.settings.full.update == "backward":
            # one tensor's gradient at a time
            num_gradients = max(
                [embedding, *(linear.num_weights for layer in shape.layers for linear in layer.linears)]
            )
        weights = self._frozen_bytes() if is_lora else num_base * (width.trained + width.copies)
        weights += shape.num_tower_params * (width.compute if is_lora else width.trained)
        if is_lora and recompute == "offload" and not (shape.tied or lora.saves(shape.embedding) or self.num_rows):
            # the embedding is kept on the host, unless it is tied and so also the head, or scaled (Gemma's, also tied)
            weights -= embedding * width.compute
        num_copied = num_adapter - (self.shape.num_lora_params(lora, of_experts=True) if is_lora else 0)
        activations, working = self._activations_bytes(size, recompute), self._working_bytes(size, recompute)
        saved, held = shape.picture_bytes(size.num_tokens, width.compute, width.hidden, activations + working)
        estimate = MemoryEstimate(
            weights_bytes=weights,
            adapter_bytes=num_adapter * width.trained + num_copied * width.copies,
            gradients_bytes=num_gradients * width.trained,
            optimizer_bytes=self._optimizer_bytes,
            activations_bytes=activations + saved,
            working_bytes=working + held,
            in_turn=not (is_lora or accumulates or self.parallel_layout.keeps_gradients),
        )
        return self._sharded(estimate, num_adapter) if self.parallel_layout.shards_state else estimate

    def _of_a_share(self, size: MicroBatchSize, recompute: Recompute, accumulates: bool) -> MemoryEstimate:
        """Return the estimate where several ranks share the micro-batch."""
        num_ranks = self.parallel_layout.context_ranks
        own_tokens, own_documents = -(-size.num_tokens // num_ranks), -(-size.num_documents // num_ranks)
        # one rank may have most labels, as those of an answer at a document's end
        share = MicroBatchSize(own_tokens, min(size.num_label_tokens, own_tokens), own_documents)
        one_rank = replace(self, parallel_layout=replace(self.parallel_layout, context_ranks=1))
        estimate = one_rank.fitted_estimate(share, recompute, accumulates)
        # of a document's keys, the pieces of a share have 1 + 1 / 2N
        picked = 1 + 1 / (2 * num_ranks)
        keys = max(layer.key_width * (2 + 2 * picked) + layer.pair_width * picked for layer in self.shape.layers)
        elements, layers = size.num_tokens * self.widths.compute, self.shape.layers
        # keys and values of all are gathered once the MLP's activations are freed
        backward_bytes = one_rank._backward_bytes(own_tokens, recompute, with_mlp=False) + CONSTANT_BYTES
        # without a kernel for pieces of documents (16 bit), attention over whole documents saves its inputs and output
        saved = 0 if self.precision in ("bf16", "fp16") else sum(layer.pair_width + layer.key_width for layer in layers)
        num_kept = max(1, len(layers) - self.shape.num_recomputed(recompute))
        saved = saved * num_kept // len(layers)
        return replace(
            estimate,
            activations_bytes=estimate.activations_bytes + elements * saved,
            working_bytes=max(estimate.working_bytes, int(backward_bytes + elements * keys)),
        )

    def _beside_experts(self, size: MicroBatchSize, recompute: Recompute, accumulates: bool) -> MemoryEstimate:
        """Return the estimate where several ranks share the experts: their state is not sharded, but the rest is."""
        layout = replace(self.parallel_layout, expert_ranks=1)
        rest = replace(self, shape=self.shape.without_experts, parallel_layout=layout)
        models = (replace(self, parallel_layout=SINGLE_RANK), replace(rest, parallel_layout=SINGLE_RANK), rest)
        replicated, replicated_rest, sharded = (model.fitted_estimate(size, recompute, accumulates) for model in models)
        state = {
            part: getattr(sharded, part) + getattr(replicated, part) - getattr(replicated_rest, part)
            for part in ("weights_bytes", "adapter_bytes", "gradients_bytes", "optimizer_bytes")
        }
        return replace(replicated, **state)

    def _sharded(self, replicated: MemoryEstimate, num_adapter: int) -> MemoryEstimate:
        """Return the estimate with sharded state, plus the weights and gradients that are temporarily unsharded."""
        shape, layout, width = self.shape, self.parallel_layout, self.widths
        is_full = self.settings.method == "full"
        part = 0.0 if layout.offload else 1 / layout.num_shards
        num_in_flight = 2 + self.settings.sharding.prefetch
        gathered = min(1.0, num_in_flight / shape.num_layers) if layout.reshard_after_forward else 1.0
        # what is outside the decoder's layers is gathered once for all passes
        num_root = shape.vocab_size * shape.hidden_size * (1 if shape.tied else 2)
        num_root += shape.tower.num_trained if shape.tower else 0
        num_blocks = shape.num_params - num_root
        root = num_root * width.trained
        if is_full:
            weights = (root + num_blocks * width.trained) * part + num_blocks * width.compute * gathered + root
        else:
            # frozen weights that are never freed stay unsharded
            blocks = self._frozen_bytes() - num_root * width.compute
            weights = replicated.weights_bytes - (blocks * (1 - part - gathered) if layout.reshard_after_forward else 0)
        # two layers' gradients exist in the compute dtype before they are summed in that of the trained weights
        num_lora = shape.num_lora_params(self.settings.lora)
        two_layers = (num_blocks if is_full else num_lora) * 2 / shape.num_layers
        # what is trained in full is mostly embedding and head, which are not freed
        unsharded_adapter = 0 if is_full else (num_adapter - num_lora) * width.trained
        unsharded_lora = (num_adapter and num_lora) * width.trained * gathered
        unsummed = two_layers * (width.compute + width.trained) + (root if is_full else unsharded_adapter)
        late = layout.sums_late
        # DeepSpeed sums late gradients in place
        summed = late + (0 if late and layout.keeps_gradients else part)
        return replace(
            replicated,
            weights_bytes=int(weights),
            adapter_bytes=int(num_adapter * width.trained * part + unsharded_lora) + unsharded_adapter,
            gradients_bytes=int(replicated.gradients_bytes * summed + (0 if late else unsummed)),
            optimizer_bytes=int(replicated.optimizer_bytes * part),
            working_bytes=replicated.working_bytes + layout.buffers_bytes,
        )

    @property
    def _unsaved_elements(self) -> int:
        """The elements per token and layer that grouped products of experts hold for a moment, and do not save."""
        grouped = self.shape.groups_experts and self.settings.groups_experts
        return sum(layer.unsaved_elements for layer in self.shape.layers) // self.shape.num_layers if grouped else 0

    def _grouped(self, layer: LayerShape) -> tuple[Linear, ...]:
        """Return the matrices of a layer's experts if grouped products compute them, which can be quantized then."""
        return layer.experts if self.shape.groups_experts and self.settings.groups_experts else ()

    def _frozen_bytes(self) -> int:
        """Return the bytes of LoRA's base: the blocks' linear layers quantized, or all of it in the compute dtype."""
        num_base, storage = self.shape.num_params, self.settings.base.storage
        if storage == "model":
            # base.backward: fp8 keeps copies of linear layers, with a scale per input
            copied = self.shape.layers if self.settings.base.backward == "fp8" else ()
            linears = [linear for layer in copied for linear in layer.linears]
            copies = sum(linear.num_experts * (linear.num_weights + 4 * linear.num_in) for linear in linears)
            return num_base * self.widths.compute + copies
        linears = [linear for layer in self.shape.layers for linear in (*layer.linears, *self._grouped(layer))]
        num_linear = sum(linear.num_experts * linear.num_weights for linear in linears)
        # experts have a scale for each unit between their two products
        units = [min(linear.num_in, linear.num_out) if linear.num_experts > 1 else linear.num_out for linear in linears]
        fp8 = num_linear + 4 * sum(linear.num_experts * count for linear, count in zip(linears, units, strict=True))
        stored = fp8 if storage == "fp8" else int(num_linear * NF4_BYTES)
        return (num_base - num_linear) * self.widths.compute + stored

    def _layer_bytes(self, num_tokens: int, *, with_mlp: bool = True) -> float:
        """Return the bytes that one layer saves for its backward pass without recomputation.

        Dropout also saves each target's own input, DoRA both outputs of a target; these count without the MLP, too.
        """
        shape, lora, width = self.shape, self.settings.lora, self.widths
        mlp = sum(layer.mlp_elements for layer in shape.layers) // shape.num_layers
        elements = activation_elements(shape) - (self._unsaved_elements if with_mlp else mlp)
        if self.settings.method == "lora" and (lora.dropout or lora.dora):
            targets = shape.targeted(lora).values()
            more = sum(linear.num_in for linear in targets) if lora.dropout else 0
            more += 2 * sum(linear.num_out for linear in targets) if lora.dora else 0
            elements += more // shape.num_layers
        wider = 2 * shape.hidden_size * (width.hidden - width.compute)
        num_bytes: float = num_tokens * (elements * width.compute + wider + 4 * shape.num_heads)
        return num_bytes if self.compiled else num_bytes * EAGER_SHARE

    def _activations_bytes(self, size: MicroBatchSize, recompute: Recompute) -> int:
        shape, num_recomputed = self.shape, self.shape.num_recomputed(recompute)
        num_kept = shape.num_layers - num_recomputed
        num_inputs = min(OFFLOAD_INPUTS, num_recomputed) if recompute == "offload" else num_recomputed
        kept_bytes = num_inputs * self.inputs_bytes(size.num_tokens) / shape.num_layers
        per_layer = self._layer_bytes(size.num_tokens) - self._again_bytes(size.num_tokens, recompute)
        kept_bytes += num_kept * per_layer
        # a layer that is computed again makes its experts' adapters anew
        factors = shape.num_lora_params(self.settings.lora, of_experts=True) if self.settings.method == "lora" else 0
        copies = factors * self.widths.copies * max(1, num_kept) / shape.num_layers
        return int(kept_bytes + copies)

    def describe(self, recompute: Recompute) -> str:
        """Return a level as text: a number with that of all layers."""
        return f"{recompute} of {self.shape.num_layers} layers" if isinstance(recompute, int) else recompute

    def _again_bytes(self, num_tokens: int, recompute: Recompute, *, with_mlp: bool = True) -> float:
        """Return what the last layer computes again of the bytes that it saves without recomputation."""
        saved = self._layer_bytes(num_tokens, with_mlp=with_mlp)
        if self.shape.num_recomputed(recompute) == self.shape.num_layers:
            return saved
        if recompute == "none" or not self.compiled:
            return 0.0
        if recompute != "selective":
            return (1 - BUDGET_SHARE) * (saved - self.inputs_bytes(num_tokens) / self.shape.num_layers)
        # both norms' outputs and the MLP's product; mlp_elements are gate, up and product
        products = 0 if self._unsaved_elements else sum(layer.mlp_elements // 3 for layer in self.shape.layers)
        elements = products // self.shape.num_layers + 2 * self.shape.hidden_size
        return int(num_tokens * elements * self.widths.compute)

    def _backward_bytes(self, num_tokens: int, recompute: Recompute, *, with_mlp: bool = True) -> float:
        """Return the bytes of one layer's backward pass: gradients of activations, and what it recomputes."""
        gradients = BACKWARD_SHARE * self._layer_bytes(num_tokens, with_mlp=with_mlp)
        # the first layers recompute when what the last ones kept is freed
        return gradients + self._again_bytes(num_tokens, recompute, with_mlp=with_mlp)

    def _working_bytes(self, size: MicroBatchSize, recompute: Recompute) -> int:
        """Return the larger of the head's temporaries and those of one layer's backward pass."""
        shape, base, element = self.shape, self.settings.base, self.widths.compute
        # one tile's logits, which their gradient replaces; the label rows and their gradient; what the last norm saves
        num_tile_rows = min(size.num_label_tokens, head_tile_rows(recompute))
        head = (num_tile_rows * shape.num_head_rows + 2 * size.num_label_tokens * shape.hidden_size) * element
        head += size.num_tokens * shape.hidden_size * LAST_NORM_BYTES
        if self.settings.method == "full" or shape.trains_head(self.settings.lora):
            # the head's weight gradient is summed in fp32, in addition to a narrower copy of the weight or the gradient
            head += shape.num_head_rows * shape.hidden_size * (4 + (element if element < 4 else 0))
        elif self.num_rows:
            # the head with its trained rows
            head += shape.num_head_rows * shape.hidden_size * element
        layer = self._backward_bytes(size.num_tokens, recompute)
        layer += size.num_tokens * self._unsaved_elements * element
        # FlashAttention-2 sums the queries' gradient in fp32, each document padded to 128 rows
        queries = (size.num_tokens + 128 * size.num_documents) * shape.num_heads * shape.head_dim * 4
        # linear layers that read the same input are unpacked as one group
        groups: dict[tuple[str, int], int] = {}
        widest = max(shape.layers, key=lambda layer: sum(linear.num_weights for linear in layer.linears))
        for linear in widest.linears:
            key = (linear.name.partition(".")[0], linear.num_in)
            groups[key] = groups.get(key, 0) + linear.num_weights
        experts = (matrix for layer in shape.layers[-1:] for matrix in self._grouped(layer))
        stacked = (matrix.num_experts * matrix.num_weights for matrix in experts)
        largest = max([*groups.values(), *stacked], default=0)
        fp8 = largest if base.storage != "model" and base.computes_in_fp8 else 0
        unpacked = largest * element if base.storage == "nf4" else 0
        return CONSTANT_BYTES + max(head, int(max(layer, queries)) + fp8 + unpacked)


def activation_elements(shape: ModelShape) -> int:
    """Return the elements per token and layer that autograd saves for fused operations, averaged over the layers.

    Two residuals and two norm outputs, and what attention (or a recurrent mixer) and the MLP save.
    """
    saved = sum(layer.mixer_elements + layer.mlp_elements for layer in shape.layers)
    return 4 * shape.hidden_size + saved // shape.num_layers
