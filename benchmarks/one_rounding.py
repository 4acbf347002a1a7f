"""Does LoRA in bf16, fp8 and NF4 learn what it learns in fp32? Loss by update on a real model, for us and for PEFT.

    python benchmarks/one_rounding.py --model DIR --rows QUESTIONS.jsonl --out DIR [--only NAME ...] [--jobs 8]

Every run of a seed trains on the same samples in the same order, from the same first adapter, as `flatout train` or as
plain transformers with PEFT in eager mode. Rows of ours are compared with ours in fp32 over the same (for fp8 and NF4:
dequantized) weights, PEFT's with PEFT's in fp32. It exits with 1 if one of ours is further away than its bound.
`--also NAME=CHECKOUT` trains the rows for older GPUs with another version as well.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

PER_UPDATE, RANK = 4, 16
PLAIN_TRAINER = Path(__file__).parent / "peers" / "plain_trainer.py"
VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "dropout": {"lora_dropout": 0.05},
    # all weights are trained
    "full": {},
}
OURS = {"use_rslora": "lora.rslora", "use_dora": "lora.dora", "lora_dropout": "lora.dropout"}
BF16, FP32 = "model.precision=bf16", "model.precision=fp32"
AMPERE, ADA = {"FLATOUT_CAPABILITY": "8.0"}, {"FLATOUT_CAPABILITY": "8.9"}


class Row(NamedTuple):
    """One system in one precision; `reference` names the row that it should learn like."""

    name: str
    reference: str
    settings: tuple[str, ...] = ()
    env: Mapping[str, str] = MappingProxyType({})
    peft: str = ""
    base: str = ""
    # largest mean absolute difference from the reference over updates 2 to 50, where this program fails
    bound: float | None = None
    unsloth: bool = False


ROWS = [
    Row("fp32", "fp32", (FP32,)),
    Row("bf16", "fp32", (BF16,), bound=0.0025),
    Row("bf16, Ampere", "fp32", (BF16,), AMPERE, bound=0.0025),
    Row("bf16, not compiled", "fp32", (BF16, "compile=off"), AMPERE, bound=0.0025),
    Row("bf16, rows", "fp32", (BF16, "batch.layout=rows"), AMPERE, bound=0.0025),
    Row("fp8 backward", "fp32", (BF16, "base.backward=fp8"), bound=0.004),
    Row("fp8 backward, Ada", "fp32", (BF16, "base.backward=fp8"), ADA, bound=0.004),
    Row("fp32 of fp8", "fp32 of fp8", (FP32,), base="fp8"),
    Row("fp8", "fp32 of fp8", (BF16, "base.storage=fp8"), bound=0.015),
    Row("fp8, Ada", "fp32 of fp8", (BF16, "base.storage=fp8"), ADA, bound=0.015),
    Row("fp32 of NF4", "fp32 of NF4", (FP32,), base="nf4"),
    Row("NF4", "fp32 of NF4", (BF16, "base.storage=nf4", "base.compute=model"), bound=0.0025),
    Row("NF4, Ampere", "fp32 of NF4", (BF16, "base.storage=nf4", "base.compute=model"), AMPERE, bound=0.0025),
    Row("NF4, fp8 products", "fp32 of NF4", (BF16, "base.storage=nf4", "base.compute=fp8"), bound=0.018),
    Row("bf16 weights", "fp32", (BF16, "full.weights=bf16"), bound=0.004),
    Row("PEFT fp32", "PEFT fp32", peft="fp32"),
    Row("PEFT bf16", "PEFT fp32", peft="bf16"),
    Row("Unsloth bf16", "PEFT fp32", peft="bf16", unsloth=True),
    Row("PEFT fp32 of NF4", "PEFT fp32 of NF4", peft="fp32", base="nf4"),
    Row("PEFT NF4", "PEFT fp32 of NF4", peft="nf4"),
    Row("Unsloth NF4", "PEFT fp32 of NF4", peft="nf4", unsloth=True),
]


PLOTTED = {
    "PEFT bf16": "#c0392b",
    "Unsloth bf16": "#e67e22",
    "Unsloth NF4": "#f1c40f",
    "bf16, Ampere": "#2e86c1",
    "bf16": "#1e8449",
    "NF4": "#7d3c98",
}
LABELS = {
    "PEFT bf16": "transformers + PEFT, bf16",
    "Unsloth NF4": "Unsloth, NF4 (beside fp32 over NF4)",
    "bf16": "flatout, bf16 (Hopper)",
    "bf16, Ampere": "flatout, bf16 (kernels of other GPUs)",
    "NF4": "flatout, NF4 (beside fp32 over NF4)",
}


def dequantized(model: Path, out: Path, storage: str) -> Path:
    """Write the model with its decoder's linear weights rounded as flatout (fp8, nf4) or bitsandbytes stores them."""
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from flatout.models.blocks import decoder_layers
    from flatout.models.frozen.frozen_linear import Fp8Linear

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for layer in decoder_layers(loaded):
        for linear in [module for module in layer.modules() if isinstance(module, nn.Linear)]:
            if storage == "fp8":
                linear.weight.data = Fp8Linear(linear.weight.data, None).weight
            else:
                import bitsandbytes.functional as bnb

                weight = linear.weight.data.to(torch.bfloat16).cuda()
                packed, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
                linear.weight.data = bnb.dequantize_4bit(packed, state).float().cpu()
    loaded.save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)
    return out


