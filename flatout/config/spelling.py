"""How each caller spells a setting and the next step of an error: a command line, Python, or studio.

Errors are written once: a setting as `batch.layout: rows`, a next step by `flatout.errors.next_steps`.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain, compress, pairwise
from pathlib import Path
from typing import Any, Literal

import yaml

from flatout.config.shortcuts import LONG_FORMS, SHORTCUTS
from flatout.errors import STEP, FlatoutError

_KEYWORDS = {setting: keyword for keyword, setting in SHORTCUTS.items()}
_VALUE = r"\[[^\]\n]*\]|\{[^}\n]*\}|[\w+-]+(?:[./][\w+-]+)*"
RESTART = "--restart"
# functions and verbs that take settings
_WITH_SETTINGS = ("train", "plan", "verify", "doctor", "launch")
# an option with a value that is refused: its name, the value, and values that are allowed
_OPTION = re.compile(
    r"(--?[\w-]+) is ('[^']*'|\S+); expected "
    r"(?:one of ([\w.-]+(?:, [\w.-]+)*)|(?:more than 0, at most |[^\d;]*)(\d[\d.]*))"
)
_IN_MEMORY = r"[^\s(]*in_memory/data-\w+/rows\.\w+:(\d+)"
_COLUMNS = re.compile(r"(?:set|map yours, such as) columns: \{([^}]*)\}")
# what a form of studio calls a setting that has no field of its own name
_FIELDS = {"name": "Name of the run"}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who reads an error: on the `command` line, in `python`, or in `studio`.

    `words` are those of the command line after `flatout`, or the called function alone.
    """

    kind: Literal["command", "python", "studio"]
    words: Sequence[str] = ()

    @property
    def _builds(self) -> bool:
        return self.kind == "command" and [*self.words[:2]] == ["data", "build"]

    def setting(self, name: str, value: str) -> str:
        """Spell a setting with its value, which is YAML."""
        if self.kind == "command":
            return _option(name, value) if self._builds and name.startswith("data.") else f"{name}={value}"
        if self.kind == "studio":
            return f"{_FIELDS.get(name, name)}: {value}"
        if name == RESTART:
            return "restart=True"
        section, _, last = name.partition(".")
        keyword = name if not last else _KEYWORDS.get(name)
        if section == "data" and not keyword and self.words[:1] != ("Config",):  # data= names the rows
            return f'{{"data": {{"{last}": {_literal(value)}}}}} as the first argument'
        return f"{keyword}={_literal(value)}" if keyword else f'{section}={{"{last}": {_literal(value)}}}'

    def step(self, words: Sequence[str]) -> str | None:
        """Spell a next step: settings, `--restart` or names, and behind `instead of` what the person wrote for them.

        Returns None if there is no such step here.
        """
        if not all(map(str.isprintable, words)):
            return None  # nobody can type it
        of = next((at for at in range(len(words)) if words[at : at + 2] == ["instead", "of"]), len(words))
        added, removed = self._as_options(words[:of]), {*words[of + 2 :]}
        if added and added[0].startswith("source="):
            return self._source(yaml.safe_load(added[0].removeprefix("source=")), *words[2:])
        takes_words = self.kind == "command" and self.words[:1] in (["data"], ["init"])
        if added and added[0].startswith("data=") and takes_words:
            if self.words[0] == "init" or added[0][5:6] != "[":  # init takes one file, and show none
                return None
            added = yaml.safe_load(added[0].removeprefix("data="))
        removed |= {_parts(word)[0] for word in added if "=" in word or word[:1] == "-"}
        if self.kind == "studio":
            return (
                None
                if any("=" not in word for word in added)
                else ", ".join(self.setting(*_parts(word)) for word in added)
            )
        if self.kind == "python":
            function = self.words[0] if self.words else "train"
            if not any("=" in word or word == RESTART for word in added):
                return f'"{" ".join(added)}" instead of "{" ".join(words[of + 2 :])}"' if added and removed else None
            # data= names the rows: settings of data stand in the first argument, a configuration
            is_first = function != "Config"
            of_data = [w for w in added if is_first and w.startswith("data.") and _parts(w)[0] not in _KEYWORDS]
            section = ", ".join(f'"{name[5:]}": {_literal(value)}' for name, value in map(_parts, of_data))
            changes = [self.setting(*_parts(word)) for word in added if word not in of_data]
            # settings of one section are one keyword
            call = re.sub(r"\b(\w+=\{)([^{}]*)\}, \1", r"\1\2, ", ", ".join(changes))
            first = f'{{"data": {{{section}}}}}, ...' if of_data else "..." if "=" in call else ""
            return f"flatout.{function}({', '.join(filter(None, [first, call]))})"
        # what stands together is replaced there alone: of `--nnodes 2 --node-rank 2`, the second 2
        gone = words[of + 2 :]
        ats = [at for at in range(len(self.words) - 1) if len(gone) > 1 and [*self.words[at : at + len(gone)]] == gone]
        if places := {*range(ats[0], ats[0] + len(gone))} if ats else set():
            removed -= {*gone} - {_parts(word)[0] for word in added}
        # a value may be what is replaced: data=chts.jsonl
        named = [
            f"{_parts(word)[0]}=" if _parts(word)[1] in removed and word not in removed else "" for word in self.words
        ]
        stays = [
            at not in places and word not in removed and _parts(word)[0] not in removed and not key
            for at, (word, key) in enumerate(zip(self.words, named, strict=True))
        ]
        has_value = {one for one, after in pairwise(added) if one[:1] == "-" and after[:1] != "-" and "=" not in after}
        values = {at + 1 for at, word in enumerate(self.words) if word in has_value}
        stays = [stay and not (at in values and self.words[at][:1] != "-") for at, stay in enumerate(stays)]
        is_change = any("=" in word or word[:1] == "-" for word in added)
        if not is_change and False not in stays and words[of:] != ["instead", "of"]:
            return None  # what is replaced stands in a file
        at = stays.index(False) if False in stays else len(stays)
        key = named[at] if at < len(named) and not is_change else ""
        before, after = self.words[:at], compress(self.words[at:], stays[at:])
        variables = [word for word in added if re.match(r"[A-Z_]+=", word)]  # of the environment
        return shlex.join([*variables, "flatout", *before, *(key + word for word in added[len(variables) :]), *after])

    def _as_options(self, words: Sequence[str]) -> list[str]:
        """Return words of a step with settings of `data` as options, where the command has options for them."""
        options = (shlex.split(self.setting(*_parts(w))) if self._builds and w[:5] == "data." else [w] for w in words)
        return [*chain.from_iterable(options)]

    def _source(self, settings: Mapping[str, Any], path: str, is_sure: str = "") -> str | None:
        """Spell the step that sets `columns`, `format` or `keys` of the source `path`; `--yes` takes sure columns."""
        from flatout.config.names import as_yaml

        verb, is_in_memory, columns = [*self.words[:1]], "in_memory" in Path(path).parts, settings.get("columns", {})
        if self.kind == "studio" or verb == ["build_data"] or (is_in_memory and Path(path).suffix != ".jsonl"):
            return None
        if settings.keys() - {"columns"} and (is_in_memory or verb == ["init"]):
            return None
        if is_in_memory and columns.keys() & {"role", "content", "from", "value"}:
            return None  # keys of turns
        if self.kind == "python" and is_in_memory:
            row = ", ".join(f'"{ours}": row["{theirs}"]' for ours, theirs in columns.items())
            return f"flatout.{verb[0]}(..., data=[{{{row}}} for row in data])"
        source = {
            **dict(reversed(LONG_FORMS["data"](path).items())),
            "sources": [{"path": path, **settings}],
        }
        if self.kind == "python":
            return f"flatout.{verb[0]}(..., data={_python(source)})"
        if verb[0] in ("data", "init"):
            pairs = ((k, f"{a}={b}") for k, v in settings.items() if isinstance(v, dict) for a, b in v.items())
            options = [f"--{name.removesuffix('s')}={pair}" for name, pair in pairs if pair not in self.words]
            options += [f"--{name}={value}" for name, value in settings.items() if isinstance(value, str)]
            return shlex.join(["flatout", *self.words, *options])
        if is_sure:
            return f"{shlex.join(['flatout', *self.words, is_sure])}  # {is_sure} accepts these columns"
        if f"data={path}" not in self.words:
            file = next((word for word in self.words if word.endswith((".yaml", ".yml"))), "the file")
            return f"in {file}: data: {as_yaml(source)}"
        return self.step([f"data={as_yaml(source)}", *(["objective=kto"] if settings.get("format") == "kto" else [])])


