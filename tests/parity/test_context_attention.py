"""Attention of pieces of documents beside the reference mask, and shares of one rank beside whole micro-batches."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch._dynamo.config
import torch.distributed as dist
from test_attention_forms import both, boundaries, inputs
from tiny_models import save_tiny_model, tiny_samples
from torch import Tensor

from flatout.config.schema import LoraConfig, ModelConfig
from flatout.kernels.attention.flash import make_varlen_attention
from flatout.kernels.attention.pieces import padded_pieces_attention, register_varlen_pieces
from flatout.kernels.attention.reference import masked_attention, packed_attention, plain_attention, sdpa_attention
from flatout.models.attention import register_over_ranks
from flatout.models.collectives import RankGroup
from flatout.models.compile.layers import CompileOptions, compile_layers
from flatout.models.context.attention import attention_over_ranks
from flatout.models.context.shard import ContextShard
from flatout.models.load.model import Loading, load_model
from flatout.models.lora.layer import add_lora, trainable_parameters
from flatout.models.model_with_loss import packed_cross_entropy
from flatout.models.packed import KeyPieces, flatten_samples
from flatout.models.selftest import check_shard

# queries and keys of each piece: a whole document, the middle and the end of one, a single query
QUERIES, KEYS = (13, 5, 4, 1, 2), (13, 9, 30, 7, 2)
CUDA = torch.device("cuda", 0)
CUDA_MARKS = pytest.mark.gpu


def pieces_mask(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, num_queries: int, num_keys: int, window: int | None = None
) -> Tensor:
    """Return the mask, bool (T, S): a query attends to keys of its piece up to itself, in a window to the last ones.

    `cu_seqlens_q` and `cu_seqlens_k` int (D+1,) are the pieces' boundaries in queries and keys. Query i of a piece with
    n queries and m >= n keys is its key i + m - n, as FlashAttention's causal mask aligns them.
    """
    queries, keys = (torch.arange(num, device=cu_seqlens_q.device) for num in (num_queries, num_keys))
    piece_of_query = torch.bucketize(queries, cu_seqlens_q[1:], right=True)
    piece_of_key = torch.bucketize(keys, cu_seqlens_k[1:], right=True)
    # how far before the piece's end
    queries, keys = cu_seqlens_q[1:][piece_of_query] - queries, cu_seqlens_k[1:][piece_of_key] - keys
    distance = keys[None, :] - queries[:, None]
    mask = (piece_of_query[:, None] == piece_of_key[None, :]) & (distance >= 0)
    return mask if window is None else mask & (distance < window)


def pieces_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    window: int | None = None,
    **settings: Any,
) -> Tensor:
    """Compute causal attention of pieces with one mask.

    query (T, H, D), key (S, K, D), value (S, K, E), boundaries as in `pieces_mask`; keywords as in `masked_attention`.
    Returns (T, H, E).
    """
    mask = pieces_mask(cu_seqlens_q, cu_seqlens_k, len(query), len(key), window)
    return masked_attention(query, key, value, mask, **settings)


class Place(NamedTuple):
    """Where a test computes, and by which form of attention; a group of one rank."""

    group: RankGroup
    device: torch.device
    form: Literal["varlen", "sdpa"]

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"


@pytest.fixture(params=["sdpa", pytest.param("cuda", marks=CUDA_MARKS)])
def place(request):
    is_cuda = request.param == "cuda"
    if is_cuda:
        torch.cuda.set_device(CUDA)
        # another test's operators may stand in its place
        register_varlen_pieces.cache_clear()
    dist.init_process_group("nccl" if is_cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = RankGroup(dist.group.WORLD.group_name, 1, 0)
    yield Place(group, CUDA if is_cuda else torch.device("cpu"), "varlen" if is_cuda else "sdpa")
    dist.destroy_process_group()


def whole_documents(q: Any, k: Any, v: Any, cu_seqlens: Any, *_: int, **settings: Any) -> Any:
    """The form for batches that are no shards, where torch's kernel is not."""
    return sdpa_attention(q, k, v, cu_seqlens, **settings)


def pieces(dtype: torch.dtype = torch.float64, device: str = "cpu", **sizes: Any) -> tuple[list[Any], Any, Any]:
    """Queries, keys and values of pieces, and both boundaries."""
    query, *_ = inputs(dtype, device, lengths=QUERIES, **sizes)
    _, key, value = inputs(dtype, device, lengths=KEYS, **sizes)
    return [query, key, value], boundaries(QUERIES, device), boundaries(KEYS, device)


