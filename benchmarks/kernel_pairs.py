"""Each kernel and choice beside what would run if it were deleted: milliseconds of both, on one GPU.

    python benchmarks/kernel_pairs.py                    all pairs, about three minutes on an H200
    python benchmarks/kernel_pairs.py --only moe loss    the pairs whose names contain one of these words
    python benchmarks/kernel_pairs.py --tiny             on a CPU: only shows that it runs

Shapes are those of docs/measurements.md: 32 chats a step, LoRA of rank 16. `gain` is what the kernel saves of the time
without it, `of a step` what it saves of a whole step, whose time is that page's. Medians of forward and backward; each
pair ends after its time, so a pair that fails costs its own row only. Layers are compiled, as in training.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from bench.samples import CHAT, REASONING
from bench.shapes import SHAPES, shape_config
from bench.timing import median_ms
from kernel_times import DEVICE, DTYPE, randn
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from flatout.config.schema import LoraConfig
from flatout.errors import first_line
from flatout.kernels import low_rank, moe, nf4, segmented
from flatout.kernels.attention import cudnn, flash, shared_prefix
from flatout.kernels.attention.pieces import padded_pieces_attention, register_varlen_pieces
from flatout.kernels.attention.reference import sdpa_attention
from flatout.kernels.attention.shared_prefix import SharedPrefixes
from flatout.kernels.attention.slots import slot_attention
from flatout.kernels.attention.tower import tower_attention
from flatout.kernels.cross_entropy.tiled import token_loss
from flatout.kernels.host_rows import gather_rows
from flatout.models.attention import register, registered_name
from flatout.models.experts.block import prepare_experts, register_experts
from flatout.models.load.quantized import QUANTIZERS, quantize_layers
from flatout.models.lora.fused import FusedLayers, fuse_layers
from flatout.models.lora.layer import add_lora

ON_GPU = DEVICE == "cuda"
TOKENS = 17408 if ON_GPU else 64
# milliseconds of a step of 17,400 tokens, by the rates of docs/measurements.md
STEP_MS = {"8b-bf16": 952, "8b-fp8": 633, "8b-nf4-fp8": 648, "0.6b-bf16": 118, "30b-a3b-12l-bf16": 182}
LAYERS_8B = 36
Run = Callable[[], object]


@dataclass(frozen=True)
class Pair:
    """A kernel or choice, and both sides of it."""

    name: str
    shape: str
    uses: Callable[[], Run]
    """Prepares the side with the kernel and returns what is timed."""
    lacks: Callable[[], Run]
    """Prepares the side without it."""
    step: str = ""
    """The step of STEP_MS that contains it."""
    calls: float = 0
    """How often a step calls it."""
    removed: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What hides the kernel while the side without it is prepared and timed."""


def both_passes(function: Callable[..., Tensor], *inputs: Tensor, trained: Sequence[Tensor] = ()) -> Run:
    """Forward and backward of a function, to its inputs and the trained tensors."""
    leaves = [tensor.detach().requires_grad_(True) for tensor in inputs]
    wanted = [*leaves, *trained]
    incoming = torch.randn_like(function(*leaves).detach())
    return lambda: torch.autograd.grad(function(*leaves), wanted, incoming)


def boundaries(lengths: Sequence[int]) -> Tensor:
    return F.pad(torch.tensor(lengths, device=DEVICE).cumsum(0), (1, 0)).to(torch.int32)


def heads_of(shape: str, num_tokens: int, num_keys: int | None = None) -> list[Tensor]:
    """Query, key and value of a model's attention."""
    sizes = SHAPES[shape]
    heads, size = (sizes["num_attention_heads"], sizes["num_key_value_heads"]), sizes["head_dim"]
    keys = num_tokens if num_keys is None else num_keys
    return [randn(num_tokens, heads[0], size), randn(keys, heads[1], size), randn(keys, heads[1], size)]


