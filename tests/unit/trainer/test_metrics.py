"""Utilisation by hand: the plan's FLOPs without recomputation, over the peak of all ranks."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flatout.config.read import make_config
from flatout.models.auxiliary_loss import AuxiliaryLoss
from flatout.planner.cost import CostModel
from flatout.planner.devices import nominal_peak
from flatout.planner.steps.step_plan import BatchLayout, Samples, assemble
from flatout.trainer import metrics
from flatout.trainer import step as step_module
from flatout.trainer.metrics import Meter, device_peak, useful_flops
from flatout.trainer.run import train
from flatout.trainer.step import StepOutcome

USEFUL = CostModel(per_token=10.0, per_pair=2.0, per_label=3.0)
COST = CostModel(per_token=15.0, per_pair=3.0, per_label=3.0, useful=USEFUL)


def make_run(records: list[Any], stages: list[str], **changes: Any) -> Any:
    samples = Samples(np.array([4, 1, 7, 2]), np.array([2, 1, 3, 0]))
    layout = BatchLayout(2, 100, COST)
    plan = SimpleNamespace(
        samples=samples, batch_layout=layout, num_steps=2, epoch_after=lambda _: 1.0, padding_avoided=lambda _: 0.5,
        numbers=range(2),
    )  # fmt: skip
    told = {"record": records.append, "stage": lambda name, text: stages.append(text), "event": lambda *told: None}
    reporter = SimpleNamespace(**told)
    config = SimpleNamespace(log_every_steps=1)
    values = {
        "plan": plan, "reporter": reporter, "config": config, "device": torch.device("cpu"), "dtype": torch.bfloat16,
        "aux_loss": AuxiliaryLoss(), "planned": SimpleNamespace(kl_pairs=None), "rank": SimpleNamespace(world=2),
        "loader": SimpleNamespace(wait_s=0.0), "progress": SimpleNamespace(elapsed_s=0),
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def steps(run: Any) -> list[Any]:
    return list(assemble(run.plan.samples, 3, run.plan.batch_layout, epoch=0, first_index=0))


def test_flops_by_hand():
    run = make_run([], [])
    first, second = steps(run)
    pairs = 4 * 5 / 2 + 1 + 7 * 8 / 2
    assert useful_flops(run, first) == 10 * (4 + 1 + 7) + 2 * pairs + 3 * (2 + 1 + 3)
    # a step without label tokens is skipped, so it computes nothing
    assert second.num_label_tokens == 0
    assert useful_flops(run, second) == 0


def test_utilisation_is_the_share_of_all_ranks_peak(monkeypatch):
    records, stages = [], []
    run = make_run(records, stages)
    peak = nominal_peak("NVIDIA H200", "bf16")
    assert peak is not None
    monkeypatch.setattr(metrics, "device_peak", lambda _: peak)
    meter = Meter(run)
    assert stages == ["MFU against 989 TFLOP/s, bf16 dense, NVIDIA H200; without recomputation"]
    for step in steps(run):
        meter.end_step(step, StepOutcome(1.0, {"token_accuracy": 0.5}, 0.1, 1e-3))
    first, second = records
    assert first.flops_per_s == pytest.approx(useful_flops(run, steps(run)[0]) / first.step_s)
    assert first.mfu == pytest.approx(first.flops_per_s / (2 * 989e12))
    assert second.flops_per_s == second.mfu == 0


def test_steps_and_ranks_without_passes_do_not_lower_the_means():
    records: list[Any] = []
    run = make_run(records, [], config=SimpleNamespace(log_every_steps=2))
    meter = Meter(run)
    busy = {"forward_s": 2.0, "backward_s": 4.0, "data_wait_s": 1.0, "peak_memory_bytes": 8.0}
    idle = {"peak_memory_bytes": 6.0}
    first, second = steps(run)
    meter.end_step(first, StepOutcome(1.0, {"token_accuracy": 0.5}, 0.1, 1e-3, rank_figures=(busy, idle)))
    meter.end_step(
        second, StepOutcome(0.0, {"token_accuracy": 0.0}, 0.0, 0.0, "no label tokens", rank_figures=(idle, idle))
    )
    (record,) = records
    assert (record.forward_s, record.backward_s, record.data_wait_s) == (2.0, 4.0, 0.25)
    assert (record.peak_memory_bytes, record.mean_peak_memory_bytes) == (6, 6)
    # the second step computed none of its tokens
    assert record.tokens_per_s * record.step_s * 2 == pytest.approx(first.num_tokens)


@pytest.mark.parametrize(
    ("other", "expected"), [({"gpu_watts": 100.0, "gpu_use": 0.2}, (400.0, 0.5)), ({}, (None, None))]
)
def test_power_is_of_all_ranks_or_not_known(other, expected):
    records: list[Any] = []
    run = make_run(records, [])
    ranks = ({"gpu_watts": 300.0, "gpu_use": 0.8}, other)
    Meter(run).end_step(steps(run)[0], StepOutcome(1.0, {"token_accuracy": 0.5}, 0.1, 1e-3, rank_figures=ranks))
    assert (records[0].gpu_watts, records[0].gpu_use) == expected


def test_no_utilisation_where_no_peak_is_known():
    records, stages = [], []
    run = make_run(records, stages)
    Meter(run).end_step(steps(run)[0], StepOutcome(1.0, {"token_accuracy": 0.5}, 0.1, 1e-3))
    assert records[0].mfu is None
    assert records[0].flops_per_s > 0
    assert stages == []


@pytest.mark.parametrize(
    ("dtype", "sections", "arithmetic"),
    [
        (torch.bfloat16, {}, "bf16"),
        (torch.bfloat16, {"base": {"storage": "fp8"}}, "fp8"),
        (torch.bfloat16, {"base": {"backward": "fp8"}}, "fp8"),
        (torch.bfloat16, {"method": "full", "full": {"compute": "fp8"}}, "fp8"),
        (torch.float16, {}, "fp16"),
    ],
)
def test_the_peak_is_that_of_the_large_products(monkeypatch, dtype, sections, arithmetic):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    config = make_config({"model": {"name": "m"}, **sections})
    run = make_run([], [], device=torch.device("cuda", 0), dtype=dtype, config=config)
    assert device_peak(run) == nominal_peak("NVIDIA H200", arithmetic)
    run.dtype, run.config = torch.float32, make_config({"model": {"name": "m"}})
    assert device_peak(run) is None


def test_a_slow_step_is_slow_in_its_own_record(tiny, tmp_path, metrics_of, monkeypatch):
    """The host reads a step's figures after it has launched the next one; the last step has no next one."""
    plain = step_module.accumulate_gradients

    def slow_at_the_end(run: Any, step: Any) -> Any:
        if step.index + 1 == run.plan.num_steps:
            time.sleep(0.2)
        return plain(run, step)

    monkeypatch.setattr(step_module, "accumulate_gradients", slow_at_the_end)
    train(tiny.config(tmp_path / "run", optim={"name": "adamw8bit"}, batch={"max_steps": 3}))
    assert metrics_of(tmp_path / "run")[-1]["step_s"] >= 0.2
