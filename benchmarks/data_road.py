"""CPU time of `flatout data build` beside a plain `datasets.map` over apply_chat_template with truncation; its memory.

    python benchmarks/data_road.py --tokenizer DIR [--rows 60000 500000] [--num-procs 1 2] [--rounds 3] [--data DIR]
    python benchmarks/data_road.py --tokenizer DIR --memory 1000000 3000000 [--num-procs 2] [--token-rows]

The rows are chats of the demo, or with --data those of public files in that folder (`alpaca_5000`, `gsm8k`), repeated
with a number in the first question, so that no two are equal. Both sides run as a process of their own with
their imports, reading and writing, in turns. CPU time is that of the process and all of its children, user and system.

--memory builds that many short chats instead, or with --token-rows rows of token ids, and reports the peak resident
memory of the parent and of the largest other process, and the peak of all together, in which pages that processes
share count once. A line through the smallest and the largest build gives the memory at 30 million rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from flatout.demo.conversations import sample_conversations

PLAIN = """
import sys
from datasets import load_dataset
from transformers import AutoTokenizer
file, folder, name, num_procs, max_tokens, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(name)
rows = load_dataset("json", data_files=file, split="train", cache_dir=folder)
def tokenize(row):
    return tokenizer.apply_chat_template(
        row["messages"], tokenize=True, return_dict=True, truncation=True, max_length=int(max_tokens)
    )
rows = rows.map(tokenize, num_proc=int(num_procs) if num_procs != "1" else None, remove_columns=["messages"])
rows.save_to_disk(out)
"""
Message = dict[str, str]


def public_chats(data: Path) -> Iterator[list[Message]]:
    """Yield chats of one to three questions without end, made of public instructions."""
    pairs = [
        ("\n\n".join(filter(None, (row["instruction"], row.get("input")))), row["output"])
        for row in json.loads((data / "alpaca_5000" / "alpaca_5000.json").read_text(encoding="utf-8"))
    ]
    with (data / "gsm8k" / "train_3000.jsonl").open(encoding="utf-8") as file:
        pairs += [(row["question"], row["answer"]) for row in map(json.loads, file)]
    pairs = [pair for pair in pairs if all(map(str.strip, pair))]
    rng = random.Random(0)
    for number in itertools.count(1):
        chat: list[Message] = []
        for question, answer in rng.choices(pairs, k=rng.randint(1, 3)):
            start = "" if chat else f"{number}. "
            chat += [{"role": "user", "content": start + question}, {"role": "assistant", "content": answer}]
        yield chat


def measure(command: list[str]) -> tuple[float, float]:
    """Run a command; return seconds of CPU and of wall time."""
    before, start_s = os.times(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    now, wall_s = os.times(), time.perf_counter() - start_s
    if done.returncode:
        sys.exit(f"{command[:4]} failed:\n{done.stderr[-2000:]}")
    return now.children_user - before.children_user + now.children_system - before.children_system, wall_s


def write_rows(file: Path, rows: Iterator[dict[str, Any]], num_rows: int) -> None:
    with file.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in itertools.islice(rows, num_rows))


def build_command(args: argparse.Namespace, file: Path, root: Path, num_procs: int) -> list[str]:
    command = [sys.executable, "-m", "flatout", "data", "build", str(file), "--name", "rows", "--root", str(root)]
    command += ["--tokenizer", args.tokenizer, "--num-procs", str(num_procs), "--max-tokens", args.max_tokens]
    return command


def pairs(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the figures of each pair of runs."""
    for num_rows in args.rows:
        file = folder / f"{num_rows}.jsonl"
        chats = public_chats(args.data) if args.data else sample_conversations(num_rows, 0, held_out=False)
        write_rows(file, ({"messages": chat} for chat in chats), num_rows)
        for num_procs in args.num_procs:
            ratios = []
            for number in range(args.rounds):
                place = folder / f"{num_rows}-{num_procs}-{number}"
                plain = [sys.executable, "-c", PLAIN, str(file), str(place / "cache"), args.tokenizer]
                plain += [str(num_procs), args.max_tokens, str(place / "plain")]
                ours, theirs = measure(build_command(args, file, place / "data", num_procs)), measure(plain)
                subprocess.run(["rm", "-r", str(place)], check=True)
                ratios.append(ours[0] / theirs[0])
                print(
                    f"{num_rows:,} rows, {num_procs} processes: flatout {ours[0]:.1f} s of CPU ({ours[1]:.1f} s), "
                    f"datasets.map {theirs[0]:.1f} s ({theirs[1]:.1f} s), ratio {ratios[-1]:.2f}",
                    flush=True,
                )
                figures = zip(("cpu_s", "wall_s", "datasets_cpu_s", "datasets_wall_s"), (*ours, *theirs), strict=True)
                rounded = {name: round(value, 2) for name, value in figures}
                yield {"rows": num_rows, "num_procs": num_procs, **rounded, "ratio": round(ratios[-1], 3)}
            print(f"{num_rows:,} rows, {num_procs} processes: median ratio {statistics.median(ratios):.2f}", flush=True)


