"""Randomness of training as a function of the position in the plan, so that resuming needs no luck."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def seed_micro_batch(seed: int, *, step: int, rank: int, micro_batch: int) -> None:
    """Dropout's random numbers for one micro-batch: the same after any resume, different on every rank."""
    state = np.random.SeedSequence([seed, step, rank, micro_batch]).generate_state(2)
    torch.manual_seed(int(state[0]) << 32 | int(state[1]))


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """This rank's generator states, uint8 tensors."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def load_rng_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Put back what `rng_state` gave; a GPU's state is left out when the run goes on without one."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