def write_inputs(args: argparse.Namespace, seed: int, variant: str) -> None:
    """Write a seed's rows in their order, held-out rows, and the first adapter of a variant."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    rows = [json.loads(line) for line in args.rows.read_text().splitlines()]
    random.Random(0).shuffle(rows)
    turns = (("user", "question"), ("assistant", "answer"))
    lines = [json.dumps({"messages": [{"role": role, "content": row[key]} for role, key in turns]}) for row in rows]
    held_out, train = lines[: args.held_out], lines[args.held_out :]
    random.Random(seed + 1).shuffle(train)
    (args.out / "eval.jsonl").write_text("\n".join(held_out) + "\n")
    (args.out / f"rows-{seed}.jsonl").write_text("\n".join(train[: args.updates * PER_UPDATE]) + "\n")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    config = LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM", **VARIANTS[variant]
    )
    get_peft_model(model, config).save_pretrained(args.out / f"adapter-{seed}-{variant}")


def run_one(
    args: argparse.Namespace, row: Row, seed: int, variant: str, lr: float, code: Path | None
) -> dict[str, Any]:
    """Train one row; return its losses, or its error."""
    place = args.out / f"{row.name}-{seed}-{variant}-{lr:g}{f'-{code.name}' if code else ''}".replace(" ", "_").replace(
        ",", ""
    )
    adapter = args.out / f"adapter-{seed}-{variant}"
    model = args.out / f"dequantized-{row.base}" if row.base else args.model
    eval_at = sorted({min(50, args.updates), args.updates})
    env = {**_env_of(code), **row.env}
    gpu = args.free.get() if args.gpus else None
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = str(gpu)
    if row.peft:
        job = {
            "model": str(model), "root": str(args.out / "data"), "rows": f"data-{seed}",
            "adapter": str(adapter) if variant != "full" else "",
            "precision": row.peft, "lr": lr, "eval_at": eval_at, "result": f"{place}.json",
            "unsloth": row.unsloth, "final": f"{place}/final", "per_update": PER_UPDATE,
        }  # fmt: skip
        command = [sys.executable, str(PLAIN_TRAINER), json.dumps(job)]
    else:
        built = f"data-{seed}{f'-{code.name}' if code else ''}"
        options = {ours: VARIANTS[variant][theirs] for theirs, ours in OURS.items() if theirs in VARIANTS[variant]}
        config = {
            "name": place.name, "run_dir": str(place), "model": {"name": str(model)},
            "data": {"name": built, "root": str(args.out / "data")},
            "batch": {"samples_per_step": PER_UPDATE, "shuffle": False, "micro_batch_tokens": 4096},
            "optim": {"lr": lr, "weight_decay": 0.0, "max_grad_norm": 1.0},
            "schedule": {"kind": "constant", "warmup_steps": 0},
            "eval": {"data": f"eval{f'-{code.name}' if code else ''}", "every_steps": eval_at[0]},
        }  # fmt: skip
        if variant == "full":
            config["method"] = "full"
        else:
            config["lora"] = {"rank": RANK, "alpha": 2 * RANK, "continue_from": str(adapter)}
        (args.out / f"{place.name}.json").unlink(missing_ok=True)
        path = args.out / f"{place.name}.yaml"
        path.write_text(json.dumps(config))
        settings = [f"{name}={str(value).lower()}" for name, value in options.items()]
        command = [sys.executable, "-m", "flatout", "train", str(path), *row.settings, *settings]
    started = time.monotonic()
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=code or args.out)
    if gpu is not None:
        args.free.put(gpu)
    print(f"{time.monotonic() - started:6.1f} s  rc {done.returncode}  {place.name}", flush=True)
    if done.returncode:
        print((done.stderr or done.stdout)[-1500:], flush=True)
        return {"error": (done.stderr or done.stdout)[-1500:]}
    final = f"{place}/final"
    if row.peft:
        found = json.loads(Path(f"{place}.json").read_text())
        evals = {int(step): loss for step, loss in found["eval"].items()}
        return {"loss": found["loss"], "eval": evals, "final": final}
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    return {
        "loss": [line["loss"] for line in lines if line["kind"] == "step"],
        "eval": {line["step"]: line["eval_loss"] for line in lines if line["kind"] == "eval"},
        "final": final,
    }


def build_sets(args: argparse.Namespace, code: Path | None) -> None:
    """Build the data sets once, before the runs that share them."""
    end = f"-{code.name}" if code else ""
    for name, rows in (("eval", "eval"), *((f"data-{seed}", f"rows-{seed}") for seed in args.seeds)):
        command = [
            sys.executable, "-m", "flatout", "data", "build", str(args.out / f"{rows}.jsonl"), "--name", name + end,
            "--tokenizer", str(args.model), "--root", str(args.out / "data"),
        ]  # fmt: skip
        subprocess.run(command, check=True, env=_env_of(code), cwd=code or args.out, stdout=subprocess.DEVNULL)


def _env_of(code: Path | None) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(code or ""), os.environ.get("PYTHONPATH", "")]))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "2",
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
    }


def summary(results: dict[str, dict[str, Any]], row: Row, key: str, seeds: list[int], old: str) -> str | None:
    """One line: differences from the reference row in percent over updates 2 to 50, and of held-out losses."""
    pairs = []
    for seed in seeds:
        own, truth = results.get(f"{row.name}{old}|{seed}|{key}"), results.get(f"{row.reference}|{seed}|{key}")
        if own and "error" in own:
            return f"| {row.name}{old} | {key} | failed: {own['error'].strip().splitlines()[-1][:100]} |"
        if own and truth and "loss" in truth:
            pairs.append((own, truth))
    if not pairs:
        return None
    ratios = [[a / b - 1 for a, b in zip(own["loss"][1:50], truth["loss"][1:50], strict=True)] for own, truth in pairs]
    signed = [statistics.fmean(own) for own in ratios]
    absolute = [statistics.fmean(map(abs, own)) for own in ratios]
    late = [
        statistics.fmean(a / b - 1 for a, b in zip(own["loss"][50:], truth["loss"][50:], strict=True))
        for own, truth in pairs
        if len(own["loss"]) > 50
    ]
    evals = [
        (step, statistics.fmean(own["eval"][step] - truth["eval"][step] for own, truth in pairs))
        for step in sorted(pairs[0][1]["eval"])
    ]
    judged = [own["in_fp32"] - truth["in_fp32"] for own, truth in pairs if "in_fp32" in own and "in_fp32" in truth]
    in_fp32 = f"{statistics.fmean(judged):+.4f} ({min(judged):+.4f} to {max(judged):+.4f})" if judged else "-"
    told = ", ".join(f"{step}: {mean:+.4f}" for step, mean in evals)
    held = ", ".join(f"{truth['eval'][max(truth['eval'])]:.4f}" for _, truth in pairs)
    rest = f"{statistics.fmean(late):+.3%}" if late else "-"
    return (
        f"| {row.name}{old} | {key} | {len(pairs)} | {statistics.fmean(signed):+.3%} ({min(signed):+.3%} to "
        f"{max(signed):+.3%}) | {statistics.fmean(absolute):.3%} | {rest} | {told} | {in_fp32} | {held} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--lrs", type=float, nargs="*", default=[2e-4])
    parser.add_argument("--variants", nargs="*", default=["lora"], choices=list(VARIANTS))
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--held-out", type=int, default=200, help="rows to evaluate on")
    parser.add_argument("--jobs", type=int, default=8, help="runs at once")
    parser.add_argument("--gpus", type=int, default=0, help="share runs among so many GPUs; 0: take what is visible")
    parser.add_argument("--results", type=Path, nargs="*", help="print tables of earlier results instead of training")
    parser.add_argument("--plot", type=Path, help="with --results: draw losses beside fp32's (needs matplotlib)")
    parser.add_argument("--also", nargs="*", default=[], help="NAME=CHECKOUT of other versions of flatout")
    args = parser.parse_args()
    if args.results:
        earlier = {key: own for path in args.results for key, own in json.loads(path.read_text()).items()}
        for own in earlier.values():
            own["eval"] = {int(step): loss for step, loss in own.get("eval", {}).items()}
        print_table(args, ROWS, earlier, [""])
        if args.plot:
            plot(args, earlier)
        sys.exit("\n".join(above_bounds(args, earlier)) or 0)
    args.model, args.out, args.rows = args.model.resolve(), args.out.resolve(), args.rows.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for variant in args.variants:
            write_inputs(args, seed, variant)
    chosen = [row for row in ROWS if not args.only or row.name in args.only]
    for storage in sorted({row.base for row in chosen} - {""}):
        dequantized(args.model, args.out / f"dequantized-{storage}", storage)
    others = {Path(path).resolve(): name for name, _, path in (given.partition("=") for given in args.also)}
    for code in (None, *others):
        build_sets(args, code)
    jobs = [
        (row, seed, variant, lr, code)
        for code in (None, *others)
        for lr in args.lrs
        for variant in args.variants
        for seed in args.seeds
        for row in chosen
        if (code is None or row.env) and (variant == "full" or "full.weights=bf16" not in row.settings)
    ]
    # the slowest first
    jobs.sort(key=lambda job: FP32 not in job[0].settings and job[0].peft != "fp32")
    args.free = queue.Queue()
    for index in range(args.jobs):
        args.free.put(index % max(1, args.gpus))
    results: dict[str, dict[str, Any]] = {}
    kept = args.out / "one-rounding.json"
    with ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(run_one, args, *job): job for job in jobs}
        for future in as_completed(running):
            row, seed, variant, lr, code = running[future]
            end = f", {others[code]}" if code else ""
            results[f"{row.name}{end}|{seed}|{variant} {lr:g}"] = future.result()
            kept.write_text(json.dumps(results))
    judge_all(args, results)
    kept.write_text(json.dumps(results))
    print_table(args, chosen, results, ["", *(f", {name}" for name in others.values())])
    sys.exit("\n".join(above_bounds(args, results)) or 0)


def judge_all(args: argparse.Namespace, results: dict[str, dict[str, Any]]) -> None:
    """Add to each result the held-out loss of its final adapter over its base in fp32, as `in_fp32`."""
    references = {row.name: row.reference for row in ROWS}
    bases = {row.name: row.base for row in ROWS}
    names = {name: name.split("|")[0] for name, result in results.items() if "final" in result}

    def judge_share(index: int) -> dict[str, float]:
        found: dict[str, float] = {}
        for storage in ("", "fp8", "nf4"):
            own = [name for name, row in names.items() if bases[references.get(row, "fp32")] == storage]
            if share := own[index :: max(1, args.gpus)]:
                result = args.out / f"judged-{index}.json"
                job = {
                    "model": str(args.out / f"dequantized-{storage}" if storage else args.model),
                    "root": str(args.out / "data"), "result": str(result),
                    "adapters": {name: results[name]["final"] for name in share},
                }  # fmt: skip
                env = {**_env_of(None), **({"CUDA_VISIBLE_DEVICES": str(index)} if args.gpus else {})}
                subprocess.run([sys.executable, str(PLAIN_TRAINER), json.dumps(job)], check=True, env=env)
                found |= json.loads(result.read_text())
        return found

    with ThreadPoolExecutor() as pool:
        for share in pool.map(judge_share, range(max(1, args.gpus))):
            for name, loss in share.items():
                results[name]["in_fp32"] = loss


def above_bounds(args: argparse.Namespace, results: dict[str, dict[str, Any]]) -> list[str]:
    """The rows whose losses are further from fp32's than their bounds, at the rates and adapters given."""
    found = []
    for row in ROWS:
        for key in (f"{variant} {lr:g}" for lr in args.lrs for variant in args.variants):
            for seed in args.seeds if row.bound else ():
                own, truth = results.get(f"{row.name}|{seed}|{key}"), results.get(f"{row.reference}|{seed}|{key}")
                if own and truth and "loss" in own and "loss" in truth:
                    pairs = zip(own["loss"][1:50], truth["loss"][1:50], strict=True)
                    mean = statistics.fmean(abs(a / b - 1) for a, b in pairs)
                    if row.bound is not None and mean > row.bound:
                        found.append(f"{row.name}, seed {seed}, {key}: {mean:.3%}, at most {row.bound:.3%}")
    return found


