"""`flatout doctor [run.yaml]`: what would go wrong, told before anything is held."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("config", type=Path, nargs="?", help="also look at this run's model, folder and disk space")
    parser.add_argument("overrides", nargs="*", metavar="section.name=value", help="such as run_dir=/data/run")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")


def run(args: argparse.Namespace) -> int:
    """Print a line a check; 0 when none failed. Raises ResourceError (exit code 6) naming those that did."""
    from flatout.config.read import load_config
    from flatout.errors import ResourceError
    from flatout.launch.place import only_these
    from flatout.parallel.rank import Rank, adopt, environment

    config = None if args.config is None else load_config(args.config, args.overrides)
    if config is not None:
        # before torch looks for GPUs
        adopt(only_these(environment(), gpus=config.gpus, on_cpu=config.device == "cpu"))
    from flatout.train.doctor import examine

    findings = examine(config, Rank.from_env())
    if args.json and findings:
        print(json.dumps([finding.to_json() for finding in findings], indent=1))
    for finding in () if args.json else findings:
        where = f"{finding.where}: " if finding.where else ""
        do = f" -> {finding.do}" if finding.do else ""
        print(f"{finding.status:<5}{where}{finding.what:<14}{finding.got}{do}")
    failed = [finding.what for finding in findings if finding.status == "fail"]
    if failed:
        raise ResourceError(f"doctor: {len(failed)} of {len(findings)} checks failed: {', '.join(failed)}")
    return 0
