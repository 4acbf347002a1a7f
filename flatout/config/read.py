"""Read a configuration file and overrides into a frozen Config; all problems are reported at once."""

from __future__ import annotations

import contextlib
import copy
import re
import runpy
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from flatout.config.folders import SETTINGS_FILES, is_run_folder, path_of_run
from flatout.config.names import FOREIGN_NAMES
from flatout.config.own_code import own_code_errors
from flatout.config.problems import Problem, name_of, problem_of, problems_error
from flatout.config.schema import Config
from flatout.config.section import with_paths
from flatout.config.shortcuts import LONG_FORMS
from flatout.config.yaml_file import MAX_FILE_BYTES, ROW_TYPES, kind_of_value, parse_yaml, read_text, read_yaml
from flatout.errors import Fix, FlatoutError, SecurityError, UsageError
from flatout.io.allowed import require_allowed
from flatout.io.json_file import read_json

# in the place of a file: all settings are overrides
NO_FILE = Path("-")
# names of the files that are opened, while they are asked for
_opened: list[list[str]] = []
# settings that runs of earlier versions wrote with these values, which change nothing: section -> names and values
_REMOVED_WHEN_OFF: Mapping[str, list[tuple[str, Any]]] = {"data": [("allowed_media_domains", [])]}


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file (or a .py file that sets `config`, which is run as code) and apply `a.b=value` overrides.

    NO_FILE stands for a file without settings.
    Raises UsageError with every problem, SecurityError for YAML with Python objects or unbounded expansion.
    """
    if path.suffix == ".py":
        return _run_python(path, overrides)
    if path == NO_FILE:
        return make_config({}, overrides, origin="the command line")
    given = [text.partition("=")[0] for text in overrides]
    return make_config(load_values(path, given), overrides, origin=str(path), folder=path.parent)


def load_values(path: Path, given: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings of a file, unchecked if it is YAML; a .py file runs. Raises as `load_config` does.

    Settings that lie in a run's folder are that run's, also after it was moved or copied, and their paths lead to where
    its files are now; `run_dir`, or a `name` for settings without a run_dir, among the settings that are `given`
    besides them, is of another run.
    """
    if path.suffix == ".py":
        return _run_python(path, ()).model_dump(mode="json")
    values, folder = read_yaml(path), path.parent
    if path.name not in SETTINGS_FILES or not is_run_folder(folder):
        return values
    for section, removed in _REMOVED_WHEN_OFF.items():
        if isinstance(own := values.get(section), dict):
            values[section] = {name: value for name, value in own.items() if (name, value) not in removed}
    old = Path(str(values.get("run_dir") or f"runs/{values.get('name', 'run')}"))
    is_of_another = "run_dir" in given or ("name" in given and not values.get("run_dir"))
    try:
        if not is_of_another and old.resolve() != folder.resolve():
            holds_here = Path.cwd().is_relative_to(folder.resolve())
            values["run_dir"] = str(folder.resolve() if holds_here else folder)
        config = make_config(values, origin=str(path), folder=folder)
    except (FlatoutError, OSError, ValueError):  # what is given besides may mend them
        return values
    return paths_in_place(config, folder, old).model_dump(mode="json", exclude_unset=True)


def paths_in_place(config: Config, folder: Path, old: Path) -> Config:
    """Return the settings of the run in `folder`, which named that folder `old`, with paths to where its files are."""
    run_dir = config.run_dir
    config = with_paths(config.model_copy(update={"run_dir": None}), lambda path: path_of_run(path, folder, old))
    return config.model_copy(update={"run_dir": run_dir})


def load_with_files(path: Path, overrides: Sequence[str] = ()) -> tuple[Config, list[Path]]:
    """Return what `load_config` does, and the files it opened: those of a .py file's own code too."""
    _watch_opened()
    _opened.append([])
    try:
        return load_config(path, overrides), [Path(name) for name in _opened[-1]]
    finally:
        _opened.pop()


@cache
def _watch_opened() -> None:
    def note(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and _opened and isinstance(args[0], str):
            _opened[-1].append(args[0])

    sys.addaudithook(note)


def make_config(
    values: Mapping[str, Any], overrides: Sequence[str] = (), *, origin: str = "config", folder: Path = Path()
) -> Config:
    """Check plain values against the schema and return the Config.

    A path in `deepspeed` is looked up here, then in `folder`. Raises ProblemsError with every wrong field's name.
    """
    merged, problems = merge_overrides(values, overrides)
    if isinstance(name := merged.get("deepspeed"), str):
        merged["deepspeed"] = _read_deepspeed(name, folder)
    try:
        config = Config.model_validate(merged, context={"is_file": True})
    except ValidationError as error:
        items = error.errors(include_url=False)
        given = {text.partition("=")[0]: text.partition("=")[2] for text in overrides}
        is_file = Path(origin).is_file()
        problems += [problem_of(item, given, is_file=is_file) for item in items]
        if items and all(name_of(item, given) in given for item in items):
            origin = "the command line"
        theirs = [one for one in items if one["loc"][-1:] and one["loc"][-1] in FOREIGN_NAMES.keys() - given.keys()]
        end = f"\n  another trainer's file? `flatout convert {shlex.quote(origin)} --to ours.yaml` translates it"
        raise problems_error(origin, problems, end * (is_file and len(theirs) > 1)) from None
    if problems:
        raise problems_error(origin, problems)
    return config


def merge_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], list[Problem]]:
    """Return a copy of `values` with `a.b=value` overrides applied, unchecked, and what is wrong with each override."""
    merged, problems = copy.deepcopy(dict(values)), list[Problem]()
    data = [text.removeprefix("data=") for text in overrides if text.startswith("data=")]
    if len(data) > 1:  # of another setting the last one counts; here rows would be left out
        problems.append(Problem("data", "given more than once", (Fix({"data": data}, "all of them"),)))
    return merged, problems + [Problem("", said) for text in overrides if (said := _apply_override(merged, text))]


