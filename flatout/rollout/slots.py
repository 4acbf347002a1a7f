"""How many slots memory has room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from flatout.io.host_memory import available_host_bytes
from flatout.models.slot_cache import SlotCache
from flatout.rollout.answers import PendingCompletion
from flatout.rollout.backends import Slots, last_rows_of
from flatout.rollout.sampler import NoRoomError
from flatout.rollout.weights import Weights

MAX_SLOTS = 1024
# of free memory; the rest is for passes
MAX_SHARE = 0.7
# slots have a multiple of this many places
_PLACES_MULTIPLE = 16
_SLOTS_MULTIPLE = 16


def open_slots(weights: Weights, answers: Sequence[PendingCompletion]) -> tuple[Slots, int]:
    """Return slots for these answers, and how many: all, or as many as memory has room for, which is told.

    Raises NoRoomError if there is no room for one.
    """
    length = max(len(each.prompt_ids) + each.limit for each in answers)
    length += -length % _PLACES_MULTIPLE
    num_bytes = _bytes_of_a_token(weights, answers[0].prompt_ids[0]) * length
    budget = int(MAX_SHARE * free_bytes(weights.device))
    wanted = min(len(answers), MAX_SLOTS)
    # float8 products want a multiple of 16 rows
    unit = _SLOTS_MULTIPLE if weights.device.type == "cuda" else 1
    num_slots = weights.least(min(wanted + -wanted % unit, budget // num_bytes))
    if num_slots < 1:
        raise NoRoomError(
            f"an answer of {length:,} tokens with its prompt keeps {num_bytes / 2**30:.2f} GiB of keys and values, but "
            f"{budget / 2**30:.2f} GiB may be used; lower the number of new tokens or shorten the prompts"
        )
    num_slots -= num_slots % unit if num_slots > unit else 0
    if num_slots < wanted:
        weights.tell(
            f"{num_slots:,} of {len(answers):,} answers are sampled at once: each keeps {num_bytes / 2**20:,.0f} MiB "
            f"of keys and values, and {budget / 2**30:.1f} GiB may be used"
        )
    cache = SlotCache(num_slots, length)
    return Slots(weights, cache), num_slots


def _bytes_of_a_token(weights: Weights, token_id: int) -> int:
    """Return what all layers keep of a token, by a pass over one."""
    cache = SlotCache(1, 1)
    row = torch.zeros(1, dtype=torch.int64, device=weights.device)
    cache.fill(row, row)
    weights.logits(replace(last_rows_of([[token_id]], weights), cache=cache))
    if not cache.num_bytes:
        raise ValueError("no layer keeps keys and values")
    return cache.num_bytes


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a device."""
    if device.type != "cuda":
        available = available_host_bytes()
        return 1 << 33 if available is None else available
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
