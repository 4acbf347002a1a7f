"""Settings in files, in memory and in forms: read, described, checked and written as the command line does it.

make_config(values, overrides)  nested settings as a checked Config
expand(settings)                keywords and short forms, such as lr and data="chats.jsonl", as nested settings
flatten(settings)               nested settings by dotted name
load_config, load_values        the settings of a file, checked or not
dump_config(config)             the YAML of a Config
render_template(config, intro)  the same with comments
with_values(text, values)       such a text with other values
read_text, read_yaml, read_json a file of settings, with limits on its size, unchecked
run_python(path)                the variables of a Python file, which runs as code
paths_of(config)                every path that a configuration names
setting_names()                 the dotted names of all settings
describe_setting(name)          its type, default, choices and help
as_yaml(value)                  a value as it is typed
OBJECTIVES, DEVICES             the kinds of losses; GPUs that a run can be planned for without one
ROW_TYPES                       endings of files that hold rows, not settings
near_path(path)                 the end of a sentence: which file a missing one may be; "" if none is near
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flatout.config.describe import as_yaml, describe_setting, render_template, with_values
from flatout.config.describe import dotted_names as setting_names
from flatout.config.objective import OBJECTIVES
from flatout.config.problems import problems_error
from flatout.config.read import dump_config, flatten, load_config, load_values, make_config, merge_overrides, run_python
from flatout.config.schema import NAME_PATTERN, Config, DataConfig, SourceConfig
from flatout.config.section import paths_of
from flatout.config.shortcuts import expand
from flatout.config.spelling import in_studio, spelled
from flatout.config.yaml_file import ROW_TYPES, read_text, read_yaml
from flatout.errors import FlatoutError, UsageError
from flatout.io import json_file
from flatout.io.durable_io import DurableIO
from flatout.io.near_path import did_you_mean as near_path
from flatout.planner.devices import DEVICES
from flatout.track.trackers import require_installed

__all__ = [
    "DEVICES", "NAME_PATTERN", "OBJECTIVES", "ROW_TYPES", "Config", "DataConfig", "SourceConfig", "as_yaml",
    "describe_setting", "dump_config", "expand", "flatten", "load_config", "load_values", "make_config", "near_path",
    "paths_of", "read_json", "read_overrides", "read_text", "read_yaml", "render_template", "require_packages",
    "run_python", "save_config", "setting_names", "with_overrides", "with_values", "words_of",
]  # fmt: skip


def read_json(path: Path) -> Any:
    """Return what a JSON file holds. Raises UsageError with the file and what is wrong with it."""
    return json_file.read_json(path, UsageError)


def with_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return nested settings with `section.name=value` words applied, unchecked. Raises ProblemsError."""
    merged, problems = merge_overrides(values, overrides)
    if problems:
        raise problems_error("settings", problems)
    return merged


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return `section.name=value` words as nested settings, unchecked. Raises ProblemsError for other words."""
    return expand(with_overrides({}, overrides))


def save_config(config: Config, path: Path) -> None:
    """Write the settings that differ from their defaults to a file, also over an earlier one; its folder is made."""
    durable_io = DurableIO()
    durable_io.make_dir(path.parent)
    durable_io.write_bytes(path, dump_config(config, only_given=True).encode())


def require_packages(config: Config, num_ranks: int = 1) -> None:
    """Raise UsageError with all optional packages that a run needs and that are not installed."""
    require_installed(config.track.to, strategy=config.strategy if num_ranks > 1 else "auto")


def words_of(error: FlatoutError) -> str:
    """Return the text of an error with its fixes as the fields of a form, not as words of a command."""
    return spelled(error, in_studio)
