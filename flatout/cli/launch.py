"""`flatout launch run.yaml --slurm | --kubernetes | --skypilot`: writes a job to submit, and does not submit it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Literal

from flatout.api.commands import write_new
from flatout.cli.parser import COUNT, add_settings
from flatout.config.read import load_config
from flatout.config.schema import Config
from flatout.environment import SECRET
from flatout.errors import Fix, UsageError
from flatout.launch.jobs import ClusterJob, manifest, sbatch_script, skypilot_task


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    config_help = "the run's YAML file (a .py file runs as code), at its path on the cluster"
    add_settings(parser, "lora.rank=32", what=config_help)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--slurm", action="store_true", help="write an sbatch script")
    where.add_argument("--kubernetes", action="store_true", help="write a PyTorchJob, or a TrainJob with --train-job")
    where.add_argument("--skypilot", action="store_true", help="write a SkyPilot task")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write; without it, print to stdout")
    parser.add_argument("--name", help="job name (the run's name)")
    parser.add_argument("--nodes", type=COUNT, default=1, help="number of nodes (1)")
    parser.add_argument("--gpus-per-node", type=COUNT, metavar="N", help="GPUs per node (as in gpus, or 1)")
    parser.add_argument("--partition", help="Slurm: partition")
    parser.add_argument("--account", help="Slurm: account")
    parser.add_argument("--time", default="24:00:00", help="Slurm: time limit (24:00:00)")
    parser.add_argument("--image", default="flatout:latest", help="Kubernetes: container image (flatout:latest)")
    parser.add_argument("--claim", default="work", help="Kubernetes: volume claim that holds data and runs (work)")
    parser.add_argument("--mount", default="/work", help="Kubernetes: mount path of the claim (/work)")
    parser.add_argument("--train-job", action="store_true", help="Kubernetes: write a TrainJob (Kubeflow Trainer v2)")
    parser.add_argument("--runtime", help="Kubernetes: training runtime of the TrainJob (torch-distributed)")
    parser.add_argument("--accelerator", default="H100", help="SkyPilot: kind of GPU (H100)")
    parser.add_argument("--spot", action="store_true", help="SkyPilot: machines that may be taken away at any time")


def run(args: argparse.Namespace) -> None:
    """Check the configuration, then write or print the job."""
    config = load_config(args.config, args.overrides)
    gpus = len(config.gpus or [0]) if args.gpus_per_node is None else args.gpus_per_node
    argv = ["train", str(args.config), *args.overrides]
    if args.out is not None and args.out.exists():
        raise UsageError(f"--out {args.out} already exists; remove it, or choose a different name")
    if args.runtime is not None and not args.train_job:
        raise UsageError("--runtime needs --train-job; a PyTorchJob has no training runtime")
    if args.slurm:
        folder, submit = Path.cwd(), "sbatch"
        text = sbatch_script(
            ClusterJob(args.name or config.name, args.nodes, gpus, argv, python=sys.executable), folder=folder,
            log_dir=folder / config.folder, partition=args.partition, account=args.account, time=args.time,
            max_restarts=config.faults.max_restarts, on_cpu=config.device == "cpu",
        )  # fmt: skip
    elif args.skypilot:
        _require_lasting(config, nodes=args.nodes, is_spot=args.spot)
        job = ClusterJob(args.name or config.name, args.nodes, gpus, argv)
        text, submit = skypilot_task(job, args.accelerator, is_spot=args.spot), "sky launch"
        submit = "sky jobs launch" if args.spot else submit
        if args.nodes > 1:
            submit = f'{SECRET}="$(openssl rand -hex 32)" {submit} --secret {SECRET}'
    else:
        name, submit = args.name or config.name.lower().replace("_", "-").replace(".", "-"), "kubectl apply -f"
        kind: Literal["PyTorchJob", "TrainJob"] = "TrainJob" if args.train_job else "PyTorchJob"
        secret = f"{name}-secret" if args.nodes > 1 else None
        runtime = args.runtime or "torch-distributed"
        job = ClusterJob(name, args.nodes, gpus, argv)
        text = manifest(job, args.image, args.claim, args.mount, kind=kind, secret=secret, runtime=runtime)
        if secret is not None:
            literal = '--from-literal=secret="$(openssl rand -hex 32)"'
            submit = f"kubectl create secret generic {secret} {literal} && {submit}"
    if args.out is None:
        print(text, end="")
        return
    write_new(args.out, text)
    print(f"wrote {args.out}; nothing was submitted. Check it, then run: {submit} {args.out}")


def _require_lasting(config: Config, *, nodes: int, is_spot: bool) -> None:
    """Raise UsageError for a run folder on the disk of a machine, where it is lost, or where other nodes do not see it.

    An absolute one is on a disk that somebody mounts.
    """
    if config.folder.is_absolute() or (nodes == 1 and (config.checkpoint.mirror or not is_spot)):
        return
    mirror = Fix({"checkpoint.mirror": f"s3://bucket/{config.folder}"}, "in a bucket of yours")
    shared = Fix({"run_dir": f"/mnt/shared/{config.folder}"}, "on a disk that is mounted there, for example")
    why = "all nodes share the run folder" if nodes > 1 else "--spot loses it with its checkpoints"
    raise UsageError(f"{config.folder} is on the disk of one machine: {why}", [*([mirror] * (nodes == 1)), shared])
