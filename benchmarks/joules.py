"""Joules of each operation of a LoRA step, looped by itself, beside the joules of whole steps; one GPU.

    python benchmarks/joules.py --out joules.json                        (under 3 minutes; more settings as overrides,
    python benchmarks/joules.py --out joules-fp8.json base.storage=fp8    which decide what a step consists of)

Operations have the shapes of one step in one micro-batch (32 samples of chat-like lengths), normal random data, and run
back to back for `--seconds`. Energy is NVML's counter (read only), read at its own ticks while the GPU stays busy, so
its period hardly matters. "above idle" is without the power of the idle GPU. Products are looped in bf16 and fp8,
whatever the configuration; `J a step` is by its calls a step.

What to make of the sum: an operation alone heats and clocks the GPU otherwise than between others. Under a power cap, a
loop of products runs at a lower clock than the same products between norms. Not looped are rotary embeddings, residual
sums, copies and gaps, and in the whole step quantizing is fused with what comes before it. So `sum / whole` says how
far the rows can be trusted as parts of a step; they are no measurement of the parts inside a step.

Needs nvidia-ml-py, and for Qwen3-8B about 100 GiB: on a smaller GPU add recompute=full, or take --shape qwen3-1.7b.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench import steps as bench_steps
from bench.figures import WARMUP_STEPS
from bench.machine import gpu_header, versions
from bench.ours import base_values
from bench.rows import SAMPLES_PER_STEP
from bench.samples import CHAT, LABEL_SHARE
from bench.shapes import SHAPES, shape_config
from bench.timing import call_ms
from torch import Tensor
from transformers import AutoConfig
from whole_steps import prepare

from flatout.config.read import make_config
from flatout.config.schema import BaseConfig
from flatout.kernels import low_rank, segmented
from flatout.kernels.fp8_matmul import quantize_rows, scaled_product
from flatout.kernels.low_rank.reference import two_terms
from flatout.models.lora.fused import over_tokens
from flatout.track.callback import MemoryCallback, Reporter
from flatout.track.console import ConsoleCallback
from flatout.track.record import StepRecord
from flatout.trainer.rank_meter import read_joules

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANK = 16
DENSE_SHAPES = [name for name in SHAPES if name.startswith("qwen3-") and "a3b" not in name]
# the host waits after so much work, and looks at the counter
BATCH_S = 0.01
WARM_UP_S = 0.4


@dataclass(frozen=True)
class Operation:
    """One operation; `calls` of it make up a step of the configuration, 0 if that computes otherwise."""

    name: str
    category: str
    calls: int
    run: Callable[[], object]


@dataclass(frozen=True)
class Window:
    """What happened between two ticks of the energy counter."""

    wall_s: float
    joules: float
    num_calls: int

    @property
    def watts(self) -> float:
        """The mean power."""
        return self.joules / self.wall_s

    def figures(self, idle_watts: float, calls: int) -> dict[str, float]:
        """Joules and seconds of a call, and joules of so many calls."""
        joules, call_s = self.joules / self.num_calls, self.wall_s / self.num_calls
        above = joules - idle_watts * call_s
        return {
            "ms": call_s * 1e3, "watts": self.watts, "joules": joules, "joules_above_idle": above, "calls": calls,
            "joules_a_step": joules * calls, "ms_a_step": call_s * 1e3 * calls,
        }  # fmt: skip


def between_ticks(
    advance: Callable[[], int],
    seconds: float,
    read: Callable[[], float] = read_joules,
    clock: Callable[[], float] = time.perf_counter,
) -> Window:
    """Let `advance` work without a pause from one tick of the counter to one at least `seconds` later.

    `advance` works for a moment, far below the counter's period, and returns how many calls ended.
    """

    def to_tick() -> tuple[float, float, int]:
        before, num_calls = read(), 0
        while (now := read()) == before:
            num_calls += advance()
        return clock(), now, num_calls

    started_s, joules, _ = to_tick()
    num_calls = 0
    while clock() - started_s < seconds:
        num_calls += advance()
    ended_s, last_joules, more = to_tick()
    return Window(ended_s - started_s, last_joules - joules, num_calls + more)


def looped(run: Callable[[], object]) -> Callable[[], int]:
    """Return a function that keeps the GPU busy with `run` and waits for the batch before the last; warmed up."""
    run()
    torch.cuda.synchronize()
    num_calls = max(1, int(BATCH_S * 1e3 / call_ms(run, 5)))
    batches: deque[torch.cuda.Event] = deque()

    def advance() -> int:
        for _ in range(num_calls):
            run()
        batches.append(torch.cuda.Event())
        batches[-1].record()
        if len(batches) < 3:
            return 0
        batches.popleft().synchronize()
        return num_calls

    started_s = time.perf_counter()
    while time.perf_counter() - started_s < WARM_UP_S:
        advance()
    return advance


def idle_watts(seconds: float) -> float:
    """The power of the GPU with nothing to do, once the last kernel is over for a second."""
    torch.cuda.synchronize()
    time.sleep(1.0)

    def wait() -> int:
        time.sleep(BATCH_S / 10)
        return 0

    return between_ticks(wait, seconds).watts


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).bfloat16()


def groups_of(shape: dict[str, Any]) -> dict[str, tuple[list[int], int]]:
    """Linear layers of one input: their outputs, and their inputs."""
    hidden, wide, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    return {
        "qkv": ([queries, keys, keys], hidden),
        "o": ([hidden], queries),
        "gate_up": ([wide, wide], hidden),
        "down": ([hidden], wide),
    }


def products(shape: dict[str, Any], num_tokens: int, base: BaseConfig) -> Iterator[Operation]:
    """Products with frozen weights, forward and input gradient, in bf16 and fp8; operands are quantized before.

    Where the run adds adapters in the same accumulator, those products are the step's, and the others have 0 calls.
    """
    num_layers = shape["num_hidden_layers"]
    forward8, backward8 = base.computes_in_fp8, base.computes_in_fp8 or base.backward == "fp8"
    for name, (outputs, num_in) in groups_of(shape).items():
        joined = in_one_accumulator(outputs, num_in)
        for kind, run in products_of(outputs, num_in, num_tokens, joined).items():
            in_fp8 = backward8 if "gradient" in kind else forward8
            used = in_fp8 == kind.startswith("fp8") and joined == kind.endswith("adapters")
            yield Operation(f"{kind} {name} {sum(outputs)} x {num_in}", "GEMM", num_layers * used, run)


def in_one_accumulator(outputs: list[int], num_in: int) -> bool:
    ranks = [RANK] * len(outputs)
    return segmented.fits(torch.device(DEVICE), torch.bfloat16, outputs, num_in, ranks)


def products_of(outputs: list[int], num_in: int, num_tokens: int, joined: bool) -> dict[str, Callable[[], object]]:
    """The products of linear layers that read the same input, and those with their adapters if `joined`."""
    x, weights = randn(num_tokens, num_in), [randn(n, num_in, scale=0.02) for n in outputs]
    grads, whole = [randn(num_tokens, n, scale=1e-3) for n in outputs], torch.cat(weights)
    (x8, x_scale), (whole8, whole_scale) = quantize_rows(x), quantize_rows(whole)
    grads8, transposed8 = (
        [quantize_rows(own) for own in each] for each in (grads, [weight.t().contiguous() for weight in weights])
    )
    runs: dict[str, Callable[[], object]] = {
        "bf16 forward": lambda: F.linear(x, whole),
        "bf16 input gradient": lambda: [grad @ weight for grad, weight in zip(grads, weights, strict=True)],
        "fp8 forward": lambda: scaled_product(x8, whole8, x_scale, whole_scale[:, 0], torch.bfloat16),
        "fp8 input gradient": lambda: [
            scaled_product(grad, weight, by_row, by_column[:, 0], torch.bfloat16)
            for (grad, by_row), (weight, by_column) in zip(grads8, transposed8, strict=True)
        ],
    }
    if not joined:
        return runs
    segmented.register_ops()
    low, narrow = randn(num_tokens, RANK * len(outputs)), randn(num_in, RANK * len(outputs))
    wide = torch.block_diag(*(randn(n, RANK) for n in outputs))
    blocks: dict[str, Any] = {
        "first_columns": [sum(outputs[:i]) for i in range(len(outputs))],
        "first_ranks": [RANK * i for i in range(len(outputs) + 1)],
    }
    of_inputs = {"row_scales": [x_scale[:, 0]], "column_scale": whole_scale[:, 0]}
    of_grads = {"row_scales": [by_row[:, 0] for _, by_row in grads8], "column_scale": transposed8[0][1][:, 0]}
    codes, copies = [own for own, _ in grads8], [own for own, _ in transposed8]
    multiply = segmented.segmented_product
    return runs | {
        "bf16 forward with adapters": lambda: multiply([x], [whole], low, wide, **blocks),
        "bf16 input gradient with adapters": lambda: multiply(grads, weights, low, narrow, weights_kn=True),
        "fp8 forward with adapters": lambda: multiply([x8], [whole8], low, wide, **of_inputs, **blocks),
        "fp8 input gradient with adapters": lambda: multiply(codes, copies, low, narrow, **of_grads),
    }


def quantizing(shape: dict[str, Any], num_tokens: int, base: BaseConfig) -> Iterator[Operation]:
    """Tokens and gradients to float8 by row, one compiled kernel for each width."""
    counts: Counter[int] = Counter()
    for outputs, num_in in groups_of(shape).values():
        counts[num_in] += base.computes_in_fp8
        for num_out in outputs:
            counts[num_out] += base.computes_in_fp8 or base.backward == "fp8"
    quantize = torch.compile(quantize_rows, dynamic=False)
    for width, count in counts.items():
        values = randn(num_tokens, width)
        calls = count * shape["num_hidden_layers"]
        yield Operation(f"quantize rows of {width}", "quantize", calls, lambda values=values: quantize(values))


def adapters(shape: dict[str, Any], num_tokens: int, base: BaseConfig) -> Iterator[Operation]:
    """The products of fused LoRA layers, forward and backward, as in flatout/models/lora/fused.py.

    Without those that are added in the frozen products' accumulator. Where these are in float8, x A.T and dY B read
    quantized values, which are made before.
    """
    low_rank.register_ops()
    forward8, backward8 = base.computes_in_fp8, base.computes_in_fp8 or base.backward == "fp8"
    for name, (outputs, num_in) in groups_of(shape).items():
        x, narrow = randn(num_tokens, num_in), randn(RANK * len(outputs), num_in, scale=0.02)
        wides, joined = [randn(n, RANK, scale=0.02) for n in outputs], in_one_accumulator(outputs, num_in)
        grads = [randn(num_tokens, n, scale=1e-3) for n in outputs]

        in_terms = joined and low_rank.fits(torch.device(DEVICE), torch.bfloat16, RANK * len(outputs))
        narrow8 = Float8Product([x], [narrow]) if in_terms and forward8 else None
        wide8 = Float8Product(grads, [wide.t() for wide in wides]) if in_terms and backward8 else None

        def both(
            x: Tensor = x, narrow: Tensor = narrow, wides: Any = wides, grads: Any = grads, joined: bool = joined,
            narrow8: Any = narrow8, wide8: Any = wide8,
        ) -> object:  # fmt: skip
            low = narrow8() if narrow8 else F.linear(x, narrow)
            pairs = zip(grads, wides, strict=True)
            low_grad = wide8() if wide8 else torch.cat([grad @ wide for grad, wide in pairs], dim=-1)
            parts = low.split(RANK, dim=-1)
            pairs = ((low_grad, x), *zip(grads, parts, strict=True))
            trained = [over_tokens(*own, torch.float32) for own in pairs]
            if joined:
                return trained
            return trained, low_grad @ narrow, [F.linear(part, wide) for part, wide in zip(parts, wides, strict=True)]

        yield Operation(f"LoRA r{RANK} {name}, both passes", "LoRA", shape["num_hidden_layers"], both)


class Float8Product:
    """Products of quantized inputs (T, K_i) with matrices (r_i, K_i) in one operator."""

    def __init__(self, inputs: list[Tensor], matrices: list[Tensor]) -> None:
        self.inputs, self.ranks = inputs, [len(matrix) for matrix in matrices]
        self.parts, self.row_scales = map(list, zip(*map(quantize_rows, inputs), strict=True))
        most = max(self.ranks)
        split = [two_terms(F.pad(matrix, (0, 0, 0, most - len(matrix)))) for matrix in matrices]
        self.terms, self.scales = torch.cat([own for own, _ in split], dim=2), torch.stack([own for _, own in split])

    def __call__(self) -> Tensor:
        dtype = self.inputs[0].dtype
        return low_rank.low_rank_product(
            self.parts, self.row_scales, self.terms, self.scales, self.ranks, dtype, self.inputs
        )


def both_passes(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Callable[[], object]:
    """Forward and backward of a function, to all of its inputs."""
    leaves = [own.requires_grad_() for own in inputs]
    grad = torch.randn_like(function(*leaves).detach()) * 1e-3
    return lambda: torch.autograd.grad(function(*leaves), leaves, grad)


def elementwise(shape: dict[str, Any], num_tokens: int) -> Iterator[Operation]:
    """Norms and SwiGLU, compiled, with frozen weights."""
    num_layers, eps, head = shape["num_hidden_layers"], shape["rms_norm_eps"], shape["head_dim"]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    compiled, num_heads = (
        torch.compile(norm, dynamic=False),
        shape["num_attention_heads"] + shape["num_key_value_heads"],
    )
    for name, size, calls in (
        ("RMSNorm", (num_tokens, shape["hidden_size"]), 2 * num_layers + 1),
        ("norms of queries and keys", (num_tokens, num_heads, head), num_layers),
    ):
        weight = randn(size[-1])
        run = both_passes(lambda x, weight=weight: compiled(x, weight), [randn(*size)])
        yield Operation(f"{name}, both passes", "norms, elementwise", calls, run)
    wide = [randn(num_tokens, shape["intermediate_size"]) for _ in range(2)]
    run = both_passes(torch.compile(swiglu, dynamic=False), wide)
    yield Operation("SwiGLU, both passes", "norms, elementwise", num_layers, run)


def attention(shape: dict[str, Any], lengths: list[int]) -> Iterator[Operation]:
    """Packed attention over the step's documents, by the implementation that a run takes."""
    from flatout.kernels.attention.cudnn import make_cudnn_attention
    from flatout.kernels.attention.flash import make_flash_attention, make_varlen_attention
    from flatout.kernels.attention.reference import sdpa_attention
    from flatout.models.attention import choose_attention

    def by_document(*inputs: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> Tensor:
        return sdpa_attention(*inputs, cu_seqlens, scale=scale)

    config = AutoConfig.for_model(**shape)
    chosen = choose_attention("auto", config, device=torch.device(DEVICE), dtype=torch.bfloat16).implementation
    named = {"varlen": make_varlen_attention, "cudnn": make_cudnn_attention, "sdpa": lambda: by_document}
    form = named.get(chosen, make_flash_attention)()
    heads, kv_heads, head = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
    inputs = [randn(sum(lengths), count, head).requires_grad_() for count in (heads, kv_heads, kv_heads)]
    boundaries = F.pad(torch.tensor(lengths, device=DEVICE).cumsum(0), (1, 0)).to(torch.int32)

    def forward() -> Tensor:
        return form(*inputs, cu_seqlens=boundaries, max_seqlen=max(lengths), scale=head**-0.5)

    def without_graph() -> Tensor:
        with torch.no_grad():
            return forward()

    num_layers, output = shape["num_hidden_layers"], forward()
    grad = torch.randn_like(output.detach()) * 1e-3
    yield Operation(f"attention ({chosen}) forward", "attention", num_layers, without_graph)
    yield Operation(
        f"attention ({chosen}) backward", "attention", num_layers,
        lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True),
    )  # fmt: skip


