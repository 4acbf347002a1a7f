"""Recompute activations in the backward pass, or offload them to host memory, instead of keeping them."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from flatout.config.schema import Recompute
from flatout.kernels.host_rows import gather_rows
from flatout.models.arch_quirks import random_fields
from flatout.models.blocks import decoder_layers, text_decoder, trained_towers
from flatout.models.lora.layer import lora_layers

# share of the activations, beyond each layer's inputs, that `budget` lets the compiler keep
MEMORY_BUDGET = 0.5
# concurrent copies to the host while later layers run; each holds its GPU memory until it is done
MAX_IN_FLIGHT = 2


def apply_recompute(model: PreTrainedModel, level: Recompute) -> bool:
    """Apply a model's recompute level; `selective` and `budget` only act in `compiling_with`.

    `full` keeps only each decoder layer's input, and a number those of the first layers; `offload` moves the inputs and
    the embedding to the host. The last layers keep their activations, as these are freed before the others recompute.
    A trained vision tower keeps only its layers' inputs at every level. Returns whether the embedding was moved.
    """
    for tower in trained_towers(model):
        _keep_inputs(tower)
    if level in ("none", "selective", "budget"):
        return False
    _keep_inputs(model)
    if isinstance(level, int):
        for layer in decoder_layers(model)[level:]:
            if isinstance(layer, GradientCheckpointingLayer):
                layer.gradient_checkpointing = False
    if level != "offload":
        return False
    ActivationOffload(model)
    return offload_embedding(model)


def recomputes_by_layer(model: PreTrainedModel) -> bool:
    """Whether each decoder layer can be told by itself to recompute: not where the decoder's loop decides for all."""
    return all(isinstance(layer, GradientCheckpointingLayer) for layer in decoder_layers(model))


def _keep_inputs(model: PreTrainedModel) -> None:
    # Non-reentrant needs no gradient on the inputs. To draw the same numbers again, checkpointing reads the random
    # state on the host in every layer, which CUDA graphs cannot record; most models draw none.
    dropout = any(layer.dropout for layer in lora_layers(model).values())
    draws = dropout or bool(random_fields(model.config.get_text_config()))
    arguments = {"use_reentrant": False, "preserve_rng_state": draws}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)


def compiling_with(level: Recompute) -> AbstractContextManager[object]:
    """Set torch's compiler options for a level while layers are compiled.

    `selective` lets the compiler recompute what only a matrix product reads; `budget` gives it a memory budget, within
    which it chooses what to recompute (as a knapsack problem), also in the last layers where the first are as `full`.
    By default it takes operators that are not torch's own, as our products and attention are, for free to compute
    again, and would keep next to nothing.
    """
    if level in ("none", "full", "offload"):
        return nullcontext()
    from torch._functorch import config

    changes: dict[str, float] = {"ban_recompute_materialized_backward": False}
    if level != "selective":
        changes = {"activation_memory_budget": MEMORY_BUDGET, "is_non_builtin_to_include": True}
    return config.patch(changes)


class HostEmbedding(nn.Module):
    """A frozen embedding whose table (V, D) stays in host memory; each pass copies its tokens' rows, (..., D)."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        table = embedding.weight.detach()
        host = torch.empty(table.shape, dtype=table.dtype, pin_memory=table.is_cuda)
        # neither parameter nor buffer, so that nothing moves it back to the device
        self.weight = host.copy_(table)

    def forward(self, token_ids: Tensor) -> Tensor:
        return gather_rows(self.weight, token_ids)


def offload_embedding(model: PreTrainedModel) -> bool:
    """Move a frozen, plain, untied input embedding to host memory, exactly; return whether it moved."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    # a subclass may do more than look up rows (Gemma's scales them)
    if type(embedding) is not nn.Embedding or embedding.weight.requires_grad or embedding.max_norm is not None:
        return False
    if head is None or head.weight.data_ptr() == embedding.weight.data_ptr():
        return False
    model.set_input_embeddings(HostEmbedding(embedding))
    return True


@dataclass(slots=True, eq=False)
class _Slot:
    """One saved tensor: its host copy, and its device copy once that is being fetched."""

    index: int
    host: Tensor
    device: torch.device
    fetched: Tensor | None = None
    ready: torch.cuda.Event | None = None


class ActivationOffload:
    """Keeps the inputs that a model's checkpointed layers save in pinned host memory between forward and backward.

    Exact: the same bytes come back. Works for both eager and compiled layers, since both save their inputs through
    autograd; the hooks are on the decoder, outside of the compiled regions. They move hidden states (1, T, width).

    Copies to the host overlap the next layers; with `MAX_IN_FLIGHT` copies in flight, the GPU waits for the oldest. In
    the backward pass, the previous layer's tensor is prefetched while a layer computes. CPU tensors are cloned.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._width = model.config.get_text_config().hidden_size
        self._open: ExitStack | None = None
        self._slots: list[_Slot] = []
        self._in_flight: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._stream: torch.cuda.Stream | None = None
        decoder = text_decoder(model)
        decoder.register_forward_pre_hook(self._begin, with_kwargs=True)
        # always_call, so that an error in the forward pass (out of memory) also removes the saved-tensor hooks
        decoder.register_forward_hook(self._end, always_call=True)

    def _begin(self, *_: Any) -> None:
        """Move what a forward pass saves from here on, if it has gradients."""
        if not torch.is_grad_enabled():
            return
        if self._stream is not None:
            # copies of an abandoned pass may still be running
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._slots, self._open = [], ExitStack()
        self._in_flight.clear()
        self._open.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))

    def _end(self, *_: Any) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _pack(self, tensor: Tensor) -> Tensor | _Slot:
        if tensor.dim() != 3 or tensor.shape[-1] != self._width or not tensor.is_floating_point():
            return tensor
        if tensor.is_cuda:
            stream = self._copy_stream(tensor.device)
            current = torch.cuda.current_stream(tensor.device)
            if len(self._in_flight) == MAX_IN_FLIGHT:
                # the memory may be reused after the copy, so the GPU waits, not the host
                current.wait_event(self._in_flight.popleft()[1])
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                host.copy_(tensor, non_blocking=True)
            self._in_flight.append((tensor, stream.record_event()))
        else:
            host = tensor.clone()
        slot = _Slot(len(self._slots), host, tensor.device)
        self._slots.append(slot)
        return slot

    def _unpack(self, packed: Tensor | _Slot) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        while self._in_flight:
            torch.cuda.current_stream(packed.device).wait_event(self._in_flight.popleft()[1])
        self._fetch(packed)
        if packed.index and packed.device.type == "cuda":
            self._fetch(self._slots[packed.index - 1])
        tensor, packed.fetched = packed.fetched, None
        assert tensor is not None
        if packed.ready is not None:
            torch.cuda.current_stream(packed.device).wait_event(packed.ready)
        return tensor

    def _fetch(self, slot: _Slot) -> None:
        """Start the copy back to the device, unless it was already started."""
        if slot.fetched is not None:
            return
        if slot.device.type != "cuda":
            slot.fetched = slot.host.clone()
            return
        stream = self._copy_stream(slot.device)
        # allocated on the compute stream, whose earlier work may still use this memory
        slot.fetched = torch.empty_like(slot.host, device=slot.device)
        stream.wait_stream(torch.cuda.current_stream(slot.device))
        with torch.cuda.stream(stream):
            slot.fetched.copy_(slot.host, non_blocking=True)
        slot.ready = stream.record_event()

    def _copy_stream(self, device: torch.device) -> torch.cuda.Stream:
        self._stream = self._stream or torch.cuda.Stream(device)
        return self._stream
