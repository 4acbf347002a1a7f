"""Names that people bring from transformers, TRL, PEFT, Axolotl, LLaMA-Factory and torchtune, and ours for them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from flatout.config.schema import Config
from flatout.config.shortcuts import SHORTCUTS
from flatout.config.table import read_table

_TABLE = read_table("other_names")
OF_OTHERS: Mapping[str, str] = {other: ours for ours, others in _TABLE["names"].items() for other in others.split()}
_INSTEAD: Mapping[str, str] = _TABLE["instead"]
_VALUES: Mapping[str, Mapping[str, str]] = {
    setting: {other: ours for ours, others in values.items() for other in others.split()}
    for setting, values in _TABLE["values"].items()
}
_WHY: Mapping[str, str] = _TABLE["why"]
_NEEDS: Mapping[str, list[str]] = _TABLE["needs"]


@dataclass(frozen=True, slots=True)
class OurName:
    """Our setting and its value, as YAML, for a name of others; `setting` is None where `why` says what is instead."""

    setting: str | None
    value: str = ""
    why: str = ""


def our_name(name: str, value: str = "", *, is_option: bool = False) -> OurName | None:
    """Return what stands for a name of others, a keyword, or a name that is nearly one of ours; None if nothing does.

    `name` may have sections, such as batch.size. `value` is YAML. What is nearly a setting counts for keys, but not for
    an option, which may be another verb's.
    """
    leaf = name.rsplit(".", 1)[-1]
    if leaf in _INSTEAD:
        return OurName(None, why=_INSTEAD[leaf])
    ours = OF_OTHERS.get(leaf) or OF_OTHERS.get(name.replace(".", "_")) or SHORTCUTS.get(name)
    if ours is None:
        names = list(dotted_names())
        same = [full for full in names if full.rsplit(".", 1)[-1] == leaf]
        near = [name] if name in names else difflib.get_close_matches(name, names, n=1, cutoff=0.75) or same
        near = near or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        if not near or (is_option and near[0] != name and near != same):
            return None
        ours = near[0]
    return our_value(ours, value)


def our_value(ours: str, value: str) -> OurName:
    """Return our setting with our form of a value of others; `ours` may have a value that replaces theirs."""
    setting, _, fixed = ours.partition(": ")
    if not fixed and (known := _VALUES.get(setting, {}).get(value.lower())):
        setting, _, fixed = known.rpartition(": ") if ": " in known else (setting, "", known)
    translated = fixed or value
    if setting == "data.sources" and not translated.startswith("["):
        setting = "data"
    return OurName(
        setting, translated, (translated != value and _WHY.get(f"{setting}: {translated}")) or _WHY.get(setting, "")
    )


def knows_value(setting: str, value: str) -> bool:
    """Whether a value is one of others for which we have another."""
    return value.lower() in _VALUES.get(setting, {})


def needed_with(changes: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
    """Return what the changes `name=value` need besides, so that they are not refused, where `settings` lack it.

    `settings` have dotted names.
    """
    names = {word.partition("=")[0] for word in changes}
    # a method that is given may be the wrong one
    has = names | {name for name, value in settings.items() if value not in (None, 0, "lora")}
    needs = [_NEEDS[name] for name in _NEEDS if name in names]
    return [choices[0] for choices in needs if not has & {choice.partition("=")[0] for choice in choices}]


def as_yaml(value: Any) -> str:
    """Return a plain value as YAML on one line."""
    return (
        yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000).removesuffix("...\n").strip()
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
