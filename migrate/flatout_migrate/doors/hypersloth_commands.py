"""HyperSloth's commands: each calls the verb of `flatout` that does it."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from flatout.api.commands import exit_code_of
from flatout.api.data import annotate_data_set
from flatout.api.settings import run_python, save_config
from flatout_migrate.doors import flatout_command as main
from flatout_migrate.doors import parser_of
from flatout_migrate.doors.hypersloth import HOW, HyperConfig, TrainingArgsConfig


def build_dataset() -> int:
    """`hypersloth-build-dataset`, and `scripts/build_dataset.py NAME`: tokenize rows into a named data set."""
    args = parser_of("hypersloth-build-dataset").parse_args()
    hub, path = args.hf_dataset or args.dataset, args.output_path
    root = path.parent if path.name == "built_dataset" else path
    number = args.num_samples or (1000 if hub else None)
    name = args.name or f"{'hf_dataset' if hub else 'sharegpt'}_{number or 'all'}_samples"
    words = ["data", "build", hub or args.local_path, "--tokenizer", args.tokenizer_name, "--name", name, "--replace"]
    words += ["--max-tokens=0", f"--seed={args.seed}", f"--root={root}"]
    words += [f"--num-samples={number}"] * (number is not None) + [f"--split={args.split}"] * (args.split is not None)

    def run() -> int:
        if code := main(words + ["--print-samples"] * args.print_samples):
            return code
        how = {"dataset_name" if hub else "path": hub or args.local_path, "split": args.split, "num_samples": number}
        how |= {"seed": args.seed, "tokenizer_name": args.tokenizer_name}
        annotate_data_set(name, root, {HOW: how})
        return 0

    return exit_code_of(run)


def init() -> int:
    """`hypersloth-init`: write example_training_config.py into the working folder; never over another file."""
    target = Path("example_training_config.py")
    if target.exists():
        print(f"error: {target} exists already; remove it, or work in another folder", file=sys.stderr)
        return 2
    shutil.copyfile(Path(__file__).with_name(target.name), target)
    print(f"wrote {target}; next: hypersloth-train ./{target}")
    return 0


def train() -> int:
    """`hypersloth-train CONFIG.py [--tmux NAME] [section.name=value ...]`: train on the GPUs that it names."""
    args = parser_of("hypersloth-train").parse_args()

    def run() -> int:
        variables = run_python(args.config)
        hyper = variables.get("hyper_config_model") or HyperConfig(**variables.get("hyper_config", {}))
        training = variables.get("training_config_model") or TrainingArgsConfig(**variables.get("training_config", {}))
        config, now = hyper.to_config(training), time.strftime("%H:%M:%S")
        for rank, gpu in enumerate(gpus := hyper.training.gpus):
            print(f"{now} | INFO | 🔧 GPU {gpu} (Rank {rank}/{len(gpus) - 1}) | Model: {config.model.name}")
        print(f"{now} | INFO | 🚀 Starting total training timer", flush=True)
        save_config(config, file := config.folder / "hypersloth.yaml")
        return main(["train", str(file), *args.overrides, *(["--tmux", args.tmux] if args.tmux else [])])

    return exit_code_of(run)


def export() -> int:
    """`hypersloth-export LORA_PATH`: merge an adapter into its base model."""
    args = parser_of("hypersloth-export").parse_args()
    base = ["--base", args.base_model_name_or_path] if args.base_model_name_or_path else []
    return main(["merge", args.lora_path, "--out", args.output_path or f"{args.lora_path}/merged", *base])
