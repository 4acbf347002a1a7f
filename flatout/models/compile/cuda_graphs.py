"""Record decoder passes as CUDA graphs, for models so small that the host cannot launch kernels fast enough."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from flatout.models.auxiliary_loss import AuxiliaryLoss
from flatout.models.blocks import hidden_states
from flatout.models.packed import PackedBatch, PackedSize, flatten_samples


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
    """Record the kernels launched inside. Entering it returns the memory that plain passes have left behind.

    Garbage is not collected inside: freeing the memory of an earlier graph would make this recording invalid.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        # thread_local, as another thread may pin memory meanwhile
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    finally:
        if collects:
            gc.enable()


class GraphedDecoder:
    """Computes last hidden states of packed batches; recorded sizes take one launch each for forward and backward.

    A recording reads its inputs from, and adds gradients to, fixed addresses: `gradients` must be the live gradient
    tensors of `parameters`, zeroed in place between steps. All recordings share one memory pool and the buffers of what
    leaves them, so a batch's backward must run before the next batch's forward. Other sizes run without graphs.

    What `aux_loss` read in a pass leaves a recording beside the states: routers' choices, and logits with gradients.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        aux_loss: AuxiliaryLoss | None = None,
    ) -> None:
        self._model, self._aux_loss = model, aux_loss or AuxiliaryLoss()
        self._parameters, self._gradients = list(parameters), list(gradients)
        # flat, as long as the largest pass needs them
        self._output_buffers: list[Tensor] = []
        self._grad_buffers: list[Tensor] = []
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(model.device)
        self._recorded: dict[PackedSize, _Recording] = {}
        # tokens of the largest recorded size
        self.largest_tokens = 0
        # autograd only calls backward if an input requires a gradient
        self._anchor = torch.zeros((), device=model.device, requires_grad=True)

    def __call__(self, batch: PackedBatch) -> Tensor:
        """Return the last hidden states (T, D) of a batch."""
        recording = self._recorded.get(PackedSize(batch.num_tokens, batch.max_seqlen))
        if recording is None or not torch.is_grad_enabled():
            return hidden_states(self._model, batch)
        for name in ("token_ids", "position_ids", "cu_seqlens"):
            getattr(recording.batch, name).copy_(getattr(batch, name), non_blocking=True)
        states, *term_outputs = _Replay.apply(self._anchor, recording)
        self._aux_loss.load_graph_outputs(term_outputs)
        return states

    def record(self, sizes: Sequence[PackedSize], num_boundaries: int) -> int:
        """Record forward and backward for batches of these sizes, largest first; gradients are zero afterwards.

        Return how many are recorded: fewer than there are sizes if memory runs out, which ends the recording.
        """
        num_recorded = 0
        try:
            # every plain pass, which loads kernels and workspaces, comes before the recordings, as their pool keeps
            # the memory of a whole pass: one after the other they would need twice as much
            for size in sizes:
                self._warm_up(self._batch_of(size, num_boundaries))
            for size in sizes:
                self._record(size, self._batch_of(size, num_boundaries))
                num_recorded += 1
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        torch._foreach_zero_(self._gradients)
        return num_recorded

    def _batch_of(self, size: PackedSize, num_boundaries: int) -> PackedBatch:
        longest = min(size.max_seqlen, size.num_tokens)
        lengths = [longest] * (size.num_tokens // longest)
        if rest := size.num_tokens - sum(lengths):
            lengths.append(rest)
        documents = [(np.zeros(length, np.int64), np.zeros(length, bool)) for length in lengths]
        batch = flatten_samples(documents, num_boundaries=num_boundaries).to(self._model.device)
        return replace(batch, max_seqlen=size.max_seqlen)

    def _warm_up(self, batch: PackedBatch) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            outputs = self._outputs(batch)
            # buffers get their length here: none may move once a recording has its address
            _views(self._output_buffers, outputs)
            sources = [output for output in outputs if output.requires_grad]
            grads = _views(self._grad_buffers, sources)
            torch._foreach_zero_(grads)
            self._add_gradients(sources, grads)
        torch.cuda.current_stream().wait_stream(self._stream)

    def _record(self, size: PackedSize, batch: PackedBatch) -> None:
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with recording(forward, self._stream, self._pool):
            outputs = self._outputs(batch)
            copies = _views(self._output_buffers, outputs)
            for copy, output in zip(copies, outputs, strict=True):
                copy.copy_(output.detach())
        sources = [output for output in outputs if output.requires_grad]
        grads = _views(self._grad_buffers, sources)
        with recording(backward, self._stream, self._pool):
            self._add_gradients(sources, grads)
        remaining = iter(grads)
        places = [next(remaining) if output.requires_grad else None for output in outputs]
        self._recorded[size] = _Recording(batch, forward, backward, copies, places)
        self.largest_tokens = max(self.largest_tokens, size.num_tokens)

    def _outputs(self, batch: PackedBatch) -> list[Tensor]:
        try:
            return [hidden_states(self._model, batch), *self._aux_loss.graph_outputs()]
        finally:
            self._aux_loss.end_pass()

    def _add_gradients(self, sources: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        summed = torch.autograd.grad(sources, self._parameters, grads, allow_unused=True)
        pairs = [(total, grad) for total, grad in zip(self._gradients, summed, strict=True) if grad is not None]
        torch._foreach_add_([total for total, _ in pairs], [grad for _, grad in pairs])


@dataclass(frozen=True)
class _Recording:
    """Forward and backward of one size: `outputs` of a `batch` and their `grads`, None for choices, which have none."""

    batch: PackedBatch
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    outputs: Sequence[Tensor]
    grads: Sequence[Tensor | None]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, recording: _Recording) -> tuple[Tensor, ...]:
        ctx.recording = recording
        ctx.set_materialize_grads(False)
        recording.forward.replay()
        outputs = tuple(output.detach() for output in recording.outputs)
        places = zip(outputs, recording.grads, strict=True)
        ctx.mark_non_differentiable(*(output for output, place in places if place is None))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        for place, grad in zip(ctx.recording.grads, grads, strict=True):
            if place is not None:
                place.zero_() if grad is None else place.copy_(grad)
        ctx.recording.backward.replay()
        return None, None


def _views(buffers: list[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a view of a flat buffer for each tensor, of its shape; a buffer that is too short is made anew."""
    for index, tensor in enumerate(tensors):
        if index == len(buffers):
            buffers.append(tensor.new_empty(0))
        if buffers[index].numel() < tensor.numel():
            buffers[index] = tensor.new_empty(tensor.numel())
    return [buffer[: tensor.numel()].view(tensor.shape) for buffer, tensor in zip(buffers, tensors, strict=True)]
