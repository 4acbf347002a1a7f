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

from flatout.kernels.attention.flash import Attention, form_of, packed_operator

# ragged batches need Hopper or newer; 64-bit boundaries need cuDNN 9.6
_MIN_MAJOR = 9
_MIN_BACKEND = 90600
# the backward pass's workspace is sized for tokens rounded up to a multiple of this, so that a run has few graphs
_TOKENS_MULTIPLE = 4096
_MAX_GRAPHS = 512
# the arguments of past layer calls, except sizes
_layers: set[tuple[Any, ...]] = set()


def cudnn_problem(device: torch.device) -> str | None:
    """Return why cuDNN's attention cannot be tried on this device (None if it can)."""
    if find_spec("cudnn") is None:
        return "cudnn is not installed (nvidia-cudnn-frontend)"
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < _MIN_MAJOR:
        return "cudnn has no kernels for packed documents on this device"
    if (torch.backends.cudnn.version() or 0) < _MIN_BACKEND:
        return f"cudnn needs cuDNN 9.6, torch has {torch.backends.cudnn.version()}"
    return None


@cache
def make_cudnn_attention() -> Attention:
    """Bind cuDNN's attention, once per process; shapes and keywords as in `make_flash_attention`.

    Raises ImportError or AttributeError for an unexpected package. Its backward is only deterministic under
    torch.use_deterministic_algorithms.
    """
    passes = _passes(importlib.import_module("cudnn"))
    return form_of(packed_operator("flatout::cudnn", *passes, log_sums_by_token=True))


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
        max_seqlen: int,
    ) -> None:  # fmt: skip
        types = cudnn.data_type
        half = types.BFLOAT16 if dtype == torch.bfloat16 else types.HALF
        self._cudnn, self._device, self.handle = cudnn, device, _handle(cudnn, device)
        self.graph = cudnn.pygraph(
            io_data_type=half, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT, handle=self.handle
        )
        num_heads, num_key_heads, size = heads
        self._size, self._max_seqlen, self._num_documents = size, max_seqlen, num_documents
        self._half, self._float = half, types.FLOAT
        # elements per token, to compute documents' starts: of query-like tensors, key-like tensors, log-sum-exps
        self._steps = torch.tensor([[num_heads * size], [num_key_heads * size], [num_heads]], device=device)
        shape: dict[str, Any] = {"dim": (num_documents + 1, 1, 1, 1), "stride": (1, 1, 1, 1)}
        self._starts = [self.graph.tensor(name=f"starts_{i}", data_type=types.INT64, **shape) for i in range(3)]
        self.lengths = self.graph.tensor(
            name="lengths", dim=(num_documents, 1, 1, 1), stride=(1, 1, 1, 1), data_type=types.INT32
        )
        self.heads = heads
        self.places: list[Any] = []
        self._workspace_bytes = 0

    def given(self, name: str, kind: int) -> Any:
        """Add an input: query-like (0), key-like (1) or log-sum-exps (2)."""
        tensor = self.graph.tensor(name=name, data_type=self._type(kind), **self._layout(kind))
        return tensor.set_ragged_offset(self._starts[kind])

    def wanted(self, tensor: Any, kind: int) -> Any:
        """Mark an output, with kinds as in `given`."""
        layout = self._layout(kind)
        tensor.set_output(True).set_dim(layout["dim"]).set_stride(layout["stride"])
        return tensor.set_data_type(self._type(kind)).set_ragged_offset(self._starts[kind])

    def build(self, places: Sequence[Any]) -> _Graph:
        """Compile the graph for these tensors, in the order in which `run` receives them."""
        self.places = [*places, *self._starts, self.lengths]
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([self._cudnn.heur_mode.A])
        self.graph.check_support()
        self.graph.build_plans()
        self._workspace_bytes = max(1, self.graph.get_workspace_size())
        return self

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], cu_seqlens: Tensor) -> None:
        """Launch on the current stream. `inputs` may have any layout; `outputs` must be contiguous."""
        starts = (cu_seqlens * self._steps).unbind()
        workspace = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=self._device)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._cudnn.set_stream(handle=self.handle, stream=stream)
        values = [*(tensor.contiguous() for tensor in inputs), *outputs, *starts, cu_seqlens.diff()]
        self.graph.execute(dict(zip(self.places, values, strict=True)), workspace, handle=self.handle)

    def _layout(self, kind: int) -> dict[str, Any]:
        heads = self.heads[1] if kind == 1 else self.heads[0]
        size = 1 if kind == 2 else self._size
        row = heads * size
        return {
            "dim": (self._num_documents, heads, self._max_seqlen, size),
            "stride": (self._max_seqlen * row, size, row, 1),
        }

    def _type(self, kind: int) -> Any:
        return self._float if kind == 2 else self._half


def _settings(graph: _Graph, scale: float, window: int | None) -> dict[str, Any]:
    # the left bound includes the row itself, like transformers' window
    return {
        "attn_scale": scale, "use_padding_mask": True, "seq_len_q": graph.lengths, "seq_len_kv": graph.lengths,
        "diagonal_band_right_bound": 0, "diagonal_band_left_bound": window,
    }  # fmt: skip


@lru_cache(_MAX_GRAPHS)
def _forward_graph(*key: Any) -> _Graph:
    *shape, scale, window = key
    graph = _Graph(*shape)
    inputs = [graph.given("query", 0), graph.given("key", 1), graph.given("value", 1)]
    output, log_sums = graph.graph.sdpa(
        name="attention", q=inputs[0], k=inputs[1], v=inputs[2], generate_stats=True, **_settings(graph, scale, window)
    )
    return graph.build([*inputs, graph.wanted(output, 0), graph.wanted(log_sums, 2)])


@lru_cache(_MAX_GRAPHS)
def _backward_graph(*key: Any) -> _Graph:
    *shape, scale, window, room, exact = key
    graph = _Graph(*shape)
    names = {"q": 0, "k": 1, "v": 1, "o": 0, "dO": 0, "stats": 2}
    inputs = {name: graph.given(name, kind) for name, kind in names.items()}
    grads = graph.graph.sdpa_backward(
        name="attention_backward", max_total_seq_len_q=room, max_total_seq_len_kv=room,
        use_deterministic_algorithm=exact, **inputs, **_settings(graph, scale, window),
    )  # fmt: skip
    outputs = [graph.wanted(grad, kind) for grad, kind in zip(grads, (0, 1, 1), strict=True)]
    return graph.build([*inputs.values(), *outputs])
