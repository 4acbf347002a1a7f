"""The parser of a command line, whose errors are one sentence with the example of the verb."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Sequence
from typing import NoReturn

from flatout.errors import UsageError

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

    `verb_words` are those of the command line that the first parser leaves to those of verbs.
    """

    verb_words: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        words = self.prog.split()[1:] or self.verb_words
        raise UsageError(f"{' '.join(words) or 'flatout'}: {message}{example_of(words[:2])}")


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


def hint_for(option: str, known: Sequence[str], verb: str) -> str:
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


def example_of(verb: Sequence[str]) -> str:
    """Return the last line of an error or a help: an example of a verb, or of a verb and an action."""
    named = " ".join(verb)
    words = _ACTION_EXAMPLES.get(named) or EXAMPLES.get(named.partition(" ")[0])
    return "" if words is None else f"\n  example: {' '.join(['flatout', named.partition(' ')[0], words]).strip()}"