def attention_pairs(shape: str) -> Iterator[Pair]:
    for named, lengths in (("chat", CHAT.group(0)), ("reasoning", REASONING.group(0))):
        if not ON_GPU or flash.varlen_problem(torch.device(DEVICE), DTYPE, SHAPES[shape]["head_dim"]):
            return
        scale, step = SHAPES[shape]["head_dim"] ** -0.5, "8b-fp8" if named == "chat" else ""
        where = f"{shape}, {len(lengths)} {named} documents, {sum(lengths):,} tokens"

        def prepare(make: Callable[[], Any], lengths: list[int], scale: float) -> Run:
            form, packed = make(), {"cu_seqlens": boundaries(lengths), "scale": scale}
            longest = {} if form is sdpa_attention else {"max_seqlen": max(lengths)}
            return both_passes(partial(form, **packed, **longest), *heads_of(shape, sum(lengths)))

        side = partial(partial, prepare, lengths=lengths, scale=scale)
        varlen = side(flash.make_varlen_attention)
        has_cudnn = cudnn.cudnn_problem(torch.device(DEVICE)) is None
        if has_cudnn:
            yield Pair("cudnn attention / varlen", where, side(cudnn.make_cudnn_attention), varlen, step, LAYERS_8B)
        if flash.flash_problem(torch.device(DEVICE)) is None:
            # without FA4, `auto` takes cudnn where it is installed
            other = side(cudnn.make_cudnn_attention) if has_cudnn else varlen
            name = f"fa4 attention / {'cudnn' if has_cudnn else 'varlen'}"
            yield Pair(name, where, side(flash.make_flash_attention), other, step, LAYERS_8B)
        yield Pair("varlen attention / sdpa by document", where, varlen, side(lambda: sdpa_attention), step, LAYERS_8B)


def prefix_pairs(shape: str, groups: int, prefix: int, suffixes: list[int]) -> Iterator[Pair]:
    """`groups` prefixes of `prefix` tokens, each with these suffixes."""
    if not ON_GPU:
        return
    own = sum(suffixes)
    stream = [prefix] * groups + suffixes * groups
    shared = SharedPrefixes(
        boundaries([prefix] * groups), boundaries([own] * groups),
        torch.tensor([groups, groups * prefix, groups * own, own, prefix]),
    )  # fmt: skip

    def prepare() -> Run:
        form = partial(
            flash.make_varlen_attention(), cu_seqlens=boundaries(stream), max_seqlen=max(stream),
            scale=SHAPES[shape]["head_dim"] ** -0.5, shared=shared,
        )  # fmt: skip
        return both_passes(form, *heads_of(shape, sum(stream)))

    yield Pair(
        "shared prefixes, triton / torch", f"{shape}, {groups} x {prefix} tokens with {len(suffixes)} suffixes each",
        prepare, prepare, "8b-fp8", LAYERS_8B, partial(patch.object, shared_prefix, "_has_kernel", lambda q: False),
    )  # fmt: skip


