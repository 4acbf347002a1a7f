"""Useful tokens a second of our own training loop on chat-like lengths: random weights, real shapes, one GPU.

    python benchmarks/throughput.py --shape qwen3-8b --budget 24000 --steps 12

Lengths are lognormal(6.0, 0.8) clipped to 32..2048 tokens, 60 % of each sample carry loss, 32 samples a step. Runs
`flatout train` on a token store of such lengths; the first 3 steps are left out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from pathlib import Path

import numpy as np
from qwen3 import SIZES, qwen3_config
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from flatout.config.read import make_config
from flatout.data import registry
from flatout.data.store import StoreMeta, new_store
from flatout.data.tokenizer import tokenizer_digest
from flatout.train.run import train


def write_inputs(root: Path, shape: str, num_samples: int) -> None:
    """A model folder with a minimal tokenizer, and a registered token store of random tokens."""
    model_dir = root / "model"
    model_dir.mkdir(parents=True, exist_ok=True)
    config = qwen3_config(shape)
    (model_dir / "config.json").write_text(json.dumps(config))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])), eos_token="a")
    tokenizer.save_pretrained(model_dir)
    draw = np.random.default_rng(0)
    lengths = np.clip(np.exp(draw.normal(6.0, 0.8, num_samples)), 32, 2048).astype(np.int64)
    token_ids = draw.integers(0, config["vocab_size"], lengths.sum()).astype(np.int32)
    trained = np.concatenate([np.arange(n) >= int(n * 0.4) for n in lengths])
    trained[np.cumsum(lengths) - lengths] = False
    folder = registry.built_dir(root / "data", "lengths")
    meta = StoreMeta(
        name="lengths",
        fingerprint="0" * 32,
        tokenizer=str(model_dir),
        tokenizer_digest=tokenizer_digest(tokenizer),
        template="",
        template_digest="",
        loss_type="response_only",
        max_tokens=2048,
        vocabulary_size=config["vocab_size"],
        files=("lengths",),
        counts={"rows": num_samples},
        max_token_id=int(token_ids.max()),
    )
    with new_store(folder) as writer:
        rows = np.arange(num_samples)
        writer.append(token_ids, trained, lengths, np.zeros(num_samples, np.int32), rows)
        writer.finish(meta, {"counts": {"rows": num_samples}})
    registry.upsert(
        root / "data",
        registry.Entry(
            name="lengths",
            path=str(folder.relative_to(root / "data")),
            sources=("lengths",),
            num_samples=num_samples,
            tokenizer=str(model_dir),
            template=None,
            loss_type="response_only",
            fingerprint=meta.fingerprint,
            created="",
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SIZES, default="qwen3-0.6b")
    parser.add_argument("--budget", type=int, default=24000)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("/tmp/throughput"))
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    write_inputs(args.out, args.shape, 32 * args.steps)
    config = make_config(
        {
            "run_dir": str(args.out / "run"),
            "model": {"name": str(args.out / "model"), "init": "random"},
            "data": {"name": "lengths", "root": str(args.out / "data")},
            "lora": {"rank": 16},
            "batch": {"samples_per_step": 32, "micro_batch_tokens": args.budget, "max_steps": args.steps},
            "checkpoint": {"every_steps": None},
        },
        args.overrides,
    )
    train(config)
    lines = map(json.loads, (args.out / "run" / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["kind"] == "step"]
    timed = steps[3:]
    rate = sum(s["num_tokens"] for s in timed) / sum(s["step_s"] for s in timed)
    print(
        json.dumps(
            {
                "shape": args.shape,
                "overrides": args.overrides,
                "budget": args.budget,
                "useful_tok_s": round(rate),
                "step_s": round(statistics.median(s["step_s"] for s in timed), 3),
                "first_step_s": round(steps[0]["step_s"], 1),
                "data_wait_share": round(sum(s["data_wait_s"] for s in timed) / sum(s["step_s"] for s in timed), 4),
                "micro_batches": statistics.mean(s["num_micro_batches"] for s in timed),
                "peak_gib": round(max(s["peak_memory_bytes"] for s in steps) / 2**30, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
