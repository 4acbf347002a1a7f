"""Runs a demo by the same calls as a user, and shows the run as it trains, and what the model answers."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from flatout.config.schema import Config
from flatout.data.build import open_or_build
from flatout.data.prompt_file import Prompt, read_prompts
from flatout.data.rows.formats.pictures import MARK
from flatout.demo import rounds, settings, shapes, write
from flatout.demo.conversations import held_out_prompts
from flatout.models.load.inference import load_trained, resolve_model_paths
from flatout.rollout.chat import Sampling, answer_all, prompt_ids
from flatout.track.console import ConsoleCallback
from flatout.track.run_log import read_run
from flatout.track.summary import summarize, summary_lines
from flatout.trainer.run import Result, train

# a demo is watched, so a step is shown this often
STEP_LINE_S = 3.0
_MAX_ANSWER_TOKENS, NUM_SHOWN = 64, 5


def show_demo(out: Path, seed: int, console: Console, *, with_pictures: bool) -> tuple[bool, list[str]]:
    """Run a demo. Return whether the model has learned what it should, and the arguments of `flatout chat` with it."""
    started = time.perf_counter()
    with ConsoleCallback(step_line_s=STEP_LINE_S) as shown:
        shown.on_phase("drawing pictures" if with_pictures else "writing conversations")
        if with_pictures:
            shapes.write_shapes(out, seed)
            config = shapes.shapes_config(out, seed)
            prompts = read_prompts(out / settings.HELD_OUT_FILE, max_bytes=1 << 20)
        else:
            write.write_demo(out, seed)
            config = settings.demo_config(out, seed)
            prompts = [Prompt(tuple(turns), (end["content"],)) for *turns, end in held_out_prompts(seed)]
        result = _train(config, out, shown)
        shown.on_phase("answering prompts")
        answers = _answers(result.folder, prompts)
    are_right = [answer in prompt.accepted for prompt, answer in zip(prompts, answers, strict=True)]
    verdicts = ["correct" if is_right else "WRONG" for is_right in are_right]
    num_right, total_s = sum(are_right), time.perf_counter() - started
    console.print("\nPrompts that are not in the training data:")
    for prompt, answer, verdict in zip(prompts[:NUM_SHOWN], answers, verdicts, strict=False):
        for message in prompt.messages:
            console.print(f"  {message['role']:>9}: {message['content'].removeprefix(MARK)}", markup=False)
        console.print(f"  {'answer':>9}: {answer}   ({verdict})\n", markup=False)
    lines = summary_lines(summarize(read_run(result.folder)), [])
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    least = shapes.LEAST_RIGHT if with_pictures else 1.0
    problems = [] if num_right >= least * len(prompts) else [f" (expected {least:.0%})"]
    problems += [] if with_pictures or loss_halved(result) else ["; the evaluation loss did not halve"]
    console.print(f"\n{num_right} of {len(prompts)} answered correctly{''.join(problems)}; {total_s:.0f} s in all")
    picture = ["--image", str(out / shapes.PICTURES_DIR / "000.png"), "--prompt", "What is shown?"]
    return not problems, [str(result.folder), *(picture if with_pictures else [])]


def show_rounds(out: Path, seed: int, console: Console) -> tuple[bool, Path]:
    """Run the demo of rounds. Return whether held-out prompts are answered better by enough, and the run's folder."""
    started = time.perf_counter()
    with ConsoleCallback(step_line_s=STEP_LINE_S) as shown:
        shown.on_phase("writing conversations and tasks")
        write.write_demo(out, seed)
        rounds.write_tasks(out, seed)
        model = _train(rounds.first_config(out, seed), out, shown).final_dir
    with ConsoleCallback(step_line_s=STEP_LINE_S) as shown:
        result = _train(rounds.rounds_config(out, seed, model), out, shown)
    records = read_run(result.folder).held_out
    before, after = (record.reward or 0.0 for record in (records[0], records[-1]))
    is_good = after - before >= rounds.LEAST_RISE
    expected = "" if is_good else f"  (expected {100 * rounds.LEAST_RISE:+.0f})"
    console.print(f"\nSampled answers to {records[-1].num_answers} tasks that no step was trained on, exactly right:")
    console.print(f"  before the rounds {before:6.1%}\n  after the rounds  {after:6.1%}")
    console.print(f"  {100 * (after - before):+.1f} points{expected}", markup=False)
    console.print(f"\n{result.progress.step:,} rounds; {time.perf_counter() - started:.0f} s in all")
    return is_good, result.folder


def _train(config: Config, folder: Path, console: ConsoleCallback) -> Result:
    """Build the data sets and train, or resume where an interrupted demo stopped. Raises FlatoutError."""
    conversations = [config.data] if config.rollout.rounds is None else []
    for data in (*conversations, *([settings.held_out_data(config, folder)] if config.eval.data else [])):
        console.on_phase(f"tokenizing {data.name}")
        open_or_build(data, config.model.name, progress=partial(console.on_phase, f"tokenizing {data.name}, row"))
    # With matrices this small, a second CPU thread makes the run at most 1.4 times faster, and on a busy machine 5
    # times slower. One thread also sums in the same order on any number of cores, so the result is the same.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(config, console=console)
    finally:
        torch.set_num_threads(before)


def _answers(run_dir: Path, prompts: list[Prompt]) -> list[str]:
    """Load the finished run as `flatout chat` does, and answer greedily."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_trained(resolve_model_paths(str(run_dir)), device=device)
    ids = [prompt_ids(model, tokenizer, prompt.messages, prompt.pictures) for prompt in prompts]
    return answer_all(model, tokenizer, ids, max_new_tokens=_MAX_ANSWER_TOKENS, sampling=Sampling(temperature=0.0))


def loss_halved(result: Result) -> bool:
    """Return whether the held-out loss after the last step is at most half of that before the first."""
    before, after = result.progress.first_eval_loss, result.progress.last_eval_loss
    return before is not None and after is not None and after <= before / 2
