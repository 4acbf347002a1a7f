"""What the schema says of each setting: its help, the values that it takes, its default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel

from flatout.config.schema import Config
from flatout.config.section import nested_kinds

_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, as a form or an error shows it."""

    name: str
    help: str
    allowed: str
    """Says which values it takes."""
    choices: tuple[str, ...]
    """Its values, if they are few."""
    default: str | None
    """As a person types it: text without quotes, anything else YAML on one line; None for a required setting."""


def describe_setting(name: str, root: type[BaseModel] = Config) -> Setting:
    """Describe the setting of a dotted name in `root`. Raises KeyError for a name that is none."""
    *sections, leaf = name.split(".")
    kind: Any = root
    for section in sections:  # a list of sections, as data.sources, stands for each of them
        kinds = nested_kinds(kind.model_fields[section].annotation)
        kind = next(one for one in kinds if isinstance(one, type) and issubclass(one, BaseModel))
    schema, field = properties(kind)[leaf], kind.model_fields[leaf]
    choices = tuple(map(str, schema.get("enum", ()))) or (("false", "true") if schema.get("type") == "boolean" else ())
    plain = plain_default(kind, leaf)
    default = None if field.is_required() else plain if isinstance(plain, str) else as_yaml(plain)
    return Setting(name, str(field.description), allowed_values(schema), choices, default)


def allowed_values(schema: Mapping[str, Any]) -> str:
    """Describe a setting's allowed values from its JSON schema: `one of lora, full` or `number > 0, or null`."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2].removesuffix("Config").lower()
    if "anyOf" in schema:
        parts = [allowed_values(part) for part in schema["anyOf"]]
        return ", or ".join(dict.fromkeys(part for part in parts if part))
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    kind = str(schema.get("type", ""))
    if kind == "array":
        items = allowed_values(schema["items"]).removeprefix("one of ") + " "
        return f"list of {items if 'enum' in schema['items'] else items.replace(' ', 's ', 1)}".strip()
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"mapping of text to {allowed_values(values) if isinstance(values, dict) else 'values'}"
    kind = {"string": "text", "boolean": "true or false"}.get(kind, kind)
    bounds = [f"{sign} {schema[key]:g}" for key, sign in _BOUNDS.items() if key in schema]
    return " ".join([kind, " and ".join(bounds)]).strip()


@cache
def properties(section: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of each setting of a section."""
    return dict(section.model_json_schema()["properties"])


def plain_default(section: type[BaseModel], name: str) -> Any:
    """Return a setting's default as plain values; None for a required one."""
    return properties(section)[name].get("default")


def as_yaml(value: Any) -> str:
    """Return a plain value as YAML on one line."""
    return (
        yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000, sort_keys=False)
        .removesuffix("...\n")
        .strip()
    )


@cache
def fields() -> Mapping[str, Any]:
    """Return pydantic's field of every setting and section by its dotted name, such as `lora.rank`."""
    return dict(_fields_of(Config, ""))


def _fields_of(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, field in section.model_fields.items():
        yield prefix + name, field
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _fields_of(kind, f"{prefix}{name}.")


def dotted_names() -> tuple[str, ...]:
    """Return every setting's and section's dotted name."""
    return tuple(fields())


def choices_of(name: str) -> tuple[str, ...]:
    """Return the words that a setting may be; empty if it may be anything else."""
    kinds = nested_kinds(fields()[name].annotation) if name in fields() else []
    return tuple(word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind))


def default_of(name: str) -> Any:
    """Return a setting's default; None for a section, an unknown name, or a default that says nothing."""
    default = getattr(fields().get(name), "default", None)
    return default if isinstance(default, str | int | float) else None
