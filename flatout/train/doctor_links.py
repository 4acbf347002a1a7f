"""How fast this machine's GPUs reach each other."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping

import torch

from flatout.train.doctor_finding import Finding, ok, warn

COPY_BYTES = 256 << 20
NUM_COPIES = 4
# PCIe 4.0 x16 reaches about 25 GB/s; below this something stands between the GPUs
SLOW_BYTES_PER_S = 8e9


def check_links() -> Iterator[Finding]:
    """Peer access of every pair and the measured bandwidth of copies from each GPU to each other; memory is freed."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus < 2:
        return
    pairs = list(itertools.permutations(range(num_gpus), 2))
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    try:
        speeds = {pair: bandwidth(*pair) for pair in pairs}
    except RuntimeError as error:
        # a full GPU, or one that has failed: the line says which
        yield warn("links", f"could not be measured: {str(error).splitlines()[0]}", "free the GPUs and look again")
        return
    finally:
        torch.cuda.empty_cache()
    yield judge_links(num_gpus, len(apart), speeds)


def judge_links(num_gpus: int, num_apart: int, speeds: Mapping[tuple[int, int], float]) -> Finding:
    """One line from the number of pairs without peer access and the bytes a second of each pair."""
    slowest = min(speeds, key=speeds.__getitem__)
    lowest, highest = speeds[slowest] / 1e9, max(speeds.values()) / 1e9
    got = (
        f"{num_gpus} GPUs, {len(speeds) - num_apart} of {len(speeds)} pairs with peer access, "
        f"{lowest:.0f} to {highest:.0f} GB/s (slowest {slowest[0]} to {slowest[1]})"
    )
    if num_apart:
        return warn("links", got, "copies go through the host: look at `nvidia-smi topo -m`, ACS and IOMMU settings")
    if speeds[slowest] < SLOW_BYTES_PER_S:
        return warn("links", got, "look at `nvidia-smi topo -m`; full fine-tuning over these GPUs will wait for them")
    return ok("links", got)


def bandwidth(source: int, target: int) -> float:
    """Bytes a second of copies from one GPU to another, the best of a few."""
    tensor = torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{source}")
    there = torch.empty_like(tensor, device=f"cuda:{target}")
    best_s = float("inf")
    for _ in range(NUM_COPIES + 1):
        _wait(source, target)
        started = time.perf_counter()
        there.copy_(tensor, non_blocking=True)
        _wait(source, target)
        best_s = min(best_s, time.perf_counter() - started)
    return COPY_BYTES / best_s


def _wait(source: int, target: int) -> None:
    torch.cuda.synchronize(source)
    torch.cuda.synchronize(target)