STUDIO = Caller("studio")


def spelled(text: str, caller: Caller) -> str:
    """Return an error's text with its settings and next steps as the caller writes them."""
    lines = []
    for line in [*text.split("\n"), *_implied(text, caller)]:
        if not line.startswith(STEP):
            if caller.kind == "python":  # rows that were copied to a file
                line, is_in_memory = re.subn(_IN_MEMORY, r"row \1 of your data", line)
                if is_in_memory and (columns := _COLUMNS.search(line)):
                    renamed = re.sub(r"(\w+): ([^,]+)", r"\2 to \1", columns[1])
                    line = line.replace(columns[0], f"rename the keys of your rows: {renamed}")
            lines.append(_mention().sub(lambda match: match[1] + caller.setting(match[2], match[3]), line))
            continue
        words, _, why = line.removeprefix(STEP).partition("  ")
        try:
            split = shlex.split(words)
        except ValueError:  # a quote in what a person wrote
            split = words.split()
        if step := caller.step(split):
            lines.append(f"  {step}" + (f"  # {why}" if why else ""))
    return "\n".join(lines)


def mentioned(text: str) -> list[str]:
    """Return the changes `name=value` that a sentence says to make first: `set A: 1 and B: 2, or C: 3` has A and B."""
    if text.startswith(f"{RESTART} ("):
        return [RESTART]
    match = _order().search(text)
    return [f"{name}={value}" for _, name, value in _mention().findall(match[0])] if match else []


