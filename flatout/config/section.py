"""The base class of all sections of the configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from flatout.errors import Fix, SettingError

Share = Annotated[float, Field(ge=0.0, lt=1.0)]
PathText = Annotated[str, Path]
"""A path, or a hub id or name that is looked up as a path first."""


class Section(BaseModel):
    """A frozen section that rejects unknown keys; the docstring under a field is its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @classmethod
    def long_form(cls, value: Any) -> Any:
        """Return the section that a short form, such as a name, stands for; any other value unchanged."""
        return value

    @model_validator(mode="before")
    @classmethod
    def _from_short_form(cls, value: Any) -> Any:
        return cls.long_form(value)

    @field_validator("*", mode="before")
    @classmethod
    def _is_of_its_kind(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject ints beyond 64 bits, and bools where a number is expected: as an int, true would mean 1.

        YAML reads a bare `on` as true and `off` as false, which a setting with these words gets back.
        """
        if isinstance(value, int) and abs(value) >= 1 << 63:
            raise ValueError("expected a number below 2**63")
        if not isinstance(value, bool) or info.field_name is None:
            return value
        kinds, word = set(nested_kinds(cls.model_fields[info.field_name].annotation)), "on" if value else "off"
        if bool not in kinds and kinds & {int, float}:
            raise ValueError("expected a number")
        return word if bool not in kinds and word in kinds else value


def short_form(*kinds: Any) -> Any:
    """Return the field of a section or list that may also be given as one of `kinds`, which are JSON schemas."""

    def extend(schema: dict[str, Any]) -> None:
        own = {key: schema.pop(key) for key in ("$ref", "type", "items") if key in schema}
        schema["anyOf"] = [own, *kinds]

    return Field(json_schema_extra=extend)


def nested_kinds(annotation: Any) -> list[Any]:
    """Return the annotation and all types nested in it."""
    return [annotation, *(kind for part in get_args(annotation) for kind in nested_kinds(part))]


def paths_of(config: BaseModel) -> list[str]:
    """Return every text in a configuration that its schema declares to be a path, without the class behind a file."""
    paths: list[str] = []

    def keep(path: str) -> str:
        paths.append(path)
        return path

    with_paths(config, keep)
    return paths


def with_paths(value: Any, change: Callable[[str], str], is_path: bool = False) -> Any:
    """Return a configuration in which every path, as `paths_of` has it, is what `change` makes of it."""
    if isinstance(value, BaseModel):
        changed = {}
        for name, field in type(value).model_fields.items():
            held, kinds = getattr(value, name), [*nested_kinds(field.annotation), *field.metadata]
            if isinstance(held, list):  # one beside a path is not of paths, as in eval.prompts
                kinds = [part for kind in kinds if get_origin(kind) is list for part in nested_kinds(kind)]
            names = {name for kind in kinds if get_origin(kind) is Literal for name in get_args(kind)}
            is_name = isinstance(held, str) and held in names
            changed[name] = with_paths(held, change, Path in kinds and not is_name)
        return value.model_copy(update={name: new for name, new in changed.items() if new != getattr(value, name)})
    if isinstance(value, Mapping):
        return {name: with_paths(part, change, is_path) for name, part in value.items()}
    if isinstance(value, list):
        return [with_paths(part, change, is_path) for part in value]
    if not is_path or not isinstance(value, str | Path):
        return value
    path = re.sub(r"(\.py):\w+$", r"\1", str(value))
    return type(value)(change(path) + str(value)[len(path) :])


def first_given(reasons: Mapping[str, object]) -> str | None:
    """Return the first of these reasons that is given, or None."""
    return next((why for why, is_given in reasons.items() if is_given), None)


def refuse_unused(section: BaseModel, names: Sequence[str], why: str, *fixes: Fix, path: str = "") -> None:
    """Raise SettingError if one of `names` differs from its default; `why` is what makes it have no effect.

    `path` is that of the section, such as "sharding.", where the error is not raised by the section itself.
    """
    for name in names:
        if getattr(section, name) != type(section).model_fields[name].default:
            text = f"{path}{name} {why if why.startswith('needs ') else f'has no effect with {why}'}"
            raise SettingError(text, *fixes)


def require_own_code(name: str, where: str, example: str, *, kind: str = "CLASS") -> None:
    """Raise ValueError for a setting that should name a class or function of a file, and does not."""
    if not re.fullmatch(r".+\.py:[A-Za-z_]\w*", where):
        raise ValueError(f"{name} is {where!r}; expected FILE.py:{kind}, such as {example}")


def require_regex(what: str, pattern: str) -> None:
    """Raise ValueError for a pattern that is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{what} is not a valid regular expression: {error}") from error
