from typing import Any

from flatout.trainer.metrics import STRAGGLER_STEPS, Stragglers


def test_a_straggler_is_named_once_it_lasts():
    told: list[tuple[str, Any]] = []
    stragglers = Stragglers(lambda kind, facts: told.append((kind, dict(facts))))
    for step in range(1, STRAGGLER_STEPS + 8):
        slow_s = 0.1 if step == 4 else 0.4
        stragglers.check(step, (0.1, slow_s, 0.12))
    assert told == [("straggler", {"rank": 1, "step": STRAGGLER_STEPS + 4, "busy_s": 0.4, "others_s": 0.11})]


def test_one_rank_and_idle_ranks_tell_nothing():
    told: list[Any] = []
    stragglers = Stragglers(lambda kind, facts: told.append(kind))
    for step in range(2 * STRAGGLER_STEPS):
        stragglers.check(step, ())
        stragglers.check(step, (0.0, 0.5, 0.0))
        stragglers.check(step, (0.3, 0.4))
    assert told == []
