"""Stop signals, and the check that no poisoned loss or gradient reaches the weights."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flatout.cli.main import main
from flatout.config.objective import ObjectiveConfig
from flatout.config.optim import OptimConfig
from flatout.config.read import dump_config, make_config
from flatout.errors import NumericError, PreemptedError
from flatout.objectives.load import load_objective
from flatout.planner.steps.step_plan import StepPlan
from flatout.trainer.run import train
from flatout.trainer.run_data import lr_note
from flatout.trainer.state import StopRequest
from flatout.trainer.step_guards import require_finite
from tests.usual import usual


def origin_of(sample_id: int) -> str:
    return f"chats.jsonl:{sample_id + 1}"


def exit_code_of(*signals: int, settle_s: float, before: Any = signal.SIG_DFL) -> int:
    """Exit code of a child that gets these signals, one right after the other: 75 when it was asked to stop.

    `before` is how it treated them.
    """
    ready, tell_ready = os.pipe()
    sent, tell_sent = os.pipe()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            for number in signals:
                signal.signal(number, before)
            with StopRequest(settle_s=settle_s) as stop:
                os.write(tell_ready, b"x")
                # until all signals are sent: what it waits for here is work that it still has to do
                os.read(sent, 1)
                code = 75 if stop.requested else 98
        except KeyboardInterrupt:
            code = 130
        finally:
            os._exit(code)
    os.read(ready, 1)
    for number in signals:
        os.kill(child, number)
    os.write(tell_sent, b"x")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for end in (ready, tell_ready, sent, tell_sent):
        os.close(end)
    return status


ASKED = [(signal.SIGTERM,), (signal.SIGINT,), (signal.SIGHUP,), (signal.SIGUSR1,)]
TREATED = [
    *((numbers, 0.0, signal.SIG_DFL, 75) for numbers in ASKED),
    # ignored, as under nohup; handled by a program
    ((signal.SIGHUP,), 0.0, signal.SIG_IGN, 98),
    ((signal.SIGUSR1,), 0.0, lambda number, frame: None, 98),
    # a second one, at once; and one Ctrl-C that terminal and launcher pass on
    ((signal.SIGTERM, signal.SIGINT), 0.0, signal.SIG_DFL, 130),
    ((signal.SIGINT, signal.SIGTERM), 3600.0, signal.SIG_DFL, 75),
]


@pytest.mark.parametrize(("numbers", "settle_s", "before", "code"), TREATED)
def test_the_first_signal_is_a_request_and_the_second_stops(numbers, settle_s, before, code):
    assert exit_code_of(*numbers, settle_s=settle_s, before=before) == code


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with StopRequest() as stop:
        assert signal.getsignal(signal.SIGTERM) not in before
        assert not stop.requested
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    with pytest.raises(ZeroDivisionError), StopRequest():
        _ = 1 / 0
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def stopped_by(number: int | None) -> None:
    if number is not None:
        signal.raise_signal(number)
    raise PreemptedError("saved")


# None: another rank got the signal, and this one's may still come
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, None])
def test_who_leaves_after_sigterm_is_not_killed_by_another(number):
    """A program started meanwhile is: it must not inherit what this one ignores."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    found = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    try:
        with pytest.raises(PreemptedError), StopRequest():
            stopped_by(number)
        after = [signal.getsignal(number) for number in numbers]
        stays = number != signal.SIGINT
        assert [handler != signal.SIG_DFL for handler in after] == [stays, False, stays]
        if number != signal.SIGINT:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGHUP)
            with subprocess.Popen(["sleep", "3600"]) as other:
                other.terminate()
                assert other.wait(120) == -signal.SIGTERM
    finally:
        for number, handler in zip(numbers, found, strict=True):
            signal.signal(number, handler)


def make_run(folder: Path, **gradients: list[float] | None) -> Any:
    named = {}
    for name, gradient in gradients.items():
        named[name] = torch.zeros(2, requires_grad=True)
        named[name].grad = None if gradient is None else torch.tensor(gradient)
    loader = SimpleNamespace(store=SimpleNamespace(origin=origin_of))
    config = SimpleNamespace(folder=folder, method="lora", objective=ObjectiveConfig(), optim=OptimConfig())
    config.model = SimpleNamespace(init="pretrained")
    planned = SimpleNamespace(objective=None, shape=SimpleNamespace(num_params=10**9))
    return SimpleNamespace(config=config, planned=planned, named_parameters=named, loader=loader)


def make_step(*sample_ids: int, index: int = 0) -> StepPlan:
    return StepPlan(index, 0, sample_ids, 0, 0, (), 1.0)


