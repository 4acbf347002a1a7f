"""Names and values that people bring from transformers, TRL, PEFT, Axolotl, LLaMA-Factory and torchtune."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel

from flatout.config.data import SourceConfig
from flatout.config.schema import Config
from flatout.config.section import nested_kinds
from flatout.config.shortcuts import SHORTCUTS
from flatout.config.table import read_table
from flatout.errors import Fix, as_text

_TABLE = read_table("other_names")
FOREIGN_NAMES: Mapping[str, str] = {other: ours for ours, others in _TABLE["names"].items() for other in others.split()}
"""A name of another trainer -> our setting, or our setting with its value."""
_INSTEAD: Mapping[str, str] = _TABLE["instead"]
_VALUES: Mapping[str, Mapping[str, str]] = {
    setting: {other: ours for ours, others in values.items() for other in others.split()}
    for setting, values in _TABLE["values"].items()
}
FOREIGN_OPTIONS: Mapping[str, Mapping[str, str]] = {
    verb: {other: ours for ours, others in options.items() for other in others.split()}
    for verb, options in _TABLE["options"].items()
}
"""By verb: an option of another tool -> ours."""
WITHOUT_OPTION: Mapping[str, Mapping[str, str]] = {
    verb: {other: why for why, others in options.items() for other in others.split()}
    for verb, options in _TABLE["without"].items()
}
"""By verb: an option of another tool -> what there is instead."""
FOREIGN_VERBS: Mapping[str, str] = {
    other: ours for ours, others in _TABLE["verbs"].items() for other in others.lower().split()
}
"""A verb of another tool -> ours, with its action."""
WITHOUT_VERB: Mapping[str, str] = {
    other: why for why, others in _TABLE["without_verb"].items() for other in others.split()
}
"""A verb of another tool -> what there is instead."""
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
        near = [name] if name in names else difflib.get_close_matches(name, names, n=1, cutoff=0.75)
        near = near or ([by_leaf[leaf]] if leaf in by_leaf else [])
        if is_option and near not in ([name], [by_leaf.get(leaf)]):
            return None
        # a slip of the finger seldom changes the first letter
        slips = [one for one in by_leaf if one[0] == leaf[:1]]
        near = near or [by_leaf[one] for one in difflib.get_close_matches(leaf, slips, n=1, cutoff=0.75)]
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


def choices_of(name: str) -> tuple[str, ...]:
    """Return the words that a setting may be; empty if it may be anything else."""
    field = _field_of(name)
    kinds = nested_kinds(field.annotation) if field else []
    return tuple(word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind))


def default_of(name: str) -> Any:
    """Return a setting's default; None for a section, an unknown name, or a default that says nothing."""
    default = getattr(_field_of(name), "default", None)
    return default if isinstance(default, str | int | float) else None


def _field_of(name: str) -> Any:
    section: Any = Config
    field = None
    for part in name.split("."):
        field = getattr(section, "model_fields", {}).get(part)
        kinds = nested_kinds(field.annotation) if field else []
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    return field


def from_yaml(text: str) -> Any:
    """Return the value that a typed text has as YAML; the text itself if it is no YAML."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text


def as_yaml(value: Any) -> str:
    """Return a plain value as YAML on one line."""
    return (
        yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000, sort_keys=False)
        .removesuffix("...\n")
        .strip()
    )


@cache
def dotted_names() -> tuple[str, ...]:
    """Return every setting's dotted name, such as `lora.rank`."""
    return tuple(_names_of(Config, ""))


def _names_of(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _names_of(kind, f"{prefix}{name}.")
