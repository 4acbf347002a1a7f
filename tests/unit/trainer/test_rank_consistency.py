"""One plan for GPUs that differ."""

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from flatout.config.read import make_config
from flatout.errors import UsageError
from flatout.parallel.rank import Rank
from flatout.planner.devices import GIB, Device, weakest
from flatout.trainer import steps_and_memory


def test_all_ranks_plan_for_what_each_can():
    large, small, old = Device("H200", 139 * GIB), Device("L40S", 44 * GIB), Device("T4", 45 * GIB, has_bf16=False)
    assert weakest([large, large]) == large
    assert weakest([large, small]) == Device("L40S (the smallest of 2 GPUs)", 44 * GIB)
    assert weakest([old, large, small]) == Device("L40S (the smallest of 3 GPUs)", 44 * GIB, has_bf16=False)
    # the same model with less memory free
    assert weakest([large, Device("H200", 138 * GIB)]) == Device("H200", 138 * GIB)


def test_one_precision_for_all(monkeypatch):
    new, old = Device("H200", 139 * GIB), Device("T4", 15 * GIB, has_bf16=False)
    monkeypatch.setattr(steps_and_memory, "gpu_of", lambda config, rank: new)

    def plan_for(precision: str, *gpus: Device) -> Device | None:
        config = make_config({"model": {"name": "m", "precision": precision}})
        gathered = [(host, asdict(one)) for host, one in zip("ab", gpus, strict=True)]
        group: Any = SimpleNamespace(rank=Rank(0, 2), all_gather=lambda mine: gathered)
        return steps_and_memory.weakest_gpu(config, group)

    with pytest.raises(UsageError, match="rank 1 on b: its T4 has no bf16") as refused:
        plan_for("auto", new, old)
    settings = [fix.settings for fix in refused.value.fixes if fix.settings]
    assert settings == [{"model.precision": "fp16"}, {"model.precision": "fp32"}]
    assert plan_for("auto", new, new) == new
    assert plan_for("auto", old, old) == old
    mixed = plan_for("fp16", new, old)
    assert mixed is not None
    assert not mixed.has_bf16
