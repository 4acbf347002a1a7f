"""Translate settings of other trainers by a table: each given name is translated, already so, or refused."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import yaml

from flatout import Fix, ProblemsError


class RefusedError(Exception):
    """flatout cannot honour a value; the text says why and what to do."""


class Unread:
    """Stands for a value that is not known: a rule that looks at it is refused, with the reason."""

    def __init__(self, why: str) -> None:
        self.why = why

    def _refuse(self, *_: Any) -> Any:
        raise RefusedError(self.why)

    __bool__ = __eq__ = __hash__ = __str__ = __repr__ = __float__ = __int__ = __iter__ = __len__ = _refuse
    __getattr__ = __getitem__ = __contains__ = __lt__ = __gt__ = __le__ = __ge__ = __add__ = __mul__ = _refuse


@dataclass(frozen=True, slots=True)
class Given:
    """What a rule sees: one name and its value, and `all` values with the defaults of their system."""

    name: str
    value: Any
    all: Mapping[str, Any]
    num_gpus: int = 1

    def number(self, name: str = "", default: float = 0.0) -> float:
        """Return this or another name's value as a number: YAML reads 2e-5 as text. Raises RefusedError."""
        value = self.all.get(name or self.name, default)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise RefusedError(f"{name or self.name} is {value!r:.60}; expected a number") from None


@dataclass(frozen=True, slots=True)
class Became:
    """What a value becomes: settings by dotted name, none if flatout does it anyway.

    `check`: the settings are not equal in every case, and `note` says in which.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    check: bool = False


Rule = Callable[[Given], Became]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one name. `is_default`: it was not given, but its system's default differs from flatout's."""

    name: str
    kind: Literal["translated", "already so", "refused"]
    settings: Mapping[str, Any]
    note: str = ""
    check: bool = False
    is_default: bool = False

    def describe(self) -> str:
        """Return the settings and the note as one line of text."""
        if self.kind == "refused":
            return f"refused: {self.note}"
        settings = ", ".join(f"{name}: {_shown(value)}" for name, value in self.settings.items())
        note = f"CHECK: {self.note}" if self.check else self.note
        return f"{settings}{' (' if settings and note else ''}{note}{')' if settings and note else ''}" or "already so"


