"""Writes a commented YAML file of every setting; names, help, choices and defaults are read from the schema itself."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from pydantic import BaseModel

from flatout.config.schema import Config, SourceConfig

WIDTH = 118
INDENT = "  "
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def render_template(config: Config, intro: Sequence[str] = ()) -> str:
    """`config` as commented YAML that `load_config` reads back to an equal Config.

    `intro` are lines for the top of the file. A comment above each setting holds its help, what it may be, and its
    default where the value differs from it.
    """
    lines = [*_comment("\n".join(intro)), ""] if intro else []
    return "\n".join([*lines, *_section(config, depth=0)]) + "\n"


def changed_settings(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted name and default, as YAML, of every setting that differs from its default; required ones have none."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from changed_settings(value, f"{prefix}{name}.")
        elif not field.is_required() and value != field.get_default(call_default_factory=True):
            yield f"{prefix}{name}", _scalar(_plain_default(type(section), name))


def allowed(schema: Mapping[str, Any]) -> str:
    """What a setting may be, in words, from its JSON schema: `one of lora, full` or `number > 0, or null`."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2].removesuffix("Config").lower()
    if "anyOf" in schema:
        parts = [allowed(part) for part in schema["anyOf"]]
        return ", or ".join(dict.fromkeys(part for part in parts if part))
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    kind = str(schema.get("type", ""))
    if kind == "array":
        return f"list of {allowed(schema['items'])}s"
    if kind == "object":
        return "mapping of text to text"
    kind = {"string": "text", "boolean": "true or false"}.get(kind, kind)
    bounds = [f"{sign} {schema[key]:g}" for key, sign in _BOUNDS.items() if key in schema]
    return " ".join([kind, " and ".join(bounds)]).strip()


def _section(section: BaseModel, depth: int) -> Iterator[str]:
    """A section's settings first, then its inner sections, each under its own help."""
    inner = [name for name in type(section).model_fields if isinstance(getattr(section, name), BaseModel)]
    for name in type(section).model_fields:
        if name not in inner:
            yield from _setting(section, name, depth)
    for name in inner:
        value = getattr(section, name)
        yield ""
        yield from _comment(_doc(type(value)), depth, mark="# ---")
        yield f"{INDENT * depth}{name}:"
        yield from _section(value, depth + 1)


def _setting(section: BaseModel, name: str, depth: int) -> Iterator[str]:
    field = type(section).model_fields[name]
    value = section.model_dump(mode="json", exclude_defaults=True).get(name, _plain_default(type(section), name))
    yield from _comment(_described(str(field.description), _facts(type(section), name, value), depth), depth)
    if name == "sources":
        yield from _comment(_source_help(), depth)
    key = f"{INDENT * depth}{name}:"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        block = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=10_000)
        yield key
        yield textwrap.indent(block.rstrip("\n"), INDENT * (depth + 1))
    else:
        yield f"{key} {_scalar(value)}"


def _described(text: str, facts: str, depth: int) -> str:
    """Help and facts in one line when they fit, else the facts in a line of their own."""
    fits = len(text) + len(facts) + 3 <= WIDTH - len(INDENT) * depth - 1
    return f"{text} [{facts}]" if fits else f"{text}\n[{facts}]"


def _facts(section: type[BaseModel], name: str, value: Any) -> str:
    what = allowed(section.model_json_schema()["properties"][name])
    if section.model_fields[name].is_required():
        return f"{what}; required"
    default = _plain_default(section, name)
    return what if value == default else f"{what}; default {_scalar(default)}"


def _plain_default(section: type[BaseModel], name: str) -> Any:
    return section.model_json_schema()["properties"][name].get("default")


def _source_help() -> str:
    """The settings of one source, which have no place of their own while the list is empty."""
    lines = ["A source is written `- path: rows.jsonl`, with any of these under it:"]
    for name, field in SourceConfig.model_fields.items():
        value = None if field.is_required() else _plain_default(SourceConfig, name)
        default = "" if field.is_required() else f"; default {_scalar(value)}"
        facts = _facts(SourceConfig, name, value).removesuffix(default)
        lines.append(f"  {name}: {field.description} [{facts}{default}]")
    return "\n".join(lines)


def _doc(section: type[BaseModel]) -> str:
    return " ".join((section.__doc__ or "").split())


def _comment(text: str, depth: int = 0, mark: str = "#") -> Iterator[str]:
    """`text` as wrapped comment lines; a line's own indent is kept."""
    width = WIDTH - len(INDENT) * depth - len(mark)
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        for piece in textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]:
            yield f"{INDENT * depth}{mark} {piece}".rstrip()


def _scalar(value: Any) -> str:
    """One value as YAML in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("...\n").strip()