def _implied(text: str, caller: Caller) -> list[str]:
    """Return the step of a sentence without one: what it says to set, or the value of an option that it expects."""
    if STEP in text or "\n  - " in text or caller.kind == "studio":
        return []
    from flatout.config.names import our_value, why_of  # lazy, as they import this file

    verb = [*caller.words[:1]]
    if (option := _OPTION.match(text)) and caller.kind == "command":
        name, given, allowed = option[1], option[2].strip("'"), (option[3] or option[4]).split(", ")
        meant = our_value(name.lstrip("-"), given)
        near = difflib.get_close_matches(meant.value.lower(), allowed, n=1) or allowed[:1]
        typed = [after for word, after in pairwise(caller.words) if word == name]
        why = meant.why or "for example" * ("such as" in option[0])
        return [f"{STEP}{shlex.join([name, *near, 'instead', 'of', name, *typed])}  {why}"]
    changes = mentioned(text) if verb[0] in _WITH_SETTINGS and "leave" not in text else []
    return [f"{STEP}{shlex.join(changes)}  {why_of(changes)}"] if changes else []


@contextmanager
def spelled_for(caller: Caller) -> Iterator[None]:
    """Raise errors of the body as this caller writes them; also a decorator of functions."""
    try:
        yield
    except FlatoutError as error:
        error.args = (spelled(str(error), caller), *error.args[1:])
        raise


@cache
def _order() -> re.Pattern[str]:
    mention = _mention().pattern
    return re.compile(rf"\b(?=set |use |give |write ){mention}(?: (?=and ){mention})*")


@cache
def _mention() -> re.Pattern[str]:
    """Match `set batch.layout: rows` with a setting that exists: what comes before it, its name, its value."""
    from flatout.config.names import dotted_names

    names = "|".join(map(re.escape, sorted(dotted_names(), key=len, reverse=True)))
    return re.compile(rf"(\b(?:set|use|or|and|with|give|write|choose|add|for|none) )({names})(?:: |=)({_VALUE})")


def _option(name: str, value: str) -> str:
    """Return a setting of `data` as an option of `flatout data build`, repeated for each part of the value."""
    given, option = yaml.safe_load(value), "--" + name.removeprefix("data.").replace("_", "-")
    if isinstance(given, dict):
        given = [f"{key}={_python(part).lower()}" for key, part in given.items()]
    if not isinstance(given, list):
        return f"{option} {value}"
    return " ".join(f"{option.removesuffix('s')} {shlex.quote(str(part))}" for part in given)


def _parts(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    return name, value


def _literal(value: str) -> str:
    """Return YAML as a Python literal; as text, what is not YAML: an error quotes what a person wrote."""
    try:
        return _python(yaml.safe_load(value))
    except (yaml.YAMLError, TypeError, ValueError, RecursionError):
        return _python(value)


def _python(value: Any) -> str:
    if isinstance(value, str):
        try:
            float(value)  # YAML takes 1e-4 for text
        except ValueError:
            return json.dumps(value, ensure_ascii=False)
        return value if value == value.strip() and math.isfinite(float(value)) else json.dumps(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_python(key)}: {_python(inner)}' for key, inner in value.items())}}}"
    if value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    raise TypeError(f"{value!r} has no literal")
