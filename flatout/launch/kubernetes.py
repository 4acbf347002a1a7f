"""A manifest for a run on Kubernetes: to read, change and apply by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from flatout.errors import UsageError

Kind = Literal["PyTorchJob", "TrainJob"]
PYTORCH_JOB: Kind = "PyTorchJob"
TRAIN_JOB: Kind = "TrainJob"
LABEL = re.compile(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?")
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,254}")


@dataclass(frozen=True, slots=True)
class KubernetesJob:
    """What a job asks for. `claim` is a volume claim that all pods mount at `mount`; the run folder lies in it."""

    name: str
    nodes: int
    gpus_per_node: int
    words: Sequence[str]
    image: str
    claim: str
    mount: str = "/work"
    kind: Kind = PYTORCH_JOB


def manifest(job: KubernetesJob) -> str:
    """The manifest as YAML. The ranks of a pod are started by flatout from what the operator tells it.

    Raises UsageError for names that Kubernetes refuses.
    """
    for option, text in (("--name", job.name), ("--claim", job.claim)):
        if not LABEL.fullmatch(text):
            raise UsageError(f"{option} {text!r}: Kubernetes takes lower-case letters, digits and -, at most 50")
    if not IMAGE.fullmatch(job.image):
        raise UsageError(f"--image {job.image!r}: expected a container image, such as registry.example/flatout:1.0")
    if not job.mount.startswith("/"):
        raise UsageError(f"--mount {job.mount!r}: expected an absolute path")
    body = _pytorch_job(job) if job.kind == PYTORCH_JOB else _train_job(job)
    return yaml.safe_dump(body, sort_keys=False, width=10_000)


def _container(job: KubernetesJob) -> dict[str, Any]:
    return {
        "name": "pytorch",
        "image": job.image,
        # a list, so no shell reads the words
        "command": ["python", "-m", "flatout", *job.words],
        "workingDir": job.mount,
        "resources": {"limits": {"nvidia.com/gpu": job.gpus_per_node}},
        "volumeMounts": [{"name": "work", "mountPath": job.mount}, {"name": "shm", "mountPath": "/dev/shm"}],
    }


def _volumes(job: KubernetesJob) -> list[dict[str, Any]]:
    # NCCL's shared memory does not fit in a container's 64 MB
    shm = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    return [{"name": "work", "persistentVolumeClaim": {"claimName": job.claim}}, shm]


def _pytorch_job(job: KubernetesJob) -> Mapping[str, Any]:
    def replicas(count: int) -> dict[str, Any]:
        spec = {"terminationGracePeriodSeconds": 600, "containers": [_container(job)], "volumes": _volumes(job)}
        return {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": spec}}

    specs = {"Master": replicas(1)}
    if job.nodes > 1:
        specs["Worker"] = replicas(job.nodes - 1)
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": job.name},
        "spec": {"nprocPerNode": str(job.gpus_per_node), "pytorchReplicaSpecs": specs},
    }


def _train_job(job: KubernetesJob) -> Mapping[str, Any]:
    container = _container(job)
    trainer = {
        "numNodes": job.nodes,
        "numProcPerNode": job.gpus_per_node,
        "image": job.image,
        "command": container["command"],
        "resourcesPerNode": container["resources"],
    }
    override = {
        "targetJobs": [{"name": "node"}],
        "containers": [{"name": "node", "volumeMounts": container["volumeMounts"]}],
        "volumes": _volumes(job),
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": trainer,
            "podTemplateOverrides": [override],
        },
    }
