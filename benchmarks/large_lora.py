"""LoRA over a quantized base too large for one GPU, cut over several: tokens a second, memory a GPU, seconds of load.

One JSON line; weights are random, drawn and quantized layer by layer:

    python benchmarks/large_lora.py --gpus 4                                 # 70B in NF4, 35 GiB over 4 GPUs
    python benchmarks/large_lora.py --gpus 2 --layers 20                     # a quarter of its layers
    python benchmarks/large_lora.py --gpus 2 --shape tiny                    # on a CPU

Samples have chat-like lengths, 32 a step; the first 3 steps are left out. A GPU's memory
is told at three times: while the model is loaded, made and cut (compiling two layers included), once it is, and in a
step. More settings follow as overrides: recompute=full, base.storage=fp8, batch.micro_batch_tokens=8192.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from typing import Any

import torch
from bench.shapes import SHAPES, shape_config
from whole_steps import gib, make_parser, on_each_rank, prepare, spread_over, take_steps

from flatout.models.bases.frozen_linear import Fp8Linear, Nf4Linear
from flatout.parallel.rank import Rank
from flatout.track.callback import MemoryCallback
from flatout.trainer.state import Run


def load_s(recorder: MemoryCallback) -> float:
    """Seconds up to the lines that tell of weights: drawing and quantizing them, and taking each rank's part."""
    return sum(end - begin for (begin, *_), (end, name, _) in pairwise(recorder.stages) if name == "model")


def measure(args: argparse.Namespace) -> dict[str, Any] | None:
    """This process's part of the run; the figures on the first rank."""
    launched_s, rank = time.time(), Rank.from_env()
    strategy = "fsdp" if args.gpus > 1 else "auto"
    overrides = ["base.storage=nf4", "model.init=random", f"strategy={strategy}", *args.overrides]
    found: dict[str, Any] = {}

    def held(run: Run) -> None:
        found["load_peak_gib"] = on_each_rank(run, gib("max_memory_allocated"))
        found["held_gib"] = on_each_rank(run, gib("memory_allocated"))
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def peak(run: Run, recorder: MemoryCallback) -> None:
        found["peak_gib"] = on_each_rank(run, gib("max_memory_allocated"))

    taken = take_steps(args.out, overrides, args.steps, before=held, after=peak)
    if not rank.is_first:
        return None
    quantized = [module for module in taken.run.model.modules() if isinstance(module, (Fp8Linear, Nf4Linear))]
    return {
        "shape": args.shape,
        "layers": taken.run.model.config.num_hidden_layers,
        "overrides": overrides,
        "quantized_weights": sum(module.in_features * module.out_features for module in quantized),
        **found,
        "load_s": round(load_s(taken.recorder), 1),
        **taken.summary(launched_s),
    }


def main() -> None:
    parser = make_parser(__doc__, gpus=2, steps=6)
    parser.add_argument("--shape", choices=SHAPES, default="llama-70b")
    parser.add_argument("--layers", type=int, help="decoder layers, the shape's own if not given")
    args = parser.parse_intermixed_args()
    if not args.part:
        shape = shape_config(args.shape)
        prepare(args.out, {**shape, "num_hidden_layers": args.layers or shape["num_hidden_layers"]}, args.steps)
        spread_over(args.gpus)
    if (found := measure(args)) is not None:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
