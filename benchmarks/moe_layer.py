"""TFLOP/s of one mixture-of-experts layer of Qwen3-30B-A3B: flatout's experts beside transformers' and torch's.

    python benchmarks/moe_layer.py --tokens 4096 16384 32768 --out moe-layer.json

Experts are frozen, as under LoRA: the backward pass makes the gradients of the input and of the routing weights. Each
form gets the same tokens and choices, balanced or by Zipf's law (exponent 1), and must agree with the loop over experts
in fp32 before it is timed. The time is the median of 5 x 10 calls, after two seconds of matrix products that bring the
GPU to its clock rate; routing scores are given, sorting them is included.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from bench.shapes import shape_config
from bench.timing import median_ms
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from flatout.models.experts.block import prepare_experts, register_experts

SHAPE = "qwen3-30b-a3b"
TOLERANCE = 1e-2


def choices(kind: str, num_tokens: int, num_experts: int, k: int) -> Tensor:
    """Return each token's experts (T, k), drawn without replacement."""
    scores = -torch.empty(num_tokens, num_experts, device="cuda").exponential_().log()
    if kind == "zipf":
        scores -= torch.arange(1, num_experts + 1, device="cuda").float().log()
    return scores.topk(k).indices


def raise_clocks() -> None:
    """Keep the GPU busy: an idle one runs its first kernels at a lower clock rate."""
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    until_s = time.perf_counter() + 2
    while time.perf_counter() < until_s:
        for _ in range(20):
            square @ square
        torch.cuda.synchronize()


def make_layer(implementation: str) -> Any:
    """Return the experts of a one-layer model with random weights."""
    config = AutoConfig.for_model(**{**shape_config(SHAPE), "num_hidden_layers": 1, "vocab_size": 1024})
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation=implementation)
    model.requires_grad_(False)
    if implementation == "flatout":
        prepare_experts(model)
    return model.model.layers[0].mlp.experts


def time_layer(layer: Any, x: Tensor, index: Tensor, weights: Tensor) -> tuple[float, float]:
    """Return the milliseconds of a forward pass, and of a forward and a backward pass."""
    incoming = torch.randn_like(x)

    def both() -> None:
        torch.autograd.grad(layer(x, index, weights.to(x.dtype)), (x, weights), incoming)

    with torch.no_grad():
        forward_ms = median_ms(lambda: layer(x, index, weights.to(x.dtype)))
    return forward_ms, median_ms(both)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 32768])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    register_experts()
    forms: dict[str, Any] = {}
    for name in ("flatout", "grouped_mm"):
        forms[name] = make_layer(name)
        forms[f"{name} compiled"] = torch.compile(forms[name], dynamic=True)
    truth = make_layer("eager").float()
    config = truth.config
    rows = []
    raise_clocks()
    for num_tokens, kind in product(args.tokens, ("balanced", "zipf")):
        index = choices(kind, num_tokens, config.num_experts, config.num_experts_per_tok)
        x = torch.randn(num_tokens, config.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weights = torch.rand(index.shape, device="cuda").requires_grad_()
        flops = 2 * index.numel() * 3 * config.hidden_size * config.moe_intermediate_size
        with torch.no_grad():
            expected = truth(x.float(), index, weights)
        for name, layer in forms.items():
            with torch.no_grad():
                error = float((layer(x, index, weights.to(x.dtype)).float() - expected).norm() / expected.norm())
            if not error <= TOLERANCE:
                raise SystemExit(f"{name}: differs from the loop over experts by {error:.1e}")
            forward_ms, both_ms = time_layer(layer, x, index, weights)
            row = {
                "form": name, "tokens": num_tokens, "routing": kind, "error": round(error, 5),
                "forward_ms": round(forward_ms, 3), "forward_tflops": round(flops / forward_ms / 1e9),
                "both_ms": round(both_ms, 3), "both_tflops": round(2 * flops / both_ms / 1e9),
            }  # fmt: skip
            rows.append(row)
            print(json.dumps(row), flush=True)
    if args.out:
        found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
