"""What is wrong with a setting, in one line, and what to set instead."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from flatout.config.names import (
    OF_OTHERS,
    OurName,
    as_yaml,
    dotted_names,
    knows_value,
    needed_with,
    our_name,
    our_value,
)
from flatout.config.schema import NAME_PATTERN
from flatout.config.shortcuts import LONG_FORMS

_PLAIN = (bool, int, float, str, list, dict, type(None))
# stands for the model that a person has to choose
_SOME_MODEL = "Qwen/Qwen3-0.6B"


def describe_error(item: Any, given: Mapping[str, str] = MappingProxyType({})) -> str:
    """Format one pydantic error as `field: what, got, what to do`; `given` are the overrides."""
    name = _name_of(item, given)
    if item["type"] == "extra_forbidden":
        if len(item["loc"]) == 1 and "." in name and name in dotted_names():
            section, _, last = name.partition(".")
            return f"{name}: in a file, a section holds its settings: {section}: {{{last}: {_written(item, given)}}}"
        ours = our_name(name, _written(item, given))
        if ours is None:
            return f"{name}: unknown key; `flatout init` writes all known keys"
        if ours.setting is None:
            return f"{name}: {ours.why}"
        meant = ours.setting if ours.setting == "data" else OF_OTHERS.get(name.rsplit(".", 1)[-1], ours.setting)
        return f"{name}: unknown key; did you mean {meant}?" + (f" ({ours.why})" if ours.why else "")
    if item["type"] == "missing":
        return f"{name}: missing; every run needs it, such as `model: {_SOME_MODEL}` in a file"
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "model_type":
        message = f"expected a section with settings{', such as model.name' if name == 'model' else ''}"
    elif item["type"] == "path_type":
        message = "expected a path"
    elif item["type"] == "string_pattern_mismatch" and NAME_PATTERN in message:
        message = "use letters, digits, dots, dashes and underscores, at most 64"
    where = f"{name}: " if name else ""
    shown = given.get(name, "") if isinstance(item["input"], bool) else ""
    shown = shown or repr(item["input"])
    got = "" if isinstance(item["input"], dict) else f", got {shown if len(shown) <= 100 else shown[:97] + '...'}"
    meant = ""
    if (fix := _fix(item, given)) is not None and fix.setting is not None:
        meant = f"; set {fix.setting}: {fix.value}" + (f" ({fix.why})" if fix.why else "")
    return f"{where}{message[:1].lower()}{message[1:]}{got}{meant}"


def _fix(item: Any, given: Mapping[str, str]) -> OurName | None:
    """Return what to set instead of a setting that is refused, if that is known."""
    name, value = _name_of(item, given), _written(item, given)
    if item["type"] == "missing" and name == "model":
        return OurName(name, _SOME_MODEL)
    if item["type"] == "float_parsing" and re.fullmatch(r"\d+,\d+|[\d.e-]+,", value):
        return OurName(name, value.rstrip(",").replace(",", "."))
    if item["type"] in ("less_than", "less_than_equal"):
        limit, number = min(item["ctx"].values()), float(item["input"])
        share = number / 100
        is_percent = limit <= 1 < number and share <= limit
        return OurName(name, f"{share:g}", f"a share, not percent: {number:g} % is {share:g}") if is_percent else None
    if item["type"] == "extra_forbidden":
        return our_name(name, value)
    if item["type"] == "model_type" and name in OF_OTHERS:
        return our_name(name, value)
    if knows_value(name, value):
        return our_value(name, value)
    if item["type"] == "literal_error" and not name[-1].isdigit():
        allowed = re.findall(r"'([^']*)'", str(item.get("ctx", {}).get("expected")))
        near = difflib.get_close_matches(value, allowed, n=1)
        return OurName(name, near[0]) if near else None
    if item["type"] == "list_type" and isinstance(item["input"], str):
        return OurName("data", value) if name == "data.sources" else our_value(name, f"[{value}]")
    if item["type"] == "string_pattern_mismatch" and (text := re.sub(r"[^A-Za-z0-9._-]+", "-", value).strip("-._")):
        return OurName(name, text[:64])
    return None


def _name_of(item: Any, given: Mapping[str, str]) -> str:
    """Return the dotted name of a refused setting: of the override, if a short form such as `track=wandb` set it."""
    name, section = ".".join(str(part) for part in item["loc"]), str(*item["loc"][:1])
    if name == "objective" and "objective.kind" in given:
        return "objective.kind"
    is_short = section in LONG_FORMS and section in given and not given[section].startswith(("{", "["))
    return section if is_short and name not in given and item["type"] != "missing" else name


def _written(item: Any, given: Mapping[str, str]) -> str:
    """Return a refused value as it is written in YAML."""
    name, value = _name_of(item, given), item["input"]
    return given.get(name) or (as_yaml(value) if isinstance(value, _PLAIN) else "...")


def steps_of(
    items: Sequence[Any], given: Mapping[str, str] | None, settings: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """Return the step that replaces all refused settings; none if they stand in a file, or one has no replacement.

    `given` are the overrides, None if all settings are a call's; `settings` are all, by dotted name.
    """
    names = [_name_of(item, given or {}) for item in items]
    fixes = [_fix(item, given or {}) for item in items]
    if given is not None and not given.keys() >= set(names) - {"model"}:
        return []
    changes = [f"{fix.setting}={fix.value}" for fix in fixes if fix is not None and fix.setting is not None]
    changes = [*changes, *needed_with(changes, settings)] if len(changes) == len(items) else []
    return [(shlex.join([*changes, "instead", "of", *names]), "")] if changes else []
