"""What is wrong with a setting, in one line, and what to set instead."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from flatout.config.names import (
    OF_OTHERS,
    SAMPLES,
    OurName,
    as_yaml,
    default_of,
    dotted_names,
    instead_of,
    knows_value,
    needed_with,
    our_name,
    our_value,
)
from flatout.config.schema import NAME_PATTERN
from flatout.config.shortcuts import LONG_FORMS
from flatout.config.spelling import mentioned
from flatout.errors import PLAIN_TYPES

# the setting that a section's name alone stands for
_MAIN = {
    "batch": "batch.samples_per_step", "lora": "lora.rank", "eval": "eval.fraction", "schedule": "schedule.kind",
    "base": "base.storage",
}  # fmt: skip
_SHARES = ("eval.fraction", "schedule.warmup_ratio", "lora.dropout", "schedule.decay_ratio", "schedule.min_lr_ratio")
LEAVE_OUT = "leave it out"
# stands for the model that a person has to choose
_SOME_MODEL = "Qwen/Qwen3-0.6B"


# what pydantic calls a value that has the wrong type -> how we say it
_EXPECTED = {
    "model_type": "expected a section with settings",
    "path_type": "expected a path",
    "int_parsing": "expected a whole number",
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_parsing": "expected a number",
    "float_type": "expected a number",
    "bool_parsing": "expected true or false",
    "bool_type": "expected true or false",
    "list_type": "expected a list",
}


def describe_error(
    item: Any, given: Mapping[str, str] = MappingProxyType({}), settings: Mapping[str, Any] = MappingProxyType({})
) -> str:
    """Format one pydantic error as `field: what, got, what to do`; `given` are the overrides.

    `settings` are all that are given, by dotted name.
    """
    name = _name_of(item, given)
    if item["type"] == "extra_forbidden":
        return _unknown_key(item, given, settings)
    if item["type"] == "missing" and name.partition(".")[0] == "model":
        return f"{name}: missing; every run needs it, such as `model: {_SOME_MODEL}` in a file"
    if item["type"] == "missing":
        return f"{name}: missing; name a file, folder or hub id; rows in memory go to flatout.train(..., data=rows)"
    message = _EXPECTED.get(item["type"]) or str(item["msg"]).removeprefix("Value error, ")
    if name.endswith(".every_steps"):
        message = "expected how many steps, or a share of the run below 1"
    elif item["type"] == "model_type" and name == "model":
        message += ", such as model.name"
    elif item["type"] == "model_type" and _of_section(item["input"], name, "") is None:
        inner = [one for one in dotted_names() if one.startswith(f"{name}.") and default_of(one)]
        message += f", such as {inner[0]}={default_of(inner[0])}" if inner else ""
    elif item["type"] == "string_pattern_mismatch" and NAME_PATTERN in message:
        message = "use letters, digits, dots, dashes and underscores, at most 64"
    message = message.removeprefix(f"{name}: ")
    if knows_value(name, _written(item, given)) or instead_of(name, _written(item, given)):
        message = re.split("[:;] ", message)[0]
    where = f"{name}: " if name else ""
    shown = given.get(name, "") if isinstance(item["input"], bool) else ""
    shown = shown or ("nothing" if item["input"] is None else repr(item["input"]))
    shown = shown.lower() if isinstance(item["input"], bool) else shown
    got = "" if isinstance(item["input"], dict) else f", got {shown if len(shown) <= 100 else shown[:97] + '...'}"
    message, advice, tail = message.partition("; ")
    got = "" if isinstance(item["input"], str) and shown in message else got
    fix, meant = _fix(item, given, settings), ""
    if fix is not None and not mentioned(tail) and not tail.endswith("?"):
        meant = f"set {fix.setting}: {fix.value}" + (f" ({fix.why})" if fix.why else "") if fix.setting else fix.why
    end = f"; {meant}" if meant else ""
    return f"{where}{message[:1].lower()}{message[1:]}{got}{advice}{tail}{end}"


def _unknown_key(item: Any, given: Mapping[str, str], settings: Mapping[str, Any]) -> str:
    name, value = _name_of(item, given), _written(item, given)
    if len(item["loc"]) == 1 and "." in name and name in dotted_names():
        section, _, last = name.partition(".")
        return f"{name}: in a file, a section holds its settings: {section}: {{{last}: {value}}}"
    key, colon, rest = str(item["loc"][-1]).partition(":")
    if colon and rest and item["input"] is None:
        return f"{name.removesuffix(colon + rest)}: YAML needs a blank after the colon: {key}: {rest}"
    ours = our_name(name, value, settings=settings)
    if ours is None:
        return f"{name}: unknown key; leave it out (`flatout init --all` writes all known keys)"
    if ours.setting is None:
        return f"{name}: {ours.why}"
    if ours.setting == "data.sources" and ours.why:
        return f"{name}: {ours.why}; set data.sources: {ours.value}"
    meant = ours.setting if ours.value == value else f"{ours.setting}: {ours.value}"
    return f"{name}: unknown key; did you mean {meant}?" + (f" ({ours.why})" if ours.why else "")


def _fix(item: Any, given: Mapping[str, str], settings: Mapping[str, Any]) -> OurName | None:
    """Return what to set instead of a setting that is refused: what was meant, else its default; None if not known."""
    name, value, kind = _name_of(item, given), _written(item, given), item["type"]
    if name == "device" and (gpu := re.fullmatch(r"(?:cuda:)?(\d+)", value)):
        return OurName(None, why=f"set device: cuda and gpus: [{gpu[1]}]")
    if why := instead_of(name, value):
        return OurName(None, why=why)
    if kind == "missing" and name == "model":
        return OurName(name, _SOME_MODEL)
    if kind == "value_error" and name.startswith("objective.") and name != "objective.kind":
        # an override has a field alone, a section all of them
        whole = {} if name in given or not isinstance(item["input"], Mapping) else item["input"]
        return _of_objective(str(item["msg"]), name, value, whole)
    if kind == "extra_forbidden":
        return our_name(name, value, settings=settings) or OurName(None, why=LEAVE_OUT)
    if isinstance(item["input"], list) and len(item["input"]) == 1 and kind in _EXPECTED:
        return _of_one(item["input"][0], name)  # a dash too many
    if kind == "model_type":
        return _of_section(item["input"], name, value)
    if name == "freeze" and kind == "list_type" and settings.get("method") != "full":
        return OurName(None, why="it is for method: full only, LoRA freezes every base weight anyway; leave it out")
    if meant := _number_meant(item, name, value) or _text_meant(item, name, value):
        return meant
    is_bool = isinstance(item["input"], bool)
    return None if kind in ("value_error", "string_pattern_mismatch") and not is_bool else _example_of(name)


def _of_one(given: Any, name: str) -> OurName | None:
    """Return the setting that is meant by a list of one in the place of a value, or of a section."""
    if isinstance(given, dict) and len(given) == 1:
        last, value = next(iter(given.items()))
        return OurName(f"{name}.{last}", as_yaml(value), "without the dash")
    return None if isinstance(given, dict | list) else OurName(name, as_yaml(given))


def _example_of(name: str) -> OurName | None:
    """Return a setting with its default, or with a value that says more; None if there is neither."""
    if name.partition(".")[0] == "gpus":
        return OurName("gpus", "1", "one GPU")
    default = default_of(name)
    shown = SAMPLES.get(name) or default
    return OurName(name, shown, "the default" if shown == default else "for example") if shown else None


def _of_objective(message: str, name: str, value: str, whole: Mapping[str, Any]) -> OurName | None:
    """Return what to set instead of a field that an objective does not have; the others of `whole` stay."""
    field = name.partition(".")[2]
    if near := re.search(r"did you mean (\w+)\?", message):
        if field in whole:
            return OurName("objective", as_yaml({near[1] if one == field else one: whole[one] for one in whole}))
        return OurName(f"objective.{near[1]}", value)
    if " has no fields" not in message:
        return None
    value = value.removeprefix(f"{{{field}: ").removesuffix("}")  # of a mapping, its field
    other = our_name(name, value)
    return other if other and other.setting is None else OurName(None, why=LEAVE_OUT)


def _of_section(given: Any, name: str, value: str) -> OurName | None:
    """Return the setting that a value in the place of its section stands for."""
    if given is None and name in ("model", "data"):
        return OurName(name, _SOME_MODEL if name == "model" else "chats.jsonl", "for example")
    if name in OF_OTHERS:
        return our_name(name, value)
    fits = isinstance(given, float if name == "eval" else int | str)
    return our_value(_MAIN[name], value) if fits and name in _MAIN else None


def _number_meant(item: Any, name: str, value: str) -> OurName | None:
    short = re.fullmatch(r"(\d+)(k|e\d|[.,]000)", value.lower())
    if name.endswith(".every_steps") and re.search("[a-z]", value.lower()):
        is_thousands = short is not None and short[2] == "k"
        return OurName(name, f"{value[:-1]}000") if is_thousands else our_value(name, "epoch")
    if item["type"] == "float_parsing" and re.fullmatch(r"\d+,\d+|[\d.e-]+[,a-df-z]", value):
        return OurName(name, re.sub("[,a-df-z]$", "", value).replace(",", "."))
    if percent := re.fullmatch(r"(\d+(?:\.\d+)?) ?%", value):
        name = "schedule.warmup_ratio" if name == "schedule.warmup_steps" else name
        is_share = name in _SHARES or name.endswith("every_steps")
        return OurName(name, f"{float(percent[1]) / 100:g}", "a share") if is_share else None
    if item["type"] == "int_parsing" and short:
        thousand = 1024 if short[2] == "k" and "tokens" in name else 1000
        factor = 10 ** int(short[2][1:]) if short[2][0] == "e" else thousand
        return OurName(name, str(int(short[1]) * factor))
    if item["type"] == "float_parsing" and (part := re.fullmatch(r"(\d+)/([1-9]\d*)", value)):
        return OurName(name, f"{int(part[1]) / int(part[2]):g}")
    if item["type"] == "int_from_float" and round(item["input"]):
        return OurName(name, str(round(item["input"])))
    if item["type"] in ("less_than", "less_than_equal"):
        limit, number = min(item["ctx"].values()), float(item["input"])
        share = number / 100
        if limit <= 1 < number and share <= limit:
            return OurName(name, f"{share:g}", f"a share, not percent: {number:g}% is {share:g}")
    return None


def _text_meant(item: Any, name: str, value: str) -> OurName | None:
    if value.startswith("="):
        return OurName(name, value[1:])
    if knows_value(name, value):
        return our_value(name, value)
    is_item = isinstance(next(reversed(item["loc"]), None), int)
    if item["type"] == "literal_error" and is_item and "," in value:
        return OurName(re.sub(r"\.\d+$", "", name), f"[{value}]")
    if item["type"] == "literal_error" and not name[-1].isdigit():
        allowed = re.findall(r"'([^']*)'", str(item.get("ctx", {}).get("expected")))
        near = difflib.get_close_matches(value.lower(), allowed, n=1)
        return OurName(name, near[0]) if near else None
    if item["type"] == "list_type" and name == "checkpoint.allow_change":
        return OurName(name, f"[{OF_OTHERS.get(value, value)}]")
    if item["type"] == "list_type" and isinstance(item["input"], str):
        return OurName("data", value) if name == "data.sources" else our_value(name, f"[{value}]")
    # as datasets slices: rows.jsonl[:100]
    if name == "data" and (part := re.fullmatch(r"(.+\.\w+)[:[]+(\d+)\]?", value)):
        return OurName(None, why=f"set data: {part[1]} and data.num_samples: {part[2]}")
    if item["type"] == "string_pattern_mismatch" and (text := re.sub(r"[^A-Za-z0-9._-]+", "-", value).strip("-._")):
        return OurName(name, text[:64])
    return None


def _name_of(item: Any, given: Mapping[str, str]) -> str:
    """Return the dotted name of a refused setting: of the override, if a short form such as `track=wandb` set it."""
    # pydantic adds the kind of a value that may have several kinds
    parts = [str(part) for part in item["loc"] if not str(part).startswith("constrained-")]
    if parts[-1:] and parts[-1].isdigit() and ".".join(parts[:-1]) in given:
        parts.pop()  # an item of a list that stands in one override
    name, section = ".".join(parts), str(*parts[:1])
    if field := re.match(r"Value error, (objective\.\w+): ", item["msg"]):
        return field[1]
    if name == "objective" and "objective.kind" in given:
        return "objective.kind"
    is_short = section in LONG_FORMS and section in given and not given[section].startswith(("{", "["))
    is_own = any(f"{name}.".startswith(f"{one}.") for one in given if "." in one)
    return section if is_short and not is_own and item["type"] != "missing" else name


def _written(item: Any, given: Mapping[str, str]) -> str:
    """Return a refused value as it is written in YAML."""
    name, value = _name_of(item, given), item["input"]
    return given.get(name) or (as_yaml(value) if isinstance(value, PLAIN_TYPES) else "...")


def steps_of(
    items: Sequence[Any], given: Mapping[str, str] | None, settings: Mapping[str, Any]
) -> tuple[list[str], list[str]] | None:
    """Return the changes `name=value` that mend all that is refused, and the names to leave out; None if not known.

    `given` are the overrides, None if all settings are a call's; `settings` are all, by dotted name. What a validator
    of several settings refuses is mended by what its sentence says to set.
    """
    changes, names = list[str](), list[str]()
    for item in items:
        fix, name = _fix(item, given or {}, settings), _name_of(item, given or {})
        text = fix.why if fix and not fix.setting else describe_error(item) if item["type"] == "value_error" else ""
        said = [] if fix and fix.setting else mentioned(text)
        left = re.findall(r"keep one: leave ([\w.]+) out", text)
        names += [name for name in left if name in (given or {})]
        if not (said or left) and (fix is None or (fix.setting is None and LEAVE_OUT not in fix.why)):
            return None
        names += [name] if item["type"] != "value_error" or name in (given or {}) else []
        changes += said or [f"{fix.setting}={fix.value}" for fix in (fix,) if fix and fix.setting]
    changes = [*dict.fromkeys(changes)]
    return [*changes, *needed_with(changes, settings)], names


def without(settings: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return a copy of settings without some, which have dotted names."""
    left = copy.deepcopy(dict(settings))
    for name in names:
        left.pop(name, None)  # of a file, where it should be in a section
        *sections, last = name.split(".")
        holder: Any = left
        for section in sections:
            holder = holder.get(section) if isinstance(holder, dict) else None
        if isinstance(holder, dict):
            holder.pop(last, None)
    return left
