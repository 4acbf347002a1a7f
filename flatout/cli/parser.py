"""The parser of a command line, whose errors are one sentence and the command that is meant."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from flatout.cli.screen import model_target
from flatout.errors import UsageError, next_steps

# what follows the verb in the example of its help
EXAMPLES = {
    "demo": "",
    "init": "run.yaml --model Qwen/Qwen3-0.6B --data chats.jsonl",
    "convert": "axolotl.yaml --to run.yaml",
    "data": "build chats.jsonl --tokenizer Qwen/Qwen3-0.6B --name chats",
    "plan": "run.yaml --device 4090",
    "verify": "run.yaml --ranks 2",
    "doctor": "run.yaml",
    "train": "run.yaml optim.lr=1e-4 lora.rank=32",
    "watch": "run",
    "launch": "run.yaml --slurm --nodes 2 --out job.sh",
    "runs": "--sort loss",
    "report": "run run-2",
    "chat": "run --prompt Hello",
    "track": "run --to tensorboard",
    "eval": "run --tasks arc_easy",
    "merge": "run --out merged",
    "export": "run --to gguf --out gguf --quantize q8_0",
    "push": "run my-model --private",
    "studio": "",
}
_ACTION_EXAMPLES = {
    "data show": "show chats -n 5",
    "data list": "list",
    "data template": "template Qwen/Qwen3-0.6B",
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are as all others, with the example of the verb.

    `verb_words` are those of the command line that the first parser leaves to those of verbs; `typed` are all.
    """

    verb_words: Sequence[str] = ()
    typed: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        words = self.prog.split()[1:] or self.verb_words
        hint, step = f"`{' '.join(['flatout', *words])} --help` lists all options", None
        why = ""
        if match := re.fullmatch(r"unrecognized arguments: (.*)", message):
            message, hint, step = self._unknown(shlex.split(match[1]) or [""], hint)
        elif match := re.fullmatch(r"argument (.+): invalid choice: '(.*)' \(choose from (.*)\)", message):
            message, hint, step, words = self._choice(match[1].rpartition("/")[2], match[2], match[3], words)
        elif match := re.fullmatch(r"argument (?:.*/)?(-\S+): expected (?:one|\d+|at least one) arguments?", message):
            one = self._option(match[1])
            value = self._sample(one) if one.nargs is None else None
            typed = [after for word, after in pairwise(self.typed) if word == match[1] and after[:2] != "--"]
            message, why = f"{match[1]} needs a value", "for example"
            shown = [one.metavar or one.dest.upper()] if isinstance(one.metavar, str | None) else one.metavar
            hint = f"write {' '.join([match[1], *shown])} ({re.split('[:;]', one.help or '')[0]})"
            step = shlex.join([match[1], value, "instead", "of", match[1], *typed]) if value else None
            bare = typed[0].lstrip("-") if typed and typed[0][:1] == "-" else ""
            if bare and typed[0] not in options_of(self, ()) and (one.choices is None or bare in one.choices):
                message, why = f"{typed[0]!r} begins with a dash, so it reads as an option", ""
                order = ["--reverse"] if "--reverse" in options_of(self, ()) else []  # -loss: from the largest
                meant = shlex.join([f"{match[1]}={typed[0]}"] if one.choices is None else [match[1], bare, *order])
                hint, step = f"write {meant}", f"{meant} instead of {match[1]} {shlex.quote(typed[0])}"
        elif match := re.fullmatch(r"argument (?:.*/)?(-\S+): ignored explicit argument '(.*)'", message):
            message, hint = f"{match[1]} takes no value, got {match[2]!r}", f"write {match[1]}"
            step = f"{match[1]} instead of {shlex.quote(f'{match[1]}={match[2]}')}"
        elif match := re.fullmatch(r"argument (?:.*/)?(-\S+): invalid (?:int|float) value: '(.*)'", message):
            value, why = self._sample(self._option(match[1])), "for example"
            message = f"{match[1]}: expected a number, got {match[2]!r}"
            step = f"{match[1]} {value} instead of {match[1]} {shlex.quote(match[2])}" if value else None
        elif match := re.fullmatch(r"one of the arguments (.*) is required", message):
            message, hint, step = f"give {match[1].replace(' ', ' or ')}", "one of them is needed", match[1].split()[0]
        elif match := re.fullmatch(r"argument (\S+): not allowed with argument (\S+)", message):
            why = f"or {match[1]}"
            message, hint, step = f"{match[2]} and {match[1]} are both given", "keep one", f"instead of {match[1]}"
        elif "are required: " in message:
            message, hint, step, why = self._missing(message.partition("required: ")[2].split(", "))
        is_told = hint.startswith("write ")
        end = next_steps((step, why)) if step else "" if is_told else example_of(words[:2])
        raise UsageError(f"{' '.join(words) or 'flatout'}: {message}; {hint}{end}")

    def _choice(
        self, name: str, given: str, choices: str, words: Sequence[str]
    ) -> tuple[str, str, str | None, Sequence[str]]:
        """Return that an argument's value is not one of its choices, a hint, a step, and words that have an example."""
        from flatout.config.names import our_value

        known, meant = re.findall(r"[\w-]+", choices), our_value(name.lstrip("-"), given).value
        near = [meant] if meant in known else difflib.get_close_matches(given, known, n=1, cutoff=0.8)
        near = near or known[: len(known) == 1]
        hint = f"did you mean {near[0]}?" if near else f"choose {', '.join(known)}"
        if name[0] != "-":
            return f"there is no {name} {given}", hint, None, [*words, *near]
        value = near[0] if near else self._sample(self._option(name))
        step = f"{name} {value} instead of {name} {shlex.quote(given)}" if value else None
        return f"there is no {name} {given}", hint, step, words

    def _unknown(self, words: Sequence[str], hint: str) -> tuple[str, str, str | None]:
        """Return what is wrong with words that are not known, a hint, and the step without them."""
        known = [*options_of(self, self.verb_words)]
        option, equals, value = words[0].partition("=")
        if option[:1] == "-":
            near = near_option(option, known, self.verb_words)
            if near is None:
                from flatout.config.names import WITHOUT_OPTION

                why = WITHOUT_OPTION.get(next(iter(self.verb_words), ""), {}).get(option)
                if why and "VALUE" in why:  # a variable of the environment
                    number = next((one for one in (value, *words[1:]) if one.replace(",", "").isdecimal()), "0")
                    variable = why.partition("VALUE")[0].split()[-1] + number
                    step = shlex.join([variable, "instead", "of", *words])
                    return f"there is no option {option}", why.replace("VALUE", number), step
                hint = f"{why}; leave it out" if why else f"leave it out; {hint}"
                return f"there is no option {option}", hint, f"instead of {shlex.join(words)}"
            step = f"{near}{equals}{shlex.quote(value) if value else ''} instead of {shlex.quote(words[0])}"
            return f"there is no option {option}", f"did you mean {near}?", step
        pairs = [word.partition("=") for word in words]
        meant = [(f"--{name}", value) for name, _, value in pairs if value and f"--{name}" in known]
        meant = meant or [("--port", word) for word in words if word.isdecimal() and "--port" in known]
        meant = meant or [("--answers", word) for word in words if Path(word).suffix and "--answers" in known]
        hint = f"write {' '.join(meant[0])}" if meant else "leave it out"
        if not meant and self.verb_words[:1] == ["push"]:
            hint = "a repository's name has no spaces"
        # a word that is also at its place would go as well
        is_sure = not {*words} & {*self.typed[: -len(words)]} and self.verb_words[:1] != ["push"]
        without = shlex.join([*(part for pair in meant for part in pair), "instead", "of", *words])
        return f"unexpected argument {words[0]!r}", hint, without if is_sure else None

    def _missing(self, names: Sequence[str]) -> tuple[str, str, str, str]:
        """Return that arguments are missing, a hint, the step that adds them as the verb's example has them, and why.

        A switch of the example, such as `push --private`, is added as well.
        """
        why = "for example"
        names = [name for name in names if "=" not in name]
        if names == ["config"]:
            step = "model=Qwen/Qwen3-0.6B data=chats.jsonl"
            return (
                "no file or setting is given",
                f"give a YAML file, or settings in its place, such as {step}",
                step,
                why,
            )
        if isinstance(self._actions[-1], argparse._SubParsersAction):
            what = f"give one of {', '.join(self._actions[-1].choices)}"
            return f"{names[0]} is not given", what, f"{EXAMPLES[self.prog.split()[-1]]} instead of", why
        needed = [one for one in self._actions if one.option_strings or one.nargs != "*"]
        missing = [one for one in needed if {one.dest, one.metavar, *one.option_strings} & {*names}]
        spare = self._spare()
        values = [*spare, *(self._sample(one) or one.dest.upper() for one in missing[len(spare) :])]
        samples = [[*one.option_strings[:1], value] for one, value in zip(missing, values, strict=False)]
        example = {*EXAMPLES.get(self.prog.split()[-1], "").split()} - {*self.typed}
        for one in (one for one in needed if one.nargs == 0 and example & {*one.option_strings}):
            samples.append([*one.option_strings[:1]])
            why += f"; {str(one.help).rpartition('; ')[2]}"
        if [*self.typed] == ["eval"]:  # it needs one of several options
            samples.append(["--tasks", "arc_easy"])
        words = shlex.join(word for sample in samples for word in sample)
        shown = [name if name[0] == "-" else name.upper() for name in names]
        what = f"{', '.join(shown)} {'are' if names[1:] else 'is'} not given"
        step = shlex.join([*shlex.split(words), "instead", "of", *spare])
        return what, f"write {'them' if names[1:] else 'it'}, such as {words}", step, why

    def _spare(self) -> list[str]:
        """Return the typed words beyond the arguments without a name: values whose option was left out."""
        takes = {name for one in self._actions if one.nargs != 0 for name in one.option_strings}
        plain = [word for before, word in pairwise(self.typed) if word[:1] != "-" and before not in takes]
        places = [one for one in self._actions if not one.option_strings]
        return [] if any(one.nargs in ("*", "+") for one in places) else plain[len(places) :]

    def _option(self, name: str) -> argparse.Action:
        return next(one for one in self._actions if name in one.option_strings)

    def _sample(self, action: argparse.Action) -> str | None:
        """Return a value of an argument: of the verb's example, else its default, or the one that its help names."""
        words = self.prog.split()[1:] or self.verb_words
        example = shlex.split(_ACTION_EXAMPLES.get(" ".join(words)) or EXAMPLES.get(words[0], ""))
        after = {word: value for word, value in pairwise(example) if word[0] == "-"}
        if action.option_strings:
            shown = re.search(r"\((?:default )?(\d[\d.e-]*)[ )]", action.help or "")
            named = next((after[name] for name in action.option_strings if name in after), None)
            named = named or (str(action.default) if action.default is not None else shown[1] if shown else None)
            return named or ("1" if action.type in (int, float) else None)
        plain = [word for at, word in enumerate(example) if word[0] != "-" and (at == 0 or example[at - 1][0] != "-")]
        places = [one for one in self._actions if not one.option_strings]
        value = dict(zip([one.dest for one in places], plain[len(words) - 1 :], strict=False)).get(action.dest)
        return _here(value, takes_model=action.type is model_target)


