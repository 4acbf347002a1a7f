"""CPU time of `flatout data build` beside a plain `datasets.map` over apply_chat_template with truncation.

    python benchmarks/data_road.py --tokenizer DIR [--rows 60000 500000] [--num-procs 1 2] [--rounds 3] [--data DIR]

The rows are chats of the demo, or with --data those of public files in that folder (`alpaca_5000`, `gsm8k`), repeated
with a number in the first question, so that no two are equal. Both sides run as a process of their own with
their imports, reading and writing, in turns. CPU time is that of the process and all of its children, user and system.
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
from pathlib import Path

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer with a chat template")
    parser.add_argument("--rows", type=int, nargs="+", default=[60_000, 500_000])
    parser.add_argument("--num-procs", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--max-tokens", default="2048")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs for each size and number of processes")
    parser.add_argument("--data", type=Path, help="folder with public data sets; without it, chats of the demo")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for num_rows in args.rows:
            file = Path(folder) / f"{num_rows}.jsonl"
            chats = public_chats(args.data) if args.data else sample_conversations(num_rows, 0, held_out=False)
            with file.open("w", encoding="utf-8") as out:
                for messages in itertools.islice(chats, num_rows):
                    out.write(json.dumps({"messages": messages}) + "\n")
            for num_procs in args.num_procs:
                ratios = []
                for number in range(args.rounds):
                    place = Path(folder) / f"{num_rows}-{num_procs}-{number}"
                    build = [sys.executable, "-m", "flatout", "data", "build", str(file)]
                    build += ["--tokenizer", args.tokenizer, "--name", "rows", "--root", str(place / "data")]
                    build += ["--num-procs", str(num_procs), "--max-tokens", args.max_tokens]
                    plain = [sys.executable, "-c", PLAIN, str(file), str(place / "cache"), args.tokenizer]
                    plain += [str(num_procs), args.max_tokens, str(place / "plain")]
                    ours, theirs = measure(build), measure(plain)
                    subprocess.run(["rm", "-r", str(place)], check=True)
                    ratios.append(ours[0] / theirs[0])
                    print(
                        f"{num_rows:,} rows, {num_procs} processes: flatout {ours[0]:.1f} s of CPU ({ours[1]:.1f} s), "
                        f"datasets.map {theirs[0]:.1f} s ({theirs[1]:.1f} s), ratio {ratios[-1]:.2f}",
                        flush=True,
                    )
                print(f"{num_rows:,} rows, {num_procs} processes: median ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
