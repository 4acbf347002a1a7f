"""`flatout data build | show | list | template`."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from rich.console import Console
from rich.text import Text

from flatout.api.data import REGISTRY, TokenStore, data_sets, load_tokenizer, open_data_set, open_or_build
from flatout.cli import screen
from flatout.cli.parser import Parser
from flatout.cli.screen import COLUMN_FORM, WIDTH, import_without_gc, pairs_of, progress_console, say, with_columns
from flatout.config.describe import describe_setting
from flatout.config.objective import REWARD
from flatout.config.problems import problem_of, problems_error
from flatout.config.read import load_config
from flatout.config.schema import Config, DataConfig
from flatout.config.section import nested_kinds
from flatout.errors import Fix, UsageError
from flatout.io.redact import printable, redacted

_WIDE = "=" * WIDTH
_COLUMN = (WIDTH - 3) // 2
# settings of the data set, and of all its sources, that are options of `build`
_OF_SOURCES = ("split", "subset", "revision", "unread_files", "format", "pairs")
_OF_DATA = (
    "num_samples", "seed", "media_root", "template", "new_tokens", "new_special_tokens", "empty_reasoning",
    "lost_reasoning", "end_of_turn", "special_tokens", "loss_type", "max_tokens", "too_long", "on_bad_row", "dedupe",
    "num_procs", "root",
)  # fmt: skip
Decode = Callable[[list[int]], str]


def add_arguments(parser: Parser) -> None:
    """Add the verb's options; those of `build` are settings of the configuration's `data` section."""
    names = "build, show, template or list"
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, help=names)
    what = "tokenize sources into a named data set"
    add = actions.add_parser("build", help=what, example=parser.example).add_argument
    add("paths", nargs="+", metavar="PATH_OR_ID", help="files, folders, globs or hub ids")
    add("--tokenizer", required=True, help="hub id or folder of the tokenizer")
    add("--name", required=True, help="name of the data set")
    for name in (*(f"data.sources.{name}" for name in _OF_SOURCES), *(f"data.{name}" for name in _OF_DATA)):
        _add_setting(add, name)
    add("--column", action="append", default=[], metavar="OURS=YOURS", help="rename a column; repeatable")
    meanings = (
        "meaning of a key in turns: train (true: loss), masked (true: no loss), train_detail, ignored; repeatable"
    )
    add("--key", action="append", default=[], metavar="NAME=MEANING", help=meanings)
    add("--template-arg", action="append", default=[], metavar="NAME=VALUE", help="template variable; repeatable")
    add("--weight", action="append", default=[], type=float, help="weight of a source in the mix; one per source")
    add("--yes", action="store_true", help="accept the proposed columns if the rows fit no format")
    add("--print-samples", action="store_true", help="print the first samples as text")
    add("--replace", action="store_true", help="overwrite a data set of that name if it differs or has images")
    show = actions.add_parser("show", help="print samples, with trained tokens in color, and statistics")
    show.add_argument("name", help="name of a built data set, or the YAML file of a run")
    show.add_argument("-n", type=int, help="number of samples to show (3; 20 in a page)")
    show.add_argument("--html", action="store_true", help="write a page with samples, packing and statistics")
    show.add_argument("--out", type=Path, metavar="FILE", help="file of the page (NAME.html)")
    template = actions.add_parser("template", help="analyze a chat template, and print how to fix its problems")
    named = "a name, a .jinja file, or a model with its own"
    template.add_argument("template", metavar="TEMPLATE_OR_MODEL", help=named)
    template.add_argument("--tokenizer", help="hub id or folder of the tokenizer (the model's)")
    for command in (show, actions.add_parser("list", help="print the registry")):
        command.add_argument("--root", type=Path, default=Path("data"), help="folder of the registry (data)")


def _add_setting(add: Callable[..., Any], name: str) -> None:
    """Add the option of a setting: a list has one that is repeatable, named in the singular.

    An option that is left out is null; --max-tokens takes 0 for it, as it has another default.
    """
    setting, leaf = describe_setting(name), name.rpartition(".")[2]
    is_list = setting.schema.get("type") == "array"
    option = f"--{leaf.removesuffix('s') if is_list else leaf}".replace("_", "-")
    kind = int if int in nested_kinds(setting.field.annotation) else str
    default = "" if setting.plain_default is None else f"; default {setting.default}"
    facts = "repeatable" if is_list else f"{setting.allowed.removesuffix(', or null')}{default}"
    text = setting.help.replace("null:", "0:" if leaf == "max_tokens" else "default:").replace("%", "%%")
    more: dict[str, Any] = {"action": "append"} if is_list else {"type": kind}
    options = ["-n", option] if leaf == "num_samples" else [option]
    add(*options, dest=leaf, help=f"{text} [{facts}]", metavar=leaf.upper(), **more)


def run(args: argparse.Namespace) -> None:
    """Build, show, list or describe a template. Raises FlatoutError."""
    {"build": _build, "show": _show, "list": _list, "template": _template}[args.action](args)


def _config(args: argparse.Namespace) -> DataConfig:
    if args.weight and len(args.weight) != len(args.paths):
        raise UsageError(f"{len(args.weight)} --weight for {len(args.paths)} sources; give one for each, or none")
    options = {name: value for name, value in vars(args).items() if value is not None}
    source = {name: options[name] for name in _OF_SOURCES if name in options}
    source["columns"] = pairs_of("--column", args.column, COLUMN_FORM)
    source["keys"] = pairs_of("--key", args.key, "NAME=MEANING, such as bad=masked")
    weights = args.weight or [1.0] * len(args.paths)
    settings = {name: options[name] for name in (*_OF_DATA, "name", "tokenizer") if name in options}
    settings["sources"] = [{**source, "path": path, "weight": w} for path, w in zip(args.paths, weights, strict=True)]
    given = pairs_of("--template-arg", args.template_arg)
    # true and false become booleans, everything else stays text: enable_thinking=false
    settings["template_args"] = {key: {"true": True, "false": False}.get(value, value) for key, value in given.items()}
    if args.max_tokens == 0:
        settings["max_tokens"] = None
    try:
        return DataConfig.model_validate(settings)
    except ValidationError as error:
        problems = []
        for item in error.errors():
            option = f"{'key ' if 'keys' in item['loc'] else ''}{str(item['loc'][-1]).replace('_', '-')}"
            problem = problem_of({**item, "loc": ("data", *item["loc"])})
            problems.append(problem._replace(field=f"--{option}"))
        raise problems_error("flatout data build", problems) from error


def _build(args: argparse.Namespace) -> None:
    config = _config(args)
    number = "all" if config.num_samples is None else config.num_samples
    say(printable(redacted(f"Loading {number} samples from {', '.join(args.paths)}...")))
    with progress_console() as console:
        console.on_phase("importing libraries")
        import_without_gc("flatout.data.build")
    from flatout.data.build import open_or_build as open_or_build_data

    def build(config: DataConfig) -> TokenStore:
        with progress_console() as console:
            console.on_phase("opening the sources")
            return open_or_build_data(
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
    say(f"\n{store.num_samples:,} samples with {int(store.lengths.sum()):,} tokens")
    say(f"Dataset saved to: {store.folder}")
    print(f"Registry updated: {config.root / REGISTRY}")
    say(f'Dataset "{config.name}" has been successfully built and saved!')


def _show(args: argparse.Namespace) -> None:
    from flatout.data.pictures.show import shortened

    count = (20 if args.html else 3) if args.n is None else args.n
    if count < 0:
        raise UsageError(f"-n is {count}; expected a number of samples such as 3; -n 1000000 shows all of most sets")
    if args.out and not args.html:
        raise UsageError("--out is only for --html; without it the samples are printed")
    config = load_config(Path(args.name)) if args.name.endswith((".yaml", ".yml")) else None
    if config is not None and (config.rollout.rounds or any(one.format == "prompts" for one in config.data.sources)):
        _show_prompts(config, count)
        return
    with progress_console() as console:
        store = open_or_build(config, console.print_line) if config else open_data_set(args.name, args.root)
        console.on_phase("loading the tokenizer")
        tokenizer = load_tokenizer(store.meta.tokenizer, added=store.meta.added_tokens) if count > 0 else None

    def decode(token_ids: list[int]) -> str:
        parts = shortened(token_ids, store.num_pictures > 0)
        return "".join(f"{tokenizer.decode(ids, skip_special_tokens=False)}{more}" for ids, more in parts if tokenizer)

    if args.html:
        from flatout.io.own_output import write_output
        from flatout.view.samples import samples_page

        content = samples_page(store, decode, count)
        out = Path(f"{store.meta.name}.html") if args.out is None else args.out
        facts = write_output(out, content.encode(), "html")
        say(f"{out.absolute()}  {facts.size_bytes / 1e6:.1f} MB")
    elif _print_samples(store, decode, count):
        _print_facts(store)


def _show_prompts(config: Config, count: int) -> None:
    """Print the first prompts of a run as the model gets them, with what rewards get."""
    data, name = config.data, config.model.name
    with progress_console() as progress:
        progress.on_phase("importing libraries")
        import_without_gc("flatout.data.prompts")
        from flatout.data.prompts import read_prompts

        prompts = read_prompts(data, name, log=progress.print_line)
    tokenizer = load_tokenizer(data.tokenizer or name, added=data.added_tokens)
    console = Console(highlight=False, soft_wrap=True)
    for number in range(min(count, len(prompts))):
        prompt = prompts[number]
        text = tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False)
        console.print(f"--- Prompt {number + 1} ({prompt.origin}, {len(prompt.token_ids)} tokens) ---")
        console.print(Text(printable(text)))
        console.print(
            Text(printable("\n".join(f"row.{key}: {value!r:.200}" for key, value in prompt.row.items())), "dim")
        )
    spread = zip((5, 50, 95, 100), np.percentile(prompts.lengths, (5, 50, 95, 100)), strict=True)
    print(f"{len(prompts):,} prompts; tokens: " + "  ".join(f"p{share} {tokens:.0f}" for share, tokens in spread))


def _print_samples(store: TokenStore, decode: Decode, count: int) -> bool:
    """Print samples or pairs with colors; return whether somebody reads them, as not after `| head`."""
    from flatout.data.pictures.show import picture_lines

    console, meta = Console(highlight=False, soft_wrap=True), store.meta
    are_pairs = bool(meta.counts.get("pairs"))
    for index in range(min(count, store.num_samples // 2 if are_pairs else store.num_samples)):
        if getattr(sys.stdout, "is_unread", False):  # a TolerantStream
            return False
        if are_pairs:
            _print_pair(console, store, index, decode)
            continue
        token_ids, loss_mask = store.sample(index).pair
        sizes = f"{len(token_ids)} tokens, {int(store.num_label_tokens[index])} with loss"
        worth = "".join(f", {name} {store.extra[name][index]:g}" for name in ("label", REWARD) if name in store.extra)
        say(f"--- Sample {index + 1} ({store.origin(index)}, {sizes}{worth}) ---")
        console.print(_colored(token_ids, loss_mask, decode))
        console.print("".join(f"{line}\n" for line in picture_lines(store, index)))
    return True


def _print_pair(console: Console, store: TokenStore, unit: int, decode: Decode) -> None:
    """Print what a pair begins with, then the rest of both answers in two columns."""
    from flatout.data.columns import PREFIX_TOKENS
    from flatout.data.preference_columns import first_difference

    common = int(store.extra[PREFIX_TOKENS][unit])
    margin = f", margin {float(store.extra['margin'][unit]):g}" if "margin" in store.extra else ""
    parts = f"diverge at token {first_difference(store, unit) + 1}"
    console.print(f"--- Pair {unit + 1} ({store.origin(2 * unit)}, {parts}{margin}) ---")
    samples = [store.sample(2 * unit + place) for place in (0, 1)]
    prompt = Text(printable(decode(samples[0].token_ids[:common].tolist())), style="dim")
    console.print(prompt.wrap(console, WIDTH, overflow="fold"))
    columns = []
    for name, sample in zip(("chosen", "rejected"), samples, strict=True):
        sizes = f"{len(sample.token_ids)} tokens, {int(sample.loss_mask.sum())} with loss"
        text = Text(f"{name}: {sizes}\n") + _colored(sample.token_ids[common:], sample.loss_mask[common:], decode)
        columns.append(list(text.wrap(console, _COLUMN, overflow="fold")))
    for left, right in zip_longest(*columns, fillvalue=Text()):
        padded = left.copy()
        padded.pad_right(_COLUMN - left.cell_len)
        console.print(Text.assemble(padded, " \N{BOX DRAWINGS LIGHT VERTICAL} ", right))
    console.print()


def _colored(token_ids: Any, loss_mask: Any, decode: Decode) -> Text:
    """Return tokens as text: those with loss in color."""
    text = Text()
    for part in np.split(np.arange(len(token_ids)), np.flatnonzero(np.diff(loss_mask)) + 1):
        style = "bold green" if loss_mask[part[0]] else "dim"
        text.append(printable(decode(token_ids[part].tolist())), style=style)
    return text


def _print_facts(store: TokenStore) -> None:
    from flatout.data.statistics import statistics_lines

    meta = store.meta
    sources = ", ".join(meta.sources) or "not built from rows"
    lines = [
        f"{meta.name}: {sources}; tokenizer {meta.tokenizer}; template {meta.template or 'none'};",
        f"{meta.limits}end of turn {meta.end_of_turn or 'none'!r}",
        *(meta.template_facts.lines() if meta.template_facts is not None else ()),
    ]
    for name in sorted(store.extra):
        column = store.columns[name]
        lines.append(f"column {name}: {column.dtype} per {column.per}: {column.meaning}")
    say("\n".join([*map(printable, lines), *statistics_lines(store)]))
    if meta.counts:
        say(f"{store.folder / 'report.json'} lists every row that was dropped or truncated")


def _template(args: argparse.Namespace) -> None:
    import_without_gc("flatout.data.tokenize")
    from flatout.data.templates.template import OURS, template_text
    from flatout.data.tokenize import SampleTokenizer, TokenizeOptions

    is_template = args.template in OURS or args.template.endswith(".jinja")
    if is_template and args.tokenizer is None:
        fix = Fix({"--tokenizer": "Qwen/Qwen3-0.6B"}, "for example; its end-of-turn token is used")
        raise UsageError(f"{args.template} is a template, which needs a tokenizer", [fix])
    near = [] if is_template or Path(args.template).exists() else difflib.get_close_matches(args.template, OURS, n=1)
    if near:
        raise UsageError(f"there is no template {args.template}; did you mean {near[0]}?")
    name = args.tokenizer or args.template
    tokenizer = load_tokenizer(name)
    template, text = template_text(tokenizer, args.template if is_template else None, name)
    description = SampleTokenizer(TokenizeOptions(name, template, text), tokenizer).description
    print("\n".join(map(printable, description.lines())))


def _list(args: argparse.Namespace) -> None:
    entries = data_sets(args.root)
    if not entries:
        print(f"no data sets in {args.root / REGISTRY}; build one with: flatout data build")
        return
    rows = [("name", "samples", "loss", "built (UTC)", "tokenizer", "template", "sources")]
    for entry in entries:
        count, template, sources = f"{entry.num_samples:,}", entry.template or "none", ", ".join(entry.sources)
        rows.append((entry.name, count, entry.loss_type, entry.created, entry.tokenizer, template, sources))
    print("\n".join(map(printable, screen.fitted(rows, (0, 4, 5, 6)))))