def other_attention_pairs() -> Iterator[Pair]:
    num_slots, places = (256, 512) if ON_GPU else (2, 8)
    lengths = torch.randint(places // 8, places, (num_slots,), device=DEVICE, dtype=torch.int32)

    def slots(use_kernel: bool) -> Run:
        tensors = heads_of("qwen3-8b", num_slots, num_slots * places)
        return torch.no_grad()(
            partial(slot_attention, *tensors, lengths, places, scale=128**-0.5, use_kernel=use_kernel)
        )

    where = f"qwen3-8b, {num_slots} slots of {places}, forward"
    yield Pair("slots attention, triton / sdpa", where, partial(slots, ON_GPU), partial(slots, False))
    if not ON_GPU:
        return
    generator = torch.Generator().manual_seed(0)
    patches = (torch.randint(14, 97, (48, 2), generator=generator).prod(1) // 4 * 4).tolist()

    def tower(by_picture: bool) -> Run:
        tensors = [randn(1, 16, sum(patches), 72) for _ in range(3)]
        settings = {"cu_seq_lens_q": boundaries(patches), "max_length_q": max(patches), "scaling": 72**-0.5}
        if not by_picture:
            return both_passes(lambda q, k, v: tower_attention(torch.nn.Identity(), q, k, v, **settings)[0], *tensors)

        def one_by_one(*qkv: Tensor) -> Tensor:
            pieces = zip(*(each.split(patches, dim=2) for each in qkv), strict=True)
            return torch.cat([F.scaled_dot_product_attention(*piece) for piece in pieces], dim=2)

        return both_passes(one_by_one, *tensors)

    where = f"qwen3-vl-8b, {len(patches)} pictures, {sum(patches):,} patches"
    yield Pair("tower attention, varlen / sdpa by picture", where, partial(tower, False), partial(tower, True))
    chunk = 8192
    q_bounds, k_bounds = boundaries([chunk, chunk]), boundaries([chunk, 4 * chunk])
    scale = 128**-0.5

    def pieces() -> Run:
        register_varlen_pieces()
        q, k, v = heads_of("qwen3-8b", 2 * chunk, 5 * chunk)
        rest = (q_bounds, k_bounds, chunk, 4 * chunk, scale, None)

        def run() -> object:
            output, log_sums = torch.ops.flatout.varlen_pieces(q, k, v, *rest)
            return torch.ops.flatout.varlen_pieces_backward(output, q, k, v, output, log_sums, *rest)

        return run

    def padded() -> Run:
        form = partial(flash.make_varlen_attention(), max_seqlen=4 * chunk)
        run = partial(padded_pieces_attention, form, cu_seqlens_q=q_bounds, cu_seqlens_k=k_bounds, scale=scale)
        return both_passes(lambda q, k, v: run(q, k, v), *heads_of("qwen3-8b", 2 * chunk, 5 * chunk))

    yield Pair(
        "pieces attention / padded documents", f"qwen3-8b, shard of {4 * chunk:,} tokens, 2 ranks", pieces, padded
    )


def loss_pairs(shape: str, step: str) -> Iterator[Pair]:
    num_rows = 10496 if ON_GPU else 48
    hidden_size, vocab_size = SHAPES[shape]["hidden_size"], SHAPES[shape]["vocab_size"]

    def prepare(function: Callable[..., Tensor]) -> Run:
        weight, targets = randn(vocab_size, hidden_size, scale=0.02), torch.randint(0, vocab_size, (num_rows,))
        return both_passes(
            partial(function, weight.requires_grad_(False), targets.to(DEVICE)), randn(num_rows, hidden_size)
        )

    def tiled(fused: bool, weight: Tensor, targets: Tensor, x: Tensor) -> Tensor:
        return token_loss(x, weight, targets, fused=fused)[0]

    def plain(weight: Tensor, targets: Tensor, x: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), targets, reduction="sum")

    tiles = partial(prepare, partial(tiled, False))
    where = f"{shape}, {num_rows:,} label rows"
    yield Pair("loss, triton tiles / torch tiles", where, partial(prepare, partial(tiled, ON_GPU)), tiles, step, 1)
    yield Pair("loss, torch tiles / all logits at once", where, tiles, partial(prepare, plain), step, 1)


def fused_mlp(shape: str, storage: str | None, *, fuses: bool = True) -> Any:
    """One layer's MLP with LoRA on its linears, in a storage, and its fused layers."""
    register()
    sizes = {**SHAPES[shape], "num_hidden_layers": 1, "vocab_size": 1024}
    attention = registered_name("varlen" if ON_GPU else "sdpa")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes), dtype=DTYPE, attn_implementation=attention)
    model.to(DEVICE).requires_grad_(False)
    if storage:
        device = torch.device(DEVICE)
        quantize_layers(model, QUANTIZERS[storage], device=device, dtype=DTYPE, place=device)
    add_lora(model, LoraConfig(rank=16, alpha=16.0), seed=0)
    return model, fuse_layers(model, fp8=storage == "nf4") if fuses else None


def mlp_run(shape: str, storage: str | None, **options: bool) -> Run:
    model, _ = fused_mlp(shape, storage, **options)
    mlp = model.model.layers[0].mlp
    trained = [parameter for parameter in mlp.parameters() if parameter.requires_grad]
    torch._dynamo.reset()
    function = torch.compile(mlp, dynamic=False) if ON_GPU else mlp
    return both_passes(function, randn(1, TOKENS, SHAPES[shape]["hidden_size"]), trained=trained)


