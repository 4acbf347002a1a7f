"""What the planner spreads over four GPUs, measured on one machine: each part's rows, beside their own first row.

    python benchmarks/four_gpus.py --gpus 4 --parts lora,full,experts,70b,preference,kills
    python benchmarks/four_gpus.py --gpus 4 --parts context --timeout 580
    python benchmarks/four_gpus.py --gpus 4 --parts tiny device=cpu compile=off      # every kind of row, on a CPU

Parts, each a list of commands of the other benchmarks (`--list` prints them):

    lora        Qwen3-8B, bf16 and fp8, 32 and 128 samples a step, on 1, 2 and 4 GPUs
    full        all weights of Qwen3-8B by fsdp, bf16 and fp8: speed, then 200 steps of tokens that can be learnt
    experts     Qwen3-30B-A3B with adapters on its experts: ddp, and experts shared by 2 and 4 ranks; 12 layers on one
    context     one document of 524,288 tokens, shared by 4 ranks
    70b         all 80 layers in NF4, by fsdp
    preference  DPO of Qwen3-8B, 32 pairs a step, on 1 and 4 GPUs
    pictures    LoRA of Qwen3-VL-8B, 32 samples with none to four pictures a step, on 1 and 4 GPUs
    kills       20 SIGKILLs of a rank of four, in five runs at once

Rows that need fewer GPUs than there are run side by side, each with GPUs of its own, so one call compares them on one
machine. Each row is a fresh process; one that fails or is late does not stop the others, and its last lines are told.
Appends a JSON line a row to `--out`/rows.jsonl, and writes the table of all that are there to `--out`/rows.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.machine import gpu_header, versions

HERE = Path(__file__).resolve().parent
EXPERTS = "lora.targets=[q_proj,k_proj,v_proj,o_proj,gate_up_proj,down_proj]"
MEAN_OVER = 10


@dataclass(frozen=True)
class Row:
    """A command of another benchmark on some GPUs. `beside` is the row whose speed and losses it is compared with."""

    name: str
    num_gpus: int
    words: Sequence[str]
    script: str = "throughput.py"
    beside: str = ""

    def command(self, out: Path) -> list[str]:
        own = [] if self.script == "kills.py" else [f"--out={out}"]
        return [sys.executable, str(HERE / self.script), *self.words, *own]


def _steps(name: str, gpus: int, *words: str, beside: str = "") -> Row:
    return Row(name, gpus, [f"--gpus={gpus}", *words], beside=beside)


def _lora() -> list[Row]:
    rows = []
    for gpus in (1, 2, 4):
        for samples in (128, 32):
            for kind, words in (("bf16", []), ("fp8", ["base.storage=fp8"])):
                name, first = f"8b-{kind}@{gpus}x{samples}", f"8b-{kind}@1x{samples}"
                sizes = ["--shape=qwen3-8b", f"--samples={samples}", "--steps=10"]
                rows.append(_steps(name, gpus, *sizes, *words, beside=first if gpus > 1 else ""))
    return rows


def _full() -> list[Row]:
    rows = []
    for kind, words in (("bf16", []), ("fp8", ["full.compute=fp8_rowwise"])):
        common = ["--shape=qwen3-8b", "method=full", "strategy=fsdp", *words]
        beside = "" if kind == "bf16" else "full-8b-bf16"
        rows.append(_steps(f"full-8b-{kind}@4x64", 4, "--samples=64", "--steps=9", *common, "optim.lr=1e-5",
                           beside=f"{beside}@4x64" if beside else ""))  # fmt: skip
        learn = ["--lengths=chain", "--samples=16", "--steps=200", "optim.lr=3e-5", "schedule.warmup_steps=20"]
        rows.append(_steps(f"full-8b-{kind}-200-steps@4", 4, *common, *learn,
                           beside=f"{beside}-200-steps@4" if beside else ""))  # fmt: skip
    return rows


def _experts() -> list[Row]:
    whole = ["--shape=qwen3-30b-a3b", "--steps=8", EXPERTS]
    part = ["--shape=qwen3-30b-a3b-12-layers", "--steps=10", EXPERTS]
    rows = [_steps("30b-a3b-12-layers@1", 1, *part)]
    for ranks in (1, 2, 4):
        shared = [f"experts.parallel={ranks}"] if ranks > 1 else []
        name = f"-shared-by-{ranks}@4" if ranks > 1 else "@4"
        rows.append(_steps(f"30b-a3b-12-layers{name}", 4, *part, *shared, beside="30b-a3b-12-layers@1"))
        rows.append(_steps(f"30b-a3b{name}", 4, *whole, *shared, beside="30b-a3b@4" if shared else ""))
    return rows


def _preference() -> list[Row]:
    pairs = ["--shape=qwen3-8b", "--rows=bf16,fp8", "--steps=5"]
    return [
        Row(f"dpo-8b@{gpus}", gpus, [*pairs, f"--gpus={gpus}"], "preference.py", "dpo-8b@1" if gpus > 1 else "")
        for gpus in (1, 4)
    ]


def _pictures() -> list[Row]:
    words = ["--shape=qwen3-vl-8b", "--rows=bf16", "--steps=5"]
    return [
        Row(f"pictures-8b@{gpus}", gpus, [*words, f"--gpus={gpus}"], "pictures.py", "pictures-8b@1" if gpus > 1 else "")
        for gpus in (1, 4)
    ]


def _kills() -> list[Row]:
    words = ["--kills=4", "--ranks=4", "--steps-per-kill=30", "--save-every=5"]
    # five at once on the same GPUs, which a tiny model does not fill
    return [Row(f"kills-{seed}", 0, [*words, f"--seed={seed}", "device=cuda"], "kills.py") for seed in range(1, 6)]


def _tiny() -> list[Row]:
    return [
        _steps("tiny@1", 1, "--shape=tiny", "--steps=5"),
        _steps("tiny@2", 2, "--shape=tiny", "--steps=5", beside="tiny@1"),
        Row("dpo-tiny@2", 2, ["--shape=tiny", "--pairs=4", "--steps=2", "--rows=bf16", "--gpus=2"], "preference.py"),
        Row(
            "pictures-tiny@2", 2, ["--shape=tiny", "--samples=4", "--steps=1", "--rows=bf16", "--gpus=2"], "pictures.py"
        ),
        Row("kills-tiny", 0, ["--kills=1", "--ranks=2", "--steps-per-kill=10", "--save-every=5"], "kills.py"),
    ]


PARTS = {
    "lora": _lora(),
    "full": _full(),
    "experts": _experts(),
    "context": [
        _steps(
            "8b-524288-tokens@4", 4, "--shape=qwen3-8b", "--tokens=524288", "--steps=1", "context.parallel=4"
        )
    ],
    "70b": [
        _steps("70b-nf4@4", 4, "--shape=llama-70b", "--steps=5", "base.storage=nf4", "strategy=fsdp")
    ],
    "preference": _preference(),
    "pictures": _pictures(),
    "kills": _kills(),
    "tiny": _tiny(),
}  # fmt: skip


@dataclass
class Job:
    """A row that runs: its process, its GPUs and its log."""

    row: Row
    process: subprocess.Popen[bytes]
    gpus: list[int]
    log: Path
    out: Path
    began_s: float = field(default_factory=time.time)


def start(row: Row, gpus: list[int], args: argparse.Namespace) -> Job:
    out, log = args.out / row.name, args.out / f"{row.name}.log"
    out.mkdir(parents=True, exist_ok=True)
    visible = gpus or list(range(args.gpus))
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, visible))}
    with log.open("wb") as file:
        # a session of its own, so that a late one is stopped with its ranks
        process = subprocess.Popen(
            [*row.command(out), *args.overrides], stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
    return Job(row, process, gpus, log, out)


def figures(job: Job) -> dict[str, Any]:
    """What the row's command found, from its own files and lines; `error` with the last lines if it failed."""
    text = job.log.read_text(encoding="utf-8", errors="replace")
    found: dict[str, Any] = {}
    if job.process.returncode:
        found["error"] = f"exit code {job.process.returncode}: " + " / ".join(text.strip().splitlines()[-6:])[-1500:]
    if job.row.script == "throughput.py" and (path := job.out / "figures.json").exists():
        found |= json.loads(path.read_text())
    elif (script := job.row.script) in ("preference.py", "pictures.py") and (
        path := (job.out / script).with_suffix(".json")
    ).exists():
        found |= json.loads(path.read_text())
        found["told"] = [line for line in text.splitlines() if line.startswith("| flatout")]
    elif job.row.script == "kills.py":
        found["told"] = [
            line for line in text.splitlines() if re.match(r"\d+ of \d+ |detection|recovery|.*equal to the bit", line)
        ]
    return {**found, "row": job.row.name, "num_gpus": job.row.num_gpus, "seconds": round(time.time() - job.began_s, 1)}


