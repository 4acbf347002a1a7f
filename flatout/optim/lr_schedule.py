"""Learning-rate schedules, as pure functions of the number of updates."""

from __future__ import annotations

import math

from flatout.config.optim import ScheduleConfig

DEFAULT_WARMUP_RATIO = 0.03


def num_warmup_updates(schedule: ScheduleConfig, num_updates_total: int) -> int:
    """Return the number of warm-up updates: `warmup_steps`, or `warmup_ratio` of the run, rounded up."""
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    ratio = DEFAULT_WARMUP_RATIO if schedule.warmup_ratio is None else schedule.warmup_ratio
    return math.ceil(ratio * num_updates_total)


def warmup_note(schedule: ScheduleConfig, num_updates_total: int) -> str | None:
    """Say what becomes of a warm-up longer than the run, as in a short trial of other settings; None for any other."""
    warmup = num_warmup_updates(schedule, num_updates_total)
    if warmup <= num_updates_total:
        return None
    return (
        f"a warm-up of {warmup:,} steps is longer than the run of {num_updates_total:,}: the learning rate ends at "
        f"{num_updates_total / warmup:.0%} of optim.lr; lower schedule.warmup_steps, or set schedule.warmup_ratio"
    )


def lr_factor(schedule: ScheduleConfig, update: int, num_updates_total: int) -> float:
    """Return the fraction of the peak learning rate for update `update` (u, from 0) of `num_updates_total` (n).

    Warm-up over w updates: (u + 1) / w for u < w, so that the first update is not lost at a rate of zero. Afterwards,
    with x = (u - w) / (n - w) in [0, 1): constant 1, linear 1 - x, cosine (1 + cos(pi x)) / 2 (Loshchilov and Hutter
    2017, arXiv:1608.03983), wsd 1 and then linear over the last `decay_ratio` n updates (Hu et al. 2024,
    arXiv:2404.06395); scaled to end at `min_lr_ratio`. Steps that fp16 overflow skips are not updates, so a run that
    skips k of its n steps ends k updates before the schedule does.
    """
    warmup = num_warmup_updates(schedule, num_updates_total)
    if update < warmup:
        return (update + 1) / warmup
    x = min(1.0, (update - warmup) / max(1, num_updates_total - warmup))
    if schedule.kind == "constant":
        shape = 1.0
    elif schedule.kind == "linear":
        shape = 1.0 - x
    elif schedule.kind == "cosine":
        shape = 0.5 * (1.0 + math.cos(math.pi * x))
    else:
        decay = max(1, math.ceil(schedule.decay_ratio * num_updates_total))
        shape = min(1.0, (num_updates_total - update) / decay)
    return schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * max(0.0, shape)
