"""`flatout merge`: merges an adapter into its base model and writes a plain Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from flatout.cli.screen import quiet_transformers
from flatout.errors import ResourceError, UsageError, reason_of
from flatout.io.durable_io import DurableIO


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("target", metavar="RUN_OR_ADAPTER", help="run folder, or adapter folder in PEFT's format")
    parser.add_argument("--out", type=Path, required=True, help="output folder; must be empty or not exist")
    parser.add_argument("--base", help="base model (folder or hub id) to use instead of the adapter's own")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device to merge on (cpu)")


def run(args: argparse.Namespace) -> int:
    """Merge and save. Raises UsageError if there is no adapter, ResourceError if the output cannot be written."""
    import torch

    from flatout.models.export import merge, publish_model
    from flatout.models.load.inference import load_trained, resolve_model_paths

    quiet_transformers()
    try:
        if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
            raise ResourceError(f"--out: {args.out} already exists and is not empty; choose a different folder")
    except OSError as error:
        raise UsageError(f"--out: {args.out}: {reason_of(error)}; choose a different folder") from error
    # fail before the model is loaded if the folder cannot be created
    DurableIO().make_dir(args.out)
    trained = resolve_model_paths(args.target, base=args.base)
    if trained.adapter is None:
        raise UsageError(f"{args.target} has no adapter to merge: it is already a plain model; copy it instead")
    model, tokenizer = load_trained(trained, device=torch.device(args.device))
    num_layers = merge(model)
    publish_model(model, tokenizer, args.out)
    dtype = str(model.dtype).removeprefix("torch.")
    print(f"merged {num_layers} layers of {trained.adapter} into {trained.base}: {args.out} ({dtype})")
    return 0
