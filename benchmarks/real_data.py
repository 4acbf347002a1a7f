"""Builds every real data set of a folder with several tokenizers and prints a table of what came out.

python benchmarks/real_data.py --data DIR --tokenizer QWEN3_DIR --tokenizer MINIMIND_DIR --out /tmp/built
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from flatout.config.schema import DataConfig, SourceConfig
from flatout.data.build import open_or_build
from flatout.data.statistics import padding_share
from flatout.io.json_file import read_json

COLUMNS = {"gsm8k": {"instruction": "question", "output": "answer"}}


def sources(root: Path) -> list[tuple[str, Path]]:
    names = ("alpaca_5000", "gsm8k", "oasst1_en_val", "t0_50k", "llamafactory_demo")
    files = [file for name in names for file in sorted((root / name).iterdir())]
    wanted = [file for file in files if file.name.endswith((".json", ".jsonl", ".jsonl.xz", ".txt"))]
    return [(file.parent.name, file) for file in wanted if file.name != "dataset_info.json"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    columns = "data set|tokenizer|rows|samples|tokens|label|median|p95|max|cut|dropped|duplicates|pad b8|s"
    print(f"| {columns.replace('|', ' | ')} |\n" + "|---" * (columns.count("|") + 1) + "|")
    for folder, file in sources(args.data):
        for tokenizer in args.tokenizer:
            config = DataConfig(
                name=f"{file.name.partition('.')[0]}-{tokenizer.name}",
                root=args.out,
                sources=[SourceConfig(path=str(file), columns=COLUMNS.get(folder, {}))],
                on_bad_row="skip",
                too_long="split" if file.suffix == ".txt" else "truncate",
            )
            started = time.perf_counter()
            store = open_or_build(config, str(tokenizer))
            seconds = time.perf_counter() - started
            lengths, counts = store.lengths, read_json(store.folder / "report.json", max_bytes=1 << 32)["counts"]
            dropped = counts["rows"] - store.num_samples if file.suffix != ".txt" else 0
            spread = " | ".join(f"{int(n):,}" for n in np.percentile(lengths, (50, 95, 100), method="higher"))
            label_share = store.num_labels.sum() / lengths.sum()
            print(
                f"| {file.name} | {tokenizer.name} | {counts['rows']:,} | {store.num_samples:,} | "
                f"{lengths.sum():,} | {label_share:.0%} | {spread} | {counts['truncated']:,} | {dropped:,} | "
                f"{counts['duplicates']:,} | {padding_share(lengths, 8):.0%} | {seconds:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
