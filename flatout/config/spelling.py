"""How a fix is spelled by each door through which a mistake comes: a command line, Python, or the studio."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import yaml

from flatout.config.shortcuts import LONG_FORMS, SHORTCUTS
from flatout.errors import Fix, FlatoutError, as_text

_KEYWORDS = {"--quantize": "kind"} | {setting: keyword for keyword, setting in SHORTCUTS.items()}


def on_command_line(fix: Fix) -> str:
    """Spell a fix as words of a command: `lora.rank=8 --restart`."""
    return shlex.join(_all_words(fix.settings))


def as_data_options(fix: Fix) -> str:
    """Spell a fix as words of `flatout data build`, which has an option for each setting of a data set and of sources.

    Those of sources are for all of them; a setting of another section is none of a data set.
    """
    settings = {
        name[5:]: value for name, value in fix.settings.items() if name[:5] == "data." and name != "data.sources"
    }
    for source in fix.settings.get("data.sources", ()):
        settings |= {name: value for name, value in source.items() if name not in ("path", "weight")}
    options = {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
    paths = fix.settings.get("data", [])
    options |= {name: value for name, value in fix.settings.items() if name[:2] == "--"}
    return shlex.join([*([paths] if isinstance(paths, str) else paths), *_all_words(options)])


def as_init_options(fix: Fix) -> str:
    """Spell a fix as words of `flatout init`, which takes a model, rows and their columns."""
    named = {f"--{name}": value for name, value in fix.settings.items() if name in ("model", "data")}
    rest = as_data_options(Fix({name: value for name, value in fix.settings.items() if f"--{name}" not in named}))
    return " ".join(filter(None, [shlex.join(_all_words(named)), rest]))


def in_python(fix: Fix) -> str:
    """Spell a fix as arguments of a call: `lora={"rank": 8}, restart=True`."""
    keywords, of_data = dict[str, Any](), dict[str, Any]()
    for name, value in fix.settings.items():
        section, _, last = name.partition(".")
        if name[:2] == "--" or not last or name in _KEYWORDS:
            keywords[_KEYWORDS.get(name, name.lstrip("-").replace("-", "_"))] = value
        elif section == "data":  # data= names the rows
            of_data[last] = value
        else:
            keywords.setdefault(section, {})[last] = value
    if sources := of_data.get("sources"):
        of_data, keywords["data"] = {}, {**LONG_FORMS["data"](sources[0]["path"]), **of_data}
    first = [f'{{"data": {_literal(of_data)}}} as the first argument'] if of_data else []
    return ", ".join([*first, *(f"{name}={_literal(value)}" for name, value in keywords.items())])


def in_build_data(fix: Fix) -> str:
    """Spell a fix as arguments of `flatout.build_data`, whose keywords are those of the section `data`."""
    return in_python(Fix({name.removeprefix("data."): value for name, value in fix.settings.items()}))


def in_studio(fix: Fix) -> str:
    """Spell a fix as fields of a form; empty if it is no setting."""
    is_option = any(name[:2] == "--" for name in fix.settings)
    return "" if is_option else ", ".join(f"{name}: {_written(value)}" for name, value in fix.settings.items())


def spelled(error: FlatoutError, spell: Callable[[Fix], str]) -> str:
    """Return an error's text and fixes as the reader of this door writes them."""
    error.spell = spell
    return str(error)


@contextmanager
def spelled_for(spell: Callable[[Fix], str]) -> Iterator[None]:
    """Raise errors of the body as their reader spells what mends them; also a decorator of functions."""
    try:
        yield
    except FlatoutError as error:
        error.spell = spell
        raise


def _all_words(settings: Mapping[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in _words(name, value)]


def _words(name: str, value: Any) -> Iterator[str]:
    if name[:2] != "--":
        yield f"{name}={_written(value)}"
    elif isinstance(value, list | dict):  # such as --special-token, once for each
        parts = value if isinstance(value, list) else [f"{key}={as_text(part)}" for key, part in value.items()]
        for part in parts:
            yield from (name.removesuffix("s"), as_text(part))
    else:
        yield from [name] if value is True else (name, as_text(value))


def _written(value: Any) -> str:
    """Return a value as YAML on one line: a text in quotes if YAML would take it for something else."""
    try:
        is_plain = not isinstance(value, str) or yaml.safe_load(value) == value
    except yaml.YAMLError:
        is_plain = False
    return as_text(value) if is_plain else json.dumps(value)


def _literal(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(str(key))}: {_literal(inner)}' for key, inner in value.items())}}}"
    if not isinstance(value, str):
        return repr(value)
    try:  # YAML takes 1e-4 for text
        return value if value == value.strip() and math.isfinite(float(value)) else json.dumps(value)
    except ValueError:
        return json.dumps(value, ensure_ascii=False)
