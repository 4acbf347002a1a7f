"""Are the data sets that two versions build equal to the bit: token ids, loss masks and every other column?

    python benchmarks/compare_stores.py OLD_COMMIT [NEW_COMMIT] [--data DATA] [--rows 300] [--only NAME]

Both versions build the same data sets, each in processes of its own; without NEW_COMMIT, the new version is this
checkout as it stands. The data sets are those of benchmarks/row_examples (one for each row format; a line is a source,
with its settings and its rows), under three templates, those of messages under every template that flatout has and
those of DATA/chat_templates, and the real ones in DATA, with the tokenizers there. Real ones are cut to --rows rows.
Rows that a version refuses are compared by their errors. It exits with 1 if anything differs, and needs a few minutes
on one core.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "benchmarks" / "row_examples"
TEMPLATES = ("chatml", "qwen3", "plain", "llama-3", "gemma", "mistral", "phi", "zephyr", "alpaca")
# how many of them every format is built with
FOR_ALL = 3
# formats that are a file in examples/formats where the version has it, and a name in earlier ones
CONVERTED = ("glaive", "gemini", "oasst", "xlam")
DEMO = "llamafactory_demo/"
# file in DATA -> settings of its source
REAL: dict[str, dict[str, Any]] = {
    "alpaca_5000/alpaca_5000.json": {},
    "gsm8k/train_3000.jsonl": {"columns": {"instruction": "question", "output": "answer"}},
    "oasst1_en_val/en-validation.jsonl": {"format": "oasst"},
    "t0_50k/t0_50k.jsonl.xz": {},
    f"{DEMO}alpaca_zh_demo.json": {},
    f"{DEMO}dpo_en_demo.json": {},
    f"{DEMO}glaive_toolcall_en_demo.json": {},
    f"{DEMO}glaive_toolcall_zh_demo.json": {},
    f"{DEMO}identity.json": {},
    f"{DEMO}kto_en_demo.json": {},
    f"{DEMO}reason_tool_use_demo_50.jsonl": {},
    f"{DEMO}v1_sft_demo.jsonl": {},
    f"{DEMO}wiki_demo.txt": {},
}
TOKENIZERS = ("tok_qwen3", "tok_minimind")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new", nargs="?")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--only", default="", help="the sets whose names begin with this")
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.build:
        build_all(json.loads((args.build / "sets.json").read_text()), Path(args.old), args.build / args.new)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        every = data_sets(folder, args.data.absolute(), args.rows)
        sets = {name: settings for name, settings in every.items() if name.startswith(args.only)}
        (folder / "sets.json").write_text(json.dumps(sets))
        trees = {"old": checked_out(args.old, folder / "old-tree"), "new": ROOT}
        if args.new:
            trees["new"] = checked_out(args.new, folder / "new-tree")
        for version, tree in trees.items():
            command = [sys.executable, "-P", __file__, str(tree), version, "--build", str(folder)]
            subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, check=True)
        return compared(sets, folder / "old", folder / "new")


def checked_out(commit: str, folder: Path) -> Path:
    """Return a folder with the files of a commit."""
    archive = subprocess.run(["git", "archive", commit, "flatout", "examples"], cwd=ROOT, capture_output=True)
    if archive.returncode:
        sys.exit(f"{commit}: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def data_sets(folder: Path, data: Path, num_rows: int) -> dict[str, dict[str, Any]]:
    """Return the settings of `data` of every set, by its name; example rows are written below `folder`."""
    sets: dict[str, dict[str, Any]] = {}
    found = sorted((data / "chat_templates").glob("*.jinja"))
    templates = [(name, name) for name in TEMPLATES] + [(file.stem, str(file)) for file in found]
    tokenizer = small_tokenizer(folder / "tokenizer")
    for file in sorted(EXAMPLES.glob("*.jsonl")):
        sources = []
        for number, line in enumerate(file.read_text().splitlines()):
            example = json.loads(line)
            rows = folder / file.stem / f"{number}.jsonl"
            rows.parent.mkdir(exist_ok=True)
            rows.write_text("".join(json.dumps(row) + "\n" for row in example["rows"]))
            sources.append({"path": str(rows), **example["source"]})
        for name, template in templates[: None if file.stem == "messages" else FOR_ALL]:
            settings = {"sources": sources, "tokenizer": tokenizer, "template": template, "on_bad_row": "skip"}
            sets[f"{file.stem}-{name}".replace(".", "_")] = settings
    if not data.is_dir():
        print(f"no folder {data}: only the examples are compared; name a folder of real data sets with --data")
    for path, source in REAL.items():
        if not (data / path).is_file():
            print(f"skipped: {data / path} is not there")
            continue
        for tokenizer in (str(data / name) for name in TOKENIZERS if (data / name).is_dir()):
            sources = [{"path": str(data / path), **source}]
            name = f"{Path(path).name.split('.')[0]}-{Path(tokenizer).name}"
            sets[name] = {"sources": sources, "tokenizer": tokenizer, "num_samples": num_rows, "on_bad_row": "skip"}
    return sets


def small_tokenizer(folder: Path) -> str:
    """Train a tokenizer of 400 byte-level tokens, so that no file is needed."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special, bpe = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    bpe.train_from_iterator([file.read_text() for file in sorted(EXAMPLES.glob("*.jsonl"))], trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=special[2], pad_token=special[0]).save_pretrained(folder)
    return str(folder)


