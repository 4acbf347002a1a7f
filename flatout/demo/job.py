"""The demo's main job, by the same calls as a user's commands: write, build, train, answer, mark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from flatout.config.schema import Config
from flatout.data.build import open_or_build
from flatout.demo.check import check
from flatout.demo.conversations import ChatMessage
from flatout.demo.prompts import held_out_prompts
from flatout.demo.settings import DemoFolder, held_out_data
from flatout.models.generate import answer
from flatout.models.trained import find_trained, load_trained
from flatout.train.run import Result, train

MAX_ANSWER_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Marked:
    """A held-out prompt, the trained model's answer, and whether it is right."""

    prompt: list[ChatMessage]
    answer: str
    right: bool


def train_demo(config: Config, folder: DemoFolder) -> Result:
    """Build both data sets and train, or go on where an interrupted demo stopped. Raises a FlatoutError."""
    for data in (config.data, held_out_data(config, folder)):
        open_or_build(data, config.model.name)
    with _one_thread():
        return train(config)


@contextmanager
def _one_thread() -> Iterator[None]:
    """One CPU thread for torch: matrices this small gain at most 1.4 times from a second one.

    On a machine with other work its waiting makes the run 5 times slower, and one thread sums in the same order on
    any number of cores, so that the demo comes out the same.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def answer_held_out(run_dir: Path, seed: int) -> list[Marked]:
    """Load the finished run as `flatout chat` does, answer the three held-out prompts, and mark the answers."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_trained(find_trained(str(run_dir)), device=device)
    marked = []
    for prompt in held_out_prompts(seed):
        text = answer(model, tokenizer, prompt, max_new_tokens=MAX_ANSWER_TOKENS)
        marked.append(Marked(prompt, text, check(prompt, text)))
    return marked


def loss_halved(result: Result) -> bool:
    """Whether the held-out loss fell by at least half from before the first step to after the last."""
    before, after = result.progress.first_eval_loss, result.progress.last_eval_loss
    return before is not None and after is not None and after <= before / 2
