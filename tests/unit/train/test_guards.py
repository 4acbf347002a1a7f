"""Stop signals, and the check that no poisoned loss or gradient reaches the weights."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from faulty_disk import FULL_DISK, FaultyDisk

from flatout.errors import NumericError, PreemptedError
from flatout.train.guards import StopRequest, first_non_finite, require_finite
from flatout.train.storage import Storage


def origin_of(sample_id: int) -> str:
    return f"chats.jsonl:{sample_id + 1}"


def exit_code_of(act: Callable[[], int], *signals: tuple[float, int]) -> int:
    """Exit code of a child that acts once it is asked to stop; `signals` are (delay in seconds, number)."""
    ready, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            with StopRequest(settle_s=0.15) as stop:
                os.write(writer, b"x")
                code = act_until(stop, act)
        except KeyboardInterrupt:
            code = 130
        finally:
            os._exit(code)
    os.read(ready, 1)
    for delay_s, number in signals:
        time.sleep(delay_s)
        os.kill(child, number)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(ready)
    os.close(writer)
    return status


def act_until(stop: StopRequest, act: Callable[[], int]) -> int:
    """A loop that works on after the first signal, for at most two seconds, and leaves by the act's code."""
    until_s = time.monotonic() + 2
    while not stop.requested and time.monotonic() < until_s:
        time.sleep(0.001)
    if not stop.requested:
        return 98
    return act()


def finish_at_once() -> int:
    return 75


def finish_slowly() -> int:
    time.sleep(1.0)
    return 75


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_a_request(number: int) -> None:
    assert exit_code_of(finish_at_once, (0.02, number)) == 75


def test_the_second_signal_stops_at_once() -> None:
    started_s = time.monotonic()
    assert exit_code_of(finish_slowly, (0.02, signal.SIGTERM), (0.3, signal.SIGINT)) == 130
    assert time.monotonic() - started_s < 0.9


def test_one_ctrl_c_passed_on_by_terminal_and_launcher_is_one_request() -> None:
    assert exit_code_of(finish_slowly, (0.02, signal.SIGINT), (0.02, signal.SIGTERM)) == 75


def test_handlers_are_put_back() -> None:
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


def stopped_by(number: int) -> None:
    signal.raise_signal(number)
    raise PreemptedError("saved")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_leaves_after_sigterm_is_not_killed_by_another(number: int) -> None:
    """A program started meanwhile is: it must not inherit what this one ignores."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        with pytest.raises(PreemptedError), StopRequest():
            stopped_by(number)
        after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        assert (after == before) == (number == signal.SIGINT)
        assert after[1] == before[1]
        if number == signal.SIGTERM:
            signal.raise_signal(signal.SIGTERM)
            with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
                other.terminate()
                assert other.wait(20) == -signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before[0])


def parameters(**gradients: list[float] | None) -> dict[str, torch.Tensor]:
    named = {}
    for name, gradient in gradients.items():
        named[name] = torch.zeros(2, requires_grad=True)
        named[name].grad = None if gradient is None else torch.tensor(gradient)
    return named


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_parameter_with_a_bad_gradient_is_named(bad: float) -> None:
    assert first_non_finite(parameters(a=[1.0, 2.0], b=None)) is None
    assert first_non_finite(parameters(a=[1.0, 2.0], b=None, c=[0.0, bad], d=[bad, bad])) == "c"


@pytest.mark.parametrize(("loss", "grad_norm"), [(math.nan, 1.0), (1.0, math.inf), (-math.inf, math.nan)])
def test_a_bad_step_is_named_with_its_samples_and_written_down(tmp_path: Path, loss: float, grad_norm: float) -> None:
    named = parameters(good=[1.0, 1.0], bad=[math.nan, 0.0])
    dump = tmp_path / "numeric_error.json"
    with pytest.raises(NumericError) as raised:
        require_finite(
            loss, grad_norm, step=41, sample_ids=range(100, 140), named=named, origin_of=origin_of, dump=dump
        )
    message = str(raised.value)
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


def test_a_loss_alone_can_be_bad_and_no_file_is_needed() -> None:
    with pytest.raises(NumericError, match=r"samples 3 \(chats\.jsonl:4\), 5 \(chats\.jsonl:6\); look") as raised:
        require_finite(math.nan, 0.0, step=1, sample_ids=(3, 5), named=parameters(a=[0.0, 0.0]), origin_of=origin_of)
    assert "first non-finite" not in str(raised.value)


def test_a_full_disk_does_not_hide_the_numeric_error(tmp_path: Path) -> None:
    storage = Storage(FaultyDisk(1, FULL_DISK, lasting=True))
    with pytest.raises(NumericError, match=r"step 1: .*could not be written down: disk or quota full"):
        require_finite(
            math.nan,
            0.0,
            step=1,
            sample_ids=(3,),
            named={},
            origin_of=origin_of,
            dump=tmp_path / "a.json",
            storage=storage,
        )


def test_finite_steps_pass_and_cost_no_look_at_the_gradients() -> None:
    require_finite(0.0, 0.0, step=1, sample_ids=(), named=parameters(a=[math.nan, 0.0]), origin_of=origin_of)
