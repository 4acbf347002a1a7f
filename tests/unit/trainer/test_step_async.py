"""Steps launched before the last one's figures are known: the same bits, and a bad or stopped step changes nothing."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from built_run import built_run
from run_folders import require_equal, state_of

from flatout.errors import NumericError, PreemptedError
from flatout.optim.flat import flatten
from flatout.optim.torch_optimizers import FlatAdamW
from flatout.optim.update import clear_found_inf, copy_to_host_async, set_found_inf, supports_found_inf
from flatout.trainer import build, loop, step
from flatout.trainer.run import train
from flatout.trainer.state import TrainingRun
from flatout.trainer.step import launch_step
from tests.usual import usual

SIGNAL = 15
LEAN = {"method": "full", "model": {"precision": "bf16"}, "full": {"weights": "bf16"}, "optim": {"name": "adamw8bit"}}


def fused(named: Any, config: Any, **_: Any) -> torch.optim.Optimizer:
    """What an adapter gets on a GPU, on the CPU."""
    options = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    return FlatAdamW(flatten(list(named.values())), weight_decay=0.1, fused=True, **options)


@pytest.fixture(params=["fused", "lean"])
def sections(request, monkeypatch):
    """The settings of a run whose optimizer can hold back."""
    if request.param == "lean":
        return LEAN
    monkeypatch.setattr(build, "make_optimizer", fused)
    return {}


def make_run(config: Any) -> TrainingRun:
    run = built_run(config)
    assert supports_found_inf(run.optimizer)
    return run


def state(run: TrainingRun) -> list[torch.Tensor]:
    """Every weight, moment and update count."""
    moments = [value for states in run.optimizer.state.values() for value in states.values()]
    return [tensor.detach().clone() for tensor in [*run.parameters, *moments]]


def assert_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert len(a) == len(b)
    assert all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def poison(monkeypatch: pytest.MonkeyPatch, index: int, parameter: int = 3) -> None:
    """From step `index` on the first micro-batch's gradient of one parameter is not finite."""
    whole = step.accumulate_gradients

    def accumulate(run: TrainingRun, planned: Any) -> Any:
        sums = whole(run, planned)
        if planned.index == index:
            list(run.named_parameters.values())[parameter].grad[0, 0] = float("inf")
        return sums

    monkeypatch.setattr(step, "accumulate_gradients", accumulate)


def test_launching_ahead_gives_the_same_bits_as_waiting(tiny, tmp_path, sections):
    configs = [tiny.config(tmp_path / name, **sections) for name in ("waits", "ahead")]
    outcomes, runs = [], [make_run(config) for config in configs]
    for run in runs:
        pending, mine = [], []
        for planned in run.plan.steps():
            pending.append((planned, launch_step(run, planned)))
            while len(pending) > (0 if run is runs[0] else 1):
                done, outcome = pending.pop(0)
                mine.append(outcome())
                run.progress.advance(done, updated=True, num_naive_tokens=0)
        outcomes.append([*mine, *(outcome() for _, outcome in pending)])
    assert outcomes[0] == outcomes[1]
    assert len({outcome.lr for outcome in outcomes[0] if outcome}) > 2
    assert_equal(state(runs[0]), state(runs[1]))


def test_a_bad_step_and_the_one_launched_after_it_change_nothing(tiny, tmp_path, monkeypatch, sections):
    run = make_run(tiny.config(tmp_path, **sections))
    steps = list(run.plan.steps())
    launch_step(run, steps[0])()
    before = state(run)
    poison(monkeypatch, 1)
    bad, after = launch_step(run, steps[1]), launch_step(run, steps[2])
    name = list(run.named_parameters)[3]
    with pytest.raises(
        NumericError, match=rf"step 2: loss \d.*gradient norm .*first non-finite gradient: {name}"
    ) as error:
        bad()
    assert f"samples {steps[1].sample_ids[0]} (" in str(error.value)
    assert (tmp_path / "non_finite.json").exists()
    assert_equal(state(run), before)
    # what came after had good figures, and yet was held back
    assert after() is not None
    assert_equal(state(run), before)


def test_a_stopped_step_and_the_one_launched_after_it_change_nothing(tiny, tmp_path, sections):
    run = make_run(tiny.config(tmp_path, **sections))
    steps = list(run.plan.steps())
    launch_step(run, steps[0])()
    before = state(run)
    run.stop._handle(SIGNAL, None)
    stopped, after = launch_step(run, steps[1]), launch_step(run, steps[2])
    assert stopped() is None
    assert after() is None
    assert_equal(state(run), before)
    run.stop.number = None
    launch_step(run, steps[1])()
    assert not torch.equal(state(run)[0], before[0])


@pytest.mark.parametrize("at", usual([2, 5], [5]))
def test_a_run_stopped_and_resumed_equals_one_that_was_not(tiny, tmp_path, monkeypatch, at, metrics_of, sections):
    settings = {"lora": {"rank": 4, "dropout": 0.2}, "checkpoint": {"every_steps": 3}, **sections}
    whole = tiny.config(tmp_path / "whole", **settings)
    train(whole)
    original = loop.step_launcher

    def stop_at(run: TrainingRun) -> Any:
        launch = original(run)

        def launch_or_stop(planned: Any) -> Any:
            if planned.index == at:
                run.stop.number = SIGNAL
            return launch(planned)

        return launch_or_stop

    cut = tiny.config(tmp_path / "cut", **settings)
    monkeypatch.setattr(loop, "step_launcher", stop_at)
    with pytest.raises(PreemptedError, match=f"saved at step {at};"):
        train(cut)
    monkeypatch.setattr(loop, "step_launcher", original)
    train(cut)
    require_equal(*(state_of(tmp_path / run, 8) for run in ("whole", "cut")))
    records = [metrics_of(tmp_path / run) for run in ("whole", "cut")]
    for key in ("step", "loss", "lr", "grad_norm", "num_tokens"):
        assert [record[key] for record in records[0]] == [record[key] for record in records[1]]


def test_held_back_updates_stay_held_back_until_let_go():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    weight.grad = torch.ones(3)
    for is_bad in (True, False):
        set_found_inf(optimizer, torch.tensor(is_bad))
        optimizer.step()
        assert weight.tolist() == [1, 1, 1]
        assert optimizer.state[weight]["step"].item() == 0
    clear_found_inf(optimizer)
    set_found_inf(optimizer, torch.tensor(False))
    optimizer.step()
    assert weight[0] < 1
    assert not supports_found_inf(torch.optim.SGD([weight], lr=0.1))
    assert copy_to_host_async(torch.tensor([1.0, 2.0]))[0]() == [1, 2]


def test_the_collector_leaves_what_start_up_made_alone_and_gets_it_back(tiny, tmp_path, monkeypatch):
    num_frozen: list[int] = []
    finish = loop.finish_step
    monkeypatch.setattr(loop, "finish_step", lambda *args: (num_frozen.append(gc.get_freeze_count()), finish(*args))[1])
    train(tiny.config(tmp_path / "run", batch={"samples_per_step": 32, "max_steps": 2}))
    assert len(num_frozen) == 2
    assert min(num_frozen) > 10_000
    assert gc.get_freeze_count() == 0
