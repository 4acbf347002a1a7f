"""Our operations beside plain torch, Liger, bitsandbytes and PEFT: forward and backward, errors first.

    python benchmarks/kernel_times.py --out kernels         (--tiny on a CPU: only shows that it runs)
    python benchmarks/kernel_times.py --products            TFLOP/s of the matrix products of a Qwen3-8B step

Each variant gives an output and the gradient of its input. The error is the relative L2 distance to the same in fp32;
ours may have twice the plain form's own error in the forward and three times in the backward, else the row is RED and
its time means nothing. Times are medians of triton.testing.do_bench. Writes kernels.json and kernels.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from bench.machine import gpu_header, versions
from bench.samples import CHAT
from bench.shapes import SHAPES
from bench.timing import median_ms
from torch import Tensor, nn

Result = tuple[Tensor, Tensor]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# e4m3 keeps 3 bits of mantissa: rounding one operand of a product costs about 2.6 % of its length
FP8_ERROR = 0.04
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


@dataclass(frozen=True)
class Case:
    """One operation. `variants` by name, "plain" among them; `exact` gives the fp32 result of the same inputs."""

    name: str
    exact: Callable[[], Result]
    variants: dict[str, Callable[[], Result]]


def differentiated(
    function: Callable[[Tensor], Tensor], x: Tensor, weights: Sequence[Tensor] = ()
) -> Callable[[], Result]:
    """Forward and backward (of a fixed random gradient, to x and the trained weights) of a function of x."""
    kept: dict[str, Tensor] = {}

    def run() -> Result:
        leaf = x.detach().requires_grad_(True)
        output = function(leaf)
        if "grad" not in kept:
            generator = torch.Generator(x.device).manual_seed(7)
            kept["grad"] = torch.randn(output.shape, generator=generator, device=x.device, dtype=torch.float32)
        gradient, *_ = torch.autograd.grad(output, [leaf, *weights], kept["grad"].to(output.dtype))
        return output.detach(), gradient

    return run


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(DTYPE)


def head_case(shape: str, num_rows: int) -> Case:
    """Cross-entropy of a frozen output head on label rows, summed."""
    from flatout.kernels.cross_entropy.tiled import token_loss

    hidden_size, vocab_size = SHAPES[shape]["hidden_size"], SHAPES[shape]["vocab_size"]
    rows, weight = randn(num_rows, hidden_size), randn(vocab_size, hidden_size, scale=0.02)
    targets = torch.randint(0, vocab_size, (num_rows,), device=DEVICE)

    def plain(x: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), targets, reduction="sum")

    def exact() -> Result:
        parts = [
            differentiated(lambda x, t=t: F.cross_entropy(x @ weight.float().t(), t, reduction="sum"), part.float())
            for part, t in zip(rows.split(1024), targets.split(1024), strict=True)
        ]
        results = [run() for run in parts]
        # each part draws the same single gradient value, as the whole does
        return torch.stack([loss for loss, _ in results]).sum(), torch.cat([gradient for _, gradient in results])

    variants = {
        "plain": differentiated(plain, rows),
        "flatout": differentiated(lambda x: token_loss(x, weight, targets)[0], rows),
    }
    if find_spec("liger_kernel") and DEVICE == "cuda":
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        variants["liger"] = differentiated(lambda x: liger(weight, x, targets), rows)
    return Case(f"head loss, {shape}, {num_rows:,} label rows", exact, variants)


def attention_case(shape: str, num_steps: int) -> Case:
    """Packed causal attention over one step's documents, by each package that is there; the gradient is the query's."""
    from flatout.kernels.attention.cudnn import cudnn_problem, make_cudnn_attention
    from flatout.kernels.attention.flash import (
        flash_problem,
        make_flash_attention,
        make_varlen_attention,
        varlen_problem,
    )
    from flatout.kernels.attention.reference import sdpa_attention

    sizes = SHAPES[shape]
    heads, kv_heads, head_dim = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["head_dim"]
    lengths = CHAT.group(0) if DEVICE == "cuda" else CHAT.group(0)[:num_steps]
    total = sum(lengths)
    query, key, value = (
        randn(total, heads, head_dim),
        randn(total, kv_heads, head_dim),
        randn(total, kv_heads, head_dim),
    )
    cu_seqlens = F.pad(torch.tensor(lengths, device=DEVICE).cumsum(0), (1, 0)).to(torch.int32)
    scale = head_dim**-0.5

    def by_document(k: Tensor, v: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda q: sdpa_attention(q, k, v, cu_seqlens, scale=scale)

    def exact() -> Result:
        return differentiated(by_document(key.float(), value.float()), query.float())()

    variants = {"plain": differentiated(by_document(key, value), query)}
    if varlen_problem(query.device, DTYPE, head_dim) is None:
        forms = {"flatout": make_varlen_attention()}
        if cudnn_problem(query.device) is None:
            forms["cudnn"] = make_cudnn_attention()
        if flash_problem(query.device) is None:
            forms["fa4"] = make_flash_attention()
        for name, form in forms.items():
            run = partial(form, k=key, v=value, cu_seqlens=cu_seqlens, max_seqlen=max(lengths), scale=scale)
            variants[name] = differentiated(run, query)
    return Case(f"attention, {shape}, {len(lengths)} documents, {total:,} tokens", exact, variants)


def linear_cases(num_tokens: int, num_out: int, num_in: int) -> Iterator[Case]:
    """A frozen linear layer: bf16, fp8 and NF4 storage. Exact is each storage's own dequantized weight."""
    from flatout.models.frozen.frozen_linear import Fp8Linear, Nf4Linear

    x, weight = randn(num_tokens, num_in), randn(num_out, num_in, scale=0.02)
    stored: dict[str, nn.Module] = {"nf4": Nf4Linear.from_dense(weight, None)}
    if DEVICE == "cuda":
        stored["fp8"] = Fp8Linear(weight, None)
    for name, layer in stored.items():
        dense = layer.weight
        variants = {
            "plain": differentiated(lambda v, w=dense: F.linear(v, w), x),
            "flatout": differentiated(layer, x),
        }
        if name == "nf4" and find_spec("bitsandbytes") and DEVICE == "cuda":
            variants["bitsandbytes"] = differentiated(bitsandbytes_linear(weight), x)
        yield Case(
            f"{name} linear {num_out} x {num_in}, {num_tokens:,} tokens",
            lambda w=dense: differentiated(lambda v: F.linear(v, w.float()), x.float())(),
            variants,
        )


