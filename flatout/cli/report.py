"""`flatout report`: a page about one run, or several runs beside each other, from their folders alone."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flatout.cli.screen import say
from flatout.io.own_output import write_output
from flatout.view.facts import json_report, markdown_report
from flatout.view.open_runs import find_run, open_runs
from flatout.view.page import page
from flatout.view.report import run_fragment, runs_fragment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("runs", nargs="+", type=find_run, metavar="RUN", help="runs in any state")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write (html: RUN/report.html; else stdout)")
    parser.add_argument("--format", choices=("html", "md", "json"), default="html", help="html, md or json (html)")


def run(args: argparse.Namespace) -> None:
    """Write the report. Raises UsageError for a missing folder, DataError for one that is not a run's."""
    logs = open_runs(args.runs)
    one = next(iter(logs.values())) if len(logs) == 1 else None
    if args.format == "html":
        content = page(f"{', '.join(logs)} · flatout", run_fragment(one) if one else runs_fragment(logs))
    else:
        content = markdown_report(logs) if args.format == "md" else json_report(logs)
        if args.out is None:
            sys.stdout.write(content)
            return
    out = args.out or (one.folder if one else Path()) / "report.html"
    facts = write_output(out, content.encode(), args.format)
    say(f"{out.absolute()}  {facts.size_bytes / 1e6:.1f} MB")
