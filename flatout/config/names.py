"""Names that people bring from transformers, TRL, PEFT, Axolotl, LLaMA-Factory and torchtune, and ours for them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from flatout.config.data import SourceConfig
from flatout.config.parallel import gpu_list
from flatout.config.schema import Config
from flatout.config.section import nested_kinds
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
SAMPLES: Mapping[str, str] = _TABLE["samples"]
"""What to propose for a setting whose default says nothing."""
_NEEDS: Mapping[str, list[str]] = _TABLE["needs"]
_OFF: Mapping[str, str] = _TABLE["when_false"]
_NOTES: Mapping[str, str] = _TABLE["notes"]
OPTIONS_OF_OTHERS: Mapping[str, Mapping[str, str]] = {
    verb: {other: ours for ours, others in options.items() for other in others.split()}
    for verb, options in _TABLE["options"].items()
}
"""By verb: an option of others -> ours."""
WITHOUT_OPTION: Mapping[str, Mapping[str, str]] = {
    verb: {other: why for why, others in options.items() for other in others.split()}
    for verb, options in _TABLE["without"].items()
}
"""By verb: an option of others -> what there is instead."""
# samples of one micro-batch of a GPU, and how many of them make a step
_PER_GPU, _ACCUMULATION = ("per_device_train_batch_size", "micro_batch_size"), "gradient_accumulation_steps"

_SOME_PER_GPU = 4
_MORE_EPOCHS = "a run of 3 epochs evaluates after each with eval.every_steps: 0.333"

_BY_NUMBER = ("gpu", "gpu_id", "gpu_ids", "cuda_visible_devices")
_OF_A_SOURCE = tuple(SourceConfig.model_fields)


@dataclass(frozen=True, slots=True)
class OurName:
    """Our setting and its value, as YAML, for a name of others; `setting` is None where `why` says what is instead."""

    setting: str | None
    value: str = ""
    why: str = ""


def our_name(
    name: str, value: str = "", *, is_option: bool = False, settings: Mapping[str, Any] = MappingProxyType({})
) -> OurName | None:
    """Return what stands for a name of others, a keyword, or a name that is nearly one of ours; None if nothing does.

    `name` may have sections, such as batch.size. `value` is YAML. What is nearly a setting counts for keys, but not for
    an option, which may be another verb's. `settings` are all that are given, by dotted name.
    """
    leaf = name.rsplit(".", 1)[-1]
    if leaf in (*_PER_GPU, _ACCUMULATION) and (step := _samples_per_step(settings)):
        return step
    if leaf in ("betas", "adam_betas"):
        first, _, second = value.strip("[]() ").partition(",")
        return OurName(None, why=f"they are two settings: set optim.beta1: {first} and optim.beta2: {second.strip()}")
    if leaf in _BY_NUMBER:
        return OurName("gpus", f"[{value.strip('[]')}]")
    if leaf in _OF_A_SOURCE and (sources := settings.get("data.sources")) and isinstance(sources, list):
        parsed = yaml.safe_load(value)
        changed = [{**({"path": one} if isinstance(one, str) else one), leaf: parsed} for one in sources]
        with suppress(ValidationError):
            SourceConfig.model_validate(changed[0])
            return OurName("data.sources", as_yaml(changed), "it belongs to a source")
    if leaf in _INSTEAD:
        return OurName(None, why=_INSTEAD[leaf].replace("VALUE", value))
    ours = OF_OTHERS.get(leaf) or OF_OTHERS.get(name.replace(".", "_")) or SHORTCUTS.get(name)
    if ours is None:
        names = list(dotted_names())
        leaves = {full.rsplit(".", 1)[-1]: full for full in reversed(names)}
        same = [full for full in names if full.rsplit(".", 1)[-1] == leaf]
        near = [name] if name in names else difflib.get_close_matches(name, names, n=1, cutoff=0.75) or same
        # a slip of the finger seldom changes the first letter
        leaves = {one: full for one, full in leaves.items() if one[0] == leaf[:1]}
        near = near or [leaves[one] for one in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)]
        if not near or (is_option and near[0] != name and near != same):
            return None
        ours = near[0]
    return (_each_epoch(ours, settings) if value == "epoch" else None) or our_value(ours, value)


def _each_epoch(ours: str, settings: Mapping[str, Any]) -> OurName | None:
    """Return what evaluates or saves after each epoch; None if the number of epochs is not known."""
    try:
        epochs = float(settings.get("batch.epochs") or 1)
    except (TypeError, ValueError):
        return None
    if epochs > 1 and ours.endswith("every_steps"):
        return OurName(ours, f"{1 / epochs:.3g}", f"a share of the run, here one of {epochs:g} epochs")
    if ours != "eval.every_steps":
        return None
    why = "a run of one epoch evaluates before its first step and at its end"
    has_rows = {"eval.fraction", "eval.data"} & settings.keys()
    if has_rows:
        return OurName(None, why=f"{why}; leave it out")
    return OurName("eval.fraction", "0.05", f"{why}; {_MORE_EPOCHS}")


def _samples_per_step(settings: Mapping[str, Any]) -> OurName | None:
    """Return the samples of a step for the batch of one GPU that `settings` give; None if they give none."""
    given = {name.rsplit(".", 1)[-1]: value for name, value in settings.items()}
    per_gpu = next((given[name] for name in _PER_GPU if name in given), _SOME_PER_GPU)
    accumulated, guess = given.get(_ACCUMULATION, 1), "" if {*_PER_GPU} & given.keys() else "for example "
    try:
        gpus = len(gpu_list(given.get("gpus")) or [0])
        number = int(per_gpu) * int(accumulated) * gpus
    except (TypeError, ValueError):
        return None
    factors = f"{guess}{per_gpu} per GPU x {accumulated} accumulated x {gpus} GPU{'s' * (gpus > 1)}"
    why = f"{factors} = {number} samples per step"
    return OurName("batch.samples_per_step", str(number), why)


def our_value(ours: str, value: str) -> OurName:
    """Return our setting with our form of a value of others; `ours` may have a value that replaces theirs."""
    setting, _, fixed = ours.partition(": ")
    if fixed and value.lower() in ("false", "no", "off", "0", "none", "null"):
        if off := _OFF.get(setting):
            return OurName(setting, off, _WHY.get(f"{setting}: {off}", ""))
        usual = "auto" if setting == "model.precision" else f"not {fixed}"
        return OurName(None, why=f"{setting} is {usual} unless you set it; leave it out")
    if setting == "schedule.warmup_steps" and (share := re.fullmatch(r"0?\.\d+|(\d+(?:\.\d+)?) ?%", value)):
        ratio = f"{float(share[1]) / 100:g}" if share[1] else value
        return OurName("schedule.warmup_ratio", ratio, f"{share[0]} is {ratio}" if share[1] else "")
    if not fixed and (known := _VALUES.get(setting, {}).get(value.lower())):
        setting, _, fixed = known.rpartition(": ") if ": " in known else (setting, "", known)
    translated = fixed or value
    if setting == "data.sources" and not translated.startswith("["):
        setting = "data"
    return OurName(
        setting, translated, (translated != value and _WHY.get(f"{setting}: {translated}")) or _WHY.get(setting, "")
    )


def instead_of(setting: str, value: str) -> str:
    """Return what there is instead of a setting with a value that only others have; "" if there is nothing."""
    return _INSTEAD.get(f"{setting}: {value}", "")


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


def why_of(changes: Sequence[str]) -> str:
    """Return what a person has to know of the changes `name=value` that are proposed; "" if nothing."""
    return next((_NOTES[change] for change in changes if change in _NOTES), "")


def default_of(name: str) -> str:
    """Return a setting's default as YAML; "" for a section, an unknown name, or a default that says nothing."""
    default: Any = Config
    for part in name.split("."):
        fields = getattr(default, "model_fields", {})
        if part.isdigit():
            continue
        if part not in fields:
            return ""
        field = fields[part]
        default = field.default if field.default_factory is None else field.default_factory
        kinds = [kind for kind in nested_kinds(field.annotation) if isinstance(kind, type)]
        default = next((kind for kind in kinds if issubclass(kind, BaseModel)), default)
    return as_yaml(default) if isinstance(default, str | int | float) else ""


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
