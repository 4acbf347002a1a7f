"""Check this machine: torch, packages, the driver, every GPU, and the links between the GPUs."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from flatout.errors import counted, first_line

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
    """What was checked, what was found, and what to do about it. `where` is the node, empty if there is only one.

    With `warn` a run works, but not as well as it could; with `fail` it would not work.
    """

    status: Literal["ok", "warn", "fail"]
    what: str
    got: str
    do: str = ""
    where: str = ""


ok, warn, fail = partial(Finding, "ok"), partial(Finding, "warn"), partial(Finding, "fail")


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
    """Check the versions of required packages, optional packages, and a C compiler for Triton's launchers."""
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
    elif compiler is None:
        do = "install gcc, which Triton needs, or set compile=off"
        yield warn("triton", f"{triton}, but no C compiler", do)
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