def build_all(sets: dict[str, dict[str, Any]], tree: Path, folder: Path) -> None:
    """Build the sets with the flatout of this process; write what each holds, or why it is refused, below `folder`."""
    import flatout
    from flatout.config.schema import DataConfig
    from flatout.data.build import open_or_build
    from flatout.errors import FlatoutError

    assert Path(flatout.__file__).is_relative_to(tree), f"{flatout.__file__} is not of {tree}"
    folder.mkdir()
    for name, settings in sets.items():
        sources = [{**one, "format": format_in(tree, one.get("format", "auto"))} for one in settings["sources"]]
        fixed = {"name": name, "root": folder / "built", "num_procs": 1, "too_long": "drop"}
        try:
            store = open_or_build(DataConfig.model_validate(settings | fixed | {"sources": sources}), "")
        except FlatoutError as error:
            (folder / f"{name}.txt").write_text(f"{type(error).__name__}: {error.text}")
            continue
        built = folder / "built" / "built_dataset" / name
        columns = {column: np.load(built / kept.file) for column, kept in store.columns.items()}
        problems = json.loads((built / "report.json").read_text())["bad_rows"]
        (folder / f"{name}.txt").write_text(json.dumps(problems, indent=1))
        np.savez(folder / f"{name}.npz", **columns)


def format_in(tree: Path, name: str) -> str:
    file = tree / "examples" / "formats" / f"{name}.py"
    return f"{file}:rows" if name in CONVERTED and file.is_file() else name


def compared(sets: dict[str, dict[str, Any]], old: Path, new: Path) -> int:
    """Print what differs, and how much was compared; return the exit status."""
    num_tokens = num_refused = num_different = 0
    for name in sets:
        told = [(folder / f"{name}.txt").read_text() for folder in (old, new)]
        files = [folder / f"{name}.npz" for folder in (old, new)]
        differing = [] if told[0] == told[1] else [f"errors:\n  {told[0]}\n  {told[1]}"]
        if all(file.is_file() for file in files):
            before, after = (np.load(file) for file in files)
            num_tokens += len(before["token_ids"])
            names = sorted({*before.files, *after.files})
            differing += [one for one in names if not is_equal(before, after, one)]
        num_refused += not files[0].is_file()
        num_different += bool(differing)
        if differing:
            print(f"{name} differs: {', '.join(differing)}")
    print(f"{len(sets)} data sets, {num_refused} refused, {num_tokens:,} tokens: {num_different} differ")
    return int(num_different > 0)


def is_equal(before: Any, after: Any, name: str) -> bool:
    if name not in before.files or name not in after.files:
        return False
    one, other = before[name], after[name]
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


if __name__ == "__main__":
    sys.exit(main())
