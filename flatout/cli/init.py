"""`flatout init [PATH]`: writes a commented configuration that runs as it is."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any

from flatout.api.commands import require_yaml, write_new
from flatout.cli.screen import COLUMN_FORM, pairs_of, say, with_columns
from flatout.config.describe import Which, changed_settings, render_template
from flatout.config.schema import NAME_PATTERN, Config, DataConfig, EvalConfig, ModelConfig, SourceConfig
from flatout.data import registry
from flatout.data.rows.formats.parser import make_parser
from flatout.data.rows.read import raise_error
from flatout.data.rows.sources import local_source, require_local
from flatout.demo.settings import MODEL_DIR, TRAIN_FILE, demo_config
from flatout.errors import Fix, UsageError
from flatout.io.near_path import files_of_rows

DEMO_DIR = Path("demo")
DEFAULT_PATH = Path("run.yaml")
OF_ANY_MODEL = ("name", "data.", "eval.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    add = parser.add_argument
    add("path", nargs="?", type=Path, help=f"file to write ({DEFAULT_PATH}); never overwritten")
    data_help = "name of a built data set, or a file, folder, glob or hub id (the demo's data)"
    add("--data", metavar="NAME", help=data_help)
    add("--column", action="append", default=[], metavar="OURS=YOURS", help="rename a column of --data; repeatable")
    add("--model", metavar="M", help="hub id or folder of the model (the demo's tiny one)")
    add("--all", action="store_true", help="write all settings with their help, but the advanced ones")
    add("--advanced", action="store_true", help="write those as well, each with the reason why it exists")
    add("--schema", action="store_true", help="print the JSON schema for editors, or write it to the given path")


def run(args: argparse.Namespace) -> None:
    """Write the file. Raises UsageError if it already exists."""
    if args.schema:
        text = json.dumps(Config.model_json_schema(), indent=2) + "\n"
        if args.path is None:
            print(text, end="")
        else:
            write_new(args.path, text)
        return
    if args.model == "" or args.data == "":
        raise UsageError(f"--{'model' if args.model == '' else 'data'} is empty; omit it to use the demo's")
    path, model = args.path or DEFAULT_PATH, args.model
    require_yaml(path)
    if args.data is not None:
        require_local(args.data)
    if model is None and args.data is not None:
        # the model whose tokenizer the data set was built with
        root = DataConfig().root
        entry = registry.load(root).get(args.data)
        if entry is None:
            text = f"also give --model; only data sets in {root / registry.FILE_NAME} record a model"
            raise UsageError(f"--data {args.data}: {text}", [Fix({"--model": "Qwen/Qwen3-0.6B"}, "for example")])
        model = entry.tokenizer
    config = starting_config(_as_name(path.stem, "run"), data=args.data, model=model)
    config = config.model_copy(update={"data": _with_columns(config.data, args)})
    file = shlex.quote(str(path))
    intro = [
        "Written by `flatout init`; `--all` writes more settings. [] shows the allowed values.",
        "Where a comment names no default, the value is the default and you can delete the line.",
        f"  flatout plan {file}      print what the run will do, without a GPU",
        f"  flatout train {file}     train; run the same command again to resume",
        f"  flatout train {file} optim.lr=1e-4 batch.epochs=2     change settings for one run",
    ]
    if model is None:
        back = [f"{name}: {default}" for name, default in changed_settings(config) if not name.startswith(OF_ANY_MODEL)]
        intro += [
            "This file trains the demo's tiny model from random weights. For a real model, set model.name (such as",
            f"Qwen/Qwen3-0.6B) and restore the defaults: {', '.join(back)}.",
        ]
    if args.data is None:
        intro.append("To use your own data, set data.name and data.sources.")
    which: Which = "advanced" if args.advanced else "all" if args.all else "first"
    write_new(path, render_template(config, intro, which=which))
    say(_next(path, args.data, model))
    if args.data is None and not ((DEMO_DIR / TRAIN_FILE).exists() and (DEMO_DIR / MODEL_DIR).exists()):
        from flatout.demo.write import write_demo

        write_demo(DEMO_DIR, seed=42)
        print(f"wrote {DEMO_DIR}/: a small chat data set and a tiny model to try it with")


def _next(path: Path, data: str | None, model: str | None) -> str:
    """Return what to do with the file that was written."""
    file = shlex.quote(str(path))
    if data is not None and _is_name(data) and data not in registry.load(DataConfig().root):
        build = f"flatout data build FILE --tokenizer {shlex.quote(str(model))} --name {data}"
        return f"data set {data} is not built; wrote {path}; next: {build}, then flatout plan {file}"
    return f"wrote {path}; next: flatout plan {file}, then flatout train {file}"


def _is_name(data: str) -> bool:
    return bool(re.fullmatch(NAME_PATTERN, data)) and not Path(data).exists() and Path(data).suffix == ""


def starting_config(name: str, *, data: str | None, model: str | None) -> Config:
    """Return a LoRA configuration for `model` (None: the demo's full training of its tiny model).

    `data` is a data set that was built, or a source; None: the demo's.
    """
    demo = demo_config(DEMO_DIR, seed=42)
    if data is None:
        data_config = DataConfig(name="demo", sources=demo.data.sources)
    elif _is_name(data):
        data_config = DataConfig(name=data)
    else:
        sources = [SourceConfig(path=data)]
        data_config = DataConfig(name=_as_name(Path(data).name.split(".")[0], "data"), sources=sources)
    values: dict[str, Any] = {"name": name, "data": data_config, "eval": EvalConfig(fraction=0.05)}
    if model is None:
        return demo.model_copy(update=values | {"run_dir": None})
    return Config(model=ModelConfig(name=model), **values)


def _with_columns(data: DataConfig, args: argparse.Namespace) -> DataConfig:
    """Return data with the columns that were named, and those that are near where the first row needs them.

    Only local files are opened. Raises DataError if no format has its columns.
    """
    columns = pairs_of("--column", args.column, COLUMN_FORM)
    if args.data is None or not data.sources:
        if columns:
            fix = Fix({"--data": (files_of_rows() or ["chats.jsonl"])[0]}, "for example")
            raise UsageError("--column needs --data, whose columns it renames", [fix])
        return data

    def read(data: DataConfig) -> DataConfig:
        for source in data.sources:
            opened = local_source(source.model_copy(update={"unread_files": "skip"}))
            if opened is not None and (row := next(opened.read(raise_error), None)):
                make_parser(source, row)
        return data

    named = [source.model_copy(update={"columns": columns}) if columns else source for source in data.sources]
    return with_columns(read, data.model_copy(update={"sources": named}), takes=True)


def _as_name(text: str, otherwise: str) -> str:
    """Turn `text` into a valid name: each run of characters other than letters, digits and ._- becomes a dash."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("._-")[:64] or otherwise
