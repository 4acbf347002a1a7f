"""Advantages of answers from the rewards of groups; a group has all answers to one prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# added to a standard deviation, as TRL has it
STD_EPS = 1e-4


@dataclass(frozen=True, slots=True)
class Advantages:
    """What a round trains: `values` float64 (N,), an answer's advantage; `is_kept` bool (N,), whether it is trained."""

    values: Floats
    is_kept: NDArray[np.bool_]
    num_dropped: int
    """Groups without signal: the rewards that their answers are compared by are equal, or none is scored."""
    count: float
    """For how many answers a kept one counts, as scored ones of dropped groups count too: the column ANSWERS."""


def make_advantages(
    rewards: Floats, sizes: NDArray[np.int64], baseline: str, *, is_masked: NDArray[np.bool_] | None = None
) -> Advantages:
    """Return the advantages of answers with `rewards` (N,), NaN for one without, in groups of `sizes` (G,).

    `baseline` is one of BASELINES. `is_masked` (N,) has answers to leave out of training alone, such as those that
    ended by length (arXiv:2503.14476, section 3.4). Whether a group has a signal is decided by equality of rewards, so
    rounding makes none.
    """
    is_scored = ~np.isnan(rewards)
    is_trained = is_scored if is_masked is None else is_scored & ~is_masked
    values, has_signal = np.zeros(len(rewards)), np.zeros(len(rewards), bool)
    compared = np.array([len(rewards)]) if baseline == "batch_mean" else sizes
    for members in _members(compared):
        members = members[is_scored[members]]
        own = rewards[members]
        if own.any() if baseline == "none" else (own != own[:1]).any():
            has_signal[members], values[members] = True, BASELINES[baseline](own)
    is_kept = is_trained & has_signal
    num_dropped = sum(not has_signal[own].any() for own in _members(sizes))
    return Advantages(values, is_kept, num_dropped, count=float(is_trained.sum() / max(1, is_kept.sum())))


def _members(sizes: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the numbers of the answers of each group."""
    return np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])


def _over_mean(rewards: Floats) -> Floats:
    return np.asarray(rewards - rewards.mean())


def _over_std(rewards: Floats) -> Floats:
    """(R - mean) / (std + 1e-4) with the unbiased standard deviation, over n - 1, as TRL and verl compute it."""
    return np.asarray(_over_mean(rewards) / (rewards.std(ddof=1) + STD_EPS))


def _over_others(rewards: Floats) -> Floats:
    """R - mean of the n - 1 others = n / (n - 1) (R - mean)   (arXiv:2402.14740, eq. 8)."""
    return np.asarray(_over_mean(rewards) * len(rewards) / (len(rewards) - 1))


# what becomes of the rewards of answers that are compared, which are not all equal
BASELINES: Mapping[str, Callable[[Floats], Floats]] = MappingProxyType(
    {
        "mean_std": _over_std,
        "mean": _over_mean,
        "leave_one_out": _over_others,
        "batch_mean": _over_mean,
        "none": np.copy,
    }
)
