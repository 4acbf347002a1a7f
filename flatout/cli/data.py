"""`flatout data build | show | list | template`."""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import ValidationError

from flatout.cli.parser import Parser
from flatout.cli.screen import COLUMN_FORM, import_without_gc, pairs_of, progress_console, with_columns
from flatout.config.data import Format
from flatout.config.problems import Problem, problem_of, problems_error
from flatout.config.schema import DataConfig, SourceConfig
from flatout.data import registry
from flatout.errors import Fix, UsageError
from flatout.io.redact import printable, redacted

if TYPE_CHECKING:
    from flatout.data.token_store import TokenStore

_WIDE = "=" * 80


def add_arguments(parser: Parser) -> None:
    """Add the verb's options; the defaults are those of the configuration's `data` section."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    what = "tokenize sources into a named data set"
    add = actions.add_parser("build", help=what, example=parser.example).add_argument
    add("paths", nargs="+", metavar="PATH_OR_ID", help="files, folders, globs or hub ids")
    add("--tokenizer", required=True, help="hub id or folder of the tokenizer")
    add("--name", required=True, help="name of the data set")
    add("-n", "--num-samples", type=int, help="use only this many rows, drawn with --seed")
    add("--split", help="split of a hub data set, or of a folder with it in file names (train)")
    add("--seed", type=int, help="seed for drawing rows (3407)")
    add("--subset", help="configuration name of a hub data set")
    add("--revision", help="commit or tag of a hub data set")
    add("--unread-files", help="error or skip: files of unknown types in a folder or archive")
    add("--format", help=f"row format (auto): {', '.join(get_args(Format))}")
    add("--column", action="append", default=[], metavar="OURS=YOURS", help="rename a column; repeatable")
    add(
        "--key",
        action="append",
        default=[],
        metavar="NAME=MEANING",
        help="meaning of a key in turns: train (true: loss), masked (true: no loss), train_detail, ignored; repeatable",
    )
    add("--pairs", help="best_worst, adjacent or all: pairs of several answers with scores or ranks (best_worst)")
    add("--yes", action="store_true", help="accept the proposed columns if the rows fit no format")
    add("--weight", action="append", default=[], type=float, help="weight of a source in the mix; one per source")
    add("--media-root", type=Path, help="folder that relative image paths start from (that of the data file)")
    add("--template", help="chat template: a name or a .jinja file (the tokenizer's own)")
    add("--template-arg", action="append", default=[], metavar="NAME=VALUE", help="template variable; repeatable")
    add("--new-token", action="append", dest="new_tokens", help="token to add to the tokenizer; repeatable")
    add("--new-special-token", action="append", dest="new_special_tokens", help="the same for special tokens")
    add("--empty-reasoning", help="train or mask: an empty <think></think> before an answer")
    add("--lost-reasoning", help="split, mask or train: how to treat answers whose reasoning the template drops")
    add("--end-of-turn", help="text that ends an answer, if the template writes none; none: no text")
    add("--special-tokens", help="keep or text: how to read special tokens in texts")
    add("--loss-type", help="response_only or all")
    add("--max-tokens", type=int, help="maximum tokens per sample (2048); 0: no limit")
    add("--too-long", help="auto, error, drop, truncate or split")
    add("--on-bad-row", help="error or skip")
    add("--dedupe", help="exact or off: drop rows that repeat an earlier one (off)")
    add("--print-samples", action="store_true", help="print the first samples as text")
    add("--num-procs", type=int, help="tokenizer processes")
    add("--replace", action="store_true", help="overwrite a data set of that name if it differs or has images")
    add("--root", type=Path, help="folder of the registry and the built data sets (data)")
    show = actions.add_parser("show", help="print samples, with trained tokens in color, and statistics")
    show.add_argument("name", help="name of a built data set")
    show.add_argument("-n", type=int, help="number of samples to show (3; 20 in a page)")
    show.add_argument("--html", action="store_true", help="write a page with samples, packing and statistics")
    show.add_argument("--out", type=Path, metavar="FILE", help="file of the page (NAME.html)")
    template = actions.add_parser("template", help="analyze a chat template, and print how to fix its problems")
    template.add_argument(
        "template", metavar="TEMPLATE_OR_MODEL", help="a name, a .jinja file, or a model with its own"
    )
    template.add_argument("--tokenizer", help="hub id or folder of the tokenizer (the model's)")
    for command in (show, actions.add_parser("list", help="print the registry")):
        command.add_argument("--root", type=Path, default=Path("data"), help="folder of the registry (data)")


def run(args: argparse.Namespace) -> int:
    """Build, show, list or describe a template. Returns 0; raises FlatoutError."""
    {"build": _build, "show": _show, "list": _list, "template": _template}[args.action](args)
    return 0


def _config(args: argparse.Namespace) -> DataConfig:
    if args.weight and len(args.weight) != len(args.paths):
        raise UsageError(f"{len(args.weight)} --weight for {len(args.paths)} sources; give one for each, or none")
    given = pairs_of("--template-arg", args.template_arg)
    # true and false become booleans, everything else stays text: enable_thinking=false
    variables = {key: {"true": True, "false": False}.get(value, value) for key, value in given.items()}
    options = {name: value for name, value in vars(args).items() if value is not None}
    source = {name: options[name] for name in SourceConfig.model_fields if name in options}
    source["columns"] = pairs_of("--column", args.column, COLUMN_FORM)
    source["keys"] = pairs_of("--key", args.key, "NAME=MEANING, such as bad=masked")
    weights = args.weight or [1.0] * len(args.paths)
    settings = {name: options[name] for name in DataConfig.model_fields if name in options}
    settings["sources"] = [{**source, "path": path, "weight": w} for path, w in zip(args.paths, weights, strict=True)]
    settings["template_args"] = variables
    if args.max_tokens == 0:
        settings["max_tokens"] = None
    try:
        return DataConfig.model_validate(settings)
    except ValidationError as error:
        raise problems_error("flatout data build", [_problem(item) for item in error.errors()]) from error


def _problem(item: Any) -> Problem:
    """Return what is wrong by one pydantic error, under the name of its option: the last part of `loc`."""
    option = f"{'key ' if 'keys' in item['loc'] else ''}{str(item['loc'][-1]).replace('_', '-')}"
    problem = problem_of({**item, "loc": ("data", *item["loc"])})
    return Problem(f"--{option}: {problem.text.partition(': ')[2]}", problem.fixes)


def _build(args: argparse.Namespace) -> None:
    config = _config(args)
    number = "all" if config.num_samples is None else config.num_samples
    print(printable(redacted(f"Loading {number} samples from {', '.join(args.paths)}...")), flush=True)
    with progress_console() as console:
        console.on_phase("importing libraries")
        import_without_gc("flatout.data.build")
    from flatout.data.build import open_or_build
    from flatout.data.tokenizer import load_tokenizer

    def build(config: DataConfig) -> TokenStore:
        with progress_console() as console:
            console.on_phase("opening the sources")
            return open_or_build(
                config,
                args.tokenizer,
                replaces=args.replace,
                reads_again=args.replace,
                progress=lambda done, total: console.on_phase("tokenizing row", done, total or 0),
                log=console.print_line,
            )

    store = with_columns(build, config, takes=args.yes)
    if args.print_samples:
        tokenizer = load_tokenizer(store.meta.tokenizer, added=store.meta.added_tokens)
        print(f"\n{_WIDE}\nSAMPLE TEXTS FROM PROCESSED DATASET:\n{_WIDE}")
        for index in range(min(3, store.num_samples)):
            print(f"\n--- Sample {index + 1} ---")
            print(printable(tokenizer.decode(store.sample(index).token_ids.tolist(), skip_special_tokens=False)))
    print(f"\nDataset saved to: {store.folder}")
    print(f"Registry updated: {config.root / registry.FILE_NAME}")
    print(f'Dataset "{config.name}" has been successfully built and saved!')


def _show(args: argparse.Namespace) -> None:
    from rich.console import Console

    from flatout.cli.show_pairs import colored, print_pair
    from flatout.data.pictures.show import picture_lines, shortened
    from flatout.data.statistics import statistics_lines
    from flatout.data.token_store import TokenStore
    from flatout.data.tokenizer import load_tokenizer

    count = (20 if args.html else 3) if args.n is None else args.n
    if count < 0:
        raise UsageError(f"-n is {count}; expected a number of samples such as 3; -n 1000000 shows all of most sets")
    if args.out and not args.html:
        raise UsageError("--out is only for --html; without it the samples are printed")
    store = TokenStore.open(registry.entry_dir(args.root, registry.find(args.root, args.name)))
    meta = store.meta
    console = Console(highlight=False, soft_wrap=True)
    tokenizer = load_tokenizer(meta.tokenizer, added=meta.added_tokens) if count > 0 else None

    def decode(token_ids: list[int]) -> str:
        parts = shortened(token_ids, store.num_pictures > 0)
        return "".join(f"{tokenizer.decode(ids, skip_special_tokens=False)}{more}" for ids, more in parts if tokenizer)

    if args.html:
        from flatout.io.own_output import write_output
        from flatout.view.samples import samples_page

        content = samples_page(store, decode, count)
        out = Path(f"{meta.name}.html") if args.out is None else args.out
        facts = write_output(out, content.encode(), "html")
        print(f"{out.absolute()}  {facts.size_bytes / 1e6:.1f} MB")
        return
    are_pairs = bool(meta.counts.get("pairs"))
    for index in range(min(count, store.num_samples // 2 if are_pairs else store.num_samples)):
        if getattr(sys.stdout, "is_unread", False):  # a TolerantStream whose reader is gone, as with `| head`
            return
        if are_pairs:
            print_pair(console, store, index, decode)
            continue
        token_ids, loss_mask = store.sample(index).pair
        sizes = f"{len(token_ids)} tokens, {int(store.num_label_tokens[index])} with loss"
        label = f", label {int(store.extra['label'][index])}" if meta.counts.get("labelled") else ""
        console.print(f"--- Sample {index + 1} ({store.origin(index)}, {sizes}{label}) ---")
        console.print(colored(token_ids, loss_mask, decode))
        console.print("".join(f"{line}\n" for line in picture_lines(store, index)))
    origin = f"{meta.name}: {', '.join(meta.sources)}; tokenizer {meta.tokenizer}; template {meta.template or 'none'};"
    print(printable(origin))
    loss_type, max_tokens = (meta.settings.get(name) for name in ("loss_type", "max_tokens"))
    print(printable(f"loss on {loss_type}; max_tokens {max_tokens}; end of turn {meta.end_of_turn or 'none'!r}"))
    if meta.template_facts is not None:
        print("\n".join(map(printable, meta.template_facts.lines())))
    for name in sorted(store.extra):
        column = store.columns[name]
        print(printable(f"column {name}: {column.dtype} per {column.per}: {column.meaning}"))
    print("\n".join(statistics_lines(store)))
    print(f"{store.folder / 'report.json'} lists every row that was dropped or truncated")


def _template(args: argparse.Namespace) -> None:
    import_without_gc("flatout.data.tokenize")
    from flatout.data.templates.template import OURS, template_text
    from flatout.data.tokenize import SampleTokenizer, TokenizeOptions
    from flatout.data.tokenizer import load_tokenizer

    is_template = args.template in OURS or args.template.endswith(".jinja")
    if is_template and args.tokenizer is None:
        fix = Fix({"--tokenizer": "Qwen/Qwen3-0.6B"}, "for example; its end-of-turn token is used")
        raise UsageError(f"{args.template} is a template, which needs a tokenizer", [fix])
    if (
        not is_template
        and not Path(args.template).exists()
        and (near := difflib.get_close_matches(args.template, OURS, n=1))
    ):
        raise UsageError(f"there is no template {args.template}; did you mean {near[0]}?")
    name = args.tokenizer or args.template
    tokenizer = load_tokenizer(name)
    template, text = template_text(tokenizer, args.template if is_template else None, name)
    description = SampleTokenizer(TokenizeOptions(name, template, text), tokenizer).description
    print("\n".join(map(printable, description.lines())))


def _list(args: argparse.Namespace) -> None:
    entries = registry.load(args.root)
    if not entries:
        print(f"no data sets in {args.root / registry.FILE_NAME}; build one with: flatout data build")
        return
    rows = [("name", "samples", "loss", "built (UTC)", "tokenizer", "template", "sources")]
    for entry in entries.values():
        count, template, sources = f"{entry.num_samples:,}", entry.template or "none", ", ".join(entry.sources)
        rows.append((entry.name, count, entry.loss_type, entry.created, entry.tokenizer, template, sources))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(printable("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()))
