"""`flatout demo`: a whole run on generated data: write, build, train, evaluate, save, answer."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from flatout.cli.screen import import_transformers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    folders = "output folder (demo-run; with --images demo-images, with --rl demo-rl)"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=folders)
    pictures = "colored shapes and a tiny vision-language model (needs the extra `images`)"
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--images", action="store_true", help=pictures)
    rounds = "reinforcement learning: rounds of sampled answers to tasks, scored by exact match"
    kind.add_argument("--rl", action="store_true", help=rounds)
    parser.add_argument("--seed", type=int, default=42, help="seed for data, weights and sample order (42)")


def run(args: argparse.Namespace) -> int:
    """Run the demo. Returns 0 if the model has learned what it should, else 1."""
    from rich.console import Console

    name = "demo-images" if args.images else "demo-rl" if args.rl else "demo-run"
    console, out = Console(highlight=False), args.out or Path(name)
    what = "conversations, a tokenizer and a tiny Qwen3-shaped model"
    if args.images:
        what = "pictures of shapes, questions and a tiny Qwen2.5-VL-shaped model"
    console.print(f"Writing {what} to {out}/")
    import_transformers()
    from flatout.demo.show import show_demo, show_rounds

    if args.rl:
        is_good, folder = show_rounds(out, args.seed, console)
        console.print("\nLook further:")
        for words in (["rollouts", str(folder)], ["rollouts", str(folder), "--round", "1"], ["chat", str(folder)]):
            console.print(f"  flatout {shlex.join(words)}", markup=False, soft_wrap=True)
        return 0 if is_good else 1
    is_good, words = show_demo(out, args.seed, console, with_pictures=args.images)
    asked = f"{'Ask' if args.images else 'Talk to'} it: flatout {shlex.join(['chat', *words])}"
    console.print(f"\n{asked}", markup=False, soft_wrap=True)
    return 0 if is_good else 1
