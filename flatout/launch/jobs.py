"""Write a run as a job for Slurm, Kubernetes or SkyPilot, to be read, edited and submitted by hand."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flatout.environment import SECRET
from flatout.errors import Fix, UsageError
from flatout.io.text_template import render

TEMPLATES = Path(__file__).with_name("templates")
# Slurm's time limits: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S
TIME = re.compile(r"(\d+-)?\d+(:\d{1,2}){0,2}")
# Slurm: seconds before the time limit at which a run is asked to save, at most
NOTICE_S = 300
# Slurm: a shorter limit leaves no time to load a model and save
MIN_TIME_S = 240
# what the value of an option has to be, as a pattern and in words
PLAIN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "letters, digits, dot, _ and -"
LABEL = r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?", "at most 50 lower-case letters, digits and -, as Kubernetes allows"
IMAGE = r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,254}", "a container image, such as registry.example/flatout:1.0"
MOUNT = r"/.*", "an absolute path"


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """A run on a cluster; `argv` follows `python -P -m flatout`, where `python` is the interpreter there."""

    name: str
    nodes: int
    gpus_per_node: int
    argv: Sequence[str]
    python: str = "python"

    @property
    def command(self) -> list[str]:
        """The command as a list, so that no shell interprets the arguments."""
        return [self.python, "-P", "-m", "flatout", *self.argv]


def sbatch_script(
    job: ClusterJob,
    *,
    folder: Path,
    log_dir: Path,
    partition: str | None = None,
    account: str | None = None,
    time: str = "24:00:00",
    max_restarts: int = 3,
    on_cpu: bool = False,
) -> str:
    """Return the script: values, and slurm.sh with what it does; one task per GPU, ranks from srun.

    `time` is in Slurm's format; the job runs in `folder`. With `on_cpu`, the tasks ask for no GPUs. The job requeues
    itself whenever the run was saved, and `max_restarts` times after crashes and lost ranks, which it counts in a file
    beside its log: SLURM_RESTART_COUNT counts both. Raises UsageError for a name or time that is not valid in an
    #SBATCH line, and for a limit under 4 minutes; 0 is no limit.
    """
    _require(PLAIN, {"--name": job.name, "--partition": partition, "--account": account})
    # every rank gets SIGTERM so many seconds before the time limit; the run saves and exits with code 75
    return render(
        TEMPLATES / "slurm.sh", job=job, command=shlex.join(job.command), on_cpu=on_cpu, partition=partition,
        account=account, time=time, notice_s=_notice_s(time), max_restarts=max_restarts,
        folder=shlex.quote(str(folder)), logs=shlex.quote(str(log_dir)),
    )  # fmt: skip


def _notice_s(time: str) -> int:
    """Return how many seconds before the time limit a run is asked to save. Raises UsageError for the limit."""
    if not TIME.fullmatch(time):
        words = f"--time is {time!r}, which is not Slurm's format: 90 (minutes), 12:00:00 or 2-00:00:00 (two days)"
        fixes = []
        given = re.fullmatch(r"(\d+) ?([mhd])[a-z]*(?: ?(\d+) ?(?:m[a-z]*)?)?", time.lower())
        if given and int(given[1]) and (given[2] == "h" or not given[3]):
            end = {"m": "", "h": ":00:00", "d": "-00:00:00"}[given[2]]
            fixes = [Fix({"--time": given[1] + (f":{int(given[3]):02}:00" if given[3] else end)})]
        raise UsageError(words, fixes)
    days, dash, rest = time.rpartition("-")
    parts = rest.split(":")
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    limit_s = int(days or 0) * 86_400 + sum(int(part) * unit for part, unit in zip(parts, units, strict=False))
    # 0 is no limit
    if 0 < limit_s < MIN_TIME_S:
        raise UsageError(
            f"--time {time} is {limit_s} seconds in Slurm's format; a run needs at least {MIN_TIME_S // 60} minutes to "
            "start and to save before the limit, such as 12:00:00"
        )
    return min(NOTICE_S, limit_s // 4) if limit_s else NOTICE_S


def manifest(
    job: ClusterJob,
    image: str,
    claim: str,
    mount: str = "/work",
    *,
    kind: Literal["PyTorchJob", "TrainJob"] = "PyTorchJob",
    secret: str | None = None,
    runtime: str = "torch-distributed",
) -> str:
    """Return the manifest as YAML. In each pod flatout starts the ranks, from the operator's environment variables.

    All pods mount the volume claim `claim` at `mount`; the run folder must be inside it. `secret` is the name of the
    Secret with which nodes authenticate (key `secret`). A TrainJob patches the training runtime `runtime`, as Kubeflow
    Trainer 2.3 reads it. Raises UsageError for names that Kubernetes rejects.
    """
    _require(LABEL, {"--name": job.name, "--claim": claim, "--runtime": runtime})
    _require(IMAGE, {"--image": image})
    _require(MOUNT, {"--mount": mount})
    secret_key = {"secretKeyRef": {"name": secret, "key": "secret"}}
    env = [] if secret is None else [{"name": SECRET, "valueFrom": secret_key}]
    template = TEMPLATES / f"{kind.lower()}.yaml"
    return render(template, json.dumps, job=job, env=env, image=image, claim=claim, mount=mount, runtime=runtime)


def skypilot_task(job: ClusterJob, accelerator: str, *, is_spot: bool) -> str:
    """Return a SkyPilot task as YAML, which installs this clone of flatout on each node, and starts its ranks there.

    Raises UsageError for a name that SkyPilot rejects, and if this is no clone.
    """
    _require(PLAIN, {"--name": job.name, "--accelerator": accelerator})
    if not ((clone := TEMPLATES.parents[2]) / "pyproject.toml").is_file():
        raise UsageError("--skypilot installs flatout from a clone, which this installation is not; run it from one")
    facts = {"accelerator": accelerator, "clone": json.dumps(str(clone)), "is_spot": is_spot}
    return render(TEMPLATES / "skypilot.yaml", str, job=job, command=shlex.join(job.command), **facts)


def _require(form: tuple[str, str], values: Mapping[str, str | None]) -> None:
    """Raise UsageError for an option's value that has another form; None is none."""
    pattern, expected = form
    for option, text in values.items():
        if text is not None and not re.fullmatch(pattern, text):
            raise UsageError(f"{option} {text!r}: expected {expected}")