@dataclass(frozen=True, slots=True)
class Translation:
    """The outcome of every name, in the order given."""

    outcomes: tuple[Outcome, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """flatout's settings, nested as in a configuration file."""
        nested: dict[str, Any] = {}
        for name, value in self.flat.items():
            *sections, last = name.split(".")
            holder = nested
            for section in sections:
                holder = holder.setdefault(section, {})
            holder[last] = value
        return nested

    @property
    def flat(self) -> dict[str, Any]:
        """flatout's settings by dotted name."""
        return {name: value for outcome in self.outcomes for name, value in outcome.settings.items()}

    def problems(self) -> list[str]:
        return [f"{outcome.name}: {outcome.note}" for outcome in self.outcomes if outcome.kind == "refused"]

    def checked(self, origin: str, fixes: Sequence[Fix] = ()) -> dict[str, Any]:
        """Return `settings`. Raises ProblemsError with `origin`, every refused setting, and `fixes`."""
        if problems := self.problems():
            raise ProblemsError(origin, problems, fixes)
        return self.settings


@dataclass(frozen=True, slots=True)
class Command:
    """A trainer's file or command: its options and their values, its system, and its ranks in the script's own words.

    Its file is in `folder`. `beside` names commands of the same programs that train nothing, and what does the same
    here; `calls` are the names of what a Python script calls, and `code` what its rewards need.
    """

    values: dict[str, Any]
    system: str = ""
    num_ranks: str = "1"
    beside: Mapping[str, str] = field(default_factory=dict)
    calls: Set[str] = frozenset()
    code: str = ""
    folder: Path = Path()


def translate(
    given: Mapping[str, Any],
    table: Mapping[str, Rule],
    *,
    defaults: Mapping[str, Any] | None = None,
    nullable: Collection[str] = (),
    aliases: Mapping[str, str] | None = None,
    num_gpus: int = 1,
) -> Translation:
    """Apply each name's rule. `defaults` are those of the other system that differ from flatout's.

    A null value means unset, except for the names in `nullable`. `aliases` maps names to those of the table. Two names
    that set one setting to different values are refused.
    """
    aliases, outcomes = aliases or {}, list[Outcome]()
    shown: dict[str, str] = {}
    for name, value in given.items():
        if value is None and name not in nullable:
            outcomes.append(Outcome(name, "already so", {}, "null means unset"))
        elif shown.setdefault(aliases.get(name, name), name) != name:
            outcomes.append(
                Outcome(name, "refused", {}, f"means the same as {shown[aliases.get(name, name)]}; keep one")
            )
    values = {name: given[other] for name, other in shown.items()}
    values = {**values, **{aliases.get(name, name): value for name, value in (defaults or {}).items()}, **values}
    owners: dict[str, tuple[str, Any]] = {}
    for name, value in values.items():
        outcome = _apply(table, Given(name, value, values, num_gpus), shown.get(name))
        for setting, target in outcome.settings.items():
            owner, other = owners.setdefault(setting, (outcome.name, target))
            if other != target:
                note = f"{owner} sets {setting} to {_shown(other)}, this name to {_shown(target)}; keep one"
                outcome = Outcome(outcome.name, "refused", {}, note)
        outcomes.append(outcome)
    return Translation(tuple(outcomes))


def _apply(table: Mapping[str, Rule], given: Given, shown: str | None) -> Outcome:
    name, rule = shown or given.name, table.get(given.name)
    if given.name in read_table("systems")["booleans"].split() and not isinstance(given.value, bool | Unread):
        return Outcome(name, "refused", {}, f"{given.value!r:.60} is neither true nor false; write one of them")
    if rule is None and not isinstance(given.value, Unread):
        near = difflib.get_close_matches(given.name, table, n=1, cutoff=0.8)
        hint = f"did you mean {near[0]}?" if near else "remove it if it does not change the training"
        return Outcome(name, "refused", {}, f"unknown here; {hint}")
    try:
        became = rule(given) if rule else Became({name: given.value})
        for value in became.settings.values():
            if isinstance(value, Unread):
                str(value)
    except RefusedError as reason:
        return Outcome(name, "refused", {}, given.value.why if isinstance(given.value, Unread) else str(reason))
    except (AttributeError, KeyError, TypeError, ValueError):  # a value of another form than its system documents
        return Outcome(name, "refused", {}, f"{given.value!r:.60} has a form that is not known here")
    kind: Literal["translated", "already so"] = "translated" if became.settings else "already so"
    return Outcome(name, kind, became.settings, became.note, became.check, is_default=shown is None)


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def inner(value: object, table: Mapping[str, Rule]) -> Translation:
    """Translate a mapping of arguments by a table of its own. Raises RefusedError."""
    if not isinstance(value, Mapping):
        raise RefusedError(f"expected a mapping, got {value!r:.60}; write its entries out")
    translation = translate(value, table)
    if problems := translation.problems():
        raise RefusedError("; ".join(problems))
    return translation


def _chosen(value: object, it: Mapping[str, Any]) -> Became:
    """Return what a table of values says of one, which may be all of Became. Raises RefusedError for another."""
    if not isinstance(value, str | bool) or value not in it["values"]:
        what = it["else"]
        raise RefusedError((what if what.startswith("{}") else "{!r:.60} is not supported; " + what).format(value))
    became = it["values"][value]
    return Became(**became) if isinstance(became, Mapping) else Became({it["setting"]: became})


def each(names: str, rule: Rule) -> dict[str, Rule]:
    """Use one rule for several names."""
    return dict.fromkeys(names.split(), rule)


@cache
def read_table(name: str) -> Any:
    """Return what a file of `tables/` holds; it is shared, so change nothing of it."""
    return yaml.safe_load((Path(__file__).parent / "tables" / f"{name}.yaml").read_text(encoding="utf-8"))


@cache
def rules_of(table: str) -> dict[str, Rule]:
    """Return the rules of FILE, or of FILE/PART, in `tables/`: names by what becomes of their values; change nothing.

    What comes later stands for what comes before: tables that it has with `include`, its own kinds of rules, functions.
    """
    file, _, part = table.partition("/")
    return _rules(read_table(file)[part] if part else read_table(file))


def _included(one: str | Mapping[str, Any]) -> dict[str, Rule]:
    """Return the rules of a table; those of {rules: TABLE, note: ...} with conditions count only if these hold."""
    if isinstance(one, str):
        return rules_of(one)

    def guarded(rule: Rule) -> Rule:
        return lambda given: rule(given) if _meets(one, given.all) else Became(note=one["note"])

    return {name: guarded(rule) for name, rule in rules_of(one["rules"]).items()}


def _function(name: str) -> Rule:
    module, _, function = name.rpartition(".")
    rule: Rule = getattr(import_module(f"flatout_migrate.{module}"), function)
    return rule


def _meets(row: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Whether a row counts: each name of `if` has a listed value (null: not given), one of `any` is true, `none` is.

    The value is that of the name `same as`, or its default there; its whole text is as `matches` says.
    """
    return bool(
        all(values.get(name) in known for name, known in row.get("if", {}).items())
        and ("any" not in row or any(values.get(name) for name in row["any"].split()))
        and not any(values.get(name) for name in row.get("none", "").split())
        and ("matches" not in row or re.fullmatch(row["matches"], str(values["value"])))
        and ("same as" not in row or values["value"] == values.get(row["same as"], row.get("default")))
    )


def names_of(value: object) -> list[str]:
    """Return names from a list or from text with commas."""
    return [str(name) for name in value] if isinstance(value, list | tuple | set) else str(value).split(",")


_GIVEN: Mapping[str, Callable[[Given], Any]] = {
    "the value": lambda given: given.value,
    "the number": lambda given: given.number(),
    "the integer": lambda given: int(given.number()),
    "the names": lambda given: [name.strip() for name in names_of(given.value)],
}


def by_cases(rows: Sequence[Mapping[str, Any]]) -> Rule:
    """Do what the first row says that counts: be `refused`, become what the function `by` says, or all else of it.

    Its conditions have the names of all values, `value` for the own one, and `name`; `above`: the number is. Settings
    may be what was given: "the value", "the number", "the integer", or "the names". `entries` is a table for those of a
    mapping, `choices` one of values.
    """

    def rule(given: Given) -> Became:
        values = {**given.all, "value": given.value, "name": given.name}
        met = (row for row in rows if _meets(row, values))
        row = next(row for row in met if "above" not in row or given.number() > row["above"])
        if function := row.get("by"):
            return _function(function)(given)
        if "entries" in row:
            return Became(inner(given.value, _rules(row["entries"])).flat)
        if "choices" in row:
            return _chosen(given.value, row["choices"])
        if why := row.get("refused"):
            raise RefusedError(why.format(given.value) if why.startswith("{!") else why)
        settings = {
            name: _GIVEN[value](given) if isinstance(value, str) and value in _GIVEN else value
            for name, value in row.get("settings", {}).items()
        }
        return Became(settings, row.get("note") or "", row.get("check", False))

    return rule


def defaults_of(table: str, given: Mapping[str, Any], part: str = "defaults") -> dict[str, Any]:
    """Return the defaults that a table has for these values: what the rows set that count, none of `unless given`."""
    known = {name: value for name, value in given.items() if not isinstance(value, Unread)}
    found: dict[str, Any] = {}
    for row in read_table(table)[part]:
        if _meets(row, known) and all(given.get(name) is None for name in row.get("unless given", "").split()):
            found |= row["set"]
    return found


_OFF: tuple[object, ...] = (False, None, 0, "", [], {}, "no", "none")
_OFF_HERE = {"note": "off, as here"}
# a kind of rules in a table -> its names and cases, from a key there and what stands behind it
_KINDS: Mapping[str, Callable[[str, Any], tuple[str, list[Mapping[str, Any]]]]] = {
    "settings": lambda name, setting: (name, [{"settings": {setting: "the value"}}]),
    "numbers": lambda name, setting: (name, [{"settings": {setting: "the number"}}]),
    "accepted": lambda note, names: (names, [{"note": note}]),
    "off here": lambda why, names: (names, [{"if": {"value": _OFF}, **_OFF_HERE}, {"refused": why}]),
    "only": lambda why, it: (it["names"], [{"if": {"value": it["values"]}, "note": it.get("note")}, {"refused": why}]),
    "switches": lambda note, it: (
        it["names"],
        [{"none": "value", **it.get("otherwise", _OFF_HERE)}, {**it, "note": note}],
    ),
    "cases": lambda names, rows: (names, rows),
    "nested": lambda names, table: (names, [{"entries": table}]),
    "choices": lambda name, it: (name, [{"choices": it}]),
    "functions": lambda function, names: (names, [{"by": function}]),
}


def _rules(kinds: Mapping[str, Mapping[str, Any]]) -> dict[str, Rule]:
    rules = {name: rule for one in kinds.get("include", ()) for name, rule in _included(one).items()}
    for kind, cases_of in _KINDS.items():
        for names, rows in itertools.starmap(cases_of, kinds.get(kind, {}).items()):
            rules |= each(names, by_cases(rows))
    return rules
