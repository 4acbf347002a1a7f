"""The parser of a verb: its errors are one sentence with an example, and unknown options say what there is instead."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from flatout.errors import Fix, UsageError

OVERRIDE = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z0-9_]+)*=")
CONFIG_HELP = "YAML or .py file (.py runs as code); not needed if settings follow"


@dataclass(frozen=True, slots=True)
class Number:
    """The type of an option that is a finite number within bounds."""

    kind: type[int] | type[float] = int
    least: float = -math.inf
    most: float = math.inf
    is_above: bool = False
    """Whether `least` itself is refused."""

    def __call__(self, text: str) -> float:
        """Return the number. Raises ValueError for another text, and beyond the bounds."""
        number = self.kind(text)
        is_low = number < self.least or (self.is_above and number == self.least)
        if not math.isfinite(number) or is_low or number > self.most:
            raise ValueError(str(self))
        return number

    def __str__(self) -> str:
        what = "a whole number" if self.kind is int else "a number"
        if math.isfinite(self.most):
            return f"{what} from {self.least:,} to {self.most:,}"
        bound = f" {'above' if self.is_above else 'of at least'} {self.least:,}"
        return what + (bound if math.isfinite(self.least) else "")


COUNT = Number(int, 1)


class Parser(argparse.ArgumentParser):
    """A parser of `flatout VERB`, or of one of its actions."""

    def __init__(self, *, example: str | None = None, **settings: Any) -> None:
        """`example` is the whole command that help and errors show."""
        self.example = example and example.strip()
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(epilog=example and f"example: {self.example}", formatter_class=form, **settings)
        self.set_defaults(parser=self)  # of an action's parser, if there is one
        self._needed: list[argparse.Action] = []

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self._words}: {message}" + (f"\n  example: {self.example}" if self.example else ""))

    @property
    def _words(self) -> str:
        return self.prog.removeprefix("flatout ")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; what is missing is named with its help."""
        self._needed = [action for action in self._actions if action.required]
        for action in self._needed:
            action.required = False
        try:
            parsed, rest = super().parse_known_args(args, namespace)
        finally:
            self._are_needed()
        if missing := [action for action in self._needed if getattr(parsed, action.dest, None) is None]:
            names = " and ".join(map(_name_of, missing))
            self.error(f"give {names}" + ("" if missing[1:] or not missing[0].help else f": {missing[0].help}"))
        return parsed, rest

    def format_help(self) -> str:
        self._are_needed()
        return super().format_help()

    def _are_needed(self) -> None:
        for action in self._needed:
            action.required = True

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError:
            if action.nargs is not None:
                raise
            self.error(f"{_name_of(action)} needs a value: {action.help}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError:
            raise self._no_choice(action, value) from None

    def _no_choice(self, action: argparse.Action, value: Any) -> UsageError:
        from flatout.config.names import value_meant  # lazy, so that --help stays instant

        choices = [*map(str, action.choices or ())]
        meant = str(next(iter(value_meant(action.dest, value).settings.values())))
        near = [meant] if meant in choices else difflib.get_close_matches(str(value).lower(), choices, n=1)
        option = next(iter(action.option_strings), None)
        hint = f"; did you mean {near[0]}?" if near and not option else ""
        fixes = [Fix({option: near[0]})] if near and option else []
        what = f"{_name_of(action)} is {value!r}; expected {', '.join(choices)}{hint}"
        return UsageError(f"{self._words}: {what}", fixes)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            number = Number(action.type) if action.type in (int, float) else action.type
            if not isinstance(number, Number):
                raise
            raise UsageError(f"{self._words}: {_name_of(action)} is {arg_string}; expected {number}") from None


def _name_of(action: argparse.Action) -> str:
    return next(iter(action.option_strings), None) or str(action.metavar or action.dest)


def add_settings(parser: argparse.ArgumentParser, example: str, *, what: str = CONFIG_HELP, **more: Any) -> None:
    """Add the arguments of a verb that reads a configuration: its file, and words that change it."""
    parser.add_argument("config", type=Path, help=what, **more)
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.name=value", help=f"e.g. {example}")


def options_of(parser: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[str]:
    """Yield the options of a parser, and of those for the actions in `words`."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for word in {*words} & {*action.choices}:
                yield from options_of(action.choices[word], words)


def refuse_unknown_options(verb: str, words: Sequence[str], parser: Parser, *, settings: bool) -> None:
    """Raise UsageError for options that a verb does not have, even if a required argument is missing.

    Those that are settings here, such as `--lr 1e-4`, are told all at once if the verb takes settings.
    """
    known = [*options_of(parser, words)]
    if settings:
        _refuse_settings_as_options(words, known)
    for word in words[: words.index("--") if "--" in words else None]:
        option = word.partition("=")[0]
        if option[:2] == "--" and not any(one.startswith(option) for one in known):
            raise UsageError(f"{verb}: there is no option {option}; {_hint_for(option, known, verb)}")


def _refuse_settings_as_options(words: Sequence[str], known: Sequence[str]) -> None:
    from flatout.config.describe import default_of
    from flatout.config.names import from_yaml, resolve_alias
    from flatout.config.problems import Problem, together

    refused = list[Problem]()
    for index, word in enumerate(words):
        option, equals, given = (f"-{word}" if re.match(r"-[a-z]{2}", word) else word).partition("=")
        if option[:2] != "--" or option == "--" or any(one.startswith(option) for one in known):
            continue
        after = next(iter(words[index + 1 : index + 2]), "-")
        is_value = after[:1] != "-" and not OVERRIDE.match(after) and not after.endswith((".yaml", ".yml", ".py"))
        name = option[2:].replace("-", "_")
        value = from_yaml(given) if equals else from_yaml(after) if is_value else True
        off = name.removeprefix("no_") if value is True else name  # --no-packing
        alias = resolve_alias(off, value if off == name else False, is_option=True)
        if isinstance(alias, str):
            raise UsageError(f"there is no option {option}; {alias}")
        if alias is not None:
            (setting, meant), *_ = alias.settings.items()
            needs = meant is True and not isinstance(default_of(setting), bool)
            fix = Fix({setting: default_of(setting)}, "for example") if needs else alias
            refused.append(Problem(option, fixes=(fix,)))
    if refused:
        options = ", ".join(problem.text for problem in refused)
        raise UsageError(f"there is no option {options}: a setting is written without dashes", together(refused))


def _hint_for(option: str, known: Sequence[str], verb: str) -> str:
    """Say what there is for an option that a verb does not have: another name, another way, or its help."""
    from flatout.config.names import FOREIGN_NAMES, FOREIGN_OPTIONS, WITHOUT_OPTION

    if why := WITHOUT_OPTION.get(verb, {}).get(option):
        return why
    ours = FOREIGN_NAMES.get(option.lstrip("-").replace("-", "_"), "").partition(":")[0]
    near = [FOREIGN_OPTIONS.get(verb, {}).get(option, ""), f"--{ours.rpartition('.')[2].replace('_', '-')}"]
    near = [one for one in near if one.split()[:1] and (one.split()[0] in known or one.isupper())]
    near += difflib.get_close_matches(option, known, n=1, cutoff=0.7)
    if not near:
        return f"`flatout {verb} --help` lists all options"
    return f"write {near[0]} right after {verb}" if near[0].isupper() else f"did you mean {near[0]}?"
