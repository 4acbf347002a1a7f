"""`flatout doctor`: check for everything that can be known to fail, before a run takes a GPU."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from flatout.checkpoint.write import Checkpoints, Snapshot
from flatout.config.schema import Config
from flatout.doctor.finding import Finding, fail, ok, warn
from flatout.doctor.links import check_links
from flatout.doctor.machine import check_gpus, check_packages, check_torch
from flatout.doctor.nodes import check_shared_folder, compare_nodes, joined, node_facts
from flatout.errors import FlatoutError
from flatout.io.durable_io import Disk, DurableIO
from flatout.io.file_lock import RunLock
from flatout.models.load.source import check_source
from flatout.parallel.rank import Rank
from flatout.plan.devices import ANY_DEVICE, GIB
from flatout.plan.memory.budget import memory_model
from flatout.plan.memory.estimate import MicroBatchSize
from flatout.train.model_shape import read_shape

# size of the rehearsal's weights: large enough to measure the disk, small enough to be quick
REHEARSAL_BYTES = 32 << 20
SLOW_DISK_BYTES_PER_S = 50 << 20


def examine(config: Config | None, rank: Rank) -> list[Finding]:
    """Return all findings; the first rank gets those of every node, the others an empty list.

    A check that raises a FlatoutError becomes a failed finding. With several ranks, the first one of each node checks
    its machine, and all take part in comparing nodes.
    """
    with joined(rank) as group:
        found: list[Finding] = []
        if rank.local_index == 0:
            found += _told("machine", _machine(config))
            if config is not None and rank.is_first:
                found += _told("model", check_model(config))
                found += _told("run folder", check_run_folder(config))
        if rank.world == 1:
            return found
        facts = {"host": socket.gethostname(), "findings": list(map(asdict, found)), "versions": node_facts()}
        everyone = group.all_gather(facts)
        all_found = [Finding(**values | {"where": node["host"]}) for node in everyone for values in node["findings"]]
        all_found.append(compare_nodes(everyone))
        if config is not None:
            all_found.append(check_shared_folder(config.folder, group, [node["host"] for node in everyone]))
        return all_found if rank.is_first else []


def _told(what: str, check: Iterator[Finding]) -> Iterator[Finding]:
    """Yield the findings of one check; a FlatoutError ends it with a failed finding."""
    try:
        yield from check
    except FlatoutError as error:
        yield fail(what, str(error), "do what the line says")


def _machine(config: Config | None) -> Iterator[Finding]:
    wanted = "auto" if config is None else config.wanted_device
    yield from check_torch(wanted)
    yield from check_packages()
    if wanted != "cpu":
        yield from check_gpus()
        yield from check_links()


def check_model(config: Config) -> Iterator[Finding]:
    """Check that the model's folder or hub id exists, is complete, and contains only data."""
    check_source(config.model.name, config.model.revision, needs_weights=config.model.init == "pretrained")
    yield ok("model", f"{config.model.name}: config.json and weights are there")


def check_run_folder(config: Config) -> Iterator[Finding]:
    """Check that the run folder can be written and locked, has space for two checkpoints, and passes the rehearsal.

    A folder that did not exist before is removed again.
    """
    folder, was_there = config.folder, config.folder.exists()
    try:
        with RunLock(folder):
            yield ok("run folder", f"{folder.absolute()}: writable, locked by nobody")
            yield from check_space(config)
            yield from rehearse(folder)
    finally:
        if not was_there and folder.exists():
            DurableIO().remove_tree(folder)


def checkpoint_bytes(config: Config) -> int:
    """Return the size of one checkpoint in bytes: the trained weights in their dtype, and the optimizer's state."""
    shape = read_shape(config.model.name, config.model.revision)
    # with `update: backward` the estimate counts one tensor's gradient, but the checkpoint holds every weight
    config = config.model_copy(update={"full": config.full.model_copy(update={"update": "step"})})
    estimate = memory_model(config, shape, ANY_DEVICE).estimate(MicroBatchSize(1, 1, 1), "none")
    # the gradients have the size of the trained weights
    return estimate.gradients_bytes + estimate.optimizer_bytes


def check_space(config: Config, disk: Disk | None = None) -> Iterator[Finding]:
    """Check for disk space for two checkpoints of this run, and for all that rotation keeps."""
    one, free = checkpoint_bytes(config), (disk or Disk()).free_bytes(config.folder)
    size = f"{one / GIB:,.1f} GiB" if one >= GIB else f"{one / 2**20:,.1f} MiB"
    got = f"{free / GIB:,.1f} GiB free; a checkpoint of this run takes {size}"
    # a new checkpoint is complete before an older one is removed
    num_kept = config.checkpoint.keep + 2
    if free < 2 * one:
        yield fail("disk space", got, "free space, or set run_dir on a larger disk")
    elif free < num_kept * one:
        yield warn("disk space", f"{got}, and up to {num_kept} exist at once", "free space, or lower checkpoint.keep")
    else:
        yield ok("disk space", got)


def rehearse(folder: Path) -> Iterator[Finding]:
    """Save, find and load a small checkpoint in the run folder as a run does, and remove it again."""
    weights = torch.randn(REHEARSAL_BYTES // 4, generator=torch.Generator().manual_seed(0))
    tensors = {"model": {"weights": weights}, "optimizer": {"step": torch.ones(1)}}
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as place:
        checkpoints = Checkpoints(Path(place), keep=1, on_event=lambda kind, facts: None)
        started = time.perf_counter()
        checkpoints.save(Snapshot(1, tensors, {"rehearsal": True}))
        saved_s = time.perf_counter() - started
        snapshot = checkpoints.newest()
    if snapshot is None or not torch.equal(snapshot.tensors["model"]["weights"], weights):
        yield fail("rehearsal", "what was saved is not what was loaded", "do not trust this disk; set another run_dir")
        return
    got = f"saved, verified and loaded {REHEARSAL_BYTES >> 20} MiB at {REHEARSAL_BYTES / saved_s / 2**20:,.0f} MiB/s"
    if REHEARSAL_BYTES / saved_s < SLOW_DISK_BYTES_PER_S:
        yield warn("rehearsal", got, "checkpoints will be slow: raise checkpoint.every_steps, or use a faster disk")
    else:
        yield ok("rehearsal", got)