def _here(value: str | None, *, takes_model: bool) -> str | None:
    """Return an example's value as it is in this folder: another trainer's file, a finished run, a model, or itself."""
    from flatout.cli.convert import is_of_others  # all lazy, as only errors need them
    from flatout.io.near_path import models_here
    from flatout.view.open_runs import finished_runs

    if value == "axolotl.yaml":
        return next((str(file) for file in sorted(Path().glob("*.y*ml")) if is_of_others(file)), value)
    there = [] if value != "run" else finished_runs() or (models_here() if takes_model else [])
    return there[0] if there and "run" not in there else value


def options_of(parser: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[str]:
    """Yield the options of a parser, and of those for the verb and action in `words`."""
    for action in arguments_of(parser, words):
        yield from action.option_strings


def arguments_of(parser: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[argparse.Action]:
    """Yield what a parser, and those for the verb and action in `words`, take."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for word in {*words} & {*action.choices}:
                yield from arguments_of(action.choices[word], words)


def near_option(option: str, known: Sequence[str], words: Sequence[str]) -> str | None:
    """Return the option that is meant by one of another name, by its name here or at other trainers."""
    from flatout.config.names import OF_OTHERS, OPTIONS_OF_OTHERS

    ours = OF_OTHERS.get(option.lstrip("-").replace("-", "_"), "").partition(":")[0]
    elsewhere = OPTIONS_OF_OTHERS.get(next(iter(words), ""), {})
    named = [elsewhere.get(option), f"--{ours.rpartition('.')[2].replace('_', '-')}"]
    plain = {name.lstrip("-"): name for name in known}
    near = [name for name in known if option.startswith(f"{name}-")]
    near += [plain[one] for one in difflib.get_close_matches(option.lstrip("-"), plain, n=1, cutoff=0.7)]
    return next((name for name in [*named, *near] if name and name.split()[0] in known), None)


def example_of(verb: Sequence[str]) -> str:
    """Return the last line of an error or a help: an example of a verb, or of a verb and an action."""
    named = " ".join(verb)
    words = _ACTION_EXAMPLES.get(named) or EXAMPLES.get(named.partition(" ")[0])
    return "" if words is None else f"\n  example: {' '.join(['flatout', named.partition(' ')[0], words]).strip()}"
