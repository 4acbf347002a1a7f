"""How a fix is spelled by each door through which a mistake comes; most command lines take it as `str(fix)` has it."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flatout.errors import Fix, FlatoutError, as_yaml_word, words_of


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
    return shlex.join([*([paths] if isinstance(paths, str) else paths), *words_of(options)])


def as_init_options(fix: Fix) -> str:
    """Spell a fix as words of `flatout init`, which takes a model, rows and their columns."""
    named = {f"--{name}": value for name, value in fix.settings.items() if name in ("model", "data")}
    rest = as_data_options(Fix({name: value for name, value in fix.settings.items() if f"--{name}" not in named}))
    return " ".join(filter(None, [shlex.join(words_of(named)), rest]))


def in_python(fix: Fix) -> str:
    """Spell a fix as arguments of a call: `lora={"rank": 8}, restart=True`."""
    from flatout.config.shortcuts import LONG_FORMS, SHORTCUTS  # lazy, so that --help stays instant

    of_setting = {"--quantize": "kind"} | {setting: keyword for keyword, setting in SHORTCUTS.items()}
    keywords, of_data = dict[str, Any](), dict[str, Any]()
    for name, value in fix.settings.items():
        section, _, last = name.partition(".")
        if name[:2] == "--" or not last or name in of_setting:
            keywords[of_setting.get(name, name.lstrip("-").replace("-", "_"))] = value
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
    return "" if is_option else ", ".join(f"{name}: {as_yaml_word(value)}" for name, value in fix.settings.items())


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
