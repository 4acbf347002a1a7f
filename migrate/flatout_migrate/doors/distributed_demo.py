"""The Distributed Training Demo's three train-llm.py: their flags become flatout's settings, and flatout trains."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from typing import Any, Literal

import xxhash

from flatout import UsageError
from flatout.api.settings import Config
from flatout_migrate.doors import parser_of
from flatout_migrate.doors.launched import data_of, device, run, say, with_rows_per_step

STRATEGIES = {"single-gpu": "single", "ddp": "ddp", "fsdp": "fsdp"}
# what names a run to Comet, and what its own variables are for
COMET = {"comet_project_name": "distributed-training-demo", "comet_workspace": "intro-ai"}
# a configured key, or Comet's offline mode
COMET_VARIABLES = ("COMET_API_KEY", "COMET_START_ONLINE")


def to_config(script: str, args: argparse.Namespace) -> Config:
    """Return flatout's configuration. Raises a UsageError that names what it cannot honor, and DataError."""
    settings: dict[str, Any] = {
        "seed": args.seed,
        "device": getattr(args, "device", device()),
        "method": "full",
        "strategy": STRATEGIES[script],
        "log_every_steps": args.log_freq,
        "model": {"name": args.model_name, "precision": getattr(args, "dtype", "bf16")},
        "data": _data(args.dataset_name, args.dataset_subset, args.seq_length),
        "batch": {"epochs": args.num_epochs},
        "optim": {"lr": args.lr, "weight_decay": 0.01, "max_grad_norm": None},
        "schedule": {"kind": "cosine", "warmup_steps": 0, "min_lr_ratio": 0.01},
        "checkpoint": {"every_steps": args.ckpt_freq},
        "track": _track(args, script),
    }
    if getattr(args, "cpu_offload", False):
        settings["sharding"] = {"offload": True}
    # without a name, a run of the same settings is the same run, and no other is in its way
    given = json.dumps([settings, args.batch_size, args.overrides], sort_keys=True)
    name = args.experiment_name or f"{script}-{xxhash.xxh3_64_hexdigest(given.encode())[:8]}"
    settings |= {"name": name, "run_dir": f"{args.save_dir}/{name}"}
    return with_rows_per_step(settings, args.overrides, args.batch_size, per_rank=True)


def _data(path: str, subset: str | None, max_tokens: int) -> dict[str, Any]:
    """Return the `data` section: documents of the column `text`, else alpaca rows, else of the first column."""
    from flatout.api.data import read_rows

    source: dict[str, Any] = {} if subset is None else {"subset": subset}
    row: Mapping[str, Any] = next(read_rows(path, **source))
    if "text" not in row and {"instruction", "output"} <= row.keys():
        data = data_of(path, max_tokens, format="alpaca", **source)
        return {**data, "template": "alpaca", "loss_type": "all", "too_long": "split"}
    column = "text" if "text" in row else next(iter(row))
    source |= {"format": "text", "columns": {} if column == "text" else {"text": column}}
    return {**data_of(path, max_tokens, **source), "loss_type": "all", "too_long": "split"}


def _track(args: argparse.Namespace, script: str) -> dict[str, Any]:
    """Return the `track` section: Comet for a named run with a key, or whose project or workspace is given."""
    env, given = os.environ, {name: value for name in COMET if (value := getattr(args, name)) is not None}
    if args.experiment_name is None:
        if given:
            flag = f"--{min(given).replace('_', '-')}"
            raise UsageError(f"{flag} has no effect without --experiment-name, which turns Comet on; add that")
        return {}
    if not given and not any(name in env for name in COMET_VARIABLES):
        say("Comet is off: COMET_API_KEY is not set")
        return {}
    if "comet_workspace" in given or "COMET_WORKSPACE" not in env:
        os.environ["COMET_WORKSPACE"] = given.get("comet_workspace", COMET["comet_workspace"])
    project = given.get("comet_project_name") or env.get("COMET_PROJECT_NAME", COMET["comet_project_name"])
    return {"to": ["comet"], "project": project, "tags": [script, "llm-training", "pytorch"]}


def main(script: Literal["single-gpu", "ddp", "fsdp"]) -> int:
    """`train-llm.py` of 01-single-gpu, 02-ddp or 03-fsdp: train, alone or as the rank that torchrun started."""
    words = {"description": f"Fine-tune ({script}).", "allow_abbrev": False}
    parser = parser_of("train-llm.py", script, "overrides", **words)
    parser.set_defaults(**({"device": "cpu" if device() == "cpu" else "cuda"} if script == "single-gpu" else {}))
    args = parser.parse_intermixed_args()
    return run(lambda: to_config(script, args))
