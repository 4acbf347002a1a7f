"""`flatout demo`: a whole run on generated data: write, build, train, evaluate, save, answer."""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path

from flatout.cli.screen import import_transformers

# a demo is watched, so a step is shown this often
STEP_LINE_S = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    folders = "output folder (demo-run; with --images demo-images)"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=folders)
    pictures = "colored shapes and a tiny vision-language model (needs the extra `images`)"
    parser.add_argument("--images", action="store_true", help=pictures)
    parser.add_argument("--seed", type=int, default=42, help="seed for data, weights and sample order (42)")


def run(args: argparse.Namespace) -> int:
    """Run the demo. Returns 0 if the held-out loss halved and every answer is right, else 1."""
    args.out = args.out or Path("demo-images" if args.images else "demo-run")
    return _run_shapes(args) if args.images else _run_conversations(args)


def _run_shapes(args: argparse.Namespace) -> int:
    """Run the demo with pictures. Returns 0 if enough held-out questions are answered right, else 1."""
    from rich.console import Console

    from flatout.track.console import ConsoleCallback

    started, console = time.perf_counter(), Console(highlight=False)
    console.print(f"Writing pictures of shapes, questions and a tiny Qwen2.5-VL-shaped model to {args.out}/")
    import_transformers()
    with ConsoleCallback(step_line_s=STEP_LINE_S) as shown:
        from flatout.demo.job import train_demo
        from flatout.demo.shapes import LEAST_RIGHT, PICTURES_DIR, answer_shapes, shapes_config, write_shapes

        shown.on_phase("drawing pictures")
        write_shapes(args.out, args.seed)
        result = train_demo(shapes_config(args.out, args.seed), args.out, shown)
        shown.on_phase("answering questions")
        seen = answer_shapes(result.folder, args.out)
    num_right = sum(one.right for one in seen)
    console.print("\nQuestions about pictures that are not in the training data:")
    for one in seen[:5]:
        console.print(f"  {one.question}  {one.answer}   ({'correct' if one.right else 'WRONG'})", markup=False)
    verdict = "" if num_right >= LEAST_RIGHT * len(seen) else f"  (expected {LEAST_RIGHT:.0%})"
    console.print(f"\n{num_right} of {len(seen)} right ({num_right / len(seen):.1%}){verdict}")
    console.print(f"{result.progress.step:,} steps; {time.perf_counter() - started:.0f} s in all")
    picture = args.out / PICTURES_DIR / "000.png"
    asked = shlex.join(["chat", str(result.folder), "--image", str(picture), "--prompt", "What is shown?"])
    console.print(f"\nAsk it: flatout {asked}", markup=False, soft_wrap=True)
    return 1 if verdict else 0


def _run_conversations(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from flatout.demo.settings import demo_config
    from flatout.track.console import ConsoleCallback

    started = time.perf_counter()
    console = Console(highlight=False)
    config = demo_config(args.out, args.seed)
    console.print(f"Writing conversations, a tokenizer and a tiny Qwen3-shaped model to {args.out}/")
    import_transformers()
    with ConsoleCallback(step_line_s=STEP_LINE_S) as shown:
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
    talk = shlex.join(["chat", str(result.folder)])
    console.print(f"\nTalk to it: flatout {talk}", markup=False, soft_wrap=True)
    return 0 if halved and all(item.right for item in marked) else 1
