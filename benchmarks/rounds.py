"""Whole rounds of rollouts inside a run: new tokens a second, and where the time of a round goes.

    python benchmarks/rounds.py [--shapes qwen3-0.6b qwen3-1.7b] [--prompts 64] [--group 8] [--new 256] [--rounds 4]
    python benchmarks/rounds.py --shapes tiny --prompts 4 --group 4 --new 16 device=cpu compile=off   # on a CPU
    torchrun --nproc-per-node 2 benchmarks/rounds.py --part --shapes qwen3-1.7b                       # on two GPUs

Weights and prompts are random, so no answer ends early; rewards are of a function in child processes. Each shape is one
JSON line of a fresh process, with the medians of all rounds but the first, which records CUDA graphs and compiles:
`other` is what is neither sampled, scored nor trained (writing, planning and moving a round), as a share of its time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
from bench.samples import MIN_ID, write_tokenizer
from bench.shapes import shape_config
from transformers import AutoTokenizer

import flatout
from flatout.config.read import make_config
from flatout.track.callback import Callback
from flatout.track.record import RewardsRecord, RoundRecord, StepRecord

NUM_IDS, PROMPT_TOKENS = 900, 128
REWARD = """
def score(answer, row):
    return sum(map(ord, answer)) % 97 / 97
"""


@dataclass
class Clock(Callback):
    """The records of each round, and when it ended."""

    rounds: list[RoundRecord] = field(default_factory=list)
    steps: list[list[StepRecord]] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)

    def on_round(self, record: RewardsRecord) -> None:
        if isinstance(record, RoundRecord):
            self.rounds.append(record)
            self.steps.append([])
            self.ended.append(time.perf_counter())

    def on_step(self, record: StepRecord) -> None:
        self.steps[-1].append(record)
        self.ended[-1] = time.perf_counter()


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def write_files(shape: str, root: Path, num_prompts: int) -> None:
    """Write the model's config and tokenizer, the reward and, last, the prompts."""
    rng, model = np.random.default_rng(0), root / "model"
    model.mkdir(parents=True)
    write_tokenizer(model)
    (model / "config.json").write_text(json.dumps(shape_config(shape)))
    (root / "reward.py").write_text(REWARD)
    tokenizer, rows = AutoTokenizer.from_pretrained(model), list[str]()
    for _ in range(num_prompts):
        text = tokenizer.decode(rng.integers(MIN_ID, NUM_IDS, PROMPT_TOKENS))
        rows.append(json.dumps({"prompt": "".join(filter(str.isprintable, text))}))
    (root / "rows").write_text("\n".join(rows))
    (root / "rows").rename(root / "prompts.jsonl")


def measure(shape: str, root: Path, args: argparse.Namespace, overrides: list[str]) -> dict[str, object]:
    """Run the rounds of one shape in this process."""
    if is_first_rank():
        write_files(shape, root, args.prompts * 2)
    while not (prompts := root / "prompts.jsonl").exists():
        time.sleep(0.1)
    values = {
        "run_dir": str(root / "run"), "model": {"name": str(root / "model"), "init": "random"}, "method": "lora",
        "lora": {"rank": 16}, "objective": "grpo", "seed": 0,
        "data": {"sources": [{"path": str(prompts)}], "root": str(root / "data")},
        "eval": {"fraction": 0, "every_steps": None},
        "rollout": {
            "rounds": args.rounds, "prompts": args.prompts, "group": args.group, "steps": args.steps,
            "max_new_tokens": args.new, "rewards": [{"path": f"{root}/reward.py:score"}],
        },
    }  # fmt: skip
    clock = Clock()
    flatout.train(make_config(values, overrides), callbacks=[clock])
    if not is_first_rank():
        return {}
    rounds, rows = clock.rounds[1:], list[dict[str, float]]()
    for record, steps, start, end in zip(rounds, clock.steps[1:], clock.ended, clock.ended[1:], strict=False):
        train_s, wall_s = sum(step.step_s for step in steps), end - start
        parts = {"sample_s": record.sample_s, "score_s": record.score_s, "train_s": train_s}
        rows.append({**parts, "wall_s": wall_s, "other": 1 - sum(parts.values()) / wall_s})
    parts = {name: round(median(row[name] for row in rows), 4) for name in rows[0]}
    return {
        "shape": shape, "new_tokens_per_s": round(median(record.new_tokens_per_s for record in rounds)),
        "first_round": round(clock.rounds[0].new_tokens_per_s), "answer_tokens": rounds[-1].mean_answer_tokens, **parts,
        "steps": args.steps, "train_tokens_per_s": round(median(
            sum(step.num_tokens for step in steps) / sum(step.step_s for step in steps) for steps in clock.steps[1:]
        )),
        "mismatch_k3": max(step.metrics["mismatch/k3"] for steps in clock.steps for step in steps),
        "peak_gib": round(max(step.peak_memory_bytes for steps in clock.steps for step in steps) / 2**30, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-0.6b", "qwen3-1.7b"])
    for name, default in {"prompts": 64, "group": 8, "new": 256, "rounds": 4, "steps": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--part", action="store_true", help="measure the first shape in this process")
    args, overrides = parser.parse_known_args()
    if args.part:
        # ranks of one start share a folder
        root = Path(tempfile.gettempdir()) / f"rounds-{args.shapes[0]}-{os.getppid()}"
        found = measure(args.shapes[0], root, args, overrides)
        if is_first_rank():
            print(json.dumps(found), flush=True)
        return
    for shape in args.shapes:
        words = [word for word in sys.argv[1:] if word not in args.shapes and word != "--shapes"]
        done = subprocess.run(
            [sys.executable, __file__, "--part", "--shapes", shape, *words], capture_output=True, text=True, check=False
        )
        lines = (done.stdout if not done.returncode else done.stdout + done.stderr).splitlines()
        print("\n".join(lines[-1:] if not done.returncode else lines[-12:]), flush=True)


if __name__ == "__main__":
    main()