def ends(shape: dict[str, Any], num_labels: int) -> Iterator[Operation]:
    """The loss head on label rows, and the optimizer over all adapters as one flat tensor."""
    from flatout.kernels.cross_entropy.tiled import token_loss

    hidden, vocab_size = shape["hidden_size"], shape["vocab_size"]
    weight, targets = randn(vocab_size, hidden, scale=0.02), torch.randint(0, vocab_size, (num_labels,), device=DEVICE)
    run = both_passes(lambda x: token_loss(x, weight, targets)[0], [randn(num_labels, hidden)])
    yield Operation("loss head, both passes", "head", 1, run)
    linears = groups_of(shape).values()
    num_adapter = shape["num_hidden_layers"] * RANK * sum(n + num_in for outputs, num_in in linears for n in outputs)
    masters = torch.nn.Parameter(torch.randn(num_adapter, device=DEVICE))
    masters.grad = torch.randn_like(masters) * 1e-3
    yield Operation("AdamW", "optimizer", 1, torch.optim.AdamW([masters], lr=1e-9, fused=True).step)


def operations(shape: dict[str, Any], lengths: list[int], base: BaseConfig) -> Iterator[Operation]:
    """All operations of a step; each family's tensors are made when its turn comes."""
    num_tokens = sum(lengths)
    yield from products(shape, num_tokens, base)
    yield from quantizing(shape, num_tokens, base)
    yield from adapters(shape, num_tokens, base)
    yield from elementwise(shape, num_tokens)
    yield from attention(shape, lengths)
    yield from ends(shape, int(num_tokens * LABEL_SHARE))


