"""`flatout doctor [run.yaml]`: checks what would go wrong before a run takes any resources."""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import asdict

from flatout.cli.parser import add_settings
from flatout.cli.screen import WIDTH, import_without_gc, show_gpus
from flatout.config.read import load_config
from flatout.errors import ResourceError
from flatout.parallel.rank import Rank


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    config_help = "also check this run's model, folder and disks (a .py file runs as code)"
    add_settings(parser, "run_dir=/data/run", what=config_help, nargs="?")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")


def run(args: argparse.Namespace) -> None:
    """Print one line per check. Raises ResourceError (exit code 6) naming those that did."""
    config = None if args.config is None else load_config(args.config, args.overrides)
    if config is not None:
        show_gpus(config)
    import_without_gc("flatout.doctor.run")
    from flatout.doctor.run import examine

    findings = examine(config, Rank.from_env())
    if args.json and findings:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    for finding in () if args.json else findings:
        where = f"{finding.where}: " if finding.where else ""
        margin = " " * 19
        first = f"{finding.status:<5}{finding.what:<13} {where}{finding.got}"
        print(textwrap.fill(first, WIDTH, subsequent_indent=margin))
        if finding.do:
            print(textwrap.fill(f"-> {finding.do}", WIDTH, initial_indent=margin, subsequent_indent=margin))
    failed = [finding.what for finding in findings if finding.status == "fail"]
    if failed:
        raise ResourceError(f"doctor: {len(failed)} of {len(findings)} checks failed: {', '.join(failed)}")
