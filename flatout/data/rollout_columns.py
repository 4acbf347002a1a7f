"""Columns of rollouts that a store may lack, as policy losses read them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from flatout.config.objective import ANSWERS, POLICY_LOGPROB, SAMPLER_LOGPROB
from flatout.data.columns import Column
from flatout.data.token_store import TokenStore

ENDINGS: tuple[Literal["stop", "length", "positions"], ...] = ("stop", "length", "positions")
"""Why an answer ended, by its number in a store: a stop token, max_new_tokens, or no further position of the model."""


def with_rollout_columns(store: TokenStore) -> TokenStore:
    """Return a store that has SAMPLER_LOGPROB with those of POLICY_LOGPROB and ANSWERS that it lacks, in memory."""
    columns, extra = dict[str, Column](store.columns), dict[str, Any](store.extra)
    if POLICY_LOGPROB not in columns:
        columns[POLICY_LOGPROB], extra[POLICY_LOGPROB] = columns[SAMPLER_LOGPROB], extra[SAMPLER_LOGPROB]
    if ANSWERS not in columns:
        columns[ANSWERS] = Column("float32", "sample", "for how many answers of its round it counts", ANSWERS)
        extra[ANSWERS] = np.ones(store.num_samples, np.float32)
    return replace(store, columns=columns, extra=extra)
