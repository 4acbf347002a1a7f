"""`flatout doctor`: everything that can be known to go wrong, looked at before a GPU is held."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from flatout.config.schema import Config
from flatout.errors import FlatoutError
from flatout.models.source import check_source, read_model_config
from flatout.parallel.rank import Rank
from flatout.plan.budget import memory_model
from flatout.plan.devices import ANY_DEVICE, GIB
from flatout.plan.memory import MicroBatchSize
from flatout.plan.shape import ModelShape
from flatout.train.checkpoint import Checkpoints, Snapshot
from flatout.train.doctor_finding import Finding, fail, ok, warn
from flatout.train.doctor_links import check_links
from flatout.train.doctor_machine import check_gpus, check_packages, check_torch
from flatout.train.doctor_nodes import compare_nodes, gather, joined, node_facts, see_one_folder
from flatout.train.lock import RunLock
from flatout.train.storage import Disk, Storage

# the rehearsal's weights: enough to measure the disk, too few to wait for
REHEARSAL_BYTES = 32 << 20
SLOW_DISK_BYTES_PER_S = 50 << 20


def examine(config: Config | None, rank: Rank) -> list[Finding]:
    """All findings, on the first rank those of every node; the others get an empty list.

    Nothing raises: what a check cannot do becomes a failed line. Under several ranks the first one of each node looks
    at its machine, and all take part in what compares nodes.
    """
    with joined(rank) as peers:
        found: list[Finding] = []
        if rank.local_index == 0:
            found += _told("machine", lambda: _machine(config))
            if config is not None and rank.is_first:
                found += _told("model", lambda: check_model(config))
                found += _told("run folder", lambda: check_run_folder(config))
        host = socket.gethostname()
        if peers is None:
            return found
        facts = {"host": host, "findings": [finding.to_json() for finding in found], "versions": node_facts()}
        everyone = gather(facts, rank)
        seen = gather(see_one_folder(config.folder, rank), rank) if config is not None else []
        if not rank.is_first:
            return []
        all_found = [Finding(**values | {"where": node["host"]}) for node in everyone for values in node["findings"]]
        return [*all_found, *compare_nodes(everyone), *(_shared(config, everyone, seen) if config is not None else ())]


def _told(what: str, check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """The findings of one check; an error of ours ends it as a failed line."""
    found: list[Finding] = []
    try:
        found.extend(check())
    except FlatoutError as error:
        found.append(fail(what, str(error), "do what the line says"))
    return found


def _machine(config: Config | None) -> Iterator[Finding]:
    wanted = "auto" if config is None else config.wanted_device
    yield from check_torch(wanted)
    yield from check_packages()
    if wanted != "cpu":
        yield from check_gpus()
        yield from check_links()


def check_model(config: Config) -> Iterator[Finding]:
    """The model's folder or hub id: there, whole, and only data."""
    check_source(config.model.name, config.model.revision, needs_weights=config.model.init == "pretrained")
    yield ok("model", f"{config.model.name}: config.json and weights are there")


def check_run_folder(config: Config) -> Iterator[Finding]:
    """The run folder can be written and locked, has room for two checkpoints, and a small one survives its rehearsal.

    Leaves the folder as it was: one that was not there is removed again.
    """
    folder, was_there = config.folder, config.folder.exists()
    try:
        with RunLock(folder):
            yield ok("run folder", f"{folder.absolute()}: writable, locked by nobody")
            yield from check_space(config)
            yield from rehearse(folder)
    finally:
        if not was_there and folder.exists():
            Storage().remove_tree(folder)


def checkpoint_bytes(config: Config) -> int:
    """Bytes of one checkpoint: the trained weights as they are kept, and the optimizer's state."""
    origin = f"{config.model.name}/config.json"
    shape = ModelShape.from_config(read_model_config(config.model.name, config.model.revision), origin=origin)
    # with update: backward the estimate counts one tensor's gradient; the checkpoint still holds every weight
    config = config.model_copy(update={"full": config.full.model_copy(update={"update": "step"})})
    estimate = memory_model(config, shape, ANY_DEVICE).estimate(MicroBatchSize(1, 1, 1), "none")
    # a gradient is as wide as the weight it belongs to
    return estimate.gradients_bytes + estimate.optimizer_bytes


def check_space(config: Config, disk: Disk | None = None) -> Iterator[Finding]:
    """Room for two checkpoints of this run, and for all that rotation keeps."""
    one, free = checkpoint_bytes(config), (disk or Disk()).free_bytes(config.folder)
    size = f"{one / GIB:,.1f} GiB" if one >= GIB else f"{one / 2**20:,.1f} MiB"
    got = f"{free / GIB:,.1f} GiB free; a checkpoint of this run takes {size}"
    # a new checkpoint is whole before an older one goes
    num_kept = config.checkpoint.keep + 2
    if free < 2 * one:
        yield fail("disk space", got, "free space, or set run_dir on a larger disk")
    elif free < num_kept * one:
        yield warn("disk space", f"{got}, and up to {num_kept} exist at once", "free space, or lower checkpoint.keep")
    else:
        yield ok("disk space", got)


def rehearse(folder: Path) -> Iterator[Finding]:
    """Save, find and load a small checkpoint in the run folder as a run does; it is removed again."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(REHEARSAL_BYTES // 4, generator=generator)
    tensors = {"model": {"weights": weights}, "optimizer": {"step": torch.ones(1)}, "rng-0": {"cpu": torch.ones(1)}}
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as place:
        checkpoints = Checkpoints(Path(place), keep=1, on_event=lambda kind, facts: None)
        started = time.perf_counter()
        checkpoints.save(Snapshot(1, tensors, {"rehearsal": True}))
        saved_s = time.perf_counter() - started
        snapshot = checkpoints.newest()
    if snapshot is None or not torch.equal(snapshot.tensors["model"]["weights"], weights):
        yield fail("rehearsal", "what was saved is not what was loaded", "do not trust this disk; set another run_dir")
        return
    speed = REHEARSAL_BYTES / saved_s
    got = f"saved, verified and loaded {REHEARSAL_BYTES >> 20} MiB at {speed / 2**20:,.0f} MiB/s"
    if speed < SLOW_DISK_BYTES_PER_S:
        yield warn("rehearsal", got, "checkpoints will be slow: raise checkpoint.every_steps, or use a faster disk")
    else:
        yield ok("rehearsal", got)


def _shared(config: Config, everyone: list[dict[str, str]], seen: list[bool]) -> Iterator[Finding]:
    blind = sorted({node["host"] for node, sees in zip(everyone, seen, strict=True) if not sees})
    if blind:
        got = f"{config.folder.absolute()} is another folder on {', '.join(blind)}"
        yield fail("shared folder", got, "set run_dir on a disk that all nodes have")
    else:
        yield ok("shared folder", f"all {len(everyone)} ranks see the run folder of the first one")
