"""Read a configuration file and overrides into a frozen Config; all problems are reported at once."""

from __future__ import annotations

import contextlib
import copy
import re
import runpy
import shlex
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from flatout.config.folders import SETTINGS_FILES, is_run_folder, path_of_run
from flatout.config.names import FOREIGN_NAMES
from flatout.config.problems import Problem, name_of, problem_of, problems_error
from flatout.config.schema import Config
from flatout.config.section import with_paths
from flatout.config.shortcuts import LONG_FORMS
from flatout.config.yaml_faults import refuse_line, yaml_fault
from flatout.errors import OF_OWN_CODE, Fix, FlatoutError, SecurityError, UsageError
from flatout.io.allowed import require_allowed
from flatout.io.json_file import read_json
from flatout.io.near_path import did_you_mean, unknown_user

# in the place of a file: all settings are overrides
NO_FILE = Path("-")
# names of the files that are opened, while they are asked for
_opened: list[list[str]] = []
MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 20
MAX_VALUES = 50_000
_KINDS = {dict: "a mapping", list: "a list", str: "text", type(None): "nothing", bool: "true or false"}
# first bytes of files that are not UTF-8 text
_OTHER_FILES = {
    b"\xff\xfe": "it is UTF-16",
    b"\xfe\xff": "it is UTF-16",
    b"\x1f\x8b": "it is compressed (gzip)",
    b"PK": "it is a zip archive",
}

YAML_TYPES = (".yaml", ".yml", "")
# a file of rows, not of settings
ROW_TYPES = (".jsonl", ".csv", ".tsv", ".txt", ".parquet")


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that rejects duplicate keys, which YAML would silently drop, and unbounded expansion."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._num_values = 0
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose one value; an alias counts as all values that it stands for, so nested aliases cannot multiply."""
        line = self.peek_event().start_mark.line + 1
        is_alias = self.check_event(yaml.AliasEvent)
        before = self._num_values
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise SecurityError(f"line {line}: nested more than {MAX_DEPTH} levels deep; settings need few")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        if is_alias and node not in self._sizes:
            raise UsageError(f"line {line}: an alias refers to a value that contains it; write the values out")
        self._num_values += self._sizes[node] if is_alias else 1
        if self._num_values > MAX_VALUES:
            raise SecurityError(f"line {line}: aliases expand to more than {MAX_VALUES:,} values; write the values out")
        self._sizes.setdefault(node, self._num_values - before)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise UsageError(f"line {key_node.start_mark.line + 1}: a key must be plain text")
            if key_node.value in seen:
                raise UsageError(
                    f"line {key_node.start_mark.line + 1}: key {key_node.value!r} is given twice; keep one"
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _refuse_tag(loader: _StrictLoader, node: yaml.Node) -> Any:
    line = node.start_mark.line + 1
    kind = node.tag.replace("tag:yaml.org,2002:", "!!")
    raise UsageError(f"line {line}: {kind} is no kind of setting; write text, a number, a list or a mapping")


# what YAML knows beside JSON's values, and would be read as text or a list
for _tag in ("binary", "omap", "pairs", "set"):
    _StrictLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _refuse_tag)


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


# settings that runs of earlier versions wrote with these values, which change nothing: section -> names and values
_REMOVED_WHEN_OFF: Mapping[str, list[tuple[str, Any]]] = {"data": [("allowed_media_domains", [])]}


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
    sys.addaudithook(_note_opened)


def _note_opened(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _opened and isinstance(args[0], str):
        _opened[-1].append(args[0])


def make_config(
    values: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    origin: str = "config",
    folder: Path = Path(),
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
        problems.append(Problem("data: given more than once", (Fix({"data": data}, "all of them"),)))
    return merged, problems + [Problem(said) for text in overrides if (said := _apply_override(merged, text))]


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


def read_text(path: Path) -> str:
    """Return the text of a file of settings. Raises UsageError, or SecurityError above MAX_FILE_BYTES."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        hint = ""
        if isinstance(error, FileNotFoundError | IsADirectoryError):
            with contextlib.suppress(OSError):  # a name in it that is too long
                hint = _instead_of(path)
        raise UsageError(hint or f"{path}: cannot be read as a configuration: {reason}") from error
    if len(content) > MAX_FILE_BYTES:
        raise SecurityError(f"{path}: too large for a configuration (limit {MAX_FILE_BYTES:,} bytes)")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        cause = next((kind for start, kind in _OTHER_FILES.items() if content.startswith(start)), "it is not UTF-8")
        raise UsageError(f"{path}:{line}: cannot be read as a configuration: {cause}; save it as UTF-8 text") from error


