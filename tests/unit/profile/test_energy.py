"""Joules of profiled steps, by a counter that the tests stand in for; and the counter of a real GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_profiler import STEP

from flatout.errors import ResourceError
from flatout.profile.profiler import Energy, Profiler
from flatout.track.record import RunEnd
from flatout.trainer.rank_meter import read_joules


def profiled(tmp_path: Path, read: Callable[[], float], **changes: float) -> list[str]:
    said: list[str] = []
    profiler = Profiler(tmp_path, 2, said.append, read_joules=read)
    for step in range(1, 6):
        torch.ones(8, 8).sum()
        profiler.on_step(replace(STEP, step=step, **changes))
    profiler.on_end(RunEnd("complete", 0, 1.0))
    return said


def test_the_line_says_what_the_counter_counted():
    energy = Energy(joules=1980.0, wall_s=3.0, num_steps=3, num_tokens=49_500)
    assert energy.line == (
        "energy: 660.0 J a step, 40.00 mJ a token, 660 W on average; 1,980.0 J in 3.00 s, within 3%; one GPU, idle "
        "power included"
    )


def test_the_counter_is_read_around_the_profiled_steps(tmp_path):
    counter = iter([1000.0, 1600.0])
    said = profiled(tmp_path, lambda: next(counter))
    energy = json.loads((tmp_path / "profile.json").read_text())["energy"]
    # two steps, each of 1000 tokens/s for 0.1 s
    assert (energy["joules"], energy["num_steps"], energy["num_tokens"]) == (600.0, 2, pytest.approx(200.0))
    assert energy["wall_s"] > 0
    (line,) = (line for line in said if line.startswith("energy:"))
    assert line.startswith("energy: 300.0 J a step, 3,000.00 mJ a token, ")
    assert next(counter, None) is None


def test_a_gpu_s_joules_are_for_its_own_share_of_the_tokens(tmp_path):
    counter = iter([0.0, 600.0])
    profiled(tmp_path, lambda: next(counter), num_ranks=4)
    energy = json.loads((tmp_path / "profile.json").read_text())["energy"]
    assert energy["num_tokens"] == pytest.approx(50.0)


def refusing() -> float:
    raise ResourceError("NVML does not give the energy of this GPU: Not Supported")


def failing_later(values: Iterator[float]) -> Callable[[], float]:
    def read() -> float:
        return value if (value := next(values, None)) is not None else refusing()

    return read


@pytest.mark.parametrize("read", [refusing, failing_later(iter([5.0]))])
def test_a_profile_without_a_counter_says_so_once_and_goes_on(tmp_path, read):
    said = profiled(tmp_path, read)
    lines = [line for line in said if line.startswith("energy:")]
    assert lines == ["energy: not measured: NVML does not give the energy of this GPU: Not Supported"]
    table = json.loads((tmp_path / "profile.json").read_text())
    assert table["energy"] is None
    assert table["num_steps"] == 2


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="this process uses a GPU")
def test_without_a_gpu_there_is_no_counter():
    with pytest.raises(ResourceError, match="this process uses no CUDA GPU"):
        read_joules()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_counter_of_a_gpu_moves():
    pytest.importorskip("pynvml")
    matrix = torch.randn(4096, 4096, device="cuda")
    first, deadline_s = read_joules(), time.monotonic() + 30
    while (joules := read_joules()) == first and time.monotonic() < deadline_s:
        matrix @ matrix
        torch.cuda.synchronize()
    # a tick of the counter, between a tenth and a few hundred joules
    assert 0 < joules - first < 1e4
