"""Attention of pieces of documents beside the reference mask, and shares of one rank beside whole micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_attention_forms import both, boundaries, inputs
from tiny_models import save_tiny_model, tiny_samples

from flatout.config.schema import LoraConfig, ModelConfig
from flatout.kernels.attention.flash import make_varlen_attention
from flatout.kernels.attention.pieces import padded_pieces_attention, pieces_attention
from flatout.kernels.attention.reference import packed_attention, plain_attention, sdpa_attention
from flatout.models.attention import register_over_ranks
from flatout.models.collectives import RankGroup
from flatout.models.compile.layers import compile_layers, report_compilations
from flatout.models.context.attention import attention_over_ranks
from flatout.models.context.share import ContextShare
from flatout.models.head import packed_loss
from flatout.models.load.model import load_model
from flatout.models.lora.layer import add_lora, trainable_parameters
from flatout.models.packed import KeyPieces, flatten_samples
from flatout.models.selftest import check_share

# queries and keys of each piece: a whole document, the middle and the end of one, a single query
QUERIES, KEYS = (13, 5, 4, 1, 2), (13, 9, 30, 7, 2)
CUDA = torch.device("cuda", 0)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    """A group of one rank."""
    backend = "gloo" if request.param == "cpu" else "nccl"
    if request.param == "cuda":
        torch.cuda.set_device(CUDA)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield RankGroup(dist.group.WORLD.group_name, 1, 0)
    dist.destroy_process_group()


def pieces(dtype: torch.dtype = torch.float64, device: str = "cpu", **sizes: Any) -> tuple[list[Any], Any, Any]:
    """Queries, keys and values of pieces, and both boundaries."""
    query, *_ = inputs(dtype, device, lengths=QUERIES, **sizes)
    _, key, value = inputs(dtype, device, lengths=KEYS, **sizes)
    return [query, key, value], boundaries(QUERIES, device), boundaries(KEYS, device)


@pytest.mark.parametrize("window", [None, 3, 13])
def test_the_mask_of_pieces_is_that_of_their_documents(window: int | None) -> None:
    """The last queries of whole documents, computed with those before them."""
    tensors, cu_q, cu_k = pieces()
    whole, key, value = inputs(lengths=KEYS)
    rows = torch.cat([torch.arange(end - n, end) for n, end in zip(QUERIES, cu_k[1:].tolist(), strict=True)])

    def truth(query: Any, key: Any, value: Any) -> Any:
        query = whole.detach().index_copy(0, rows, query)
        return packed_attention(query, key, value, cu_k, scale=0.3, window=window)[rows]

    both(lambda *t: pieces_attention(*t, cu_q, cu_k, scale=0.3, window=window), truth, tensors)


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
@pytest.mark.parametrize("form", [sdpa_attention, plain_attention, packed_attention])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_any_form_computes_pieces(form: Any, heads: int, kv_heads: int, window: int | None, with_sinks: bool) -> None:
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
def test_keys_are_gathered_and_their_gradients_return(group: RankGroup, window: int | None, with_sinks: bool) -> None:
    """Pieces with common keys; on a GPU by torch's kernel, with the keys in another order than the pieces."""
    is_cuda = dist.get_backend() == "nccl"
    device, dtype = ("cuda", torch.bfloat16) if is_cuda else ("cpu", torch.float64)
    lengths, places = [10, 300, 1], [300, 10, 1]
    draw = torch.Generator().manual_seed(0)
    order = torch.randperm(sum(lengths), generator=draw).to(device)
    # the second document in two pieces, which both have its first keys
    cu_q, cu_k = boundaries([10, 120, 180, 1], device), boundaries([10, 120, 300, 1], device)
    rows = torch.cat([torch.arange(10), torch.arange(10, 130), torch.arange(10, 310), torch.arange(310, 311)])
    keys = KeyPieces(order[rows.to(device)], cu_k, 512)
    tensors = inputs(dtype, device, size=64, lengths=places)
    sinks = torch.linspace(-3, 8, 4, dtype=dtype, device=device).requires_grad_(True) if with_sinks else None
    whole = make_varlen_attention() if is_cuda else sdpa_attention
    form = attention_over_ranks(whole, group, is_varlen=is_cuda)
    settings = {"scale": 0.125, "window": window}

    def outcome(call: Any, wide: torch.dtype) -> list[torch.Tensor]:
        leaves = [
            tensor.detach().to(wide).requires_grad_(True) for tensor in (*tensors, *([sinks] if with_sinks else []))
        ]
        options = {"sinks": leaves[3]} if with_sinks else {}
        output = call(*leaves[:3], **settings, **options)
        incoming = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(device, wide)
        return [output.detach(), *torch.autograd.grad(output, leaves, incoming)]

    def truth(query: Any, key: Any, value: Any, **settings: Any) -> Any:
        # keys and values lie in another order than their documents'
        return packed_attention(query, key[order], value[order], boundaries(lengths, device), **settings)

    expected = outcome(truth, torch.float64)
    longest = [512] if is_cuda else []
    found = outcome(lambda *t, **s: form(*t, cu_q, *longest, keys=keys, **s), dtype)
    for mine, true in zip(found, expected, strict=True):
        error = (mine.double() - true).norm() / true.norm()
        assert error < (1e-2 if is_cuda else 1e-12)
    # without keys, it is the form itself
    bounds = boundaries(lengths, device)
    same = form(*tensors, bounds, *longest, **settings), whole(*tensors, bounds, *longest, **settings)
    torch.testing.assert_close(*same, rtol=0, atol=0)