def _instead_of(path: Path) -> str:
    """Say that a path is a folder or does not exist, and what to name instead: one that is there, or a new one."""
    for file in (path / "config.yaml", path / "run.yaml", Path("runs") / path / "config.yaml"):
        if file.is_file():
            what = "run" if is_run_folder(file.parent) else "folder"
            return f"{path} is a {what}; its settings are in {file}"
    if (path / "config.json").is_file():
        return f"{path} is a model, not a YAML file; pass it as model={path}"
    if path.exists():
        shown = ", ".join(map(str, sorted(path.glob("*/config.yaml"))[:3]))
        return f"{path} {f'holds runs; to continue one, give its settings: {shown}' if shown else 'is a folder'}"
    user, here = unknown_user(path), Path(path.name)
    if user and here.is_file():
        return f"{path}: {user}; did you mean {here}?"
    if near := did_you_mean(path):
        return f"{path}: no such file{near}"
    there = [str(file) for file in path.parent.glob("*.y*ml") if file.is_file()] if path.parent.is_dir() else []
    there.sort(key=lambda file: (file != "run.yaml", file))
    listing = f"; files here include {', '.join(there[:4])}" if there else ""
    new = path if path.suffix in YAML_TYPES else "run.yaml"
    written = "" if path.suffix == ".py" else f"; `flatout init {shlex.quote(str(new))}` writes one"
    return f"{path}: {user or f'no such file{listing}{written}'}"


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the settings of a YAML file, unchecked. Raises UsageError, or SecurityError as `load_config` does."""
    text = read_text(path)
    try:
        # _StrictLoader is a SafeLoader: it builds plain values only
        values = yaml.load(text, Loader=_StrictLoader)
    except yaml.constructor.ConstructorError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise SecurityError(f"{path}:{line}: {error.problem}; only plain values are allowed") from error
    except yaml.YAMLError as error:
        if path.suffix in ROW_TYPES:
            fix = Fix({"model": "Qwen/Qwen3-0.6B", "data": str(path)}, "for example")
            raise UsageError(f"{path} holds rows, not settings", [fix]) from error
        refuse_line(path, text)
        raise UsageError(f"{path}: {yaml_fault(error)}") from error
    except (UsageError, SecurityError) as error:
        raise error.at(path) from None
    except ValueError as error:
        # an impossible date, or a number with thousands of digits
        raise UsageError(f"{path}: a value cannot be read: {str(error).partition(';')[0]}") from error
    if not isinstance(values, dict):
        refuse_line(path, text)
        is_dashed = isinstance(values, list) and all(isinstance(value, dict) for value in values)
        hint = "; remove the dashes" if is_dashed else "; `flatout init new.yaml` writes one"
        raise UsageError(f"{path}: expected sections such as `model:`, found {_kind(values)}{hint}")
    return values


def _kind(value: object) -> str:
    """Return the kind of a value for messages, such as "a list"."""
    return _KINDS.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")


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
        raise UsageError(f"deepspeed: {path}: expected a JSON object, found {_kind(values)}")
    return values


def line_of(error: BaseException, path: Path) -> str:
    """Return `:LINE` of a Python file at which an error arose; empty if it is not known."""
    frames = traceback.extract_tb(error.__traceback__)
    line = next((frame.lineno for frame in reversed(frames) if frame.filename == str(path)), None)
    line = error.lineno if isinstance(error, SyntaxError) else line
    return f":{line}" if line else ""


def _require_own(path: Path) -> None:
    """Raise UsageError for a file that does not import flatout and set `config`, such as another trainer's script."""
    needed = (r"(?:import|from) flatout\b", r"config\b[^=\n]*=")
    if not all(re.search(rf"^[ \t]*{pattern}", read_text(path), re.MULTILINE) for pattern in needed):
        raise UsageError(
            f"{path}: not run: a configuration imports flatout.Config and must set `config` to one; another trainer's "
            f"script is translated by `flatout convert {shlex.quote(str(path))} --to ours.yaml`"
        )


def run_python(path: Path) -> dict[str, Any]:
    """Run a Python file and return its globals. Raises UsageError with the line at which it failed."""
    read_text(path)
    try:
        return runpy.run_path(str(path))
    except UsageError as error:
        raise error.at(path) from error
    except OF_OWN_CODE as error:
        raise UsageError(
            f"{path}{line_of(error, path)}: the configuration's own code failed with {type(error).__name__}: "
            f"{error}; fix it, or write the settings as YAML"
        ) from error


def _run_python(path: Path, overrides: Sequence[str]) -> Config:
    _require_own(path)
    config = run_python(path).get("config")
    if not isinstance(config, Config):
        raise UsageError(f"{path}: must set `config` to a flatout.config.schema.Config, found {_kind(config)}")
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
    name, equals, raw = text.partition("=")
    if not equals or not name:
        return _no_override(text)
    try:
        value = yaml.load(raw, Loader=_StrictLoader)
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
