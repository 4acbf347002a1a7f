"""The power and use of GPUs in the records of a run: by readings that the tests stand in for, and by a real driver."""

from __future__ import annotations

import pytest
import torch

from flatout.errors import ResourceError
from flatout.track.run_log import read_run
from flatout.trainer import rank_meter
from flatout.trainer.rank_meter import GpuUse
from flatout.trainer.run import train

UNKNOWN: dict[str, float] = {}


def test_power_is_the_mean_between_two_readings(monkeypatch):
    clock = [10.0]
    monkeypatch.setattr(rank_meter.time, "monotonic", lambda: clock[0])
    readings = [(1000.0, 0.5), (1600.0, 0.9), (1700.0, 0.1)]
    use = GpuUse(torch.device("cpu"), lambda: readings.pop(0))
    assert use.figures() == UNKNOWN
    clock[0] = 10.9
    assert use.figures() == UNKNOWN  # not read again within a second
    assert len(readings) == 2
    clock[0] = 12.0
    assert use.figures() == {"gpu_watts": 300.0, "gpu_use": 0.9}
    clock[0] = 12.5
    assert use.figures() == {"gpu_watts": 300.0, "gpu_use": 0.9}
    clock[0] = 14.0
    assert use.figures() == {"gpu_watts": 50.0, "gpu_use": 0.1}


def test_a_driver_that_does_not_answer_is_asked_once():
    asked = []

    def refuse() -> tuple[float, float]:
        asked.append(1)
        raise ResourceError("NVML does not give the energy of this GPU: Not Supported")

    use = GpuUse(torch.device("cuda"), refuse)
    assert [use.figures(), use.figures()] == [UNKNOWN, UNKNOWN]
    assert len(asked) == 1


@pytest.mark.gpu
def test_a_run_on_a_gpu_records_its_power(tiny, tmp_path):
    pytest.importorskip("pynvml")
    config = tiny.config(tmp_path / "run", device="cuda", batch={"max_steps": 400})
    train(config)
    known = [one for one in read_run(config.folder).steps if one.gpu_watts is not None]
    assert known
    assert all(10 < one.gpu_watts < 2000 and 0 <= (one.gpu_use or 0) <= 1 for one in known if one.gpu_watts)
