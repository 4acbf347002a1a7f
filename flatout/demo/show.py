"""What a person sees of the demos: the run as it trains, what the model answers then, and the command to ask it."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flatout.demo import settings, shapes, write
from flatout.demo.job import answer_held_out, loss_halved, train_demo
from flatout.track.console import ConsoleCallback
from flatout.trainer.run import Result

# a demo is watched, so a step is shown this often
STEP_LINE_S = 3.0


def show_shapes(out: Path, seed: int, console: Console) -> tuple[bool, list[str]]:
    """Run the demo with pictures. Return whether enough held-out questions are answered right, and how to chat."""
    started = time.perf_counter()
    with ConsoleCallback(step_line_s=STEP_LINE_S) as shown:
        shown.on_phase("drawing pictures")
        shapes.write_shapes(out, seed)
        result = train_demo(shapes.shapes_config(out, seed), out, shown)
        shown.on_phase("answering questions")
        seen = shapes.answer_shapes(result.folder, out)
    num_right = sum(one.right for one in seen)
    console.print("\nQuestions about pictures that are not in the training data:")
    for one in seen[:5]:
        console.print(f"  {one.question}  {one.answer}   ({_verdict(one.right)})", markup=False)
    is_good = num_right >= shapes.LEAST_RIGHT * len(seen)
    expected = "" if is_good else f"  (expected {shapes.LEAST_RIGHT:.0%})"
    console.print(f"\n{num_right} of {len(seen)} right ({num_right / len(seen):.1%}){expected}")
    console.print(f"{result.progress.step:,} steps; {time.perf_counter() - started:.0f} s in all")
    picture = str(out / shapes.PICTURES_DIR / "000.png")
    return is_good, [str(result.folder), "--image", picture, "--prompt", "What is shown?"]


def show_conversations(out: Path, seed: int, console: Console) -> tuple[bool, list[str]]:
    """Run the demo. Return whether the held-out loss halved and every answer is right, and how to chat."""
    started = time.perf_counter()
    with ConsoleCallback(step_line_s=STEP_LINE_S) as shown:
        shown.on_phase("writing conversations")
        write.write_demo(out, seed)
        result = train_demo(settings.demo_config(out, seed), out, shown)
        shown.on_phase("answering prompts")
        marked = answer_held_out(result.folder, seed)
    console.print("\nThree prompts that are not in the training data:")
    for item in marked:
        for message in item.prompt:
            console.print(f"  {message['role']:>9}: {message['content']}", markup=False)
        console.print(f"  {'answer':>9}: {item.answer}   ({_verdict(item.right)})\n", markup=False)
    num_right = sum(item.right for item in marked)
    console.print(_table(result, f"{num_right}/{len(marked)}", time.perf_counter() - started))
    return loss_halved(result) and num_right == len(marked), [str(result.folder)]


def _verdict(right: bool) -> str:
    return "correct" if right else "WRONG"


def _table(result: Result, answered: str, total_s: float) -> Table:
    progress = result.progress
    assert progress.first_eval_loss is not None
    assert progress.last_eval_loss is not None
    table = Table(title="flatout demo", show_header=False, title_justify="left")
    table.add_row("held-out loss before", f"{progress.first_eval_loss:.4f}")
    verdict = "" if loss_halved(result) else "  [red](did not halve)[/]"
    table.add_row("held-out loss after", f"{progress.last_eval_loss:.4f}{verdict}")
    table.add_row("held-out prompts answered correctly", answered)
    table.add_row("tokens/s", f"{result.tokens_per_s:,.0f}")
    table.add_row("padding avoided vs. naive batching", f"{result.padding_avoided:.0%}")
    table.add_row("steps", f"{progress.step:,}, {progress.num_tokens:,} tokens in {progress.elapsed_s:.0f} s")
    table.add_row("total time", f"{total_s:.0f} s")
    table.add_row("run folder", str(result.folder))
    return table
