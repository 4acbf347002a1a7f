"""CPU time of `flatout data build` against a plain `datasets.map` over apply_chat_template on the same rows.

    python benchmarks/data_build.py --tokenizer DIR [--rows 50000] [--num-procs 1]

The rows are the demo's conversations. Both sides run as a process of their own, with their imports and their writing;
CPU time is that of the process and its children, user and system. With 15,000 rows, one process and Qwen3's tokenizer:
16.2 s against 15.8 s on two cores with nothing else on them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from flatout.demo.conversations import sample_conversations

PLAIN = """
import sys
from datasets import load_dataset
from transformers import AutoTokenizer
file, folder, name, num_procs, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(name)
rows = load_dataset("json", data_files=file, split="train", cache_dir=folder)
def tokenize(row):
    return tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)
rows = rows.map(tokenize, num_proc=int(num_procs) if num_procs != "1" else None, remove_columns=["messages"])
rows.save_to_disk(out)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer with a chat template")
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--num-procs", default="1")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        with file.open("w", encoding="utf-8") as out:
            for messages in sample_conversations(args.rows, 0, held_out=False):
                out.write(json.dumps({"messages": messages}) + "\n")
        build = [sys.executable, "-m", "flatout", "data", "build", str(file), "--tokenizer", args.tokenizer]
        build += ["--name", "rows", "--root", f"{folder}/data", "--num-procs", args.num_procs, "--max-tokens", "0"]
        plain = [sys.executable, "-c", PLAIN, str(file), folder, args.tokenizer, args.num_procs, f"{folder}/plain"]
        print(f"{args.rows:,} rows, {args.num_procs} processes")
        for name, command in (("flatout data build", build), ("datasets.map", plain)):
            before, start_s = os.times(), time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            now, wall_s = os.times(), time.perf_counter() - start_s
            cpu_s = now.children_user - before.children_user + now.children_system - before.children_system
            print(f"{name:20} {cpu_s:7.1f} s of CPU {wall_s:7.1f} s", flush=True)


if __name__ == "__main__":
    main()
