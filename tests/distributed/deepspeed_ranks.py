"""One rank of the checkpoint test: states move between DeepSpeed's stages and other strategies. Started with RANK,
WORLD_SIZE and a port: `deepspeed_ranks.py SPEC`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from strategies import weight_of, whole
from torch import Tensor, nn

from flatout.checkpoint.write import Checkpoints
from flatout.config.read import make_config
from flatout.errors import NumericError
from flatout.parallel.control_group import ControlGroup
from flatout.parallel.process_group import join_group, leave_group
from flatout.parallel.rank import Rank
from flatout.track.callback import Reporter
from flatout.trainer.build import build_run
from flatout.trainer.planned_run import open_and_plan
from flatout.trainer.resume import take_snapshot
from flatout.trainer.run import export
from flatout.trainer.state import Setup, TrainingRun
from flatout.trainer.step import launch_step


def build(values: dict[str, Any], folder: Path, messages: ControlGroup, *, resume: bool) -> TrainingRun:
    """A Run that writes its checkpoints to `folder`, and goes on from the newest there with `resume`."""
    config = make_config({**values, "run_dir": str(folder)})
    reporter = Reporter()
    planned = open_and_plan(config, reporter, messages.rank)
    checkpoints = Checkpoints(folder, keep=9, on_event=reporter.event, group=messages)
    snapshot = checkpoints.newest() if resume else None
    return build_run(Setup(config, planned, checkpoints, reporter, messages.rank), snapshot)


def train(run: TrainingRun, end: int) -> dict[str, Any]:
    """Steps up to `end`: their losses and norms, and the weights after them."""
    outcomes = []
    for step in run.plan.steps(start=run.progress.step):
        if step.index == end:
            break
        outcome = launch_step(run, step)()
        assert outcome is not None
        run.progress.advance(step, updated=True, num_naive_tokens=1)
        outcomes.append(outcome)
    return {
        "loss": torch.tensor([outcome.loss for outcome in outcomes], dtype=torch.float64),
        "norm": torch.tensor([outcome.grad_norm for outcome in outcomes], dtype=torch.float64),
        "weights": {name: whole(weight_of(run, parameter)) for name, parameter in run.named_parameters.items()},
    }


def refuse_poison(run: TrainingRun) -> None:
    """A gradient that is not finite, under a finite loss, stops the run and changes no weight."""
    before = {name: whole(weight_of(run, parameter)) for name, parameter in run.named_parameters.items()}

    def poison(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: grad * torch.inf)

    run.model.get_decoder().layers[0].mlp.down_proj.register_forward_hook(poison)
    with pytest.raises(NumericError, match="the weights were not updated"):
        launch_step(run, run.plan.step(0))()
    for name, parameter in run.named_parameters.items():
        assert torch.equal(whole(weight_of(run, parameter)), before[name]), name


def move(spec: dict[str, Any], messages: ControlGroup) -> dict[str, Any]:
    """Train, save, and go on under the next strategy, through all of them; then export."""
    folder, figures, end = Path(spec["folder"]), [], 0
    for index, sections in enumerate(spec["strategies"]):
        run = build({**spec["values"], **sections}, folder, messages, resume=index > 0)
        assert run.progress.step == end
        end += spec["num_steps"]
        figures.append(train(run, end))
        run.saver.save(take_snapshot(run), required=True)
        if index == 0 or index + 1 == len(spec["strategies"]):
            export(run, folder / "final")
            refuse_poison(run)
        run.loader.close()
    return {
        "loss": torch.cat([figure["loss"] for figure in figures]),
        "norm": torch.cat([figure["norm"] for figure in figures]),
        "weights": figures[-1]["weights"],
    }


def main(path: str) -> None:
    spec = json.loads(Path(path).read_text())
    torch.set_num_threads(1)
    rank = Rank.from_env()
    join_group(rank, torch.device("cpu"))
    messages = ControlGroup(rank)
    got = move(spec, messages)
    if rank.is_first:
        got["exported"] = load_file(next(Path(spec["folder"], "final").glob("*.safetensors")))
        torch.save(got, spec["report"])
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1])
