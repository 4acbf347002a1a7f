"""`flatout demo`: a whole run on generated data: write, build, train, evaluate, save, answer."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from flatout.cli.screen import import_transformers

# a demo is watched, so a step is shown this often
STEP_LINE_S = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("--out", type=Path, default=Path("demo"), metavar="FOLDER", help="output folder (demo)")
    parser.add_argument("--seed", type=int, default=42, help="seed for data, weights and sample order (42)")


def run(args: argparse.Namespace) -> int:
    """Run the demo. Returns 0 if the held-out loss halved and every answer is right, else 1."""
    from rich.console import Console
    from rich.table import Table

    from flatout.demo.settings import demo_config
    from flatout.track.console import ConsoleCallback

    started = time.perf_counter()
    console = Console(highlight=False)
    config = demo_config(args.out, args.seed)
    console.print(f"Writing conversations, a tokenizer and a tiny Qwen3-shaped model to {args.out}/")
    with ConsoleCallback(step_line_s=STEP_LINE_S) as shown:
        shown.on_phase("importing torch and transformers")
        import_transformers()
        from flatout.demo.job import answer_held_out, loss_halved, train_demo
        from flatout.demo.write import write_demo

        shown.on_phase("writing conversations")
        write_demo(args.out, args.seed)
        result = train_demo(config, args.out, shown)
        shown.on_phase("answering prompts")
        marked = answer_held_out(result.folder, args.seed)
    console.print("\nThree prompts that are not in the training data:")
    for item in marked:
        for message in item.prompt:
            console.print(f"  {message['role']:>9}: {message['content']}", markup=False)
        console.print(f"  {'answer':>9}: {item.answer}   ({'correct' if item.right else 'WRONG'})\n", markup=False)
    halved, progress = loss_halved(result), result.progress
    assert progress.first_eval_loss is not None
    assert progress.last_eval_loss is not None
    table = Table(title="flatout demo", show_header=False, title_justify="left")
    table.add_row("held-out loss before", f"{progress.first_eval_loss:.4f}")
    verdict = "" if halved else "  [red](did not halve)[/]"
    table.add_row("held-out loss after", f"{progress.last_eval_loss:.4f}{verdict}")
    table.add_row("held-out prompts answered correctly", f"{sum(item.right for item in marked)}/{len(marked)}")
    table.add_row("tokens/s", f"{result.tokens_per_s:,.0f}")
    table.add_row("padding avoided vs. naive batching", f"{result.padding_avoided:.0%}")
    table.add_row("steps", f"{progress.step:,}, {progress.num_tokens:,} tokens in {progress.elapsed_s:.0f} s")
    table.add_row("total time", f"{time.perf_counter() - started:.0f} s")
    table.add_row("run folder", str(result.folder))
    console.print(table)
    console.print(f"\nTalk to it: flatout chat {result.folder}")
    return 0 if halved and all(item.right for item in marked) else 1