def loop_all(
    shape: dict[str, Any], lengths: list[int], base: BaseConfig, seconds: float, idle: float
) -> list[dict[str, Any]]:
    """The figures of every operation, printed as they are found."""
    rows = []
    for operation in operations(shape, lengths, base):
        window = between_ticks(looped(operation.run), seconds)
        own = {"name": operation.name, "category": operation.category, **window.figures(idle, operation.calls)}
        rows.append(own)
        print(f"{operation.name:45s} {own['ms']:8.3f} ms {own['watts']:5.0f} W {own['joules']:8.4f} J", flush=True)
    return rows


class StepEnergy(MemoryCallback):
    """Reads the counter twice, with the GPU drained both times.

    A step's record comes while the next step runs. So each reading is taken after the step that follows the record: the
    record before the last one reads after the last step. fp16 runs no step ahead, so its window would differ.
    """

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self._num_steps = num_steps
        self._read: list[tuple[float, float]] = []

    def on_step(self, record: StepRecord) -> None:
        super().on_step(record)
        if len(self.steps) in (WARMUP_STEPS, self._num_steps - 1):
            torch.cuda.synchronize()
            self._read.append((time.perf_counter(), read_joules()))

    def figures(self, idle: float) -> dict[str, float]:
        """The whole steps between the two readings."""
        (started_s, first), (ended_s, last) = self._read
        timed, wall_s = self.steps[WARMUP_STEPS + 1 :], ended_s - started_s
        num_tokens = sum(record.num_tokens for record in timed)
        return {
            "num_steps": len(timed), "num_tokens": num_tokens, "step_s": wall_s / len(timed),
            "micro_batches": sum(record.num_micro_batches for record in timed) / len(timed),
            "joules_a_step": (last - first) / len(timed), "joules_a_token": (last - first) / num_tokens,
            "joules_a_token_above_idle": (last - first - idle * wall_s) / num_tokens,
            "watts": (last - first) / wall_s,
        }  # fmt: skip


