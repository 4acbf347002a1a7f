"""Seed dropout from (seed, step, rank, micro-batch), so that no generator state has to be saved."""

from __future__ import annotations

import numpy as np
import torch


def seed_micro_batch(seed: int, *, step: int, rank: int, micro_batch: int) -> None:
    """Seed torch for one micro-batch's dropout: the same after a resume with the same ranks and micro-batches."""
    state = np.random.SeedSequence([seed, step, rank, micro_batch]).generate_state(2)
    torch.manual_seed(int(state[0]) << 32 | int(state[1]))
