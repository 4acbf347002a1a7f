"""Write a Kubernetes manifest for a run, to be read, edited and applied by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from flatout.environment import SECRET
from flatout.errors import UsageError

LABEL = re.compile(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?")
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,254}")


@dataclass(frozen=True, slots=True)
class KubernetesJob:
    """The settings of a job. All pods mount the volume claim `claim` at `mount`; the run folder must be inside it."""

    name: str
    nodes: int
    gpus_per_node: int
    words: Sequence[str]
    image: str
    claim: str
    mount: str = "/work"
    kind: Literal["PyTorchJob", "TrainJob"] = "PyTorchJob"


def secret_name(job: KubernetesJob) -> str | None:
    """Return the name of the Secret with which nodes authenticate (key `secret`); None for a single node."""
    return f"{job.name}-secret" if job.nodes > 1 else None


def manifest(job: KubernetesJob) -> str:
    """Return the manifest as YAML. In each pod flatout starts the ranks, from the operator's environment variables.

    Raises UsageError for names that Kubernetes rejects.
    """
    for option, text in (("--name", job.name), ("--claim", job.claim)):
        if not LABEL.fullmatch(text):
            raise UsageError(f"{option} {text!r}: Kubernetes allows at most 50 lower-case letters, digits and -")
    if not IMAGE.fullmatch(job.image):
        raise UsageError(f"--image {job.image!r}: expected a container image, such as registry.example/flatout:1.0")
    if not job.mount.startswith("/"):
        raise UsageError(f"--mount {job.mount!r}: expected an absolute path")
    # a list, so that no shell interprets the words
    command = ["python", "-m", "flatout", *job.words]
    secret = {"name": SECRET, "valueFrom": {"secretKeyRef": {"name": secret_name(job), "key": "secret"}}}
    env = [secret] if job.nodes > 1 else []
    resources = {"limits": {"nvidia.com/gpu": job.gpus_per_node}}
    mounts = [{"name": "work", "mountPath": job.mount}, {"name": "shm", "mountPath": "/dev/shm"}]
    # NCCL's shared memory does not fit into a container's default of 64 MB
    shm = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    volumes = [{"name": "work", "persistentVolumeClaim": {"claimName": job.claim}}, shm]
    spec: dict[str, Any]
    if job.kind == "PyTorchJob":
        api = "kubeflow.org/v1"
        container: dict[str, Any] = {"name": "pytorch", "image": job.image, "command": command, "workingDir": job.mount}
        container |= {"env": env, "resources": resources, "volumeMounts": mounts}
        pod = {"spec": {"terminationGracePeriodSeconds": 600, "containers": [container], "volumes": volumes}}
        spec = {"nprocPerNode": str(job.gpus_per_node), "pytorchReplicaSpecs": {}}
        for role, count in (("Master", 1), ("Worker", job.nodes - 1)):
            if count:
                replicas = {"replicas": count, "restartPolicy": "OnFailure", "template": pod}
                spec["pytorchReplicaSpecs"][role] = replicas
    else:
        api, node = "trainer.kubeflow.org/v1alpha1", {"name": "node", "volumeMounts": mounts}
        trainer: dict[str, Any] = {"numNodes": job.nodes, "numProcPerNode": job.gpus_per_node, "image": job.image}
        trainer |= {"command": command, "env": env, "resourcesPerNode": resources}
        override = {"targetJobs": [{"name": "node"}], "containers": [node], "volumes": volumes}
        spec = {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": trainer,
            "podTemplateOverrides": [override],
        }
    body = {"apiVersion": api, "kind": job.kind, "metadata": {"name": job.name}, "spec": spec}
    # copied through JSON: YAML would write a shared object as an anchor, which is hard to edit by hand
    return yaml.safe_dump(json.loads(json.dumps(body)), sort_keys=False, width=10_000)