@pytest.mark.parametrize(("loss", "grad_norm"), [(math.nan, 1.0), (1.0, math.inf), (-math.inf, math.nan)])
def test_a_bad_step_is_named_with_its_samples_and_written_down(tmp_path, loss, grad_norm):
    run = make_run(tmp_path, good=[1.0, 1.0], bad=[math.nan, 0.0])
    with pytest.raises(NumericError) as raised:
        require_finite(run, make_step(*range(100, 140), index=40), loss, grad_norm)
    message, dump = str(raised.value), tmp_path / "non_finite.json"
    for part in (f"step 41: loss {loss}, gradient norm {grad_norm}", "first non-finite gradient: bad", str(dump)):
        assert part in message
    assert "samples 100 (chats.jsonl:101), 101 (chats.jsonl:102), " in message
    assert ", 107 (chats.jsonl:108) and 32 more" in message
    assert "the weights were not updated" in message
    assert raised.value.exit_code == 5
    assert json.loads(dump.read_text()) == {
        "step": 41,
        "loss": str(loss),
        "grad_norm": str(grad_norm),
        "first_non_finite_gradient": "bad",
        "samples": {str(i): origin_of(i) for i in range(100, 140)},
    }


def test_a_loss_alone_can_be_bad(tmp_path):
    with pytest.raises(NumericError, match=r"samples 3 \(chats\.jsonl:4\), 5 \(chats\.jsonl:6\); written") as raised:
        require_finite(make_run(tmp_path, a=[0.0, 0.0]), make_step(3, 5), math.nan, 0.0)
    assert "first non-finite" not in str(raised.value)


def test_a_folder_that_cannot_be_written_does_not_hide_the_numeric_error(tmp_path):
    with pytest.raises(NumericError, match=r"step 1: .*; they could not be written: cannot write .*; check these rows"):
        require_finite(make_run(tmp_path / "gone"), make_step(3), math.nan, 0.0)


def test_finite_steps_pass_and_cost_no_look_at_the_gradients(tmp_path):
    require_finite(make_run(tmp_path, a=[math.nan, 0.0]), make_step(3), 0.0, 0.0)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def taught(tiny, tmp_path_factory):
    """A model whose loss is far below that of a guess."""
    folder: Path = tmp_path_factory.mktemp("taught") / "run"
    settings = {"batch": {"max_steps": 40}, "optim": {"lr": 1e-2}, "schedule": {"kind": "constant"}}
    train(tiny.config(folder, method="full", **settings))
    return folder / "final"


def diverged(folder: Path) -> list[Any]:
    events = (json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines())
    return [event for event in events if event["kind"] == "diverged"]


@pytest.mark.parametrize(("lr", "times"), usual([(2e4, "100,000,000"), (0.5, "2,500")], [(0.5, "2,500")]))
def test_a_run_that_diverged_says_so(taught, tiny, tmp_path, capsys, lr, times):
    settings = {"model": {"name": str(taught)}, "batch": {"max_steps": 5}, "schedule": {"kind": "constant"}}
    (tmp_path / "run.yaml").write_text(dump_config(tiny.config(tmp_path / "run", optim={"lr": lr}, **settings)))
    odd = f"optim.lr {lr:g} is {times} times the usual 0.0002"
    for verb in ("plan", "train"):
        assert main([verb, str(tmp_path / "run.yaml")]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert odd in said
    assert said.index(odd) < said.index("step 1/5")
    assert "please report" not in said
    (event,) = diverged(tmp_path / "run")
    assert event["loss"] > 4 > event["first_loss"]
    assert event["why"] in said
    assert f"training diverged at step {event['step']}: loss" in said
    assert (tmp_path / "run" / "final" / "adapter_model.safetensors").exists()


def test_a_usual_run_is_not_said_to_have_diverged(taught, tiny, tmp_path, capsys):
    """Neither a pretrained model's, nor one from random weights, whose loss begins near that of a guess."""
    taught_model, random = {"model": {"name": str(taught)}}, {"method": "full", "optim": {"lr": 1e-4}}
    for name, settings in {"lora": taught_model, "random": random}.items():
        train(tiny.config(tmp_path / name, batch={"max_steps": 5}, **settings))
        assert not diverged(tmp_path / name)
    assert "times the usual" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("method", "kind", "lr", "num_params", "is_told"),
    [
        ("lora", "grpo", 2e-4, 596e6, False), ("lora", "grpo", 3e-4, 200e6, False), ("lora", "grpo", 2e-4, 8e9, True),
        ("full", "grpo", 6e-4, 623_360, False), ("full", "grpo", 6e-4, 135e6, True), ("lora", "grpo", 2e-2, 1e5, True),
        ("lora", "dpo", 5e-6, 8e9, False), ("lora", "dpo", 5e-5, 8e9, True),
        ("lora", "cross_entropy", 5e-3, 8e9, False), ("lora", "cross_entropy", 0.5, 1e5, True),
    ],
)  # fmt: skip
def test_a_rate_is_told_that_is_far_too_great_for_a_model_of_its_size(method, kind, lr, num_params, is_told):
    config = make_config({"model": "m", "method": method, "objective": kind, "optim": {"lr": lr}})
    note = lr_note(config, load_objective(config.objective), num_params)
    assert bool(note) == is_told
    assert ("models of this size rarely take more than" in note) == is_told


def test_a_loss_that_overflows_names_the_rate(taught, tiny, tmp_path):
    settings = {"model": {"name": str(taught)}, "batch": {"max_steps": 5}, "schedule": {"kind": "constant"}}
    with pytest.raises(NumericError, match=r"training diverged: optim\.lr 1e\+28 is .* times the usual 1e-05"):
        train(tiny.config(tmp_path / "run", method="full", optim={"lr": 1e28}, **settings))
