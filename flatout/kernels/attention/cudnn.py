"""Packed causal attention by cuDNN's fused kernels through NVIDIA's `cudnn` frontend package, where installed.

torch ships cuDNN itself, but its binding rebuilds cuDNN's graph at every call with boundaries; with the frontend,
graphs are cached.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from flatout.kernels.attention.flash import Attention, packed_operator
from flatout.kernels.capability import HOPPER, capability

# 64-bit boundaries need cuDNN 9.6
_MIN_BACKEND = 90600
# the backward pass's workspace is sized for tokens rounded up to a multiple of this, so that a run has few graphs
_TOKENS_MULTIPLE = 4096
_MAX_GRAPHS = 512
# the arguments of past layer calls, except sizes
_layers: set[tuple[Any, ...]] = set()
_newest_layout: dict[str, Any] = {}


def cudnn_problem(device: torch.device) -> str | None:
    """Return why cuDNN's attention cannot be tried on this device (None if it can)."""
    if find_spec("cudnn") is None:
        return "cudnn is not installed (nvidia-cudnn-frontend)"
    # ragged batches
    if capability(device) < HOPPER:
        return "cudnn has no kernels for packed documents on this device"
    if (torch.backends.cudnn.version() or 0) < _MIN_BACKEND:
        return f"cudnn needs cuDNN 9.6, but torch has {torch.backends.cudnn.version()}"
    return None


@cache
def make_cudnn_attention() -> Attention:
    """Bind cuDNN's attention, once per process. Raises ImportError or AttributeError for an unexpected package."""
    return packed_operator("flatout::cudnn", *_passes(importlib.import_module("cudnn")), log_sums_by_token=True)


def prepare_cudnn_attention(sizes: Collection[tuple[int, int]], num_boundaries: int) -> int:
    """Build cuDNN's graphs of every layer that was called with `num_boundaries`, for sizes (tokens, max_seqlen).

    Returns the number of graphs. Building one takes the host about 50 ms, during which the GPU would idle in the first
    step of a size.
    """
    exact = torch.are_deterministic_algorithms_enabled()
    layers = [layer for layer in _layers if layer[4] == num_boundaries - 1]
    wanted = {(_key(layer, max_seqlen), _room(num_tokens)) for layer in layers for num_tokens, max_seqlen in sizes}
    forward_keys = {key for key, _ in wanted}
    for key in forward_keys:
        _forward_graph(*key)
    for key, room in wanted:
        _backward_graph(*key, room, exact)
    return len(forward_keys) + len(wanted)


