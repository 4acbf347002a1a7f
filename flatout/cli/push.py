"""`flatout push`: pushes a run's adapter or merged model to the hub, with a model card."""

from __future__ import annotations

import argparse
from functools import partial

from flatout.cli.screen import import_transformers, progress_console
from flatout.view.open_runs import find_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    add = parser.add_argument
    add("run", type=partial(find_run, needs_results=True), metavar="RUN", help="name or folder of a run")
    add("repo", metavar="REPO", help="repository, such as org/my-model; without org, your own")
    add("--merged", action="store_true", help="push the whole model with the adapter merged in")
    private = "make the new repository private; without --private everybody can see it"
    add("--private", action="store_true", help=private)
    add("--best", action="store_true", help="push the run's best/ instead of final/")
    add("--base", metavar="ORG/NAME", help="the base model's name on the hub, if the adapter was trained from a folder")
    add("--replace", action="store_true", help="replace the files of a repository that exists; its history stays")


def run(args: argparse.Namespace) -> None:
    """Push, and print where. Raises as `push` does."""
    import_transformers()
    from flatout.export.push import push

    results = "best" if args.best else "final"
    options = {"merged": args.merged, "private": args.private, "base": args.base, "replace": args.replace}
    with progress_console() as console:
        done = push(args.run, args.repo, results=results, on_phase=console.on_phase, **options)
    print(done)
