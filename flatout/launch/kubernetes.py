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
) -> str:
    """Return the manifest as YAML. In each pod flatout starts the ranks, from the operator's environment variables.

    All pods mount the volume claim `claim` at `mount`; the run folder must be inside it. `secret` is the name of the
    Secret with which nodes authenticate (key `secret`). Raises UsageError for names that Kubernetes rejects.
    """
    for option, text in (("--name", name), ("--claim", claim)):
        if not LABEL.fullmatch(text):
            raise UsageError(f"{option} {text!r}: Kubernetes allows at most 50 lower-case letters, digits and -")
    if not IMAGE.fullmatch(image):
        raise UsageError(f"--image {image!r}: expected a container image, such as registry.example/flatout:1.0")
    if not mount.startswith("/"):
        raise UsageError(f"--mount {mount!r}: expected an absolute path")
    # a list, so that no shell interprets the words
    command = ["python", "-m", "flatout", *words]
    env = []
    if secret is not None:
        env = [{"name": SECRET, "valueFrom": {"secretKeyRef": {"name": secret, "key": "secret"}}}]
    resources = {"limits": {"nvidia.com/gpu": gpus_per_node}}
    mounts = [{"name": "work", "mountPath": mount}, {"name": "shm", "mountPath": "/dev/shm"}]
    # NCCL's shared memory does not fit into a container's default of 64 MB
    shm = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    volumes = [{"name": "work", "persistentVolumeClaim": {"claimName": claim}}, shm]
    spec: dict[str, Any]
    if kind == "PyTorchJob":
        api = "kubeflow.org/v1"
        container: dict[str, Any] = {"name": "pytorch", "image": image, "command": command, "workingDir": mount}
        container |= {"env": env, "resources": resources, "volumeMounts": mounts}
        pod = {"spec": {"terminationGracePeriodSeconds": 600, "containers": [container], "volumes": volumes}}
        spec = {"nprocPerNode": str(gpus_per_node), "pytorchReplicaSpecs": {}}
        for role, count in (("Master", 1), ("Worker", nodes - 1)):
            if count:
                replicas = {"replicas": count, "restartPolicy": "OnFailure", "template": pod}
                spec["pytorchReplicaSpecs"][role] = replicas
    else:
        api, node = "trainer.kubeflow.org/v1alpha1", {"name": "node", "volumeMounts": mounts}
        trainer: dict[str, Any] = {"numNodes": nodes, "numProcPerNode": gpus_per_node, "image": image}
        trainer |= {"command": command, "env": env, "resourcesPerNode": resources}
        override = {"targetJobs": [{"name": "node"}], "containers": [node], "volumes": volumes}
        spec = {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": trainer,
            "podTemplateOverrides": [override],
        }
    body = {"apiVersion": api, "kind": kind, "metadata": {"name": name}, "spec": spec}
    # copied through JSON: YAML would write a shared object as an anchor, which is hard to edit by hand
    return yaml.safe_dump(json.loads(json.dumps(body)), sort_keys=False, width=10_000)
