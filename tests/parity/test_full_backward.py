"""Updates in the backward pass: the weights, states and figures of ordinary updates, to the bit."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from built_run import built_run
from run_folders import require_equal, state_of

from flatout.config.optim import OPTIMIZERS
from flatout.errors import NumericError, ResourceError, UsageError
from flatout.parallel.rank import Rank
from flatout.planner.settings import PlanSettings
from flatout.track.callback import Reporter
from flatout.trainer.planned_run import check_backward_update, open_and_plan
from flatout.trainer.run import train
from flatout.trainer.step import step_launcher
from tests.usual import usual


def full_config(tiny: Any, run_dir: Path, update: str, **sections: Any) -> Any:
    values: dict[str, Any] = {
        "method": "full",
        "full": {"update": update},
        "batch": {"samples_per_step": 6, "micro_batch_tokens": 4000, "max_steps": 6},
        "optim": {"lr": 1e-3, "weight_decay": 0.01, "max_grad_norm": None},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return tiny.config(run_dir, **values)


@pytest.mark.parametrize("precision", usual(["fp32", "fp64"], ["fp32"]))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_ordinary_updates_to_the_bit(tiny, tmp_path, metrics_of, precision, name):
    for update in ("step", "backward"):
        model = {"name": str(tiny.model_dir), "precision": precision}
        train(full_config(tiny, tmp_path / update, update, model=model, optim={"name": name}))
    require_equal(*(state_of(tmp_path / update, 6) for update in ("step", "backward")))
    for one, other in zip(metrics_of(tmp_path / "step"), metrics_of(tmp_path / "backward"), strict=True):
        assert (one["loss"], one["lr"]) == (other["loss"], other["lr"])
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5 if precision == "fp32" else 1e-12)


def test_gradients_never_exist_together(tiny, tmp_path, monkeypatch):
    run = built_run(full_config(tiny, tmp_path, "backward"))
    live: list[int] = []
    ordinary = run.optimizer.step
    monkeypatch.setattr(
        run.optimizer, "step", lambda: (live.append(sum(p.grad is not None for p in run.parameters)), ordinary())
    )
    assert step_launcher(run)(run.plan.step(0))() is not None
    assert live == [1] * len(run.parameters)
    assert all(parameter.grad is None for parameter in run.parameters)


@pytest.mark.parametrize("when", ["before the step", "in its forward pass"])
def test_a_stop_leaves_the_weights_alone(tiny, tmp_path, when):
    run = built_run(full_config(tiny, tmp_path, "backward"))
    before = [parameter.detach().clone() for parameter in run.parameters]

    def stop(*_: object) -> None:
        run.stop.number = signal.SIGTERM

    if when == "before the step":
        stop()
    else:
        run.loss_module.register_forward_pre_hook(stop)
    assert step_launcher(run)(run.plan.step(0))() is None
    assert all(torch.equal(parameter, old) for parameter, old in zip(run.parameters, before, strict=True))


def test_a_loss_that_is_not_finite_stops_before_any_update(tiny, tmp_path):
    run = built_run(full_config(tiny, tmp_path, "backward"))
    run.parameters[0].data[:] = float("nan")
    before = [parameter.detach().clone() for parameter in run.parameters]
    with pytest.raises(NumericError, match=r"step 1: loss nan; the weights were not updated"):
        step_launcher(run)(run.plan.step(0))
    assert all(torch.equal(p, old) for p, old in zip(run.parameters[1:], before[1:], strict=True))


def test_a_gradient_that_is_not_finite_names_the_way_back(tiny, tmp_path):
    run = built_run(full_config(tiny, tmp_path, "backward"))
    run.parameters[3].register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(NumericError, match=r"step 1: gradient norm (inf|nan), found after the update"):
        step_launcher(run)(run.plan.step(0))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_running_out_of_memory_ends_with_what_to_do(tiny, tmp_path, where):
    """A part of the step cannot be repeated: its weights may have changed."""
    run = built_run(full_config(tiny, tmp_path, "backward"))

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("planted")

    handle = (
        run.parameters[3].register_hook(fail)
        if where == "backward"
        else run.loss_module.register_forward_pre_hook(fail)
    )
    with pytest.raises(
        ResourceError, match=r"step 1: out .* full\.update=backward takes .* batch\.samples_per_step or"
    ):
        step_launcher(run)(run.plan.step(0))
    handle.remove()


def test_memory_that_ran_out_in_an_evaluation_does_not_split_the_steps(tiny, tmp_path):
    losses = []
    for cap in (None, 50):
        run = built_run(full_config(tiny, tmp_path, "backward"))
        run.state.micro_batch_cap = cap
        outcome = step_launcher(run)(run.plan.step(0))()
        assert outcome is not None
        losses.append((outcome.loss, outcome.grad_norm))
    assert losses[0] == losses[1]


def test_what_cannot_be_updated_in_backward_is_refused_by_the_plan(tiny, tmp_path):
    fits = full_config(tiny, tmp_path, "backward")
    plan = open_and_plan(fits, Reporter(), Rank()).plan
    check_backward_update(PlanSettings.of(fits), plan, Rank())
    with pytest.raises(UsageError, match=r"got 2 ranks"):
        check_backward_update(PlanSettings.of(fits), plan, Rank(0, 2))
    half = fits.model_copy(update={"model": fits.model.model_copy(update={"precision": "fp16"})})
    with pytest.raises(UsageError, match=r"unscale gradients of fp16"):
        check_backward_update(PlanSettings.of(half), plan, Rank())
    with pytest.raises(UsageError, match=r"step \d+ has [2-9] of [\d,]+ tokens in total"):
        train(full_config(tiny, tmp_path, "backward", batch={"micro_batch_tokens": 700}))