def print_table(args: argparse.Namespace, rows: list[Row], results: dict[str, dict[str, Any]], ends: list[str]) -> None:
    """Print the summaries as a table in Markdown."""
    print(
        "| row | adapter, lr | seeds | updates 2 to 50, signed | absolute | later | held out, difference | in fp32 "
        "| reference |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for key in (f"{variant} {lr:g}" for lr in args.lrs for variant in args.variants):
        for row in rows:
            for end in ends:
                if line := summary(results, row, key, args.seeds, end):
                    print(line)


def plot(args: argparse.Namespace, results: dict[str, dict[str, Any]]) -> None:
    """Draw the losses of updates beside fp32's, in percent, as the mean over seeds and over 5 updates."""
    from matplotlib import pyplot
    from numpy import convolve, full, mean

    key = f"{args.variants[0]} {args.lrs[0]:g}"
    figure, axes = pyplot.subplots(figsize=(7.5, 3.6))
    for name, color in PLOTTED.items():
        reference = next(row.reference for row in ROWS if row.name == name)
        own = [
            [a / b - 1 for a, b in zip(results[f"{name}|{seed}|{key}"]["loss"], truth["loss"], strict=True)]
            for seed in args.seeds
            if (truth := results.get(f"{reference}|{seed}|{key}")) and f"{name}|{seed}|{key}" in results
        ]
        curve = 100 * convolve(mean(own, 0), full(5, 0.2), "valid")
        axes.plot(range(3, len(curve) + 3), curve, color=color, label=f"{LABELS.get(name, name)}", linewidth=1.3)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xlabel("update")
    axes.set_ylabel("training loss above fp32's, %")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(args.plot, metadata={"Date": None} if args.plot.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