def bitsandbytes_linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    import bitsandbytes

    layer = bitsandbytes.nn.Linear4bit(
        weight.shape[1], weight.shape[0], bias=False, compute_dtype=DTYPE, quant_type="nf4", compress_statistics=True
    )
    layer.weight = bitsandbytes.nn.Params4bit(weight.cpu(), requires_grad=False, quant_type="nf4")
    return layer.to(DEVICE)


def lora_case(shape: str, num_tokens: int) -> Case:
    """The MLP of one layer with LoRA r=16 on its three linears: ours joined, PEFT as it comes."""
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    from flatout.config.schema import LoraConfig
    from flatout.models.attention import register, registered_name
    from flatout.models.lora.fused import fuse_layers
    from flatout.models.lora.layer import add_lora

    register()
    sizes = {**SHAPES[shape], "num_hidden_layers": 1, "vocab_size": 1024}
    config = AutoConfig.for_model(**sizes)
    x = randn(num_tokens, sizes["hidden_size"])

    def model(dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        attention = registered_name("varlen" if DEVICE == "cuda" else "sdpa")
        made = AutoModelForCausalLM.from_config(config, dtype=DTYPE, attn_implementation=attention)
        return made.to(DEVICE, dtype).requires_grad_(False)

    # B is 0 at the start on both sides, so all three compute the same function
    ours, exact = model(DTYPE), model(torch.float32)
    add_lora(ours, LoraConfig(rank=16, alpha=16.0), seed=0)
    fuse_layers(ours)
    theirs = peft.get_peft_model(model(DTYPE), peft.LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"))
    mlps = {"plain": model(DTYPE).model, "flatout": ours.model, "peft": theirs.base_model.model.model}
    variants = {}
    for name, inner in mlps.items():
        mlp = inner.layers[0].mlp
        variants[name] = differentiated(mlp, x, [p for p in mlp.parameters() if p.requires_grad])
    return Case(
        f"MLP with LoRA, {shape}, {num_tokens:,} tokens (plain: without LoRA)",
        differentiated(exact.model.layers[0].mlp, x.float()),
        variants,
    )


def cases(tiny: bool) -> Iterator[Case]:
    if tiny:
        yield head_case("tiny", 50)
        yield attention_case("tiny", 4)
        yield from linear_cases(32, 64, 128)
        yield lora_case("tiny", 64)
        return
    for shape in ("qwen3-8b", "qwen3-0.6b"):
        yield head_case(shape, 10496)
        yield attention_case(shape, 1)
        yield lora_case(shape, 8192)
    yield from linear_cases(8192, 12288, 4096)
    yield from linear_cases(8192, 3072, 1024)


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.float() - exact).norm() / exact.norm()).item()


