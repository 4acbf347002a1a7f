"""This machine's driver, GPUs and packages, as `flatout doctor` tells them."""

from __future__ import annotations

import pwd
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from flatout.train.doctor_finding import Finding, fail, ok, warn

GPU_FIELDS = ("index", "uuid", "name", "driver_version", "memory.total", "memory.used")
PROCESS_FIELDS = ("gpu_uuid", "pid", "used_memory", "process_name")
SMI_TIMEOUT_S = 20
# a GPU without processes still shows some memory: the driver's own
FREE_MIB = 1024
# module -> package and what it is for
OPTIONAL = {
    "cudnn": ("nvidia-cudnn-frontend", "faster packed attention"),
    "torchao": ("torchao", "fp8 for full fine-tuning"),
    "flash_attn_interface": ("flash-attn-3", "FlashAttention-3"),
    "flash_attn.cute": ("flash-attn-4", "FlashAttention-4"),
    "deepspeed": ("deepspeed", "strategy: deepspeed"),
}
REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)\s*>=\s*([0-9.]+)\s*$")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One row of nvidia-smi; memory in MiB."""

    index: int
    uuid: str
    name: str
    driver: str
    total_mib: int
    used_mib: int


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds memory of a GPU; memory in MiB, None where the driver does not tell."""

    uuid: str
    pid: int
    used_mib: int | None
    name: str


def check_torch(wanted: str) -> Iterator[Finding]:
    """torch's build, its CUDA and NCCL; a build that cannot use the GPUs that are there fails."""
    cuda = torch.version.cuda or "none"
    yield ok("torch", f"{torch.__version__}, CUDA {cuda}, gloo {dist.is_gloo_available()}")
    available = torch.cuda.is_available()
    if not available and smi_rows("gpu", ("index",)):
        why = "torch is a CPU build" if torch.version.cuda is None else f"the driver does not serve CUDA {cuda}"
        got = f"GPUs are there, but {why}"
        do = "install a torch that fits the driver"
        yield ok("CUDA", got) if wanted == "cpu" else fail("CUDA", got, do)
    elif not available:
        got = "no GPU"
        yield fail("CUDA", got, "set device: cpu, or use a machine with a GPU") if wanted == "cuda" else ok("CUDA", got)
    else:
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None
        cudnn = torch.backends.cudnn.version()
        yield ok("CUDA", f"{torch.cuda.device_count()} GPU(s) visible, cuDNN {cudnn}")
        several = torch.cuda.device_count() > 1
        if nccl:
            yield ok("NCCL", nccl)
        elif several:
            yield fail("NCCL", "torch has none", "install a torch with NCCL, or train on one GPU")


def check_packages() -> Iterator[Finding]:
    """Required packages at their floors, optional ones, and a compiler for Triton's launchers."""
    old = [problem for package, floor in required() if (problem := _below(package, floor))]
    if old:
        yield fail("packages", "; ".join(old), "pip install -U these packages")
    else:
        yield ok("packages", "all required ones at their versions or newer")
    yield ok("optional", "; ".join(_optional(module) for module in OPTIONAL))
    if torch.cuda.is_available():
        compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
        if not _is_there("triton"):
            yield warn("triton", "not installed", "install triton, or set compile: off")
        elif compiler is None:
            do = "install gcc: Triton compiles its launchers with it; or set compile: off"
            yield warn("triton", f"{_version('triton')}, but no C compiler", do)
        else:
            yield ok("triton", f"{_version('triton')}, compiler {compiler}")


def _optional(module: str) -> str:
    package, purpose = OPTIONAL[module]
    return f"{package} {_version(package) if _is_there(module) else 'not installed'} ({purpose})"


def required() -> list[tuple[str, str]]:
    """(package, lowest version) of flatout's own requirements; empty where it runs from a bare source tree."""
    try:
        lines = metadata.requires("flatout") or []
    except metadata.PackageNotFoundError:
        return []
    return [(match[1], match[2]) for line in lines if (match := REQUIREMENT.match(line))]


def check_gpus() -> Iterator[Finding]:
    """Every GPU with its free memory, and who holds the rest."""
    gpus, holders = read_gpus(smi_rows("gpu", GPU_FIELDS)), read_holders(smi_rows("compute-apps", PROCESS_FIELDS))
    if gpus:
        yield ok("driver", gpus[0].driver)
    yield from judge_gpus(gpus, holders)


def judge_gpus(gpus: Sequence[Gpu], holders: Sequence[Holder]) -> Iterator[Finding]:
    """A line a GPU: ok when it is free, else a warning with the processes that hold it."""
    for gpu in gpus:
        held = [holder for holder in holders if holder.uuid == gpu.uuid]
        free_gib, total_gib = (gpu.total_mib - gpu.used_mib) / 1024, gpu.total_mib / 1024
        got = f"{gpu.name}, {free_gib:.1f} of {total_gib:.1f} GiB free"
        if gpu.used_mib < FREE_MIB and not held:
            yield ok(f"GPU {gpu.index}", got)
            continue
        who = ", ".join(describe(holder) for holder in held) or "processes that this container cannot see"
        yield warn(f"GPU {gpu.index}", f"{got}; held by {who}", "wait, stop them, or choose other GPUs")


def describe(holder: Holder) -> str:
    """`pid 7 (user, program) 3.2 GiB`."""
    used = "" if holder.used_mib is None else f" {holder.used_mib / 1024:.1f} GiB"
    return f"pid {holder.pid} ({_user(holder.pid)}, {Path(holder.name).name}){used}"


def smi_rows(what: str, fields: Sequence[str]) -> list[Mapping[str, str]]:
    """Rows of `nvidia-smi --query-<what>`; none without the program, when it fails, or when it does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_rows(done.stdout, fields) if done.returncode == 0 else []


def parse_rows(text: str, fields: Sequence[str]) -> list[Mapping[str, str]]:
    """CSV without a header as rows by field name; lines of another width are left out."""
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines())
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def read_gpus(rows: Sequence[Mapping[str, str]]) -> list[Gpu]:
    """GPUs from nvidia-smi's rows; one whose memory it does not tell is left out."""
    values = [[row[field] for field in GPU_FIELDS] for row in rows]
    return [
        Gpu(int(index), uuid, name, driver, int(total), int(used))
        for index, uuid, name, driver, total, used in values
        if index.isdigit() and total.isdigit() and used.isdigit()
    ]


def read_holders(rows: Sequence[Mapping[str, str]]) -> list[Holder]:
    """Processes from nvidia-smi's rows."""
    values = [[row[field] for field in PROCESS_FIELDS] for row in rows]
    return [
        Holder(uuid, int(pid), int(used) if used.isdigit() else None, name)
        for uuid, pid, used, name in values
        if pid.isdigit()
    ]


def _user(pid: int) -> str:
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
        return pwd.getpwuid(uid).pw_name
    except (OSError, KeyError):
        return "another user"


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _below(package: str, floor: str) -> str:
    """A text when the package is missing or older than `floor`; empty when it is good."""
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"{package} is missing, {floor} needed"
    return f"{package} {found}, {floor} needed" if _numbers(found) < _numbers(floor) else ""


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0+cpu is (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
