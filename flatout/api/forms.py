"""What a form for settings needs: names, descriptions, short values as text, and files with comments.

setting_names()                       the dotted names of all settings
describe_setting(name)                its type, default, choices and help
OBJECTIVES                            the kinds of losses
DEVICES                               GPUs that a run can be planned for without one
as_yaml(value)                        a value as it is typed
render_template(config, intro)        a configuration file with comments
with_values(text, values)             the same file with other values
flatten(settings)                     nested settings by dotted name
paths_of(config)                      every path that a configuration names
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flatout.config.describe import as_yaml as as_yaml
from flatout.config.describe import describe_setting as describe_setting
from flatout.config.describe import dotted_names as setting_names
from flatout.config.objective import OBJECTIVES as OBJECTIVES
from flatout.config.problems import problems_error
from flatout.config.read import flatten as flatten
from flatout.config.read import load_config as load_config
from flatout.config.read import load_values as load_values
from flatout.config.read import merge_overrides
from flatout.config.schema import NAME_PATTERN as NAME_PATTERN
from flatout.config.schema import DataConfig as DataConfig
from flatout.config.schema import SourceConfig as SourceConfig
from flatout.config.section import paths_of as paths_of
from flatout.config.spelling import in_studio, spelled
from flatout.config.template import render_template as render_template
from flatout.config.template import with_values as with_values
from flatout.errors import FlatoutError
from flatout.planner.devices import DEVICES as DEVICES

__all__ = [
    "DEVICES", "NAME_PATTERN", "OBJECTIVES", "DataConfig", "SourceConfig", "as_yaml", "describe_setting",
    "flatten", "load_config", "load_values", "paths_of", "render_template", "setting_names", "with_overrides",
    "with_values", "words_of",
]  # fmt: skip


def with_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return nested settings with `section.name=value` words applied, unchecked. Raises ProblemsError."""
    merged, problems = merge_overrides(values, overrides)
    if problems:
        raise problems_error("settings", problems)
    return merged


def words_of(error: FlatoutError) -> str:
    """Return the text of an error with its fixes as the fields of a form, not as words of a command."""
    return spelled(error, in_studio)
