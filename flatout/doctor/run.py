"""`flatout doctor`: check for everything that can be known to fail, before a run takes a GPU."""

from __future__ import annotations

import itertools
import platform
import secrets
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from flatout.checkpoint.manifest import versions
from flatout.checkpoint.write import Checkpoints, Snapshot
from flatout.config.folders import require_own
from flatout.config.schema import Config
from flatout.errors import FlatoutError, counted, first_line
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
GPU_FIELDS = ("index", "uuid", "name", "driver_version", "memory.total", "memory.used")
PROCESS_FIELDS = ("gpu_uuid", "pid", "used_memory", "process_name")
SMI_TIMEOUT_S = 20
# an idle GPU still shows some memory in use, by the driver
FREE_MIB = 1024
COPY_BYTES = 256 << 20
NUM_COPIES = 4
# PCIe 4.0 x16 reaches about 25 GB/s; anything below this points to a problem between the GPUs
SLOW_BYTES_PER_S = 8e9
OPTIONAL = {
    "nvidia-cudnn-frontend": "faster packed attention",
    "torchao": "fp8 for full fine-tuning",
    "flash-attn-4": "FlashAttention-4",
    "deepspeed": "strategy: deepspeed",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What was checked, what was found, and what to do about it."""

    status: Literal["ok", "warn", "fail"]
    """warn: a run works, but not as well as it could; fail: it would not work."""
    what: str
    got: str
    do: str = ""
    where: str = ""
    """The node; empty if there is only one."""


ok, warn, fail = partial(Finding, "ok"), partial(Finding, "warn"), partial(Finding, "fail")


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


def check_machine(wanted: str) -> Iterator[Finding]:
    """Check torch, packages and, unless `wanted` is cpu, every GPU and the links between them."""
    yield from check_torch(wanted)
    yield from _check_packages()
    if wanted == "cpu":
        return
    gpus = smi_rows("gpu", GPU_FIELDS)
    if gpus:
        yield ok("driver", gpus[0]["driver_version"])
    yield from judge_gpus(gpus, smi_rows("compute-apps", PROCESS_FIELDS))
    yield from _check_links()


def check_torch(wanted: str) -> Iterator[Finding]:
    """Check torch's build, CUDA and NCCL; a build that cannot use the GPUs of this machine is a failure."""
    cuda = torch.version.cuda or "none"
    yield ok("torch", f"{torch.__version__}, CUDA {cuda}, gloo {dist.is_gloo_available()}")
    if torch.cuda.is_available():
        num_gpus = torch.cuda.device_count()
        yield ok("CUDA", f"{counted(num_gpus, 'GPU')} visible, cuDNN {torch.backends.cudnn.version()}")
        if dist.is_nccl_available():
            yield ok("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
        elif num_gpus > 1:
            yield fail("NCCL", "torch has none", "install a torch with NCCL, or train on one GPU")
    elif smi_rows("gpu", ("index",)):
        why = "torch is a CPU build" if torch.version.cuda is None else f"the driver does not support CUDA {cuda}"
        got = f"this machine has GPUs, but {why}"
        yield ok("CUDA", got) if wanted == "cpu" else fail("CUDA", got, "install a torch build that matches the driver")
    elif wanted == "cuda":
        yield fail("CUDA", "no GPU", "set device=cpu, or use a machine with a GPU")
    else:
        yield ok("CUDA", "no GPU")


def _check_packages() -> Iterator[Finding]:
    """Check the versions of required packages, optional packages, and what compiles Triton's launchers."""
    wrong = []
    # None if flatout runs from a source tree without being installed
    required = metadata.requires("flatout") if _version("flatout") else None
    for requirement in map(Requirement, required or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version or 'is missing'}, needs {requirement.specifier}")
    if wrong:
        yield fail("packages", "; ".join(wrong), "upgrade these packages with pip install -U")
    else:
        yield ok("packages", "all required packages are recent enough")
    described = (f"{package} {_version(package) or 'not installed'} ({use})" for package, use in OPTIONAL.items())
    yield ok("optional", "; ".join(described))
    if not torch.cuda.is_available():
        return
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    # nightly builds of torch ship it under the second name
    triton = _version("triton") or _version("pytorch-triton")
    if triton is None:
        yield warn("triton", "not installed", "install triton, or set compile=off")
    elif compiler is None or not (header := Path(sysconfig.get_path("include"), "Python.h")).is_file():
        do = "install gcc and python3-dev, with which Triton compiles, or set compile=off"
        yield warn("triton", f"{triton}, but no {'C compiler' if compiler is None else header}", do)
    else:
        yield ok("triton", f"{triton}, compiler {compiler}")


def judge_gpus(gpus: Sequence[Mapping[str, str]], processes: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """Yield a finding per GPU: ok if it is free, else a warning with the processes that use it.

    The rows come from nvidia-smi; a GPU whose memory it does not report is left out.
    """
    for gpu in gpus:
        total, used = gpu["memory.total"], gpu["memory.used"]
        if not (total.isdigit() and used.isdigit()):
            continue
        on_gpu = [process for process in processes if process["gpu_uuid"] == gpu["uuid"]]
        got = f"{gpu['name']}, {(int(total) - int(used)) / 1024:.1f} of {int(total) / 1024:.1f} GiB free"
        if int(used) < FREE_MIB and not on_gpu:
            yield ok(f"GPU {gpu['index']}", got)
            continue
        described = []  # `pid 7 (user, program) 3.2 GiB`, as far as the driver and the kernel report it
        for process in on_gpu:
            try:
                user = Path("/proc", process["pid"]).owner()
            except (OSError, KeyError):
                user = "another user"
            of_process = process["used_memory"]
            gib = f" {int(of_process) / 1024:.1f} GiB" if of_process.isdigit() else ""
            described.append(f"pid {process['pid']} ({user}, {Path(process['process_name']).name}){gib}")
        who = ", ".join(described) or "processes that this container cannot see"
        yield warn(f"GPU {gpu['index']}", f"{got}; used by {who}", "wait, stop them, or use other GPUs")


def _check_links() -> Iterator[Finding]:
    """Check peer access and measure the copy bandwidth of every pair of GPUs; the memory is freed afterwards."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    pairs = list(itertools.permutations(range(num_gpus), 2))
    if not pairs:
        return
    try:
        speeds = {pair: _bandwidth(*pair) for pair in pairs}
    except RuntimeError as error:
        # a GPU is full or has failed; the message says which
        yield warn("links", f"could not be measured: {first_line(error)}", "free the GPUs and run doctor again")
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
        return warn("links", got, "copies go through the host: check `nvidia-smi topo -m`, ACS and IOMMU settings")
    if speeds[slowest] < SLOW_BYTES_PER_S:
        return warn("links", got, "check `nvidia-smi topo -m`; these links will limit full fine-tuning")
    return ok("links", got)


def _bandwidth(source: int, target: int) -> float:
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


def smi_rows(what: str, fields: Sequence[str]) -> list[Mapping[str, str]]:
    """Return the rows of `nvidia-smi --query-<what>`; none if the program is missing, fails or does not answer."""
    command = ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_rows(done.stdout, fields) if done.returncode == 0 else []


def parse_rows(text: str, fields: Sequence[str]) -> list[Mapping[str, str]]:
    """Parse CSV without a header into rows by field name; lines with another number of fields are skipped."""
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines())
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
