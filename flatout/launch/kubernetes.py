"""Write a Kubernetes manifest for a run, to be read, edited and applied by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

import yaml

from flatout.environment import SECRET
from flatout.errors import UsageError

LABEL = re.compile(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?")
# seconds from SIGTERM to SIGKILL, in which a run saves
GRACE_S = 600
# of all pods of a PyTorchJob, which restarts them after any exit code
MAX_POD_RESTARTS = 10
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,254}")


def manifest(
    name: str,
    nodes: int,
    gpus_per_node: int,
    words: Sequence[str],
    image: str,
    claim: str,
    mount: str = "/work",
    kind: Literal["PyTorchJob", "TrainJob"] = "PyTorchJob",
    secret: str | None = None,
    runtime: str = "torch-distributed",
) -> str:
    """Return the manifest as YAML. In each pod flatout starts the ranks, from the operator's environment variables.

    All pods mount the volume claim `claim` at `mount`; the run folder must be inside it. `secret` is the name of the
    Secret with which nodes authenticate (key `secret`). A TrainJob patches the training runtime `runtime`, as Kubeflow
    Trainer 2.3 reads it. Raises UsageError for names that Kubernetes rejects.
    """
    _check_names((("--name", name), ("--claim", claim), ("--runtime", runtime)), image, mount)
    # a list, so that no shell interprets the words
    command = ["python", "-m", "flatout", *words]
    env = []
    if secret is not None:
        env = [{"name": SECRET, "valueFrom": {"secretKeyRef": {"name": secret, "key": "secret"}}}]
    resources = {"limits": {"nvidia.com/gpu": gpus_per_node}}
    mounts = [{"name": "work", "mountPath": mount}, {"name": "shm", "mountPath": "/dev/shm"}]
    # NCCL's shared memory does not fit into a container's default of 64 MB
    shm = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    pod: dict[str, Any] = {"terminationGracePeriodSeconds": GRACE_S, "containers": []}
    pod["volumes"] = [{"name": "work", "persistentVolumeClaim": {"claimName": claim}}, shm]
    spec: dict[str, Any]
    if kind == "PyTorchJob":
        api = "kubeflow.org/v1"
        container: dict[str, Any] = {"name": "pytorch", "image": image, "command": command, "workingDir": mount}
        pod["containers"].append(container | {"env": env, "resources": resources, "volumeMounts": mounts})
        roles = {"Master": 1, "Worker": nodes - 1}
        replicas = {"restartPolicy": "OnFailure", "template": {"spec": pod}}
        spec = {
            "runPolicy": {"backoffLimit": MAX_POD_RESTARTS},
            "nprocPerNode": str(gpus_per_node),
            "pytorchReplicaSpecs": {role: {"replicas": count, **replicas} for role, count in roles.items() if count},
        }
    else:
        api = "trainer.kubeflow.org/v1alpha1"
        # a TrainJob cannot set the working folder of its container
        command = ["env", f"--chdir={mount}", *command]
        trainer: dict[str, Any] = {"numNodes": nodes, "numProcPerNode": gpus_per_node, "image": image}
        trainer |= {"command": command, "env": env, "resourcesPerNode": resources}
        pod["containers"].append({"name": "node", "volumeMounts": mounts})
        jobs = [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
        patch = {"manager": "flatout", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
        spec = {"runtimeRef": {"name": runtime}, "trainer": trainer, "runtimePatches": [patch]}
    body = {"apiVersion": api, "kind": kind, "metadata": {"name": name}, "spec": spec}
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
