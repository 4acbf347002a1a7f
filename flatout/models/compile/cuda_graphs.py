"""Record decoder passes as CUDA graphs, for models so small that the host cannot launch kernels fast enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from flatout.models.blocks import hidden_states
from flatout.models.packed import PackedBatch, PackedSize, flatten_samples


class GraphedDecoder:
    """Computes last hidden states of packed batches; recorded sizes take one launch each for forward and backward.

    A recording reads its inputs from, and adds gradients to, fixed addresses: `gradients` must be the live gradient
    tensors of `parameters`, zeroed in place between steps. All recordings share one memory pool, so a batch's backward
    must run before the next batch's forward. Other sizes run without graphs.
    """

    def __init__(self, model: PreTrainedModel, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        self._model = model
        self._parameters, self._gradients = list(parameters), list(gradients)
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
        states: Tensor = _Replay.apply(self._anchor, recording)
        return states

    def record(self, sizes: Sequence[PackedSize], num_boundaries: int) -> int:
        """Record forward and backward for batches of these sizes, largest first; gradients do not change.

        Return how many are recorded: fewer than there are sizes if memory runs out, which ends the recording.
        """
        before, num_recorded = [gradient.clone() for gradient in self._gradients], 0
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
        torch._foreach_copy_(self._gradients, before)
        return num_recorded

    def _batch_of(self, size: PackedSize, num_boundaries: int) -> PackedBatch:
        """Return a batch of this size; any tokens and documents will do."""
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
            states = hidden_states(self._model, batch)
            self._add_gradients(states, torch.zeros_like(states))
        torch.cuda.current_stream().wait_stream(self._stream)

    def _record(self, size: PackedSize, batch: PackedBatch) -> None:
        # thread_local, as the loader's thread may pin memory meanwhile
        options: dict[str, Any] = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # entering a recording returns the memory that plain passes have left behind
        with torch.cuda.graph(forward, **options):
            states = hidden_states(self._model, batch)
        states_grad = torch.empty_like(states)
        with torch.cuda.graph(backward, **options):
            self._add_gradients(states, states_grad)
        self._recorded[size] = _Recording(batch, forward, backward, states.detach(), states_grad)
        self.largest_tokens = max(self.largest_tokens, size.num_tokens)

    def _add_gradients(self, states: Tensor, states_grad: Tensor) -> None:
        grads = torch.autograd.grad(states, self._parameters, states_grad, allow_unused=True)
        pairs = [(total, grad) for total, grad in zip(self._gradients, grads, strict=True) if grad is not None]
        torch._foreach_add_([total for total, _ in pairs], [grad for _, grad in pairs])


@dataclass(frozen=True)
class _Recording:
    """Forward and backward of one size: tokens and documents in `batch`, the last hidden states and their gradient."""

    batch: PackedBatch
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    states: Tensor
    states_grad: Tensor


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, recording: _Recording) -> Tensor:
        ctx.recording = recording
        recording.forward.replay()
        return recording.states.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.recording.states_grad.copy_(grads[0])
        ctx.recording.backward.replay()
        return None, None
