"""`flatout demo`: a whole run on generated data: write, build, train, evaluate, save, answer."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from flatout.demo.job import Marked
    from flatout.train.run import Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("--out", type=Path, default=Path("demo"), metavar="FOLDER", help="where all files go (demo)")
    parser.add_argument("--seed", type=int, default=42, help="seed of data, weights and order (42)")


def run(args: argparse.Namespace) -> int:
    """Run the demo. Returns 0 if the held-out loss halved and every answer is right, else 1."""
    import time

    from rich.console import Console

    from flatout.demo.settings import demo_config
    from flatout.demo.write import write_demo

    started = time.perf_counter()
    console = Console()
    config = demo_config(args.out, args.seed)
    console.print(f"Writing conversations, a tokenizer and a tiny Qwen3-shaped model to {args.out}/")
    write_demo(args.out, args.seed)
    # torch is imported here, after the data is written
    from flatout.cli.quiet import quiet_transformers
    from flatout.demo.job import answer_held_out, loss_halved, train_demo

    quiet_transformers()
    result = train_demo(config, args.out)
    console.print("\nThree prompts that are not in the training data:", highlight=False)
    marked = answer_held_out(result.folder, args.seed)
    for item in marked:
        _print_answer(console.print, item)
    console.print(summary(result, marked, time.perf_counter() - started))
    console.print(f"\nTalk to it: flatout chat {result.folder}", highlight=False)
    return 0 if loss_halved(result) and all(item.right for item in marked) else 1


def summary(result: Result, marked: list[Marked], elapsed_s: float) -> Table:
    """Return the closing table."""
    from rich.table import Table

    from flatout.demo.job import loss_halved

    progress = result.progress
    assert progress.first_eval_loss is not None
    assert progress.last_eval_loss is not None
    table = Table(title="flatout demo", show_header=False, title_justify="left")
    verdict = "" if loss_halved(result) else "  [red](did not halve)[/]"
    table.add_row("loss on held-out, before", f"{progress.first_eval_loss:.4f}")
    table.add_row("loss on held-out, after", f"{progress.last_eval_loss:.4f}{verdict}")
    table.add_row("held-out prompts answered right", f"{sum(item.right for item in marked)}/{len(marked)}")
    table.add_row("useful tokens/s", f"{result.tokens_per_s:,.0f}")
    table.add_row("padding avoided against naive batching", f"{result.padding_avoided:.0%}")
    table.add_row("steps", f"{progress.step:,}, {progress.num_tokens:,} tokens in {progress.elapsed_s:.0f} s")
    table.add_row("whole demo", f"{elapsed_s:.0f} s")
    table.add_row("run folder", str(result.folder))
    return table


def _print_answer(say: Callable[..., None], item: Marked) -> None:
    for message in item.prompt:
        say(f"  {message['role']:>9}: {message['content']}", highlight=False, markup=False)
    say(f"  {'answer':>9}: {item.answer}   ({'right' if item.right else 'WRONG'})\n", highlight=False, markup=False)
