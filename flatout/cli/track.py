"""`flatout track RUN`: sends a run folder to its trackers now, or what they have not received yet."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TextIO

from flatout.cli.screen import WIDTH
from flatout.errors import ResourceError, UsageError
from flatout.io.file_lock import RunLock
from flatout.track.forward import Delivery, TrackedRun
from flatout.track.trackers import TRACKERS, require_installed
from flatout.view.open_runs import find_run

POLL_S, PRINT_EVERY_S = 0.1, 4.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("run", type=find_run, metavar="RUN", help="name or folder of a run")
    parser.add_argument("--to", metavar="NAME[,NAME]", help=f"instead of the run's track.to: {', '.join(TRACKERS)}")


def run(args: argparse.Namespace) -> None:
    """Send. Raises ResourceError (exit code 6) if a tracker does not answer."""
    tracked = TrackedRun.read(args.run)
    names = list(dict.fromkeys(args.to.split(","))) if args.to else tracked.config.to
    if not names:
        raise UsageError(f"{args.run} was trained without trackers; name one: --to mlflow")
    if unknown := [name for name in names if name not in TRACKERS]:
        raise UsageError(f"--to: {unknown[0]!r} is not a tracker; use {', '.join(TRACKERS)}")
    require_installed(names)
    limit_s, screen = tracked.linger_s, sys.stdout
    # a run that trains sends by itself
    with RunLock(args.run), tracked.sending(limit_s):
        deliveries = [Delivery(tracked, name, retries=False) for name in names]
        for delivery in deliveries:
            delivery.finish(tracked.end())
            delivery.start()
        _show_progress(deliveries, limit_s, screen)
    if failed := [one for one in deliveries if not one.is_complete]:
        reasons = "; ".join(f"{one.name}: {one.trouble or f'no answer for {limit_s:.0f} s'}" for one in failed)
        raise ResourceError(f"{reasons}; nothing is lost: run the same command again")
    for delivery in deliveries:
        print(f"{delivery.name:<11} has everything; {delivery.num_sent:,} records sent now"[:WIDTH])


def _show_progress(deliveries: list[Delivery], limit_s: float, screen: TextIO) -> None:
    """Return when all deliveries have ended, or nothing was sent for `limit_s`; print a line every few seconds."""
    num_sent, changed_at, printed_at = 0, time.monotonic(), time.monotonic()
    while alive := [one for one in deliveries if one.is_alive()]:
        now_s = time.monotonic()
        before, num_sent = num_sent, sum(one.num_sent for one in deliveries)
        if num_sent > before:
            changed_at = now_s
        if now_s - changed_at > limit_s:
            return
        if now_s - printed_at > PRINT_EVERY_S:
            printed_at = now_s
            names = ", ".join(one.name for one in alive)
            print(f"sending to {names}: {num_sent:,} records so far", file=screen, flush=True)
        time.sleep(POLL_S)
