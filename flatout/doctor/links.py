"""Measure the links between this machine's GPUs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping

import torch

from flatout.doctor.finding import Finding, ok, warn
from flatout.errors import first_line

COPY_BYTES = 256 << 20
NUM_COPIES = 4
# PCIe 4.0 x16 reaches about 25 GB/s; anything below this points to a problem between the GPUs
SLOW_BYTES_PER_S = 8e9


def check_links() -> Iterator[Finding]:
    """Check peer access and measure the copy bandwidth of every pair of GPUs; the memory is freed afterwards."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    pairs = list(itertools.permutations(range(num_gpus), 2))
    if not pairs:
        return
    try:
        speeds = {pair: bandwidth(*pair) for pair in pairs}
    except RuntimeError as error:
        # a GPU is full or has failed; the message says which
        yield warn("links", f"could not be measured: {first_line(error)}", "free the GPUs and look again")
        return
    finally:
        torch.cuda.empty_cache()
    yield judge_links(num_gpus, sum(not torch.cuda.can_device_access_peer(*pair) for pair in pairs), speeds)


def judge_links(num_gpus: int, num_apart: int, speeds: Mapping[tuple[int, int], float]) -> Finding:
    """Return a finding from the number of pairs without peer access and each pair's bandwidth in bytes per second."""
    slowest = min(speeds, key=speeds.__getitem__)
    got = (
        f"{num_gpus} GPUs, {len(speeds) - num_apart} of {len(speeds)} pairs with peer access, "
        f"{speeds[slowest] / 1e9:.0f} to {max(speeds.values()) / 1e9:.0f} GB/s (slowest {slowest[0]} to {slowest[1]})"
    )
    if num_apart:
        return warn("links", got, "copies go through the host: look at `nvidia-smi topo -m`, ACS and IOMMU settings")
    if speeds[slowest] < SLOW_BYTES_PER_S:
        return warn("links", got, "look at `nvidia-smi topo -m`; full fine-tuning over these GPUs will wait for them")
    return ok("links", got)


def bandwidth(source: int, target: int) -> float:
    """Return the bandwidth of a copy from one GPU to another in bytes per second, the best of a few."""
    tensor = torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{source}")
    there = torch.empty_like(tensor, device=f"cuda:{target}")
    best_s = float("inf")
    for _ in range(NUM_COPIES + 1):
        started = time.perf_counter()
        there.copy_(tensor, non_blocking=True)
        for gpu in (source, target):
            torch.cuda.synchronize(gpu)
        best_s = min(best_s, time.perf_counter() - started)
    return COPY_BYTES / best_s
