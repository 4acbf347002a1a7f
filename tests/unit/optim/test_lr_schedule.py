import math

import pytest

from flatout.config.schema import ScheduleConfig
from flatout.optim.lr_schedule import lr_factor, num_warmup_updates, warmup_note

N = 100


def factors(**settings: object) -> list[float]:
    schedule = ScheduleConfig.model_validate(settings)
    return [lr_factor(schedule, update, N) for update in range(N)]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_warmup_is_linear_and_reaches_the_peak(kind):
    got = factors(kind=kind, warmup_steps=10)
    assert got[:10] == pytest.approx([(u + 1) / 10 for u in range(10)], abs=1e-15)
    assert got[10] == 1.0


def test_closed_forms():
    xs = [(u - 10) / 90 for u in range(10, N)]
    assert factors(kind="linear", warmup_steps=10)[10:] == pytest.approx([1 - x for x in xs], abs=1e-15)
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * x)) / 2 for x in xs]
    assert factors(kind="cosine", warmup_steps=10, min_lr_ratio=0.1)[10:] == pytest.approx(cosine, abs=1e-15)
    assert factors(kind="constant", warmup_steps=0) == [1.0] * N


def test_wsd_holds_then_decays_to_the_floor():
    got = factors(kind="wsd", warmup_steps=10, decay_ratio=0.2, min_lr_ratio=0.5)
    assert got[10:81] == [1.0] * 71
    assert got[80:] == pytest.approx([0.5 + 0.5 * (N - u) / 20 for u in range(80, N)], abs=1e-15)


def test_last_update_of_linear_is_not_zero_and_the_end_would_be():
    schedule = ScheduleConfig(kind="linear", warmup_steps=0)
    assert lr_factor(schedule, N - 1, N) == pytest.approx(1 / N)
    assert lr_factor(schedule, N, N) == 0.0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, 3), ({"warmup_ratio": 0.0}, 0), ({"warmup_ratio": 0.015}, 2), ({"warmup_steps": 7}, 7)],
)
def test_warmup_length(settings, expected):
    assert num_warmup_updates(ScheduleConfig.model_validate(settings), N) == expected


def test_a_one_step_run_trains_at_the_peak():
    assert lr_factor(ScheduleConfig(), 0, 1) == 1.0


def test_a_warm_up_longer_than_the_run_is_told_and_rises_as_in_other_trainers():
    assert warmup_note(ScheduleConfig(warmup_steps=5), 5) is None
    assert warmup_note(ScheduleConfig(), 1) is None
    schedule = ScheduleConfig(warmup_steps=6)
    said = "a warm-up of 6 steps is longer than the run of 3: the learning rate ends at 50% of optim.lr; "
    assert str(warmup_note(schedule, 3)).startswith(said)
    assert [lr_factor(schedule, update, 3) for update in range(3)] == pytest.approx([1 / 6, 2 / 6, 3 / 6])
