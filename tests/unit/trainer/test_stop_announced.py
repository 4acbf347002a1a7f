"""A stop signal is announced at once on the console, also in the middle of a pass that runs no Python."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pytest
from warm_process import WarmProcess

from flatout.config.read import dump_config
from flatout.io.stop_signals import StopSignals, announcing_stop
from flatout.track.callback import Reporter

# one pass waits in a C function for a byte in the pipe `pass_over`; signals go to other threads meanwhile, as in a
# backward pass, which leaves no instruction of Python to the main thread
CONFIG = """
import ctypes, os, signal
from pathlib import Path
import torch
from torch import nn
from flatout.config.read import load_config
from flatout.models.model_with_loss import ModelWithLoss

def wait(module, inputs):
    if isinstance(module, ModelWithLoss) and torch.is_grad_enabled() is {in_step} and not Path("in_pass").exists():
        pipe = os.open("pass_over", os.O_RDWR)
        signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGINT, signal.SIGTERM}})
        Path("in_pass").touch()
        ctypes.CDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {{signal.SIGINT, signal.SIGTERM}})

nn.modules.module.register_module_forward_pre_hook(wait)
# a shell's background jobs ignore it
signal.signal(signal.SIGINT, signal.default_int_handler)
config = load_config(Path("base.yaml"))
"""


@pytest.mark.parametrize(("number", "in_step"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_signal_is_announced_before_the_pass_is_over(number, in_step, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sections: dict[str, Any] = {"batch": {"max_steps": 3}, "eval": {"fraction": 0.1}}
    Path("base.yaml").write_text(dump_config(tiny.config(tmp_path / "run", **sections)))
    Path("run.py").write_text(CONFIG.format(in_step=in_step))
    os.mkfifo("pass_over")
    pipe, log = os.open("pass_over", os.O_RDWR), Path("log")
    process = WarmProcess(["-m", "flatout", "train", "run.py"], os.environ, log)
    limit = Timer(240, lambda: os.kill(process.pid, signal.SIGKILL))
    limit.start()
    while not Path("in_pass").exists() and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, number)
    while "stopping   after this pass, then saves" not in log.read_text() and process.poll() is None:
        time.sleep(0.01)
    assert process.poll() is None, log.read_text()
    os.write(pipe, b"x")
    assert process.wait() == 75
    limit.cancel()
    os.close(pipe)
    lines = [line for line in log.read_text().splitlines() if line.startswith("stopping")]
    assert len(lines) == 1


def test_a_signal_that_the_program_handles_itself_is_not_announced():
    own, told = [], Event()
    before = signal.signal(signal.SIGUSR1, lambda number, _: own.append(number))
    try:
        with StopSignals(lambda: None) as stop, announcing_stop(told.set, stop.numbers):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not told.wait(0.5)
            os.kill(os.getpid(), signal.SIGTERM)
            assert told.wait(60)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert own == [signal.SIGUSR1]


@pytest.mark.parametrize(
    "block", [lambda: Reporter().telling_slow_callbacks(), lambda: announcing_stop(lambda: None, {signal.SIGTERM})]
)
def test_no_thread_outlives_its_block(block):
    """One that ends while Python exits may free the run's tensors, which aborts the process after it printed all."""
    before = {*threading.enumerate()}
    for _ in range(20):
        with block():
            assert {*threading.enumerate()} - before
        assert not {*threading.enumerate()} - before
