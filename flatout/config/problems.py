"""What is wrong with a setting, in one line, and what to set instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from flatout.config.data import SourceConfig
from flatout.config.describe import default_of, settings
from flatout.config.names import FOREIGN_NAMES, instead_of, resolve_alias, value_meant
from flatout.config.schema import NAME_PATTERN
from flatout.config.shortcuts import LONG_FORMS, SHORTCUTS
from flatout.errors import PLAIN_TYPES, Fix, ProblemsError, as_text
from flatout.io.redact import redacted

# the setting that a section's name alone stands for
_MAIN = {
    "batch": "batch.samples_per_step", "lora": "lora.rank", "eval": "eval.fraction", "schedule": "schedule.kind",
    "base": "base.storage",
}  # fmt: skip
_SAMPLES = {"model": "Qwen/Qwen3-0.6B", "model.name": "Qwen/Qwen3-0.6B", "data": "chats.jsonl", "gpus": 1}


class Problem(NamedTuple):
    """What is wrong with a setting or an option."""

    field: str
    """Its name; empty for the settings as a whole."""
    what: str = ""
    fixes: tuple[Fix, ...] = ()
    """Each of them mends it."""

    @property
    def text(self) -> str:
        return ": ".join(filter(None, (self.field, self.what)))


def problem_of(item: Any, given: Mapping[str, str] = MappingProxyType({}), *, is_file: bool = False) -> Problem:
    """Return what is wrong by one pydantic error; `given` are the overrides; `is_file`: the rest is in a file."""
    name, value = name_of(item, given), item["input"]
    if item["type"] == "extra_forbidden":
        return _unknown_key(item, name, is_file=is_file and name not in given)
    if item["type"] == "missing":
        is_source = name.startswith("data.sources")
        what = "name a file, folder or hub id; rows in memory are data=rows" if is_source else "every run needs it"
        return Problem(name, f"missing; {what}", _example_of(name))
    if instead := instead_of(name, value):
        return Problem(name, f"there is no {as_text(value)}: {instead}")
    error = item.get("ctx", {}).get("error")
    known = _setting_of(item["loc"])
    if item["type"] == "string_pattern_mismatch" and NAME_PATTERN in item["msg"]:
        text = "use letters, digits, dots, dashes and underscores, at most 64"
    elif item["type"] == "model_type":
        text = "expected a section with settings"
    else:
        text = str(error or (f"expected {settings()[known].allowed}" if known else item["msg"]))
    text = text.removeprefix(f"{name}: ")
    shown = "nothing" if value is None else as_text(value) if isinstance(value, bool) else repr(value)
    got = "" if isinstance(value, dict) or (error and shown in text) else f", got {redacted(shown):.100}"
    fixes = getattr(error, "fixes", ()) or _value_meant(item, name, value)
    field = "" if text.startswith(f"{name}.") else name
    return Problem(field, f"{text[:1].lower()}{text[1:]}{got}", fixes)


def problems_error(what: str, problems: Sequence[Problem], end: str = "") -> ProblemsError:
    """Return the error of all problems of `what`; `end` is there instead of fixes."""
    texts = list(dict.fromkeys(problem.text for problem in problems))
    return ProblemsError(what, [*texts[:-1], texts[-1] + end], [] if end else together(problems))


def together(problems: Collection[Problem]) -> list[Fix]:
    """Return the fixes of problems: of one its own, of several one that mends all it can; none if they contradict."""
    if len(problems) == 1:
        return [*next(iter(problems)).fixes]
    first = [problem.fixes[0] for problem in problems if problem.fixes]
    changes = [change for fix in first for change in fix.settings.items()]
    settings = dict(changes)
    is_one = all(settings[name] == value for name, value in changes)
    return [Fix(settings, next((fix.why for fix in first if fix.why), ""))] if settings and is_one else []


def _unknown_key(item: Any, name: str, *, is_file: bool) -> Problem:
    value = item["input"]
    for part in name.split(".")[len(item["loc"]) :] if isinstance(value, dict) else ():
        value = value[part]
    value = value if isinstance(value, PLAIN_TYPES) else "..."
    if len(item["loc"]) == 1 and "." in name and name in settings():
        section, _, last = name.partition(".")
        return Problem(name, f"in a file, a section holds its settings: {section}: {{{last}: {as_text(value)}}}")
    key, colon, rest = str(item["loc"][-1]).partition(":")
    if colon and rest and value is None:
        return Problem(name.removesuffix(colon + rest), f"YAML needs a blank after the colon: {key}: {rest}")
    if name.startswith("data.sources."):
        near = difflib.get_close_matches(name.rpartition(".")[2], SourceConfig.model_fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"a source has {', '.join(SourceConfig.model_fields)}"
        return Problem(name, f"unknown key; {hint}")
    alias = resolve_alias(name, value)
    if isinstance(alias, str):
        return Problem(name, f"not a setting: {alias}")
    if alias is None:
        return Problem(name, "unknown key; leave it out (`flatout init --all` writes all known keys)")
    # an override adds the right key, but leaves the wrong one in its file
    why = f" ({alias.why})" if alias.why else ""
    text = f"unknown key; did you mean {next(iter(alias.settings))}?{why}"
    return Problem(name, text, () if is_file else (Fix(alias.settings),))


def _value_meant(item: Any, name: str, value: Any) -> tuple[Fix, ...]:
    if item["type"] == "model_type" and (main := _MAIN.get(name) or FOREIGN_NAMES.get(name)):
        return (value_meant(main, value),) if isinstance(value, str | int | float) else ()
    if (meant := value_meant(name, value)).settings != {name: value}:
        return (meant,)
    if name == "device" and (gpu := re.fullmatch(r"cuda:(\d+)", str(value))):
        return (Fix({"device": "cuda", "gpus": [int(gpu[1])]}, "that GPU"),)
    full = ".".join(str(part) for part in item["loc"] if not isinstance(part, int))
    words = settings()[full].words if full in settings() else ()
    if item["type"] == "literal_error" and "," in str(value):
        return (Fix({name: re.split(", *", str(value))}),)
    if item["type"] == "literal_error" and (near := difflib.get_close_matches(str(value).lower(), words, n=1)):
        return (Fix({name: near[0]}),)
    if item["type"].startswith("int_") and (number := _whole_number(value)) is not None:
        return (Fix({name: number}),)
    if item["type"] == "value_error":
        return ()
    if item["type"] == "list_type" and isinstance(value, str) and name != "data.sources":
        return (Fix({name: [SHORTCUTS.get(value, value)]}),)
    return _example_of(name)


def _whole_number(value: Any) -> int | None:
    """Return the whole number that a text such as 1e3 stands for; None for any other value."""
    try:
        return int(number) if isinstance(value, str) and (number := float(value)).is_integer() else None
    except ValueError:
        return None


def _example_of(name: str) -> tuple[Fix, ...]:
    if name in _SAMPLES:
        return (Fix({name: _SAMPLES[name]}, "for example"),)
    default = default_of(name)
    return () if default is None else (Fix({name: default}, "the default"),)


def name_of(item: Any, given: Mapping[str, str]) -> str:
    """Return the dotted name of a refused setting: of the override, if a short form such as `track=wandb` set it."""
    parts = [str(part) for part in item["loc"]]
    if (known := _setting_of(item["loc"])) and item["type"] not in ("missing", "extra_forbidden"):
        # pydantic adds the kind of a value that may have several, and the place in a list
        count = known.count(".") + 1
        parts = parts[: next(n for n in range(count, len(parts) + 1) if _setting_of(parts[:n]) == known)]
    name, section = ".".join(parts), str(*parts[:1])
    if name == "objective" and "objective.kind" in given:
        return "objective.kind"
    if item["type"] == "extra_forbidden" and (below := [one for one in given if one.startswith(f"{name}.")]):
        return below[0]
    is_own = any(f"{name}.".startswith(f"{one}.") for one in given if "." in one)
    is_short = section in LONG_FORMS and section in given and not given[section].startswith(("{", "["))
    return section if is_short and not is_own and item["type"] != "missing" else name


def _setting_of(parts: Sequence[Any]) -> str:
    """Return the setting to which a place in the settings belongs, such as data.sources.path of an item's path."""
    names = [str(part) for part in parts if not str(part).isdigit()]
    prefixes = (".".join(names[:count]) for count in range(len(names), 0, -1))
    return next((name for name in prefixes if name in settings()), "")
