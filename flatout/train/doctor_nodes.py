"""What must be alike on every node: versions, and the run folder."""

from __future__ import annotations

import json
import platform
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flatout.parallel.rank import Rank
from flatout.train.doctor_finding import Finding, fail, ok
from flatout.train.doctor_machine import smi_rows
from flatout.train.manifest import versions
from flatout.train.storage import Storage

TOKEN_NAME = ".doctor-token"
WAIT = timedelta(minutes=5)


@contextmanager
def joined(rank: Rank) -> Iterator[Rank | None]:
    """The group of all ranks over gloo, as a launcher's environment names it; None for one process alone."""
    if rank.world == 1:
        yield None
        return
    dist.init_process_group("gloo", rank=rank.index, world_size=rank.world, timeout=WAIT)
    try:
        yield rank
    finally:
        dist.destroy_process_group()


def gather(value: Any, rank: Rank) -> list[Any]:
    """Every rank's JSON value, in the order of ranks, on every rank; sent as JSON bytes, never as objects."""
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(rank.world)]
    dist.all_gather(sizes, torch.tensor([len(content)]))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(content)] = content
    parts = [torch.empty_like(padded) for _ in range(rank.world)]
    dist.all_gather(parts, padded)
    return [json.loads(bytes(part[: int(size)].tolist())) for part, size in zip(parts, sizes, strict=True)]


def node_facts() -> dict[str, str]:
    """What has to be the same on every node."""
    drivers = smi_rows("gpu", ("driver_version",))
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    facts = {"CUDA": torch.version.cuda or "none", "NCCL": nccl, "machine": platform.machine()}
    return versions() | facts | {"driver": drivers[0]["driver_version"] if drivers else "none"}


def compare_nodes(everyone: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """One line: all alike, or what differs on which host."""
    first = everyone[0]
    different = []
    for node in everyone[1:]:
        for name in sorted({*first["versions"], *node["versions"]}):
            ours, theirs = first["versions"].get(name, "none"), node["versions"].get(name, "none")
            if ours != theirs:
                different.append(f"{name} {ours} on {first['host']}, {theirs} on {node['host']}")
    if different:
        got = "; ".join(dict.fromkeys(different))
        yield fail("versions", got, "install the same versions on all nodes")
    else:
        yield ok("versions", f"equal on all {len(everyone)} ranks")


def see_one_folder(folder: Path, rank: Rank) -> bool:
    """Whether this rank reads in the run folder what the first rank wrote there. A folder made for it is removed."""
    was_there, token = folder.exists(), secrets.token_hex(16)
    path = folder / TOKEN_NAME
    if rank.is_first:
        Storage().make_dir(folder)
        Storage().write_bytes(path, token.encode())
    expected: str = gather(token, rank)[0]
    try:
        seen = path.read_text() == expected
    except OSError:
        seen = False
    # nobody still reads when it goes
    gather(seen, rank)
    if rank.is_first:
        Storage().remove_tree(path if was_there else folder)
    return seen