def dump_config(config: Config, *, only_given: bool = False) -> str:
    """Return YAML that `load_config` reads back to an equal Config; with `only_given`, without defaults."""
    values = config.model_dump(mode="json", exclude_unset=only_given)
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def is_as_dumped(text: str) -> bool:
    """Whether a text is YAML as `dump_config` writes it: without a person's comments and layout."""
    try:
        return yaml.safe_dump(yaml.safe_load(text), sort_keys=False, allow_unicode=True) == text
    except (yaml.YAMLError, ValueError, RecursionError):
        return False


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting with its dotted name, such as `lora.rank`."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _read_deepspeed(name: str, folder: Path) -> dict[str, Any]:
    """Read the JSON file of that name in the working directory, else the one in `folder`."""
    file: Path | None = None
    with contextlib.suppress(OSError):  # a name that is too long is reported when it is read
        file = next((one for one in (Path(name), folder / name) if one.is_file()), None)
    path = file or Path(name)
    try:
        require_allowed(path)
        values = read_json(path, UsageError, max_bytes=MAX_FILE_BYTES)
    except UsageError as error:
        stage = next(iter(re.findall(r"[123]", name)), "3")
        fix = Fix({"strategy": f"zero{stage}"}, "a stage without a file; leave deepspeed out")
        raise UsageError(f"deepspeed: {error.text}", [] if file else [fix]) from error.__cause__
    if not isinstance(values, dict):
        raise UsageError(f"deepspeed: {path}: expected a JSON object, found {kind_of_value(values)}")
    return values


def run_python(path: Path) -> dict[str, Any]:
    """Run a Python file and return its globals. Raises UsageError with the line at which it failed."""
    read_text(path)
    with own_code_errors(path, "configuration", "; fix it, or write the settings as YAML"):
        return runpy.run_path(str(path))


def _run_python(path: Path, overrides: Sequence[str]) -> Config:
    """Return the `config` of a Python file that imports flatout and sets it; no other, such as a script, is run."""
    needed = (r"(?:import|from) flatout\b", r"config\b[^=\n]*=")
    if not all(re.search(rf"^[ \t]*{pattern}", read_text(path), re.MULTILINE) for pattern in needed):
        raise UsageError(
            f"{path}: not run: a configuration imports flatout.Config and must set `config` to one; another trainer's "
            f"script is translated by `flatout convert {shlex.quote(str(path))} --to ours.yaml`"
        )
    config = run_python(path).get("config")
    if not isinstance(config, Config):
        raise UsageError(f"{path}: must set `config` to a flatout.config.schema.Config, found {kind_of_value(config)}")
    return make_config(config.model_dump(mode="json"), overrides, origin=str(path))


def _no_override(text: str) -> str:
    """Say what a word behind the configuration is, which is no override."""
    if text.endswith(ROW_TYPES):
        return f"{text} holds rows; pass it as data={text}"
    if Path(text, "config.json").is_file():
        return f"{text} is a model; pass it as model={text}"
    if text.endswith((".yaml", ".yml")):
        return f"{text}: settings come from one file, and another stands before it; leave it out"
    return f"{text!r} is not an override; write section.name=value, such as lora.rank=32"


def _apply_override(values: dict[str, Any], text: str) -> str | None:
    """Set what an override says in `values`; return what is wrong with it, if that is known before it is checked."""
    name, equals, raw = text.partition("=")
    if not equals or not name:
        return _no_override(text)
    try:
        value = parse_yaml(raw)
    except (UsageError, SecurityError) as error:
        return f"{name}: {error}"
    except (yaml.YAMLError, ValueError):
        if any(raw.count(start) > raw.count(end) for start, end in ("[]", "{}")):
            raise UsageError(f"{text}: the shell ends a word at a blank; put the whole setting in quotes") from None
        if raw[:1] != "*":
            return f"{name}: the value {raw!r:.200} is not valid YAML"
        value = raw  # a glob is text
    if value is None and values.get(name) and name in ("model", "data"):
        raise UsageError(f"{text} is empty; leave it out, which keeps that of the file")
    *sections, last = name.split(".")
    holder = values
    for section in sections:
        inner = holder.setdefault(section, {})
        if holder is values and section in LONG_FORMS:
            inner = holder[section] = LONG_FORMS[section](inner)
        if not isinstance(inner, dict):
            return f"{name}: {section} is a value, not a section"
        holder = inner
    holder[last] = value
    return None
