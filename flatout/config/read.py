"""From a file and overrides to a frozen Config, with every problem told at once."""

from __future__ import annotations

import difflib
import json
import runpy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from flatout.config.schema import Config
from flatout.errors import ProblemsError, SecurityError, UsageError

MAX_FILE_BYTES = 1 << 20
MAX_ALIASES = 100


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, which YAML would silently drop."""

    num_aliases = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            self.num_aliases += 1
            if self.num_aliases > MAX_ALIASES:
                raise SecurityError(f"the file uses more than {MAX_ALIASES} YAML aliases; write the values out")
        return super().compose_node(parent, index)

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


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file (or a .py file that sets `config`, which is then run as code) and apply `a.b=value` overrides.

    Raises UsageError with every problem, SecurityError for YAML that asks for Python objects or expands without bound.
    """
    if path.suffix == ".py":
        return _run_python(path, overrides)
    return make_config(_read_yaml(path), overrides, origin=str(path), folder=path.parent)


def make_config(
    values: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    origin: str = "config",
    folder: Path = Path(),
) -> Config:
    """Check plain values against the schema. A DeepSpeed JSON is sought here, then in `folder`.

    Raises ProblemsError listing every wrong field by its dotted name.
    """
    merged = _plain_copy(values)
    problems = [problem for text in overrides if (problem := _apply_override(merged, text))]
    if isinstance(name := merged.get("deepspeed"), str):
        path = next((path for path in (Path(name), folder / name) if path.is_file()), Path(name))
        merged["deepspeed"] = _read_json(path)
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:
        problems += [_describe(item) for item in error.errors(include_url=False)]
    if problems:
        raise ProblemsError(origin, problems)
    return config


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML that `load_config` reads back to an equal Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def dotted_names(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every setting's dotted name, such as `lora.rank`."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from dotted_names(kind, f"{prefix}{name}.")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_FILE_BYTES:
            raise SecurityError(f"{path}: {size_bytes} bytes is too large for a configuration (limit {MAX_FILE_BYTES})")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as a configuration ({error})") from error
    try:
        # _StrictLoader is a SafeLoader: it builds plain values only
        values = yaml.load(text, Loader=_StrictLoader)
    except yaml.constructor.ConstructorError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise SecurityError(f"{path}:{line}: {error.problem}; only plain values are allowed") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    except (UsageError, SecurityError) as error:
        raise type(error)(f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path}: expected sections such as `model:`, found {type(values).__name__}")
    return values


def _read_json(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text, object_pairs_hook=_once)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path}: expected an object, found {type(values).__name__}")
    return values


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"key {twice[0]!r} is given twice; keep one")
    return dict(pairs)


def _run_python(path: Path, overrides: Sequence[str]) -> Config:
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    found = runpy.run_path(str(path)).get("config")
    if not isinstance(found, Config):
        raise UsageError(f"{path}: must set `config` to a flatout.config.schema.Config, found {type(found).__name__}")
    return make_config(found.model_dump(mode="json"), overrides, origin=str(path))


def _plain_copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain_copy(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def _apply_override(values: dict[str, Any], text: str) -> str | None:
    name, equals, raw = text.partition("=")
    if not equals or not name:
        return f"{text!r} is no override; write section.name=value, such as lora.rank=32"
    try:
        value = yaml.safe_load(raw)
    except yaml.YAMLError:
        return f"{name}: the value {raw!r} is not valid YAML"
    *sections, last = name.split(".")
    place = values
    for section in sections:
        inner = place.setdefault(section, {})
        if not isinstance(inner, dict):
            return f"{name}: {section} is a value, not a section"
        place = inner
    place[last] = value
    return None


def _describe(item: Any) -> str:
    """One pydantic error as `field: what, got, what to do`."""
    name = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden" and item["loc"][-1] == "device_map":
        return (
            f"{name}: training does not place a model's layers on GPUs one by one, since all but one GPU would wait; "
            "set strategy: fsdp (or zero3) and start one process a GPU; flatout chat has --device-map for answers"
        )
    if item["type"] == "extra_forbidden":
        return f"{name}: unknown key{_did_you_mean(name)}"
    if item["type"] == "missing":
        return f"{name}: missing; every run needs it"
    message = str(item["msg"]).removeprefix("Value error, ")
    where = f"{name}: " if name else ""
    got = "" if isinstance(item["input"], dict) else f", got {item['input']!r}"
    return f"{where}{message[:1].lower()}{message[1:]}{got}"


def _did_you_mean(name: str) -> str:
    names = list(dotted_names())
    last = name.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    near = near or [full for full in names if full.rsplit(".", 1)[-1] == last]
    near = near or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else "; `flatout init` writes all known keys"
