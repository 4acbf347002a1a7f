"""A Qwen3.5-shaped hybrid with random weights: tokens a second packed, and in rows, of LoRA on chat lengths, one GPU.

    pip install flash-linear-attention fla-core einops
    python benchmarks/hybrid_layouts.py [--shape 4b] [--steps 10] [OVERRIDE ...]

One JSON line. Each layout is a process of its own, on the same samples; the first 3 steps are left out. `compiled` and
`layout` are what the run said of itself: packed needs the packages above, and a run that fell back to rows fails here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from whole_steps import gib, prepare, take_steps

from flatout.track.callback import MemoryCallback
from flatout.trainer.state import Run

# config.json of Qwen3.5-4B's text model in its own class, and one small enough for a CPU
_QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 248320,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
}
_TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {"4b": _QWEN3_5, "tiny": {**_QWEN3_5, **_TINY}}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Take the steps in this process with one layout."""
    launched_s = time.time()
    prepare(args.out, SHAPES[args.shape], args.steps)
    found: dict[str, Any] = {}

    def after(run: Run, recorder: MemoryCallback) -> None:
        found["peak_gib"] = round(gib("max_memory_allocated"), 2)
        found["layout"] = run.plan.layout.name
        found["said"] = [text for _, name, text in recorder.stages if name in ("layout", "compile", "self-test")]

    overrides = ["model.init=random", f"batch.layout={args.layout}", *args.overrides]
    taken = take_steps(args.out, overrides, args.steps, after=after)
    return {**found, **taken.summary(launched_s)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="4b")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layouts", nargs="+", default=["packed", "rows"])
    parser.add_argument("--layout", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("/tmp/hybrid_layouts"))
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    if args.layout:
        (args.out.parent / f"{args.out.name}-{args.layout}.json").write_text(json.dumps(measure(args)))
        return
    found = {}
    for layout in args.layouts:
        out = Path(f"{args.out}-{layout}")
        command = [sys.executable, __file__, "--layout", layout, "--shape", args.shape, "--steps", str(args.steps)]
        subprocess.run([*command, "--out", str(out), *args.overrides], check=True, stdout=sys.stderr)
        found[layout] = json.loads((out.parent / f"{out.name}-{layout}.json").read_text())
    rates = [held["tokens_per_s"] for held in found.values()]
    print(json.dumps({"shape": args.shape, "ratio": round(rates[0] / rates[-1], 3), **found}))


if __name__ == "__main__":
    main()
