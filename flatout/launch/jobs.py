"""Write a run as a job for Slurm or Kubernetes, to be read, edited and submitted by hand."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from flatout.environment import SECRET
from flatout.errors import UsageError

PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")
LABEL = re.compile(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?")
# seconds from SIGTERM to SIGKILL, in which a run saves
GRACE_S = 600
# of all pods of a PyTorchJob, which restarts them after any exit code
MAX_POD_RESTARTS = 10
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,254}")


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """A run on a cluster; `words` follow `python -m flatout`, where `python` is the interpreter there."""

    name: str
    nodes: int
    gpus_per_node: int
    words: Sequence[str]
    python: str = "python"

    @property
    def command(self) -> list[str]:
        """The command as a list, so that no shell interprets the words."""
        return [self.python, "-m", "flatout", *self.words]


def sbatch_script(
    job: ClusterJob,
    *,
    folder: Path,
    log_dir: Path,
    partition: str | None = None,
    account: str | None = None,
    time: str = "24:00:00",
    max_restarts: int = 3,
) -> str:
    """Return the script: one task per GPU, ranks from srun, and a signal to save before the time limit.

    `time` is in Slurm's format, such as 12:00:00 or 2-00:00:00; the job runs in `folder`. Raises UsageError for a name
    or time that is not valid in an #SBATCH line.
    """
    for option, text in (("--name", job.name), ("--partition", partition), ("--account", account)):
        if text is not None and not PLAIN.fullmatch(text):
            raise UsageError(f"{option} {text!r}: expected letters, digits, dot, _ and -")
    if not TIME.fullmatch(time):
        raise UsageError(f"--time {time!r}: expected Slurm's format, such as 12:00:00 or 2-00:00:00")
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.gpus_per_node,
        "gpus-per-node": job.gpus_per_node,
        "cpus-per-task": 8,
        "time": time,
        "partition": partition,
        "account": account,
        # five minutes before the time limit every rank gets SIGTERM; the run saves and exits with code 75
        "signal": "TERM@300",
    }
    lines = "\n".join(f"#SBATCH --{key}={value}" for key, value in options.items() if value is not None)
    return f"""#!/bin/bash
{lines}
#SBATCH --requeue

set -u
cd -- {shlex.quote(str(folder))} || exit 2
# Slurm does not create the folder of its log, so this script does
logs={shlex.quote(str(log_dir))}
mkdir -p -- "$logs" || exit 6
echo "the log is $logs/slurm-$SLURM_JOB_ID.log"
exec >>"$logs/slurm-$SLURM_JOB_ID.log" 2>&1
# ranks authenticate each other with it; it is not stored
FLATOUT_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export FLATOUT_SECRET
srun --kill-on-bad-exit=1 -- {shlex.join(job.command)}
code=$?
# 75: stopped and saved; 7: a rank was lost; both resume from the newest checkpoint
if [ "$code" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
if [ "$code" -eq 7 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {max_restarts} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


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
    _check_names((("--name", job.name), ("--claim", claim), ("--runtime", runtime)), image, mount)
    env = []
    if secret is not None:
        env = [{"name": SECRET, "valueFrom": {"secretKeyRef": {"name": secret, "key": "secret"}}}]
    resources = {"limits": {"nvidia.com/gpu": job.gpus_per_node}}
    mounts = [{"name": "work", "mountPath": mount}, {"name": "shm", "mountPath": "/dev/shm"}]
    # NCCL's shared memory does not fit into a container's default of 64 MB
    shm = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    pod: dict[str, Any] = {"terminationGracePeriodSeconds": GRACE_S, "containers": []}
    pod["volumes"] = [{"name": "work", "persistentVolumeClaim": {"claimName": claim}}, shm]
    spec: dict[str, Any]
    if kind == "PyTorchJob":
        api = "kubeflow.org/v1"
        container: dict[str, Any] = {"name": "pytorch", "image": image, "command": job.command, "workingDir": mount}
        pod["containers"].append(container | {"env": env, "resources": resources, "volumeMounts": mounts})
        roles = {"Master": 1, "Worker": job.nodes - 1}
        replicas = {"restartPolicy": "OnFailure", "template": {"spec": pod}}
        spec = {
            "runPolicy": {"backoffLimit": MAX_POD_RESTARTS},
            "nprocPerNode": str(job.gpus_per_node),
            "pytorchReplicaSpecs": {role: {"replicas": count, **replicas} for role, count in roles.items() if count},
        }
    else:
        api = "trainer.kubeflow.org/v1alpha1"
        # a TrainJob cannot set the working folder of its container
        command = ["env", f"--chdir={mount}", *job.command]
        trainer: dict[str, Any] = {"numNodes": job.nodes, "numProcPerNode": job.gpus_per_node, "image": image}
        trainer |= {"command": command, "env": env, "resourcesPerNode": resources}
        pod["containers"].append({"name": "node", "volumeMounts": mounts})
        jobs = [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
        patch = {"manager": "flatout", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
        spec = {"runtimeRef": {"name": runtime}, "trainer": trainer, "runtimePatches": [patch]}
    body = {"apiVersion": api, "kind": kind, "metadata": {"name": job.name}, "spec": spec}
    # copied through JSON: YAML would write a shared object as an anchor, which is hard to edit by hand
    return yaml.safe_dump(json.loads(json.dumps(body)), sort_keys=False, width=10_000)


def _check_names(labels: Sequence[tuple[str, str]], image: str, mount: str) -> None:
    """Raise UsageError for an option's value that Kubernetes rejects."""
    for option, text in labels:
        if not LABEL.fullmatch(text):
            raise UsageError(f"{option} {text!r}: Kubernetes allows at most 50 lower-case letters, digits and -")
    if not IMAGE.fullmatch(image):
        raise UsageError(f"--image {image!r}: expected a container image, such as registry.example/flatout:1.0")
    if not mount.startswith("/"):
        raise UsageError(f"--mount {mount!r}: expected an absolute path")
