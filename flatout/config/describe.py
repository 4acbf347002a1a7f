"""What the schema says of each setting, one by one and as a configuration file with comments."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from flatout.config.schema import Config
from flatout.config.section import nested_kinds
from flatout.config.table import read_table

WIDTH = 118
INDENT = "  "
Which = Literal["first", "all", "advanced"]
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}

ADVANCED: Mapping[str, str] = read_table("advanced")
"""Settings that few runs need, each with the reason why it exists; `flatout init --all` leaves them out."""
# what matters for a first run
FIRST_SETTINGS = (
    "name", "method", "model.name", "data.name", "data.sources", "data.sources.path", "data.sources.columns",
    "data.sources.system", "data.max_tokens", "lora.rank", "lora.alpha", "batch.samples_per_step", "batch.epochs",
    "optim.lr", "schedule.kind", "eval.fraction", "checkpoint.every_steps",
)  # fmt: skip

PATHS: Mapping[str, str] = {"data.sources": "rows.jsonl", "rollout.rewards": "rewards.py:correct"}
"""Settings that are a list of sections, each with what the path of an item may be."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting or a section, as a form, a file or an error shows it."""

    name: str
    """Dotted, such as lora.rank; data.sources.path is that of each source, as with all PATHS."""
    field: FieldInfo
    section: type[BaseModel]
    """The class that has the field."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """Its JSON schema."""
        properties: Mapping[str, Any] = _properties(self.section)[self.name.rpartition(".")[2]]
        return properties

    @property
    def help(self) -> str:
        return " ".join(str(self.field.description).split())

    @property
    def allowed(self) -> str:
        """Says which values it takes."""
        return allowed_values(self.schema)

    @property
    def choices(self) -> tuple[str, ...]:
        """Its values, if they are few."""
        values = tuple(map(str, self.schema.get("enum", ())))
        return values or (("false", "true") if self.schema.get("type") == "boolean" else ())

    @property
    def words(self) -> tuple[str, ...]:
        """The words that it may be, also beside values of other kinds."""
        kinds = (kind for kind in nested_kinds(self.field.annotation) if get_origin(kind) is Literal)
        return tuple(word for kind in kinds for word in get_args(kind))

    @property
    def plain_default(self) -> Any:
        """Its default as plain values; None for a required one."""
        return self.schema.get("default")

    @property
    def default(self) -> str | None:
        """As a person types it: text without quotes, anything else YAML on one line; None for a required setting."""
        plain = self.plain_default
        return None if self.field.is_required() else plain if isinstance(plain, str) else as_yaml(plain)

    def facts(self, value: Any = ...) -> str:
        """Return its allowed values, and its default if `value` is another."""
        if self.field.is_required():
            return f"{self.allowed}; required"
        default = self.plain_default
        return self.allowed if value == default else f"{self.allowed}; default {as_yaml(default)}"


@cache
def settings() -> Mapping[str, Setting]:
    """Return every setting and section by its dotted name, each section before its settings."""
    return {setting.name: setting for setting in _settings_of(Config, "")}


def _settings_of(section: type[BaseModel], prefix: str) -> Iterator[Setting]:
    for name, field in section.model_fields.items():
        yield Setting(prefix + name, field, section)
        for kind in nested_kinds(field.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _settings_of(kind, f"{prefix}{name}.")


@cache
def _properties(section: type[BaseModel]) -> dict[str, Any]:
    return dict(section.model_json_schema()["properties"])


def dotted_names() -> tuple[str, ...]:
    """Return every setting's and section's dotted name."""
    return tuple(settings())


def describe_setting(name: str) -> Setting:
    """Describe the setting of a dotted name. Raises KeyError for a name that is none."""
    return settings()[name]


def default_of(name: str) -> Any:
    """Return a setting's default; None for a section, an unknown name, or a default that says nothing."""
    default = settings()[name].field.default if name in settings() else None
    return default if isinstance(default, str | int | float) else None


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
        items = allowed_values(schema["items"]).removeprefix("one of ")
        if "enum" not in schema["items"]:
            items = ", or ".join(f"{part} ".replace(" ", "s ", 1).strip() for part in items.split(", or "))
        return f"list of {items}"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"mapping of text to {allowed_values(values) if isinstance(values, dict) else 'values'}"
    kind = {"string": "text", "boolean": "true or false"}.get(kind, kind)
    bounds = [f"{sign} {schema[key]:g}" for key, sign in _BOUNDS.items() if key in schema]
    return " ".join([kind, " and ".join(bounds)]).strip()