def whole_steps(args: argparse.Namespace, config: Any, idle: float) -> dict[str, float]:
    """Energy of whole steps of the configuration, compiled and planned as in training."""
    prepare(args.work, shape_config(args.shape), args.steps)
    energy = StepEnergy(args.steps)
    bench_steps.take_steps(config, Reporter(ConsoleCallback(), energy))
    return energy.figures(idle)


def table(rows: list[dict[str, Any]], num_tokens: int, whole: dict[str, float]) -> str:
    """The operations, their sum by category, and the whole step beside the sum."""
    lines = [
        "| operation | calls a step | ms | W | J a call | above idle | J a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['name']} | {row['calls']:.0f} | {row['ms']:.3f} | {row['watts']:.0f} | {row['joules']:.4f} | "
            f"{row['joules_above_idle']:.4f} | {row['joules_a_step']:.1f} |"
        )
    joules, milliseconds = Counter[str](), Counter[str]()
    for row in rows:
        joules[row["category"]] += row["joules_a_step"]
        milliseconds[row["category"]] += row["ms_a_step"]
    total = sum(joules.values())
    lines += ["", "| category | J a step | share | ms a step | share |", "|---|---|---|---|---|"]
    for category, own in joules.most_common():
        own_ms = milliseconds[category]
        lines.append(
            f"| {category} | {own:.1f} | {own / total:.1%} | {own_ms:.1f} | {own_ms / milliseconds.total():.1%} |"
        )
    a_token = whole["joules_a_token"]
    lines += [
        "",
        f"sum: {total:.1f} J and {milliseconds.total():.1f} ms for {num_tokens:,} tokens, "
        f"{total / num_tokens * 1e3:.2f} mJ a token",
        f"whole steps: {whole['joules_a_step']:.1f} J and {whole['step_s'] * 1e3:.1f} ms for "
        f"{whole['num_tokens'] / whole['num_steps']:,.0f} tokens in {whole['micro_batches']:.1f} micro-batches, "
        f"{a_token * 1e3:.2f} mJ a token ({whole['joules_a_token_above_idle'] * 1e3:.2f} above idle), "
        f"{whole['watts']:.0f} W",
        f"sum / whole, a token: {total / num_tokens / a_token:.3f}",
    ]
    return "\n".join(lines)


