"""Check that all nodes have the same versions and share the run folder."""

from __future__ import annotations

import platform
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flatout.checkpoint.manifest import versions
from flatout.doctor.finding import Finding, fail, ok
from flatout.doctor.machine import smi_rows
from flatout.io.durable_io import DurableIO
from flatout.parallel.control_group import ControlGroup
from flatout.parallel.process_group import join_group, leave_group
from flatout.parallel.rank import Rank

WAIT_S = 300.0


@contextmanager
def joined(rank: Rank) -> Iterator[ControlGroup]:
    """Join the group of all ranks over gloo, as set in the launcher's environment, and leave it on exit."""
    join_group(rank, torch.device("cpu"), join_s=WAIT_S)
    try:
        yield ControlGroup(rank)
    finally:
        leave_group()


def node_facts() -> dict[str, str]:
    """Return the facts that must be the same on every node."""
    drivers = smi_rows("gpu", ("driver_version",))
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    facts = {"CUDA": torch.version.cuda or "none", "NCCL": nccl, "machine": platform.machine()}
    return versions() | facts | {"driver": drivers[0]["driver_version"] if drivers else "none"}


def compare_nodes(everyone: Sequence[Mapping[str, Any]]) -> Finding:
    """Return a finding: versions are equal on all ranks, or what differs on which host."""
    first = everyone[0]
    different = {
        f"{name} {first['versions'].get(name, 'none')} on {first['host']}, "
        f"{node['versions'].get(name, 'none')} on {node['host']}": None
        for node in everyone[1:]
        for name in sorted({*first["versions"], *node["versions"]})
        if first["versions"].get(name) != node["versions"].get(name)
    }
    if different:
        return fail("versions", "; ".join(different), "install the same versions on all nodes")
    return ok("versions", f"equal on all {len(everyone)} ranks")


def check_shared_folder(folder: Path, group: ControlGroup, hosts: Sequence[str]) -> Finding:
    """Check that every rank can read what the first one writes to the run folder; a folder made for it is removed."""
    was_there, path, token = folder.exists(), folder / ".doctor-token", secrets.token_hex(16)
    if group.rank.is_first:
        DurableIO().make_dir(folder)
        DurableIO().write_bytes(path, token.encode())
    expected = group.all_gather(token)[0]
    try:
        sees = path.read_text() == expected
    except OSError:
        sees = False
    blind = sorted({host for host, seen in zip(hosts, group.all_gather(sees), strict=True) if not seen})
    if group.rank.is_first:
        DurableIO().remove_tree(path if was_there else folder)
    if blind:
        got = f"{folder.absolute()} is another folder on {', '.join(blind)}"
        return fail("shared folder", got, "set run_dir on a disk that all nodes have")
    return ok("shared folder", f"all {len(hosts)} ranks see the run folder of the first one")
