"""Settings in files and in memory, read, checked and written as the command line does it.

make_config(values, overrides)  nested settings as a checked Config
expand(settings)                keywords and short forms, such as lr and data="chats.jsonl", as nested settings
dump_config(config)             the YAML of a Config
read_text, read_yaml, read_json a file of settings, with limits on its size, unchecked
run_python(path)                the variables of a Python file, which runs as code
ROW_TYPES                       endings of files that hold rows, not settings
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flatout.config.problems import problems_error
from flatout.config.read import ROW_TYPES as ROW_TYPES
from flatout.config.read import dump_config as dump_config
from flatout.config.read import make_config as make_config
from flatout.config.read import merge_overrides
from flatout.config.read import read_text as read_text
from flatout.config.read import read_yaml as read_yaml
from flatout.config.read import run_python as run_python
from flatout.config.schema import Config as Config
from flatout.config.shortcuts import expand as expand
from flatout.errors import UsageError
from flatout.io import json_file
from flatout.io.durable_io import DurableIO
from flatout.io.near_path import did_you_mean
from flatout.track.trackers import require_installed


def read_json(path: Path) -> Any:
    """Return what a JSON file holds. Raises UsageError with the file and what is wrong with it."""
    return json_file.read_json(path, UsageError)


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return `section.name=value` words as nested settings, unchecked. Raises UsageError for what is no such word."""
    values, problems = merge_overrides({}, overrides)
    if problems:
        raise problems_error("settings", problems)
    return expand(values)


def save_config(config: Config, path: Path) -> None:
    """Write the settings that differ from their defaults to a file, also over an earlier one; its folder is made."""
    durable_io = DurableIO()
    durable_io.make_dir(path.parent)
    durable_io.write_bytes(path, dump_config(config, only_given=True).encode())


def require_packages(config: Config, num_ranks: int = 1) -> None:
    """Raise UsageError with all optional packages that a run needs and that are not installed."""
    require_installed(config.track.to, strategy=config.strategy if num_ranks > 1 else "auto")


def near_path(path: Path) -> str:
    """Return the end of a sentence that says which file a missing one may be; "" if none is near."""
    return did_you_mean(path)
