"""Rates of the matrix products of a Qwen3-8B step on this GPU, alone and with LoRA's columns beside the weight.

    python benchmarks/gemm.py

bf16, M = 16,384 tokens, random data, three rounds over all cases (so the power cap acts as in training), median. `+P`
has P more columns in x and W, as an augmented [x | x A] [W | B] product would; `low` is the product of rank 48.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

NUM_TOKENS, RANK = 16384, 48
SHAPES = {"qkv": (6144, 4096), "gate_up": (24576, 4096), "down": (4096, 12288), "o": (4096, 4096)}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def cases() -> dict[str, tuple[Callable[[], torch.Tensor], int]]:
    found: dict[str, tuple[Callable[[], torch.Tensor], int]] = {}
    for name, (outputs, inputs) in SHAPES.items():
        flops = 2 * NUM_TOKENS * outputs * inputs
        grad, total = draw(NUM_TOKENS, outputs), draw(NUM_TOKENS, outputs)
        for padding in (0, 48, 64):
            x, weight = draw(NUM_TOKENS, inputs + padding), draw(outputs, inputs + padding)
            found[f"forward {name} +{padding}"] = (lambda x=x, w=weight: x @ w.t(), flops)
            found[f"backward {name} +{padding}"] = (lambda g=grad, w=weight, k=inputs: g @ w[:, :k], flops)
        low, wide = draw(NUM_TOKENS, RANK), draw(outputs, RANK)
        flops = 2 * NUM_TOKENS * outputs * RANK
        found[f"low {name}, product"] = (lambda x=low, w=wide: x @ w.t(), flops)
        found[f"low {name}, added in place"] = (lambda t=total, x=low, w=wide: t.addmm_(x, w.t()), flops)
    return found


def milliseconds(run: Callable[[], torch.Tensor], repeats: int = 12) -> float:
    for _ in range(3):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def main() -> None:
    found = cases()
    rounds = [{name: milliseconds(run) for name, (run, _) in found.items()} for _ in range(3)]
    for name, (_, flops) in found.items():
        median_ms = sorted(times[name] for times in rounds)[1]
        print(f"{name:28s} {median_ms:7.3f} ms {flops / median_ms / 1e9:6.0f} TFLOP/s")


if __name__ == "__main__":
    main()