def run_rows(rows: Sequence[Row], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every row as soon as enough GPUs are free, in order; returns their figures."""
    waiting, running, done = list(rows), list[Job](), list[dict[str, Any]]()
    free, ends_s = list(range(args.gpus)), time.time() + args.time_limit
    while waiting or running:
        while waiting and len(free) >= waiting[0].num_gpus and time.time() < ends_s:
            # rows without GPUs of their own wait until all others are done
            if not waiting[0].num_gpus and any(job.gpus for job in running):
                break
            row = waiting.pop(0)
            running.append(start(row, [free.pop(0) for _ in range(row.num_gpus)], args))
        if waiting and time.time() >= ends_s and not running:
            print("out of time before: " + ", ".join(row.name for row in waiting), flush=True)
            break
        time.sleep(0.2)
        for job in list(running):
            if job.process.poll() is None and time.time() - job.began_s > args.timeout:
                os.killpg(job.process.pid, 9)
                job.process.wait()
            if job.process.poll() is not None:
                running.remove(job)
                free = sorted([*free, *job.gpus])
                done.append(figures(job))
                with (args.out / "rows.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(done[-1]) + "\n")
                print(told(done[-1]), flush=True)
    return done


def told(found: dict[str, Any]) -> str:
    keys = ("tokens_per_s", "step_s", "peak_gib", "planned_gib", "recompute", "micro_batches", "share_of_bound",
            "launch_to_first_step_s", "error", "told")  # fmt: skip
    shown = " ".join(f"{key}={found[key]}" for key in keys if key in found)
    return f"{found['row']} ({found['seconds']:.0f} s): {shown}"


def worst_difference(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference of means over MEAN_OVER steps."""

    def means(losses: Sequence[float]) -> list[float]:
        return [statistics.fmean(losses[at : at + MEAN_OVER]) for at in range(0, len(losses), MEAN_OVER)]

    return max(abs(a - b) / abs(b) for a, b in zip(means(mine), means(theirs), strict=False))


def table(out: Path) -> str:
    """The rows of throughput.py in `out`, as Markdown; speed and losses are beside the row that each names."""
    lines = (out / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    by_name = {found["row"]: found for found in map(json.loads, lines)}
    lines = [
        "| row | tokens/s | times its first row | loss beside it | GiB, planned | measured | to the first step |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in (row for part in PARTS.values() for row in part):
        found, first = by_name.get(row.name, {}), by_name.get(row.beside, {})
        if "tokens_per_s" not in found:
            continue
        peaks = found["peak_gib"] if isinstance(found["peak_gib"], list) else [found["peak_gib"]]
        speed = difference = ""
        if "tokens_per_s" in first:
            speed = f"{found['tokens_per_s'] / first['tokens_per_s']:.2f}"
            difference = f"{worst_difference(found['losses'], first['losses']):.1e}"
        lines.append(
            f"| `{row.name}` | {found['tokens_per_s']:,} | {speed} | {difference} | {found.get('planned_gib', '')} | "
            f"{max(peaks)} | {found['launch_to_first_step_s']} s |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS)[:-1])
    parser.add_argument("--only", default="", metavar="REGEX", help="of these rows, those whose name it matches")
    parser.add_argument("--gpus", type=int, default=4, help="of this machine (4)")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds of one row (400)")
    parser.add_argument("--time-limit", type=float, default=3600.0, help="seconds after which no row starts (3600)")
    parser.add_argument("--list", action="store_true", help="print the rows' commands and stop")
    parser.add_argument("--out", type=Path, default=Path("/tmp/four-gpus"))
    parser.add_argument("overrides", nargs="*", help="settings that every row gets")
    args = parser.parse_intermixed_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts: there is no {', '.join(sorted(unknown))}; expected some of {', '.join(PARTS)}")
    rows = [row for part in args.parts for row in PARTS[part] if re.search(args.only, row.name)]
    if args.list:
        print("\n".join(f"{row.name}: " + " ".join(row.command(args.out / row.name)[1:]) for row in rows))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "machine.json").write_text(json.dumps({"gpu": gpu_header(), "versions": versions()}, indent=1))
    done = run_rows(rows, args)
    (args.out / "rows.md").write_text(table(args.out) + "\n")
    print(table(args.out))
    sys.exit(any("error" in found for found in done) or len(done) < len(rows))


if __name__ == "__main__":
    main()