@pytest.mark.parametrize("window", [None, 3, 13])
def test_the_mask_of_pieces_is_that_of_their_documents(window):
    """The last queries of whole documents, computed with those before them."""
    tensors, cu_q, cu_k = pieces()
    whole, *_ = inputs(lengths=KEYS)
    rows = torch.cat([torch.arange(end - n, end) for n, end in zip(QUERIES, cu_k[1:].tolist(), strict=True)])

    def truth(query: Any, key: Any, value: Any) -> Any:
        query = whole.detach().index_copy(0, rows, query)
        return packed_attention(query, key, value, cu_k, scale=0.3, window=window)[rows]

    both(lambda *t: pieces_attention(*t, cu_q, cu_k, scale=0.3, window=window), truth, tensors)


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
@pytest.mark.parametrize("form", [sdpa_attention, plain_attention, packed_attention])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_any_form_computes_pieces(form, heads, kv_heads, window, with_sinks):
    tensors, cu_q, cu_k = pieces(heads=heads, kv_heads=kv_heads)
    sinks = torch.linspace(-3, 8, heads, dtype=torch.float64, requires_grad=True) if with_sinks else None
    settings = {"scale": 0.3, "window": window, "sinks": sinks}
    both(
        lambda *t: padded_pieces_attention(form, *t[:3], cu_q, cu_k, **settings),
        lambda *t: pieces_attention(*t[:3], cu_q, cu_k, **settings),
        [*tensors, *([] if sinks is None else [sinks])],
    )


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_keys_are_gathered_and_their_gradients_return(place, window, with_sinks):
    """Pieces with common keys, which lie in another order than their documents."""
    device, is_varlen = place.device, place.form == "varlen"
    dtype = torch.bfloat16 if place.is_cuda else torch.float64
    lengths = [10, 300, 1]
    order = torch.randperm(sum(lengths), generator=torch.Generator().manual_seed(0)).to(device)
    # the second document in two pieces, which both have its first keys
    cu_q, cu_k = boundaries([10, 120, 180, 1], str(device)), boundaries([10, 120, 300, 1], str(device))
    rows = torch.cat([torch.arange(130), torch.arange(10, 311)]).to(device)
    keys = KeyPieces(order[rows], cu_k, 512)
    tensors = inputs(dtype, str(device), size=64, lengths=lengths)
    if with_sinks:
        tensors.append(torch.linspace(-3, 8, 4, dtype=dtype, device=device).requires_grad_(True))
    whole = make_varlen_attention() if place.is_cuda else whole_documents
    form = attention_over_ranks(whole, place.group, is_varlen=is_varlen)
    bounds, longest = boundaries(lengths, str(device)), [512] if is_varlen else []

    def outcome(call: Any, wide: torch.dtype) -> list[torch.Tensor]:
        leaves = [tensor.detach().to(wide).requires_grad_(True) for tensor in tensors]
        sinks = leaves[3] if with_sinks else None
        output = call(*leaves[:3], scale=0.125, window=window, sinks=sinks)
        incoming = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(device, wide)
        return [output.detach(), *torch.autograd.grad(output, leaves, incoming)]

    def truth(query: Any, key: Any, value: Any, **settings: Any) -> Any:
        return packed_attention(query, key[order], value[order], bounds, **settings)

    expected = outcome(truth, torch.float64)
    found = outcome(lambda *t, **s: form(*t, cu_q, *longest, keys=keys, **s), dtype)
    for mine, true in zip(found, expected, strict=True):
        assert (mine.double() - true).norm() < (1e-2 if place.is_cuda else 1e-12) * true.norm()
    # without keys, it is the form itself
    same = [own(*tensors[:3], bounds, *longest, scale=0.125, window=window) for own in (form, whole)]
    torch.testing.assert_close(*same, rtol=0, atol=0)


def test_a_share_of_one_rank_has_the_loss_of_the_whole(place, tmp_path):
    """Also in compiled layers, which are one graph for every size."""
    shape = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384} if place.is_cuda else {}
    save_tiny_model(tmp_path, "qwen3", **shape)
    config = ModelConfig(name=str(tmp_path), precision="bf16" if place.is_cuda else "fp64")
    loaded = load_model(config, method="lora", device=place.device, seed=0, how=Loading(context_ranks=2))
    assert loaded.attention == ("varlen" if place.is_cuda else "sdpa")
    add_lora(loaded.model, LoraConfig(rank=8), seed=0)
    # B starts at zero, which would leave A without a gradient
    draw = torch.Generator().manual_seed(0)
    for name, own in trainable_parameters(loaded.model).items():
        if name.endswith("lora_b"):
            own.data.copy_(torch.randn(own.shape, generator=draw) * 0.02)
    shard = ContextShard(1, 0)
    number = shard.num_boundaries(20) if place.form == "varlen" else None
    batches = [flatten_samples(tiny_samples(lengths)) for lengths in ([5, 300, 1, 90], [900, 300], [64], [400] * 3)]

    def gradients(batch: Any) -> tuple[float, torch.Tensor]:
        loaded.model.zero_grad()
        loss = packed_cross_entropy(loaded.model, batch.to(place.device)).loss_sum
        loss.backward()
        grads = [own.grad.flatten().double() for own in trainable_parameters(loaded.model).values()]
        return loss.item(), torch.cat(grads)

    expected = [gradients(batch) for batch in batches]
    loaded.model.set_attn_implementation(register_over_ranks(place.form, place.group))
    error, limit = check_shard(loaded, shard)
    assert error <= limit
    torch.compiler.reset()
    if place.is_cuda:
        outcome = compile_layers(loaded, "auto", CompileOptions(num_boundaries=number or 0, shard=shard))
        assert outcome.is_complete, outcome.line
    # floats such as a norm's epsilon are constants in compiled layers
    with torch._dynamo.config.patch(error_on_recompile=True, specialize_float=True):
        found = [gradients(shard.of(batch, number)) for batch in batches]
    for (loss, grads), (true_loss, true) in zip(found, expected, strict=True):
        assert loss == pytest.approx(true_loss, rel=2e-3 if place.is_cuda else 1e-7)
        assert (grads - true).norm() < (0.03 if place.is_cuda else 1e-6) * true.norm()
    if place.is_cuda:
        batch = shard.of(batches[0], number).to(place.device)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            packed_cross_entropy(loaded.model, batch).loss_sum.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
