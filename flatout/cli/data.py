"""`flatout data build | show | list`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.config.schema import DataConfig
    from flatout.data.store import TokenStore

_WIDE = "=" * 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options. Defaults are those of the configuration's `data` section."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_build(actions.add_parser("build", help="tokenise sources into a data set with a name"))
    show = actions.add_parser("show", help="print samples, what is trained in colour, and the statistics")
    show.add_argument("name", help="name of a built data set")
    show.add_argument("-n", type=int, default=3, help="samples to print (3)")
    listing = actions.add_parser("list", help="print the registry")
    for command in (show, listing):
        command.add_argument("--root", type=Path, default=Path("data"), help="folder of the registry (data)")


def run(args: argparse.Namespace) -> int:
    """Build, show or list; returns 0. Raises FlatoutError."""
    if args.action == "build":
        return _build(args)
    return _show(args) if args.action == "show" else _list(args)


def _add_build(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH_OR_ID", help="files, folders, globs or hub ids")
    add("--tokenizer", required=True, help="hub id or folder of the tokenizer")
    add("--name", required=True, help="name of the data set")
    add("-n", "--num-samples", type=int, help="use only so many rows, drawn by --seed")
    add("--split", help="split of hub data sets (train)")
    add("--seed", type=int, help="seed of drawing rows (3407)")
    add("--subset", help="configuration name of a hub data set")
    add("--revision", help="commit or tag of a hub data set")
    add("--format", help="row format (auto)")
    add("--column", action="append", default=[], metavar="OURS=YOURS", help="rename a column; repeatable")
    add("--weight", action="append", default=[], type=float, help="share of a source in the mix; once for each source")
    add("--template", help="chat template: a name or a .jinja file (the tokenizer's own)")
    add("--loss-type", help="response_only or all")
    add("--max-tokens", type=int, help="longest sample in tokens (2048); 0: no limit")
    add("--too-long", help="error, drop, truncate or split")
    add("--on-bad-row", help="error or skip")
    add("--print-samples", "--print_samples", action="store_true", help="print the first samples as text")
    add("--num-procs", type=int, help="processes that tokenise")
    add("--root", type=Path, help="folder of the registry and the built data sets (data)")


def _config(args: argparse.Namespace) -> DataConfig:
    from pydantic import ValidationError

    from flatout.config.schema import DataConfig
    from flatout.errors import ProblemsError, UsageError

    if args.weight and len(args.weight) != len(args.paths):
        raise UsageError(f"{len(args.weight)} --weight for {len(args.paths)} sources; give one for each, or none")
    columns = {}
    for rename in args.column:
        ours, equals, yours = rename.partition("=")
        if not equals:
            raise UsageError(f"--column {rename!r} is not OURS=YOURS, such as instruction=question")
        columns[ours] = yours
    source = _given(args, "split", "subset", "revision", "format") | {"columns": columns}
    weights = args.weight or [1.0] * len(args.paths)
    sources = [{"path": path, "weight": weight, **source} for path, weight in zip(args.paths, weights, strict=True)]
    settings = _given(
        args, "name", "num_samples", "seed", "template", "loss_type", "max_tokens", "too_long", "on_bad_row",
        "num_procs", "root",
    )  # fmt: skip
    if args.max_tokens == 0:
        settings["max_tokens"] = None
    try:
        return DataConfig.model_validate({"sources": sources, "tokenizer": args.tokenizer, **settings})
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, found['loc']))}: {found['msg']}" for found in error.errors()]
        raise ProblemsError("flatout data build", problems) from error


def _given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _build(args: argparse.Namespace) -> int:
    config = _config(args)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from flatout.data.build import open_or_build
    from flatout.data.registry import FILE_NAME

    number = "all" if config.num_samples is None else config.num_samples
    print(f"Loading {number} samples from {', '.join(args.paths)}...", flush=True)
    columns = (TextColumn("tokenising"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True, soft_wrap=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        store = open_or_build(
            config,
            args.tokenizer,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            say=lambda text: console.print(text, markup=False, highlight=False),
        )
    if args.print_samples:
        _print_samples(store)
    print(f"\nDataset saved to: {store.folder}")
    print(f"Registry updated: {config.root / FILE_NAME}")
    print(f'Dataset "{config.name}" has been successfully built and saved!')
    return 0


def _print_samples(store: TokenStore, num_samples: int = 3) -> None:
    from flatout.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(store.meta.tokenizer)
    print(f"\n{_WIDE}\nSAMPLE TEXTS FROM PROCESSED DATASET:\n{_WIDE}")
    for index in range(min(num_samples, store.num_samples)):
        print(f"\n--- Sample {index + 1} ---")
        print(tokenizer.decode(store.sample(index)[0].tolist(), skip_special_tokens=False))


def _show(args: argparse.Namespace) -> int:
    import numpy as np
    from rich.console import Console
    from rich.text import Text

    from flatout.data import registry
    from flatout.data.statistics import statistics, statistics_lines
    from flatout.data.store import TokenStore
    from flatout.data.tokenizer import load_tokenizer

    store = TokenStore.open(registry.entry_dir(args.root, registry.find(args.root, args.name)))
    console = Console(highlight=False, soft_wrap=True)
    tokenizer = load_tokenizer(store.meta.tokenizer) if args.n > 0 else None
    for index in range(min(args.n, store.num_samples)):
        token_ids, trained = store.sample(index)
        labels = int(store.num_labels[index])
        console.print(f"--- Sample {index + 1} ({store.origin(index)}, {len(token_ids)} tokens, {labels} trained) ---")
        text = Text()
        for run in np.split(np.arange(len(token_ids)), np.flatnonzero(np.diff(trained)) + 1):
            piece = tokenizer.decode(token_ids[run].tolist(), skip_special_tokens=False) if tokenizer else ""
            text.append(piece, style="bold green" if trained[run[0]] else "dim")
        console.print(text, end="\n\n")
    meta = store.meta
    print(f"{meta.name}: {', '.join(meta.sources)}; tokenizer {meta.tokenizer}; template {meta.template or 'none'};")
    print(f"loss on {meta.loss_type}; max_tokens {meta.max_tokens}; end of turn {meta.end_of_turn or 'none'!r}")
    print("\n".join(statistics_lines(statistics(store))))
    print(f"every row left out or cut is listed in {store.folder / 'report.json'}")
    return 0


def _list(args: argparse.Namespace) -> int:
    from flatout.data import registry

    entries = registry.load(args.root)
    if not entries:
        print(f"no data sets in {args.root / registry.FILE_NAME}; build one with: flatout data build")
        return 0
    rows = [("name", "samples", "loss", "built (UTC)", "tokenizer", "template", "sources")]
    for entry in entries.values():
        count, template, sources = f"{entry.num_samples:,}", entry.template or "none", ", ".join(entry.sources)
        rows.append((entry.name, count, entry.loss_type, entry.created, entry.tokenizer, template, sources))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0