def as_yaml(value: Any) -> str:
    """Return a plain value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000, sort_keys=False)
    return text.removesuffix("...\n").strip()


def with_values(content: str, values: Mapping[str, Any]) -> str:
    """Return YAML with other values of settings outside sections; its comments and all else stay as they were written.

    A value of None replaces one that is given, and adds none.
    """
    root: Any = yaml.compose(content, Loader=yaml.SafeLoader)
    changes: list[tuple[int, int, str]] = []
    given, first = {key.value: node for key, node in root.value}, root.value[0][0].start_mark
    for name, value in values.items():
        if (node := given.get(name)) is not None:
            start, end = node.start_mark.index, node.end_mark.index
            changes.append((start, end, f"{'' if end > start else ' '}{as_yaml(value)}"))
        elif value is not None:
            after = ", " if root.flow_style else "\n" + " " * first.column
            changes.append((first.index, first.index, f"{name}: {as_yaml(value)}{after}"))
    for start, end, new in sorted(changes, reverse=True):
        content = content[:start] + new + content[end:]
    return content


def render_template(config: Config, intro: Sequence[str] = (), *, which: Which = "advanced") -> str:
    """Return `config` as commented YAML that `load_config` reads back to an equal Config.

    `which` is `first` (FIRST_SETTINGS), `all` but ADVANCED, or those, too; changed settings are always written. `intro`
    are lines for the top. The comment above a setting holds its help, its allowed values, its default if the value
    differs from it, and for an advanced one why it exists.
    """
    lines = [*_comment("\n".join(intro)), ""] if intro else []
    first = {name for name in FIRST_SETTINGS if config.method == "lora" or not name.startswith("lora.")}
    shown = {"first": first, "all": set(settings()) - ADVANCED.keys(), "advanced": set(settings())}[which]
    shown |= {name for name, _ in changed_settings(config)}
    return "\n".join([*lines, *_section(config, shown)]) + "\n"


def changed_settings(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted name and default (as YAML) of every optional setting that differs from its default."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from changed_settings(value, f"{prefix}{name}.")
        elif not field.is_required() and value != field.get_default(call_default_factory=True):
            yield f"{prefix}{name}", as_yaml(settings()[prefix + name].plain_default)


def _section(section: BaseModel, shown: Collection[str], prefix: str = "") -> Iterator[str]:
    """Yield the lines of a section's settings, then those of its inner sections, each under its own help."""
    depth, given = prefix.count("."), section.model_dump(mode="json", exclude_defaults=True)
    values = {name: getattr(section, name) for name in type(section).model_fields}
    inner = {f"{prefix}{name}.": value for name, value in values.items() if isinstance(value, BaseModel)}
    for name in values:
        if prefix + name in shown and f"{prefix}{name}." not in inner:
            setting = settings()[prefix + name]
            yield from _setting(setting, given.get(name, setting.plain_default), shown)
    for name, value in (section.model_extra or {}).items():  # parameters of an objective
        yield f"{INDENT * depth}{name}: {as_yaml(value)}"
    for below, value in inner.items():
        if any(setting.startswith(below) for setting in shown):
            yield ""
            yield from _comment(" ".join((type(value).__doc__ or "").partition("\n\n")[0].split()), depth, mark="# ---")
            yield f"{INDENT * depth}{below.removeprefix(prefix)[:-1]}:"
            yield from _section(value, shown, below)


def _setting(setting: Setting, value: Any, shown: Collection[str]) -> Iterator[str]:
    depth, why = setting.name.count("."), ADVANCED.get(setting.name)
    text, facts = setting.help + (f" Advanced: {why}." if why else ""), setting.facts(value)
    # the facts are on a line of their own if they do not fit behind the help
    separator = " " if len(text) + len(facts) + 3 <= WIDTH - len(INDENT) * depth - 1 else "\n"
    yield from _comment(f"{text}{separator}[{facts}]", depth)
    if (path := PATHS.get(setting.name)) is not None:
        # the settings of an item are not in the file while the list is empty
        lines, prefix = (
            [f"Write a {setting.name[:-1].rpartition('.')[2]} as `- path: {path}`, with any of these below it:"],
            f"{setting.name}.",
        )
        for name, one in settings().items():
            if name.startswith(prefix) and name in shown:
                lines.append(f"  {name.removeprefix(prefix)}: {one.help} [{one.facts()}]")
        yield from _comment("\n".join(lines), depth)
    key = f"{INDENT * depth}{setting.name.rpartition('.')[2]}:"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        block = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=10_000)
        yield key
        yield textwrap.indent(block.rstrip("\n"), INDENT * (depth + 1))
    else:
        yield f"{key} {as_yaml(value)}"


def _comment(text: str, depth: int = 0, mark: str = "#") -> Iterator[str]:
    """Wrap `text` into comment lines, keeping each line's indent."""
    width = WIDTH - len(INDENT) * depth - len(mark)
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        for piece in textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]:
            yield f"{INDENT * depth}{mark} {piece}".rstrip()
