"""Render settings as commented YAML; names, help, choices and defaults come from the schema itself."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import yaml
from pydantic import BaseModel

from flatout.config.describe import allowed_values, as_yaml, dotted_names, plain_default, properties
from flatout.config.schema import Config, SourceConfig
from flatout.config.table import read_table

WIDTH = 118
INDENT = "  "
Which = Literal["first", "all", "advanced"]

ADVANCED: Mapping[str, str] = read_table("advanced")
"""Settings that few runs need, each with the reason why it exists; `flatout init --all` leaves them out."""
# what matters for a first run
FIRST_SETTINGS = (
    "name", "method", "model.name", "data.name", "data.sources", "data.sources.path", "data.sources.columns",
    "data.sources.system", "data.max_tokens", "lora.rank", "lora.alpha", "batch.samples_per_step", "batch.epochs",
    "optim.lr", "schedule.kind", "eval.fraction", "checkpoint.every_steps",
)  # fmt: skip


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
    changed = {name for name, _ in changed_settings(config)}
    first = {name for name in FIRST_SETTINGS if config.method == "lora" or not name.startswith("lora.")}
    shown = {"first": first, "all": set(dotted_names()) - ADVANCED.keys(), "advanced": set(dotted_names())}[which]
    shown |= changed
    return "\n".join([*lines, *_section(config, shown)]) + "\n"


def changed_settings(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted name and default (as YAML) of every optional setting that differs from its default."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from changed_settings(value, f"{prefix}{name}.")
        elif not field.is_required() and value != field.get_default(call_default_factory=True):
            yield f"{prefix}{name}", as_yaml(plain_default(type(section), name))


def _section(section: BaseModel, shown: Collection[str], prefix: str = "") -> Iterator[str]:
    """Yield the lines of a section's settings, then those of its inner sections, each under its own help."""
    depth = prefix.count(".")
    inner = [name for name in type(section).model_fields if isinstance(getattr(section, name), BaseModel)]
    for name in type(section).model_fields:
        if name not in inner and prefix + name in shown:
            yield from _setting(section, name, shown, prefix)
    for name in inner:
        below = f"{prefix}{name}."
        if not any(setting.startswith(below) for setting in shown):
            continue
        value = getattr(section, name)
        yield ""
        yield from _comment(" ".join((type(value).__doc__ or "").partition("\n\n")[0].split()), depth, mark="# ---")
        yield f"{INDENT * depth}{name}:"
        yield from _section(value, shown, below)


def _setting(section: BaseModel, name: str, shown: Collection[str], prefix: str) -> Iterator[str]:
    kind, depth, why = type(section), prefix.count("."), ADVANCED.get(prefix + name)
    value = section.model_dump(mode="json", exclude_defaults=True).get(name, plain_default(kind, name))
    text, facts = " ".join(str(kind.model_fields[name].description).split()), _facts(kind, name, value)
    text += f" Advanced: {why}." if why else ""
    # the facts are on a line of their own if they do not fit behind the help
    separator = " " if len(text) + len(facts) + 3 <= WIDTH - len(INDENT) * depth - 1 else "\n"
    yield from _comment(f"{text}{separator}[{facts}]", depth)
    if name == "sources":
        # a source's settings are not in the file while the list is empty
        lines = ["Write a source as `- path: rows.jsonl`, with any of these below it:"]
        for key, field in SourceConfig.model_fields.items():
            if f"data.sources.{key}" not in shown:
                continue
            default, text = plain_default(SourceConfig, key), " ".join(str(field.description).split())
            unless_given = "" if field.is_required() else f"; default {as_yaml(default)}"
            lines.append(f"  {key}: {text} [{_facts(SourceConfig, key, default)}{unless_given}]")
        yield from _comment("\n".join(lines), depth)
    key = f"{INDENT * depth}{name}:"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        block = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=10_000)
        yield key
        yield textwrap.indent(block.rstrip("\n"), INDENT * (depth + 1))
    else:
        yield f"{key} {as_yaml(value)}"


def _facts(section: type[BaseModel], name: str, value: Any) -> str:
    """Return a setting's allowed values, and its default if the value is another."""
    what = allowed_values(properties(section)[name])
    if section.model_fields[name].is_required():
        return f"{what}; required"
    default = plain_default(section, name)
    return what if value == default else f"{what}; default {as_yaml(default)}"


def _comment(text: str, depth: int = 0, mark: str = "#") -> Iterator[str]:
    """Wrap `text` into comment lines, keeping each line's indent."""
    width = WIDTH - len(INDENT) * depth - len(mark)
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        for piece in textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]:
            yield f"{INDENT * depth}{mark} {piece}".rstrip()
