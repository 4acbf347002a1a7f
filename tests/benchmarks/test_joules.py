"""The loop between two ticks of an energy counter, and what a step consists of; clock and counter are stand-ins."""

from __future__ import annotations

import pytest
from joules import Window, between_ticks, table


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
def test_a_window_ends_at_ticks_so_the_period_hardly_matters(period_s):
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


def test_a_step_s_rows_add_up_beside_whole_steps():
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