def time_ms(run: Callable[[], object]) -> float:
    if DEVICE == "cuda":
        from triton.testing import do_bench

        return do_bench(run, return_mode="median")
    return median_ms(run, num_blocks=3, calls_per_block=1)


def time_products(num_tokens: int, rank: int) -> None:
    """Rates of a Qwen3-8B step's matrix products in bf16, alone and with LoRA's columns beside the weight (`+P`).

    Three rounds over all cases, so that the power cap acts as in training. `low` is the product of rank `rank`.
    """
    runs: dict[str, tuple[Callable[[], object], int]] = {}
    for name, (outputs, inputs) in {
        "qkv": (6144, 4096),
        "gate_up": (24576, 4096),
        "down": (4096, 12288),
        "o": (4096, 4096),
    }.items():
        flops, grad, total = 2 * num_tokens * outputs * inputs, randn(num_tokens, outputs), randn(num_tokens, outputs)
        for padding in (0, 48, 64):
            x, weight = randn(num_tokens, inputs + padding), randn(outputs, inputs + padding)
            runs[f"forward {name} +{padding}"] = (partial(F.linear, x, weight), flops)
            runs[f"backward {name} +{padding}"] = (partial(torch.matmul, grad, weight[:, :inputs]), flops)
        low, wide = randn(num_tokens, rank), randn(outputs, rank)
        runs[f"low {name}, product"] = (partial(F.linear, low, wide), 2 * num_tokens * outputs * rank)
        runs[f"low {name}, added in place"] = (partial(total.addmm_, low, wide.t()), 2 * num_tokens * outputs * rank)
    rounds = [{name: median_ms(run, 1, 12) for name, (run, _) in runs.items()} for _ in range(3)]
    for name, (_, flops) in runs.items():
        found_ms = statistics.median(times[name] for times in rounds)
        print(f"{name:28s} {found_ms:7.3f} ms {flops / found_ms / 1e9:6.0f} TFLOP/s")


def measure(case: Case) -> list[dict[str, object]]:
    exact = case.exact()
    errors = {
        name: [error(found, wanted) for found, wanted in zip(run(), exact, strict=True)]
        for name, run in case.variants.items()
    }
    del exact
    rows: list[dict[str, object]] = []
    for name, run in case.variants.items():
        forward, backward = errors[name]
        limits = [factor * own + 1e-6 for factor, own in zip((2, 3), errors["plain"], strict=True)]
        if case.name.startswith("fp8"):
            limits = [FP8_ERROR, FP8_ERROR]
        green = forward <= limits[0] and backward <= limits[1]
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        row = {"case": case.name, "variant": name, "error": forward, "grad_error": backward, "green": green}
        row["ms"] = time_ms(run)
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else None
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("kernels"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--products", action="store_true", help="only the rates of a step's matrix products")
    args = parser.parse_args()
    if args.products:
        time_products(16384, 48) if not args.tiny else time_products(8, 2)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    rows: list[dict[str, object]] = []
    table = [
        "| operation | variant | ms, forward + backward | against plain | error | gradient's error | |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in cases(args.tiny):
        found = measure(case)
        rows += found
        plain_ms = found[0]["ms"]
        for row in found:
            table.append(
                f"| {row['case']} | {row['variant']} | {row['ms']:.3f} | {plain_ms / row['ms']:.2f}x | "
                f"{row['error']:.1e} | {row['grad_error']:.1e} | {'' if row['green'] else 'RED'} |"
            )
            print(table[-1], flush=True)
        header = {"gpu": gpu_header(), "versions": versions()}
        (args.out / "kernels.json").write_text(json.dumps({"header": header, "rows": rows}, indent=1))
        (args.out / "kernels.md").write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
