"""`flatout init [PATH]`: writes a commented configuration of every setting that runs unmodified."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.errors import UsageError

if TYPE_CHECKING:
    from flatout.config.schema import Config, DataConfig

DEMO_DIR = Path("demo")
DEFAULT_PATH = Path("run.yaml")
OF_ANY_MODEL = ("name", "data.", "eval.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("path", nargs="?", type=Path, help=f"file to write ({DEFAULT_PATH}); never overwritten")
    parser.add_argument(
        "--data",
        metavar="NAME",
        help="a data set built before, or a file, folder, glob or hub id (the demo's conversations)",
    )
    parser.add_argument("--model", metavar="M", help="hub id or folder of the model (the demo's tiny one)")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema for editors instead, or write it")


def run(args: argparse.Namespace) -> int:
    """Write the file; 0. Raises UsageError when it is there already."""
    from flatout.config.schema import Config
    from flatout.config.template import render_template

    if args.schema:
        text = json.dumps(Config.model_json_schema(), indent=2) + "\n"
        if args.path is None:
            print(text, end="")
        else:
            _write_new(args.path, text)
        return 0
    path = args.path or DEFAULT_PATH
    config = starting_config(_as_name(path.stem, "run"), data=args.data, model=args.model)
    intro = _intro(path, config, own_model=args.model is not None, own_data=args.data is not None)
    _write_new(path, render_template(config, intro))
    print(f"wrote {path}; next: flatout plan {path}, then flatout train {path}")
    if args.data is None or args.model is None:
        _write_demo_inputs()
    return 0


def starting_config(name: str, *, data: str | None, model: str | None) -> Config:
    """A configuration for LoRA on `model`, or the demo's full training of its tiny model when none is named."""
    from flatout.config.schema import Config, EvalConfig, ModelConfig
    from flatout.demo.settings import DemoFolder, demo_config

    demo = demo_config(DemoFolder(DEMO_DIR), seed=42)
    values: dict[str, Any] = {"name": name, "data": data_of(data, demo), "eval": EvalConfig(fraction=0.05)}
    if model is None:
        return demo.model_copy(update=values | {"run_dir": None})
    return Config(model=ModelConfig(name=model), **values)


def data_of(named: str | None, demo: Config) -> DataConfig:
    """The data section for what `--data` names: nothing, a built data set, or a source."""
    from flatout.config.schema import NAME_PATTERN, DataConfig, SourceConfig

    if named is None:
        return DataConfig(name="demo", sources=demo.data.sources)
    if re.fullmatch(NAME_PATTERN, named) and not Path(named).exists() and Path(named).suffix == "":
        return DataConfig(name=named)
    return DataConfig(name=_as_name(Path(named).name.split(".")[0], "data"), sources=[SourceConfig(path=named)])


def _intro(path: Path, config: Config, *, own_model: bool, own_data: bool) -> list[str]:
    from flatout.config.template import changed_settings

    lines = [
        "Written by `flatout init`. Every setting is here, with its help; [] says what it may be.",
        "Where a comment names no default, the value is the default and the line may be deleted.",
        f"  flatout plan {path}      what the run will do, before a GPU is held",
        f"  flatout train {path}     train; the same command goes on after an interruption",
        f"  flatout train {path} optim.lr=1e-4 batch.epochs=2     change settings for one run",
    ]
    if not own_model:
        back = [f"{name}: {default}" for name, default in changed_settings(config) if not name.startswith(OF_ANY_MODEL)]
        lines += [
            "As it is, it trains the demo's tiny model from random weights. For a real one set model.name (such as",
            f"Qwen/Qwen3-0.6B) and go back to the defaults: {', '.join(back)}.",
        ]
    if not own_data:
        lines.append("For your own data set data.name and data.sources.")
    return lines


def _write_new(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path}: exists and is left as it is; name another file, or remove it") from None
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be written ({error.strerror}); name a file in a folder that is there"
        ) from error


def _write_demo_inputs() -> None:
    """The file refers to the demo's data or model: have them there, as `flatout demo` would write them."""
    from flatout.demo.settings import DemoFolder

    folder = DemoFolder(DEMO_DIR)
    if folder.train_file.exists() and folder.model_dir.exists():
        return
    from flatout.demo.write import write_demo

    write_demo(folder, seed=42)
    print(f"wrote {DEMO_DIR}/: a small chat data set and a tiny model to try it on")


def _as_name(text: str, otherwise: str) -> str:
    """`text` as a run's or data set's name: other characters than letters, digits, dot and dash become dashes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("._-")[:64] or otherwise