def _passes(cudnn: Any) -> tuple[Any, Any]:
    def layer_of(q: Tensor, k: Tensor, cu_seqlens: Tensor, scale: float, left: int | None) -> tuple[Any, ...]:
        heads = (q.shape[1], k.shape[1], q.shape[2])
        return cudnn, q.device, q.dtype, heads, len(cu_seqlens) - 1, scale, left

    def forward(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, left: int | None
    ) -> tuple[Tensor, Tensor]:
        layer = layer_of(q, k, cu_seqlens, scale, left)
        _layers.add(layer)
        output, log_sums = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
        _forward_graph(*_key(layer, max_seqlen)).run([q, k, v], [output, log_sums], cu_seqlens)
        return output, log_sums

    def backward(
        output_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sums: Tensor, cu_seqlens: Tensor,
        max_seqlen: int, scale: float, left: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        exact = torch.are_deterministic_algorithms_enabled()
        key = _key(layer_of(q, k, cu_seqlens, scale, left), max_seqlen)
        q_grad, k_grad, v_grad = (tensor.new_empty(tensor.shape) for tensor in (q, k, v))
        inputs, outputs = [q, k, v, output, output_grad, log_sums], [q_grad, k_grad, v_grad]
        _backward_graph(*key, _room(len(q)), exact).run(inputs, outputs, cu_seqlens)
        return q_grad, k_grad, v_grad

    return forward, backward


def _key(layer: tuple[Any, ...], max_seqlen: int) -> tuple[Any, ...]:
    """Return the cache key of a cuDNN graph, which does not include the number of tokens."""
    *shape, scale, left = layer
    window = None if left is None or left + 1 >= max_seqlen else left + 1
    return *shape, max_seqlen, scale, window


def _room(num_tokens: int) -> int:
    return -(-num_tokens // _TOKENS_MULTIPLE) * _TOKENS_MULTIPLE


@cache
def _handle(cudnn: Any, device: torch.device) -> Any:
    with torch.cuda.device(device):
        return cudnn.create_handle()


class _Graph:
    """A cuDNN graph over streams of tokens (T, heads, size), with the boundaries of their documents."""

    def __init__(
        self, cudnn: Any, device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int], num_documents: int,
        max_seqlen: int, scale: float, window: int | None,
    ) -> None:  # fmt: skip
        types = cudnn.data_type
        half = types.BFLOAT16 if dtype == torch.bfloat16 else types.HALF
        self._cudnn, self._device, self._handle = cudnn, device, _handle(cudnn, device)
        self.graph = cudnn.pygraph(
            io_data_type=half, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT, handle=self._handle
        )
        num_heads, num_key_heads, head_dim = heads
        # heads, size and type of query-like tensors (kind 0), key-like tensors (1) and log-sum-exps (2)
        kinds = ((num_heads, head_dim, half), (num_key_heads, head_dim, half), (num_heads, 1, types.FLOAT))
        self._layouts: list[dict[str, Any]] = [
            {
                "dim": (num_documents, count, max_seqlen, size),
                "stride": (max_seqlen * count * size, size, count * size, 1),
                "data_type": data_type,
            }
            for count, size, data_type in kinds
        ]
        # elements per token, to compute documents' starts
        self._steps = tuple(count * size for count, size, _ in kinds)
        shape: dict[str, Any] = {"dim": (num_documents + 1, 1, 1, 1), "stride": (1, 1, 1, 1)}
        self._starts = [self.graph.tensor(name=f"starts_{i}", data_type=types.INT64, **shape) for i in range(3)]
        self._lengths = self.graph.tensor(
            name="lengths", dim=(num_documents, 1, 1, 1), stride=(1, 1, 1, 1), data_type=types.INT32
        )
        # the left bound includes the row itself, like transformers' window
        self.settings = {
            "attn_scale": scale, "use_padding_mask": True, "seq_len_q": self._lengths, "seq_len_kv": self._lengths,
            "diagonal_band_right_bound": 0, "diagonal_band_left_bound": window,
        }  # fmt: skip

    def given(self, name: str, kind: int) -> Any:
        """Add an input of one kind."""
        return self.graph.tensor(name=name, **self._layouts[kind]).set_ragged_offset(self._starts[kind])

    def build(self, inputs: Sequence[Any], outputs: Sequence[Any], kinds: Sequence[int]) -> _Graph:
        """Compile the graph for these inputs and outputs, of these kinds, in the order in which `run` gets them."""
        for tensor, kind in zip(outputs, kinds, strict=True):
            layout = self._layouts[kind]
            tensor.set_output(True).set_dim(layout["dim"]).set_stride(layout["stride"])
            tensor.set_data_type(layout["data_type"]).set_ragged_offset(self._starts[kind])
        self._places = [*inputs, *outputs, *self._starts, self._lengths]
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([self._cudnn.heur_mode.A])
        self.graph.check_support()
        self.graph.build_plans()
        self._workspace_bytes = max(1, self.graph.get_workspace_size())
        return self

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], cu_seqlens: Tensor) -> None:
        """Launch on the current stream. `inputs` may have any layout; `outputs` must be contiguous."""
        workspace = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=self._device)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._cudnn.set_stream(handle=self._handle, stream=stream)
        values = [*(tensor.contiguous() for tensor in inputs), *outputs, *_ragged_layout(cu_seqlens, self._steps)]
        self.graph.execute(dict(zip(self._places, values, strict=True)), workspace, handle=self._handle)


def _ragged_layout(cu_seqlens: Tensor, steps: tuple[int, ...]) -> list[Tensor]:
    """Return documents' starts in elements, int64 (N+1,), for tensors of each number of elements a token, and lengths.

    All layers of a pass ask with the same boundaries, so the newest result is kept.
    """
    # a recorded graph computes its own, and inference tensors do not count their changes
    if torch.cuda.is_current_stream_capturing() or cu_seqlens.is_inference():
        return _compute_ragged_layout(cu_seqlens, steps)
    key = (cu_seqlens.data_ptr(), cu_seqlens._version, cu_seqlens.shape, steps)
    if _newest_layout.get("key") != key:
        # as long as the boundaries are kept, nothing else can have their address
        _newest_layout.update(key=key, of=cu_seqlens, layout=_compute_ragged_layout(cu_seqlens, steps))
    return _newest_layout["layout"]


def _compute_ragged_layout(cu_seqlens: Tensor, steps: tuple[int, ...]) -> list[Tensor]:
    wide = cu_seqlens.to(torch.int64)
    return [*(wide * step for step in steps), cu_seqlens.diff()]


@lru_cache(_MAX_GRAPHS)
def _forward_graph(*key: Any) -> _Graph:
    graph = _Graph(*key)
    q, k, v = graph.given("query", 0), graph.given("key", 1), graph.given("value", 1)
    outputs = graph.graph.sdpa(name="attention", q=q, k=k, v=v, generate_stats=True, **graph.settings)
    return graph.build([q, k, v], outputs, kinds=(0, 2))


@lru_cache(_MAX_GRAPHS)
def _backward_graph(*key_room_exact: Any) -> _Graph:
    *key, room, exact = key_room_exact
    graph = _Graph(*key)
    names = {"q": 0, "k": 1, "v": 1, "o": 0, "dO": 0, "stats": 2}
    inputs = {name: graph.given(name, kind) for name, kind in names.items()}
    grads = graph.graph.sdpa_backward(
        name="attention_backward", max_total_seq_len_q=room, max_total_seq_len_kv=room,
        use_deterministic_algorithm=exact, **inputs, **graph.settings,
    )  # fmt: skip
    return graph.build([*inputs.values()], grads, kinds=(0, 1, 1))
