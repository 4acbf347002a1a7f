"""A stop request in passes without gradients: left at the next micro-batch, saved, and the same bits after resuming."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from flatout.errors import PreemptedError
from flatout.models.model_with_loss import ModelWithLoss
from flatout.track.callback import Callback
from flatout.track.run_log import read_run
from flatout.trainer.run import train

# evaluations of several micro-batches after steps 0, 3 and 6, the last of which is the end's; then some answers
SECTIONS: dict[str, Any] = {
    "lora": {"rank": 4, "dropout": 0.2},
    "batch": {"samples_per_step": 6, "micro_batch_tokens": 300, "max_steps": 6},
    "data": {"max_tokens": 300, "too_long": "drop"},
    "eval": {"fraction": 0.2, "every_steps": 3, "prompts": ["What is my name?"], "max_new_tokens": 4},
}


@contextmanager
def each_inference_pass(call: Callable[[int], None]) -> Iterator[None]:
    """Call with the number of each pass without gradients before it, from 0."""
    passes = 0

    def before(module: nn.Module, inputs: Any) -> None:
        nonlocal passes
        if isinstance(module, ModelWithLoss) and not torch.is_grad_enabled():
            call(passes)
            passes += 1

    handle = nn.modules.module.register_module_forward_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()


def results(run_dir: Path) -> dict[str, Any]:
    """What must not depend on a stop: the last checkpoint's bits, losses, evaluations and answers."""
    log = read_run(run_dir)
    weights = load_file(run_dir / "checkpoints" / "step-6" / "model.safetensors")
    optimizer = load_file(run_dir / "checkpoints" / "step-6" / "optimizer.safetensors")
    return {
        "bits": {name: tensor.numpy().tobytes() for name, tensor in {**weights, **optimizer}.items()},
        "losses": [(record.step, record.loss) for record in log.steps],
        "evals": [(record.step, record.eval_loss, record.is_best) for record in log.evals],
        "answers": [(record.step, record.answers) for record in log.answers],
        "best": sorted(path.name for path in (run_dir / "best").iterdir()) if (run_dir / "best").exists() else None,
    }


class Evaluations(Callback):
    """Counts passes, and how many each evaluation took."""

    def __init__(self) -> None:
        self.passes: list[int] = []

    def on_phase(self, name: str, done: int = 0, total: int = 0) -> None:
        if name == "evaluating":
            self.passes.append(0)

    def count(self, number: int) -> None:
        self.passes[-1] += 1


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """The results of a run that nobody stopped, and the number of passes of each of its evaluations."""
    run_dir, evaluations = tmp_path_factory.mktemp("whole"), Evaluations()
    with each_inference_pass(evaluations.count):
        train(tiny.config(run_dir, **SECTIONS), callbacks=[evaluations])
    return results(run_dir), evaluations.passes


def test_each_evaluation_can_be_left_at_each_place(whole, tiny, tmp_path):
    """One run, stopped by SIGTERM early and in the last pass of each evaluation; the last is an answer's.

    No pass begins after the signal, where the whole evaluation would have followed.
    """
    expected, (first, second, third) = whole
    assert [step for step, *_ in expected["evals"]] == [0, 3, 6]
    assert min(first, second, third) > 5
    # the first answers of a command are compared with a pass without a cache
    second, third = second + 1, third + 1
    config = tiny.config(tmp_path / "run", **SECTIONS)
    # passes since the start of each command, which begins with the evaluation that was left
    stops = {0: (0, first - 1), 3: (first, second - 1), 6: (second, third - 1)}
    for step, numbers in stops.items():
        for stop_at in numbers:
            evaluations = Evaluations()

            def stop(number: int, stop_at: int = stop_at, evaluations: Evaluations = evaluations) -> None:
                evaluations.count(number)
                if number == stop_at:
                    os.kill(os.getpid(), signal.SIGTERM)

            with each_inference_pass(stop), pytest.raises(PreemptedError, match=f"saved at step {step};"):
                train(config, callbacks=[evaluations])
            assert sum(evaluations.passes) == stop_at + 1
    train(config)
    assert results(tmp_path / "run") == expected