def layer_pairs(shape: str, storage: str | None, step: str) -> Iterator[Pair]:
    where = f"{shape}, MLP with LoRA over {storage or 'bf16'}, {TOKENS:,} tokens"
    prepare = partial(mlp_run, shape, storage)

    def pair(name: str, removed: Callable[[], AbstractContextManager[Any]] = nullcontext, **options: bool) -> Pair:
        return Pair(name, where, prepare, partial(prepare, **options), step, LAYERS_8B, removed)

    def without(module: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
        return partial(patch.object, module, name, value)

    yield pair("LoRA layers fused / each alone", fuses=False)
    # with float8, the kernels of low_rank need the accumulator's
    yield pair("one accumulator, hopper.cu / torch's products", without(segmented, "fits", lambda *_: False))
    if storage == "fp8":
        yield pair("low_rank, triton / bf16", without(low_rank, "fits", lambda *_: False))

    def copies(write: Callable[[Any], Run]) -> Run:
        fused: FusedLayers = fused_mlp(shape, storage)[1]
        run = write([copy for group in fused._fused for copy in group.matrix_copies()] * LAYERS_8B)
        return torch.no_grad()(run)

    yield Pair(
        "copies of adapters, triton / torch", f"{shape}, {storage or 'bf16'}, MLPs of {LAYERS_8B} layers",
        partial(copies, lambda found: low_rank.MatrixCopies(found).write),
        partial(copies, lambda found: partial(low_rank.reference.write, found)), step, 1,
    )  # fmt: skip


def storage_pairs() -> Iterator[Pair]:
    num_out, num_in = (12288, 4096) if ON_GPU else (64, 128)

    def dequantized(function: Callable[..., Tensor], dtype: torch.dtype, scales: bool) -> Run:
        nf4.register_ops()
        weight = nf4.reference.quantize(randn(num_out, num_in, scale=0.02))
        scale = nf4.reference.row_scale(weight, num_out, num_in) if scales else None
        return partial(function, weight, scale, dtype)

    def by_kernel(weight: Any, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        return nf4.dequantize([weight], [num_out], num_in, dtype, scales=[] if scale is None else [scale])

    def by_torch(weight: Any, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        return nf4.reference.dequantize(weight, num_out, num_in, dtype, scale)

    # 6.9 billion weights in the layers' linears, in both passes
    calls = 2 * 6.9e9 / (12288 * 4096)
    for dtype, scales in ((DTYPE, False), (torch.float8_e4m3fn, True)):
        sides = [partial(dequantized, function, dtype, scales) for function in (by_kernel, by_torch)]
        where = f"{num_out} x {num_in} to {str(dtype).removeprefix('torch.')}"
        yield Pair("nf4, triton / torch", where, *sides, "8b-nf4-fp8", calls)
    vocab_size, hidden_size = (151936, 4096) if ON_GPU else (128, 16)

    def rows(function: Callable[[Tensor, Tensor], Tensor]) -> Run:
        table = torch.zeros(vocab_size, hidden_size, dtype=DTYPE, pin_memory=ON_GPU)
        return partial(function, table, torch.randint(0, vocab_size, (TOKENS,), device=DEVICE))

    def by_host(table: Tensor, ids: Tensor) -> Tensor:
        return F.embedding(ids.to(table.device), table).to(ids.device)

    where = f"{TOKENS:,} of {vocab_size:,} x {hidden_size}"
    yield Pair(
        "host rows, triton / the host", where, partial(rows, gather_rows), partial(rows, by_host), "8b-nf4-fp8", 1
    )


def experts_run(num_tokens: int) -> Run:
    """One layer of adapted experts of Qwen3-30B-A3B (`--tiny`: a small one)."""
    register_experts()
    small = {"hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    sizes = {**shape_config("qwen3-30b-a3b"), **({} if ON_GPU else small), "num_hidden_layers": 1, "vocab_size": 1024}
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**sizes), dtype=DTYPE, experts_implementation="flatout"
        )
    prepare_experts(model)
    add_lora(model, LoraConfig(rank=16 if ON_GPU else 2, targets=["gate_up_proj", "down_proj"]), seed=0)
    experts, num_experts = model.model.layers[0].mlp.experts, sizes["num_experts"]
    index = torch.rand(num_tokens, num_experts, device=DEVICE).topk(sizes["num_experts_per_tok"]).indices
    weights = torch.rand(index.shape, device=DEVICE, dtype=DTYPE)
    trained = [parameter for parameter in experts.parameters() if parameter.requires_grad]
    return both_passes(
        lambda x, weights: experts(x, index, weights), randn(num_tokens, sizes["hidden_size"]), weights, trained=trained
    )


def moe_pairs() -> Iterator[Pair]:
    hidden, width, num_experts, k = (2048, 768, 128, 8) if ON_GPU else (32, 16, 4, 2)
    num_tokens = 16384 if ON_GPU else 16
    prepare, layers, step = partial(experts_run, num_tokens), 12, "30b-a3b-12l-bf16"
    where = f"experts of qwen3-30b-a3b with LoRA, {num_tokens:,} tokens"
    hidden_kernels = partial(patch.object, moe, "_has_kernels", lambda *_: False)
    yield Pair("moe, all triton / torch's grouped product", where, prepare, prepare, step, layers, hidden_kernels)
    removals: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "moe, narrow outer, triton / torch's grouped product": partial(patch.object, moe.reference, "MAX_NARROW", 0),
        "moe, sums of slots, triton / torch": partial(patch.object, moe, "_sum_slots", moe.reference.sum_slots),
    }
    if ON_GPU:
        from flatout.kernels.moe import triton

        name = "moe, products, triton / torch's grouped product"
        removals[name] = partial(patch.object, triton, "fits_product", lambda *_: False)
    for name, removed in removals.items():
        yield Pair(name, where, prepare, prepare, step, layers, removed)

    def rows(function: Callable[..., object], backward: bool) -> Run:
        moe.register_ops()
        index = torch.rand(num_tokens, num_experts, device=DEVICE).topk(k).indices
        routing, rows = moe.route(index, num_experts), randn(num_tokens * k, 2 * width)
        more = (randn(num_tokens * k, width), torch.rand(num_tokens * k, device=DEVICE)) if backward else ()
        return partial(function, rows, *more, routing)

    sorted_rows = f"{num_tokens * k:,} rows of {2 * width}"
    for name, backward in (("swiglu", False), ("swiglu_backward", True)):
        sides = (partial(rows, getattr(module, name), backward) for module in (moe, moe.reference))
        yield Pair(f"moe, {name}, triton / torch", sorted_rows, *sides, step, layers)

    def in_float8(dequantizes: bool) -> Run:
        moe.register_ops()
        index = torch.rand(num_tokens, num_experts, device=DEVICE).topk(k).indices
        routing, x = moe.route(index, num_experts), randn(num_tokens, hidden)
        weight, scale = moe.reference.quantize_rows(randn(num_experts, 2 * width, hidden, scale=0.02))
        if not dequantizes:
            return partial(moe.grouped_linear_fp8, x, weight, routing, gather=True, out_scale=scale[..., 0])
        return lambda: moe.grouped_linear(x, (weight.float() * scale).to(DTYPE), routing, gather=True)

    yield Pair(
        "moe, float8 product / dequantized", f"up projection, forward, {num_tokens:,} tokens",
        partial(in_float8, False), partial(in_float8, True),
    )  # fmt: skip


def pairs() -> Iterator[Pair]:
    large, small = ("qwen3-8b", "qwen3-0.6b") if ON_GPU else ("tiny", "tiny")
    yield from attention_pairs(large)
    yield from prefix_pairs(large, 1, 200, CHAT.group(0))
    yield from prefix_pairs(large, 32, 400, [200, 200])
    yield from other_attention_pairs()
    yield from loss_pairs(large, "8b-fp8")
    yield from loss_pairs(small, "0.6b-bf16")
    yield from storage_pairs()
    yield from moe_pairs()
    yield from layer_pairs(large, None, "8b-bf16")
    if ON_GPU:
        yield from layer_pairs(large, "fp8", "8b-fp8")


def time_side(prepare: Callable[[], Run], removed: AbstractContextManager[Any]) -> float:
    with ExitStack() as stack:
        stack.enter_context(removed)
        return median_ms(prepare(), *((5, 5) if ON_GPU else (1, 1)))


def row(pair: Pair, known_ms: dict[Callable[[], Run], float]) -> str:
    """Time a pair; a side with the kernel that several pairs have is timed once."""
    if pair.uses not in known_ms:
        known_ms[pair.uses] = time_side(pair.uses, nullcontext())
    with_ms, without_ms = known_ms[pair.uses], time_side(pair.lacks, pair.removed())
    saved_ms = without_ms - with_ms
    share = f"{100 * saved_ms * pair.calls / STEP_MS[pair.step]:.1f} % of {pair.step}" if pair.step else ""
    times = f"{with_ms:.3f} | {without_ms:.3f} | {100 * saved_ms / without_ms:.1f}"
    return f"| {pair.name} | {pair.shape} | {times} | {share} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD")
    parser.add_argument("--tiny", action="store_true", help="needs no GPU")
    args = parser.parse_args()
    if not ON_GPU and not args.tiny:
        raise SystemExit("this needs a CUDA GPU; --tiny shows on a CPU that it runs")
    torch.manual_seed(0)
    print("| kernel or choice / without it | shape | with, ms | without, ms | gain, % | of a step |")
    print("|---|---|---|---|---|---|", flush=True)
    known_ms: dict[Callable[[], Run], float] = {}
    for pair in pairs():
        if not any(word in pair.name for word in args.only):
            continue
        try:
            print(row(pair, known_ms), flush=True)
        except Exception as error:  # noqa: BLE001  (a package may be missing, or a kernel not fit this GPU)
            print(f"| {pair.name} | {pair.shape} | {type(error).__name__}: {first_line(error)} | | | |", flush=True)
        if ON_GPU:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