def test_a_share_of_one_rank_has_the_loss_of_the_whole(group: RankGroup, tmp_path: Any) -> None:
    """Eager, compiled in one graph that no size compiles again, and recomputed from this rank's keys alone."""
    is_cuda = dist.get_backend() == "nccl"
    shape = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384} if is_cuda else {}
    save_tiny_model(tmp_path, "qwen3", **shape)
    config = ModelConfig(name=str(tmp_path), precision="bf16" if is_cuda else "fp64")
    device = CUDA if is_cuda else torch.device("cpu")
    loaded = load_model(config, method="lora", device=device, seed=0, context_ranks=2)
    assert loaded.attention == ("varlen" if is_cuda else "sdpa")
    add_lora(loaded.model, LoraConfig(rank=8), seed=0)
    # B starts at zero, which would leave A without a gradient
    draw = torch.Generator().manual_seed(0)
    for name, own in trainable_parameters(loaded.model).items():
        if name.endswith("lora_b"):
            own.data.copy_(torch.randn(own.shape, generator=draw) * 0.02)
    share, number = ContextShare(1, 0), ContextShare(1, 0).num_boundaries(20) if is_cuda else None
    batches = [flatten_samples(tiny_samples(lengths)) for lengths in ([5, 300, 1, 90], [2000, 300], [64], [400] * 9)]

    def gradients(batch: Any) -> tuple[float, torch.Tensor]:
        loaded.model.zero_grad()
        loss = packed_loss(loaded.model, batch.to(device)).loss_sum
        loss.backward()
        grads = [own.grad.flatten().double() for own in trainable_parameters(loaded.model).values()]
        return loss.item(), torch.cat(grads)

    expected = [gradients(batch) for batch in batches]
    loaded.model.set_attn_implementation(register_over_ranks(loaded.attention, group))
    error, limit = check_share(loaded, share)
    assert error <= limit
    if is_cuda:
        torch._dynamo.reset()
        outcome = compile_layers(loaded, "auto", num_boundaries=number or 0, share=share)
        assert outcome.is_complete, outcome.line
    compiled_s: list[float] = []
    with report_compilations(compiled_s.append):
        found = [gradients(share.of(batch, number)) for batch in batches]
    assert not compiled_s
    for (loss, grads), (true_loss, true) in zip(found, expected, strict=True):
        assert loss == pytest.approx(true_loss, rel=2e-3 if is_cuda else 1e-7)
        assert (grads - true).norm() < (0.03 if is_cuda else 1e-6) * true.norm()
    if is_cuda:
        batch = share.of(batches[0], number).to(device)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            packed_loss(loaded.model, batch).loss_sum.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