def short_chats() -> Iterator[dict[str, Any]]:
    for number in itertools.count():
        answer = {"role": "assistant", "content": str(number + 1)}
        yield {"messages": [{"role": "user", "content": f"What comes after {number}?"}, answer]}


def token_rows() -> Iterator[dict[str, Any]]:
    """Yield rows of five to eight tokens, no two equal, of which the last ones are learnt."""
    for number in itertools.count():
        ids = [number // 1000**place % 1000 for place in range(3)] + [7] * (2 + number % 4)
        yield {"input_ids": ids, "labels": [-100, -100, *ids[2:]]}


def below(pid: int) -> list[int]:
    """Return a process and all that it started, and those again."""
    found = [pid]
    for parent in found:
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def kib(pid: int, file: str, name: str) -> int:
    """Return a figure of a process, 0 once it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    return 0


def memory(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the peak memory of a build of each size; the last line is the bound at 30 million rows."""
    found: list[tuple[int, float]] = []
    for num_rows in args.memory:
        file, root = folder / f"{num_rows}.jsonl", folder / "memory"
        write_rows(file, token_rows() if args.token_rows else short_chats(), num_rows)
        build = subprocess.Popen(build_command(args, file, root, args.num_procs[-1]), stderr=subprocess.DEVNULL)
        parent = others = together = 0
        while build.poll() is None:
            pids = below(build.pid)
            parent = max(parent, kib(build.pid, "status", "VmHWM"))
            others = max([others, *(kib(pid, "status", "VmHWM") for pid in pids[1:])])
            together = max(together, sum(kib(pid, "smaps_rollup", "Pss") for pid in pids))
            time.sleep(1.0)
        if build.returncode:
            sys.exit(f"the build of {num_rows:,} rows failed with {build.returncode}")
        subprocess.run(["rm", "-r", str(root), str(file)], check=True)
        peaks = {"parent_mib": parent >> 10, "other_mib": others >> 10, "all_mib": together >> 10}
        print(f"{num_rows:,} rows: {peaks}", flush=True)
        found.append((num_rows, together / 1024))
        yield {"rows": num_rows, "num_procs": args.num_procs[-1], **peaks}
    (few, small), (many, large) = found[0], found[-1]
    if few != many:
        slope = max(0.0, (large - small) / (many - few))
        bound = {
            "mib_per_million_rows": round(slope * 1e6, 1),
            "all_mib_at_30_million": round(large + slope * (3e7 - many)),
        }
        print(bound)
        yield bound


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer with a chat template")
    parser.add_argument("--rows", type=int, nargs="+", default=[60_000, 500_000])
    parser.add_argument("--num-procs", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--max-tokens", default="2048")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs for each size and number of processes")
    parser.add_argument("--data", type=Path, help="folder with public data sets; without it, chats of the demo")
    parser.add_argument("--memory", type=int, nargs="+", metavar="ROWS", help="measure memory with so many short rows")
    parser.add_argument("--token-rows", action="store_true", help="--memory with rows of token ids")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all figures as JSON")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for result in (memory if args.memory else pairs)(args, Path(folder)):
            results.append(result)
            if args.out:
                lines = ",\n ".join(map(json.dumps, results))
                args.out.write_text(
                    f'{{"kind": "{"memory" if args.memory else "pairs"}", "results": [\n {lines}\n]}}\n'
                )


if __name__ == "__main__":
    main()
