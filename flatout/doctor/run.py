"""`flatout doctor`: check for everything that can be known to fail, before a run takes a GPU."""

from __future__ import annotations

import platform
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from flatout.checkpoint.manifest import versions
from flatout.checkpoint.write import Checkpoints, Snapshot
from flatout.config.folders import require_own
from flatout.config.schema import Config
from flatout.doctor.machine import Finding, check_machine, fail, ok, smi_rows, warn
from flatout.errors import FlatoutError
from flatout.io.durable_io import Disk, DurableIO
from flatout.io.file_lock import RunLock
from flatout.models.load.source import check_source
from flatout.parallel.control_group import ControlGroup
from flatout.parallel.process_group import join_group, leave_group
from flatout.parallel.rank import Rank
from flatout.planner.devices import ANY_DEVICE, GIB
from flatout.planner.memory.budget import memory_model
from flatout.planner.memory.sizes import MicroBatchSize
from flatout.planner.settings import PlanSettings
from flatout.trainer.model_shape import read_shape

JOIN_S = 300.0
# size of the rehearsal's weights: large enough to measure the disk, small enough to be quick
REHEARSAL_BYTES = 32 << 20
SLOW_DISK_BYTES_PER_S = 50 << 20


def examine(config: Config | None, rank: Rank) -> list[Finding]:
    """Return all findings; the first rank gets those of every node, the others an empty list.

    A check that raises a FlatoutError becomes a failed finding. With several ranks, the first one of each node checks
    its machine, and all take part in comparing nodes.
    """
    join_group(rank, torch.device("cpu"), join_s=JOIN_S)
    try:
        group = ControlGroup(rank)
        findings = _check_node(config, rank) if rank.local_index == 0 else []
        return findings if rank.world == 1 else _check_nodes(config, group, findings)
    finally:
        leave_group()


def _check_node(config: Config | None, rank: Rank) -> list[Finding]:
    checks = [("machine", check_machine("auto" if config is None else config.wanted_device))]
    if config is not None and rank.is_first:
        checks += [("model", _check_model(config)), ("run folder", _check_run_folder(config))]
    findings: list[Finding] = []
    for what, check in checks:
        try:
            findings.extend(check)
        except FlatoutError as error:
            do = " or ".join(map(str, error.fixes)) or "see the message above"
            findings.append(fail(what, error.text, do))
    return findings


def _check_model(config: Config) -> Iterator[Finding]:
    """Check that the model's folder or hub id exists, is complete, and contains only data."""
    check_source(config.model.name, config.model.revision, needs_weights=config.model.init == "pretrained")
    yield ok("model", f"{config.model.name}: found config.json and weights")


def _check_run_folder(config: Config) -> Iterator[Finding]:
    """Check that the run folder can be written and locked, its disk's space, and a checkpoint; leave nothing behind."""
    folder, was_there = config.folder, config.folder.exists()
    require_own(folder)
    try:
        with RunLock(folder, "doctor"):
            yield ok("run folder", f"{folder.absolute()}: writable and not locked")
            yield check_space(config)
            yield _rehearse(folder)
    finally:
        if not was_there and folder.exists():
            DurableIO().remove_tree(folder)


def check_space(config: Config, disk: Disk | None = None) -> Finding:
    """Check for disk space for two checkpoints of this run, and for all that rotation keeps."""
    one, free = checkpoint_bytes(config), (disk or Disk()).free_bytes(config.folder)
    size = f"{one / GIB:,.1f} GiB" if one >= GIB else f"{one / 2**20:,.1f} MiB"
    got = f"{free / GIB:,.1f} GiB free; a checkpoint of this run takes {size}"
    # a new checkpoint is complete before an older one is removed
    num_kept = config.checkpoint.keep + 2
    if free < 2 * one:
        return fail("disk space", got, "free space, or set run_dir on a larger disk")
    if free < num_kept * one:
        return warn("disk space", f"{got}, and up to {num_kept} exist at once", "free space, or lower checkpoint.keep")
    return ok("disk space", got)


def checkpoint_bytes(config: Config) -> int:
    """Return the size of one checkpoint in bytes: the trained weights in their dtype, and the optimizer's state."""
    shape = read_shape(config.model.name, config.model.revision, trained=config.model.trained_parts)
    # with `update: backward` the estimate counts one tensor's gradient, but the checkpoint holds every weight
    full = config.full.model_copy(update={"update": "step"})
    settings = PlanSettings.of(config.model_copy(update={"full": full}))
    estimate = memory_model(settings, shape, ANY_DEVICE).estimate(MicroBatchSize(1, 1, 1), "none")
    # the gradients have the size of the trained weights
    return estimate.gradients_bytes + estimate.optimizer_bytes


def _rehearse(folder: Path) -> Finding:
    """Save, find and load a small checkpoint in the run folder as a run does, and remove it again."""
    weights = torch.randn(REHEARSAL_BYTES // 4, generator=torch.Generator().manual_seed(0))
    tensors = {"model": {"weights": weights}, "optimizer": {"step": torch.ones(1)}}
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as place:
        checkpoints = Checkpoints(Path(place), keep=1, on_event=lambda kind, facts: None)
        started = time.perf_counter()
        checkpoints.save(Snapshot(1, tensors, {"rehearsal": True}))
        bytes_per_s = REHEARSAL_BYTES / (time.perf_counter() - started)
        snapshot = checkpoints.newest()
    if snapshot is None or not torch.equal(snapshot.tensors["model"]["weights"], weights):
        do = "do not trust this disk; set run_dir on a different one"
        return fail("rehearsal", "the loaded checkpoint differs from the saved one", do)
    got = f"saved, verified and loaded {REHEARSAL_BYTES >> 20} MiB at {bytes_per_s / 2**20:,.0f} MiB/s"
    if bytes_per_s < SLOW_DISK_BYTES_PER_S:
        return warn("rehearsal", got, "checkpoints will be slow: raise checkpoint.every_steps, or use a faster disk")
    return ok("rehearsal", got)


def _check_nodes(config: Config | None, group: ControlGroup, findings: list[Finding]) -> list[Finding]:
    """Compare all ranks; the first one gets the findings of every node and those of the comparison."""
    drivers = smi_rows("gpu", ("driver_version",))
    same = versions() | {
        "CUDA": torch.version.cuda or "none",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none",
        "machine": platform.machine(),
        "driver": drivers[0]["driver_version"] if drivers else "none",
    }
    everyone = group.all_gather(
        {"host": socket.gethostname(), "findings": [asdict(finding) for finding in findings], "versions": same}
    )
    all_found = [Finding(**values | {"where": node["host"]}) for node in everyone for values in node["findings"]]
    all_found.append(compare_nodes(everyone))
    if config is not None:
        all_found.append(_check_shared_folder(config.folder, group, [node["host"] for node in everyone]))
    return all_found if group.rank.is_first else []


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


def _check_shared_folder(folder: Path, group: ControlGroup, hosts: Sequence[str]) -> Finding:
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
        got = f"{folder.absolute()} is a different folder on {', '.join(blind)}"
        return fail("shared folder", got, "set run_dir on a disk that all nodes share")
    return ok("shared folder", f"all {len(hosts)} ranks see the same run folder")
