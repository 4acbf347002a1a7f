"""The demo's main job, by the same calls as a user's commands: write, build, train, answer, check."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from flatout.config.schema import Config
from flatout.data.build import open_or_build
from flatout.demo.conversations import ChatMessage, held_out_prompts
from flatout.demo.settings import held_out_data
from flatout.models.load.inference import load_trained, resolve_model_paths
from flatout.rollout.chat import answer
from flatout.track.console import ConsoleCallback
from flatout.trainer.run import Result, train

MAX_ANSWER_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Marked:
    """A held-out prompt, the trained model's answer, and whether it is right."""

    prompt: list[ChatMessage]
    answer: str
    right: bool


def train_demo(config: Config, folder: Path, console: ConsoleCallback) -> Result:
    """Build the data sets and train, or resume where an interrupted demo stopped. Raises FlatoutError."""
    for data in (config.data, *([held_out_data(config, folder)] if config.eval.data else [])):
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


def answer_held_out(run_dir: Path, seed: int) -> list[Marked]:
    """Load the finished run as `flatout chat` does, answer the three held-out prompts, and check the answers."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_trained(resolve_model_paths(str(run_dir)), device=device)
    marked = []
    for *prompt, right in held_out_prompts(seed):
        text = answer(model, tokenizer, prompt, max_new_tokens=MAX_ANSWER_TOKENS)
        marked.append(Marked(prompt, text, text == right["content"]))
    return marked


def loss_halved(result: Result) -> bool:
    """Return whether the held-out loss after the last step is at most half of that before the first."""
    before, after = result.progress.first_eval_loss, result.progress.last_eval_loss
    return before is not None and after is not None and after <= before / 2
