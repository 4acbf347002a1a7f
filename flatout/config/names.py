"""Names and values that people bring from transformers, TRL, PEFT, Axolotl, LLaMA-Factory and torchtune."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import yaml

from flatout.config.data import SourceConfig
from flatout.config.describe import dotted_names
from flatout.config.shortcuts import SHORTCUTS
from flatout.config.table import read_table
from flatout.errors import Fix, as_text


def _by_other(names: Mapping[str, str]) -> dict[str, str]:
    """Return a table of ours -> names elsewhere, with blanks between them, as other name -> ours."""
    return {other: ours for ours, others in names.items() for other in others.split()}


_TABLE = read_table("other_names")
FOREIGN_NAMES: Mapping[str, str] = _by_other(_TABLE["names"])
"""A name of another trainer -> our setting, or our setting with its value."""
FOREIGN_VERBS: Mapping[str, str] = _by_other(_TABLE["verbs"])
"""A verb of another tool -> ours, with its action."""
WITHOUT_VERB: Mapping[str, str] = _by_other(_TABLE["without_verb"])
"""A verb of another tool -> what there is instead."""
FOREIGN_OPTIONS: Mapping[str, Mapping[str, str]] = {
    verb: _by_other(options) for verb, options in _TABLE["options"].items()
}
"""By verb: an option of another tool -> ours."""
WITHOUT_OPTION: Mapping[str, Mapping[str, str]] = {
    verb: _by_other(options) for verb, options in _TABLE["without"].items()
}
"""By verb: an option of another tool -> what there is instead."""
_VALUES: Mapping[str, Mapping[str, str]] = {setting: _by_other(values) for setting, values in _TABLE["values"].items()}
_INSTEAD: Mapping[str, str] = _TABLE["instead"]
_WHEN_FALSE: Mapping[str, str] = _TABLE["when_false"]
_WHY: Mapping[str, str] = _TABLE["why"]


def resolve_alias(name: str, value: Any = True, *, is_option: bool = False) -> Fix | str | None:
    """Return what to set for a name of another trainer or nearly one of ours, with its value in our form.

    A sentence where there is something else instead of a setting; None for a name that is not known. What is nearly a
    setting does not count for an option, which may be another verb's.
    """
    leaf, names = name.rsplit(".", 1)[-1], dotted_names()
    if leaf in _INSTEAD:
        return _INSTEAD[leaf]
    if name not in names and leaf in SourceConfig.model_fields and name.rpartition(".")[0] in ("", "data"):
        return f"it is of a source, not of the data set: data.sources=[{{path: FILE, {leaf}: ...}}]"
    ours = FOREIGN_NAMES.get(leaf) or FOREIGN_NAMES.get(name.replace(".", "_")) or SHORTCUTS.get(name)
    if ours is None:
        by_leaf = {full.rsplit(".", 1)[-1]: full for full in reversed(names)}
        near = [name] if name in names else difflib.get_close_matches(name, names, n=1, cutoff=0.78)
        near = near or ([by_leaf[leaf]] if leaf in by_leaf else [])
        if is_option and near not in ([name], [by_leaf.get(leaf)]):
            return None
        # a slip of the finger seldom changes the first letter
        slips = [one for one in by_leaf if one[0] == leaf[:1]]
        near = near or [by_leaf[one] for one in difflib.get_close_matches(leaf, slips, n=1, cutoff=0.75)]
        near = near or [FOREIGN_NAMES[one] for one in difflib.get_close_matches(leaf, FOREIGN_NAMES, n=1, cutoff=0.85)]
        if not near:
            return None
        ours = near[0]
    setting, _, fixed = ours.partition(": ")
    if not fixed:
        return value_meant(setting, value)
    is_off = as_text(value).lower() in ("false", "no", "off", "0", "none", "null")
    if is_off and setting not in _WHEN_FALSE:
        return f"{setting} is not {fixed} unless you set it; leave it out"
    return _fix(setting, _WHEN_FALSE[setting] if is_off else fixed)


def value_meant(setting: str, value: Any) -> Fix:
    """Return the fix that sets a setting to a value, or to ours for one of another trainer."""
    if setting == "schedule.warmup_steps" and (share := _share(value)):
        return Fix({"schedule.warmup_ratio": share}, "a share of the run")
    if setting.endswith(".every_steps") and (share := _share(value)):
        return Fix({setting: share}, "a share of the run")
    known = _VALUES.get(setting, {}).get(as_text(value).lower())
    other, _, ours = (known or "").rpartition(": ")
    return Fix({setting: value}, _WHY.get(setting, "")) if known is None else _fix(other or setting, ours)


def _share(value: Any) -> float | None:
    """Return a share of the run that was given for its steps: 0.1 or 10%; None for any other value."""
    percent = str(value).removesuffix("%")
    with suppress(ValueError):
        number = float(percent) / (100 if percent != str(value) else 1)
        return number if 0 < number < 1 else None
    return None


def instead_of(setting: str, value: Any) -> str:
    """Return what there is instead of a setting with a value that only others have; "" if there is nothing."""
    return _INSTEAD.get(f"{setting}: {as_text(value)}", "")


def _fix(setting: str, written: str) -> Fix:
    return Fix({setting: yaml.safe_load(written)}, _WHY.get(f"{setting}: {written}", ""))


def from_yaml(text: str) -> Any:
    """Return the value that a typed text has as YAML; the text itself if it is no YAML."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text
