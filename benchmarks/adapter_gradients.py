"""Gradients that pass through LoRA's B: plain products beside the one-pass kernel, on the layers of Qwen3-8B.

    python benchmarks/adapter_gradients.py              (a Hopper GPU; under a minute)
    python benchmarks/adapter_gradients.py --sweep      (tiles of the kernel, 17k tokens)

bf16, random data, L2 emptied before each call. `compiled` is the plain form as compiled layers run it. The bandwidth is
that of reading each dY once; launches are the kernels of one call, and host its time to launch them. Errors are
relative to the same in fp32: where the kernel's are larger than the plain form's the row is RED. The last lines sum up
the layers of a model.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from flatout.kernels.lora import adapter_gradients, reference, register_ops, uses_kernel

DEVICE = torch.device("cuda")
NUM_LAYERS = 36
GROUPS = {"q, k, v": [4096, 1024, 1024], "o": [4096], "gate, up": [12288, 12288], "down": [4096]}
# tokens and rank
SIZES = [(2048, 16), (8192, 16), (17408, 16), (8192, 32), (8192, 64)]
# tokens and columns of a tile, warps, stages
TILES = [
    (64, 512, 8, 3), (64, 512, 4, 3), (64, 512, 8, 2), (64, 512, 4, 2), (128, 256, 8, 3), (128, 256, 8, 2),
    (64, 256, 8, 4), (64, 256, 8, 3), (64, 256, 4, 3), (64, 256, 4, 2), (32, 512, 8, 4),
]  # fmt: skip
Result = tuple[Tensor, Sequence[Tensor]]


def draw(num_tokens: int, outputs: list[int], rank: int) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)

    grads = [randn(num_tokens, width) for width in outputs]
    return grads, randn(num_tokens, rank * len(outputs)), [randn(width, rank) for width in outputs]


def milliseconds(run: Callable[[], Result]) -> float:
    from triton.testing import do_bench

    return do_bench(run, warmup=10, rep=50, return_mode="median")


def num_launches(run: Callable[[], Result]) -> int:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return sum(
        event.device_type == torch.autograd.DeviceType.CUDA
        and not event.is_user_annotation
        and not event.name.startswith(("Memset", "Memcpy"))
        for event in profiler.events()
    )


def host_us(run: Callable[[], Result], repeats: int = 50) -> float:
    """Time to launch a call, with the device far behind."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    launched = time.perf_counter()
    torch.cuda.synchronize()
    return (launched - started) / repeats * 1e6


def error(found: Result, exact: Result) -> float:
    """The largest relative distance of a gradient."""
    pairs = zip([found[0], *found[1]], [exact[0], *exact[1]], strict=True)
    return max(((ours.float() - truth).norm() / truth.norm()).item() for ours, truth in pairs)


def compare() -> None:
    compiled = torch.compile(reference.adapter_gradients, dynamic=True)
    forms = {"plain": reference.adapter_gradients, "compiled": compiled, "one pass": adapter_gradients}
    totals: Counter[tuple[int, int, str]] = Counter()
    columns = ["layers", "tokens", "rank", "ms: plain", "compiled", "one pass", "GB/s", "launches", "host us"]
    columns += ["against compiled", "error", ""]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for num_tokens, rank in SIZES:
        for name, outputs in GROUPS.items():
            grads, low, wides = draw(num_tokens, outputs, rank)
            exact = reference.adapter_gradients(
                [grad.float() for grad in grads], low.float(), [wide.float() for wide in wides], 0.5, torch.float32
            )
            runs = {form: partial(run, grads, low, wides, 0.5, torch.float32) for form, run in forms.items()}
            errors = {form: error(run(), exact) for form, run in runs.items()}
            del exact
            times = {form: milliseconds(run) for form, run in runs.items()}
            launches = "/".join(str(num_launches(run)) for run in runs.values())
            host = "/".join(f"{host_us(run):.0f}" for run in runs.values())
            for form, ms in times.items():
                totals[num_tokens, rank, form] += ms
            rate = num_tokens * sum(outputs) * 2 / times["one pass"] / 1e6
            is_green = errors["one pass"] <= 1.05 * errors["plain"]
            print(
                f"| {name} | {num_tokens:,} | {rank} | {times['plain']:.3f} | {times['compiled']:.3f} | "
                f"{times['one pass']:.3f} | {rate:,.0f} | {launches} | {host} | {verdict(times)} | "
                f"{errors['one pass']:.1e} | {'' if is_green else 'RED'} |",
                flush=True,
            )
    for num_tokens, rank in SIZES:
        times = {form: NUM_LAYERS * totals[num_tokens, rank, form] for form in forms}
        print(
            f"{NUM_LAYERS} layers, {num_tokens:,} tokens, rank {rank}: plain {times['plain']:.2f} ms, compiled "
            f"{times['compiled']:.2f} ms, one pass {times['one pass']:.2f} ms: {verdict(times)}"
        )


def verdict(times: dict[str, float]) -> str:
    ratio = times["compiled"] / times["one pass"]
    return f"{'wins' if ratio > 1 else 'LOSES'} {ratio:.2f}x"


def sweep(num_tokens: int = 17408) -> None:
    """Print the time of each tile that fits the GPU's shared memory, fastest first."""
    from triton.runtime.errors import OutOfResources

    from flatout.kernels.lora import triton as kernel

    num_processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    for rank in (16, 32, 64):
        for name, outputs in GROUPS.items():
            inputs = draw(num_tokens, outputs, rank)
            found: list[tuple[float, tuple[int, ...]]] = []
            for tile in TILES:
                run = partial(
                    kernel.adapter_gradients, *inputs, 0.5, torch.float32,
                    num_processors=num_processors, tile=kernel.Tile(*tile),
                )  # fmt: skip
                try:
                    found.append((milliseconds(run), tile))
                except OutOfResources:
                    continue
            bytes_read = num_tokens * sum(outputs) * 2
            lines = (f"{tile} {ms:.3f} ms {bytes_read / ms / 1e6:,.0f} GB/s" for ms, tile in sorted(found))
            print(f"{name}, rank {rank} (now {tuple(kernel.TILES[rank])}): " + "; ".join(lines), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available() or not uses_kernel([16], torch.bfloat16, DEVICE):
        raise SystemExit("the kernel needs triton and a Hopper GPU, such as H100 or H200; neither form was timed")
    print(torch.cuda.get_device_name(DEVICE), "torch", torch.__version__)
    register_ops()
    torch.manual_seed(0)
    sweep() if args.sweep else compare()


if __name__ == "__main__":
    main()