def counter_period_s(num_ticks: int = 10) -> float:
    """The time between two ticks of the counter."""
    windows = [between_ticks(lambda: 0, 0.0) for _ in range(num_ticks)]
    return sum(window.wall_s for window in windows) / num_ticks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=DENSE_SHAPES, default="qwen3-8b")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each operation")
    parser.add_argument("--steps", type=int, default=WARMUP_STEPS + 9)
    parser.add_argument("--out", type=Path, default=Path("joules.json"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/joules"))
    parser.add_argument("overrides", nargs="*", help="settings of the step, e.g. base.storage=fp8")
    args = parser.parse_args()
    if args.steps < WARMUP_STEPS + 2:
        parser.error(f"--steps is {args.steps}; the first {WARMUP_STEPS + 1} are left out, so take more")
    paths = {"run_dir": "run", "model_dir": "model", "data_root": "data"}
    job = {name: str(args.work / leaf) for name, leaf in paths.items()}
    job |= {"num_steps": args.steps, "samples_per_step": SAMPLES_PER_STEP}
    one_pass = ["model.init=random", "batch.micro_batch_tokens=24000", "recompute=none"]
    config = make_config(base_values(job, args.overrides), [*one_pass, *args.overrides])
    if DEVICE == "cpu":
        parser.error("there is no CUDA GPU whose energy could be read")
    idle, period_s, gpu = idle_watts(args.seconds), counter_period_s(), gpu_header()
    print(f"idle {idle:.0f} W; the counter moves every {period_s * 1e3:.0f} ms; {gpu}", flush=True)
    rows = loop_all(shape_config(args.shape), CHAT.group(0), config.base, args.seconds, idle)
    gc.collect()
    torch.cuda.empty_cache()
    whole, num_tokens = whole_steps(args, config, idle), sum(CHAT.group(0))
    header = {"gpu": gpu, "versions": versions(), "shape": args.shape, "overrides": args.overrides,
              "idle_watts": idle, "counter_period_s": period_s, "num_tokens": num_tokens}  # fmt: skip
    args.out.write_text(json.dumps({"header": header, "operations": rows, "whole": whole}, indent=1))
    print(table(rows, num_tokens, whole))


if __name__ == "__main__":
    main()
