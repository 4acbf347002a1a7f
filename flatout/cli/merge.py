"""`flatout merge`: merges an adapter into its base model and writes a plain Hugging Face folder."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from flatout.cli.screen import import_transformers, progress_console, say
from flatout.view.open_runs import find_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    target = "run, or adapter folder in PEFT's format"
    parser.add_argument("target", type=partial(find_run, needs_results=True), metavar="RUN_OR_ADAPTER", help=target)
    parser.add_argument("--out", type=Path, required=True, help="output folder; must be empty or not exist")
    parser.add_argument("--base", help="base model (folder or hub id) to use instead of the adapter's own")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device to merge on (cpu)")


def run(args: argparse.Namespace) -> None:
    """Merge and save. Raises as `merge_adapter` does."""
    import_transformers()
    from flatout.models.export import merge_adapter

    with progress_console() as console:
        console.on_phase(f"merging {args.target}")
        merged = merge_adapter(str(args.target), args.out, base=args.base, device=args.device)
    say(merged)
