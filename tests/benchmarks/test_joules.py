"""The loop between two ticks of an energy counter, and what a step consists of; clock and counter are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import joules
import pytest
import torch
from bench.shapes import shape_config
from joules import StepEnergy, Window, between_ticks, groups_of, operations, table

from flatout.config.schema import BaseConfig
from flatout.track.record import StepRecord


class Machine:
    """A GPU of constant power whose counter moves every `period_s`, and a clock that only work moves."""

    def __init__(self, watts: float, period_s: float, call_s: float) -> None:
        self.watts, self.period_s, self.call_s, self.now_s = watts, period_s, call_s, 0.037

    def work(self) -> int:
        self.now_s += 4 * self.call_s
        return 4

    def read(self) -> float:
        return self.watts * self.period_s * int(self.now_s / self.period_s + 1e-9)

    def clock(self) -> float:
        return self.now_s


@pytest.mark.parametrize("period_s", [0.02, 0.1])
def test_a_window_ends_at_ticks_so_the_period_hardly_matters(period_s: float) -> None:
    machine = Machine(watts=650.0, period_s=period_s, call_s=0.5e-3)
    window = between_ticks(machine.work, 2.0, machine.read, machine.clock)
    assert 2.0 <= window.wall_s < 2.0 + period_s + 0.01
    # a batch of 2 ms at each end
    assert window.watts == pytest.approx(650.0, rel=2e-3)
    figures = window.figures(idle_watts=150.0, calls=36)
    assert figures["ms"] == pytest.approx(0.5, rel=2e-3)
    assert figures["joules"] == pytest.approx(650 * 0.5e-3, rel=2e-3)
    assert figures["joules_above_idle"] == pytest.approx(500 * 0.5e-3, rel=4e-3)
    assert figures["joules_a_step"] == pytest.approx(36 * 650 * 0.5e-3, rel=2e-3)


def test_a_step_s_rows_add_up_beside_whole_steps() -> None:
    rows = [
        {"name": "a product", "category": "GEMM", **Window(2.0, 1400.0, 1000).figures(100.0, 36)},
        {"name": "the same in fp8", "category": "GEMM", **Window(2.0, 1400.0, 2000).figures(100.0, 0)},
        {"name": "a norm", "category": "norms, elementwise", **Window(2.0, 1000.0, 4000).figures(100.0, 72)},
    ]
    whole = {
        "num_steps": 2, "num_tokens": 2000, "step_s": 0.2, "micro_batches": 1.0, "joules_a_step": 100.0,
        "joules_a_token": 0.1, "joules_a_token_above_idle": 0.08, "watts": 500.0,
    }  # fmt: skip
    text = table(rows, 1000, whole)
    # 36 x 1.4 J and 72 x 0.25 J
    assert "| GEMM | 50.4 | 73.7% | 72.0 | 66.7% |" in text
    assert "| norms, elementwise | 18.0 | 26.3% | 36.0 | 33.3% |" in text
    assert "sum: 68.4 J and 108.0 ms for 1,000 tokens, 68.40 mJ a token" in text
    assert "sum / whole, a token: 0.684" in text


def test_whole_steps_count_the_step_that_runs_while_a_record_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    # steps 1 to 3 warm up, and step 4 has ended, too, when step 3's record waits for the GPU
    step_s, num_ended = [9.0, 9.0, 9.0, 9.0, 1.0, 2.0, 3.0], 0
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(joules.time, "perf_counter", lambda: sum(step_s[:num_ended]))
    monkeypatch.setattr(joules, "read_joules", lambda: 600.0 * sum(step_s[:num_ended]))
    energy = StepEnergy(len(step_s))
    for index in range(len(step_s)):
        num_ended = min(index + 2, len(step_s))
        energy.on_step(cast(StepRecord, SimpleNamespace(num_tokens=100 * step_s[index], num_micro_batches=1)))
    figures = energy.figures(idle=100.0)
    assert figures["num_steps"] == 3
    assert figures["step_s"] == pytest.approx(2.0)
    assert figures["joules_a_step"] == pytest.approx(1200.0)
    assert figures["joules_a_token"] == pytest.approx(6.0)
    assert figures["joules_a_token_above_idle"] == pytest.approx(5.0)


def test_the_products_are_those_of_the_shape() -> None:
    shape = shape_config("qwen3-8b")
    num_weights = shape["num_hidden_layers"] * sum(sum(out) * num_in for out, num_in in groups_of(shape).values())
    # 8.19 billion parameters without embedding, head and norms
    assert num_weights == 6_945_767_424


BASES = {
    "bf16": (BaseConfig(), ["bf16 forward", "bf16 input"], 0),
    "fp8": (BaseConfig(storage="fp8"), ["fp8 forward", "fp8 input"], 11),
    "fp8 backward": (BaseConfig(backward="fp8"), ["bf16 forward", "fp8 input"], 7),
}


@pytest.mark.parametrize(("base", "kinds", "num_quantized"), BASES.values(), ids=BASES.keys())
def test_every_operation_runs_and_a_step_has_those_of_its_configuration(
    base: BaseConfig, kinds: list[str], num_quantized: int
) -> None:
    shape = shape_config("tiny")
    layers, of_step = shape["num_hidden_layers"], dict[str, int]()
    # what is compiled on a GPU
    with torch.compiler.set_stance("force_eager"):
        for operation in operations(shape, [9, 30], base):
            operation.run()
            of_step[operation.name] = operation.calls
    products = {name: calls for name, calls in of_step.items() if name.startswith(("bf16", "fp8"))}
    assert len(products) == 16
    assert {name for name, calls in products.items() if calls} == {
        name for name in products if name.startswith(tuple(kinds))
    }
    assert set(products.values()) == {0, layers}
    # qkv, o, gate_up and down read four inputs and have seven gradients
    assert sum(calls for name, calls in of_step.items() if name.startswith("quantize")) == num_quantized * layers
    assert of_step["RMSNorm, both passes"] == 2 * layers + 1
    assert of_step["AdamW"] == of_step["loss head, both passes"] == 1
