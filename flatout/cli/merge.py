"""`flatout merge`: an adapter added into its base model, written as a plain Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from flatout.errors import ResourceError, UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("target", metavar="RUN_OR_ADAPTER", help="run folder, or adapter folder in PEFT's format")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist or be empty")
    parser.add_argument("--base", help="base model (folder or hub id) instead of the one the adapter names")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to add the weights (cpu)")


def run(args: argparse.Namespace) -> int:
    """Merge and save. Raises UsageError when there is no adapter, ResourceError when the output folder is in use."""
    import torch

    from flatout.cli.quiet import quiet_transformers
    from flatout.models.export import merge, save_model
    from flatout.models.trained import find_trained, load_trained

    quiet_transformers()
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise ResourceError(f"--out: {args.out} exists and is not empty; give another folder")
    trained = find_trained(args.target, base=args.base)
    if trained.adapter is None:
        raise UsageError(f"{args.target} has no adapter: it is a plain model already; copy it instead")
    model, tokenizer = load_trained(trained, device=torch.device(args.device))
    num_layers = merge(model)
    save_model(model, tokenizer, args.out)
    dtype = str(model.dtype).removeprefix("torch.")
    print(f"merged {num_layers} layers of {trained.adapter} into {trained.base}: {args.out} ({dtype})")
    return 0
