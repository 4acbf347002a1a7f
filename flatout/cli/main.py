"""`flatout VERB`: finds the verb's file, runs it, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from flatout import __version__
from flatout.environment import let_idle_threads_sleep
from flatout.errors import FlatoutError, PreemptedError, UsageError, next_steps
from flatout.io.host_memory import host_memory_error
from flatout.io.redact import printable, redacted
from flatout.io.stop_signals import SIGNALS as STOP_SIGNALS
from flatout.track.tolerant_stream import tolerant_output

# verb -> what it does; flatout/cli/<verb>.py has add_arguments(parser) and run(args) -> exit code
VERBS = {
    "demo": "generate data and a tiny model, train, evaluate and chat, in minutes",
    "init": "write a commented config file that runs unmodified",
    "convert": "translate a config from Axolotl, LLaMA-Factory, ms-swift, TRL or TrainingArguments",
    "data": "build, show or list tokenized data sets",
    "plan": "print what a run will do, without a GPU",
    "verify": "check that packing, accumulation, ranks and strategies do not change this run's step",
    "doctor": "check the machine, the run folder and the disks before a run",
    "train": "fine-tune",
    "watch": "show a running or finished run: progress, loss, speed, ranks, events",
    "launch": "write an sbatch script or a Kubernetes manifest for a run",
    "runs": "list runs with their losses, times and sizes",
    "report": "write an HTML report of a run, or compare several runs",
    "chat": "chat with a run, an adapter or a model",
    "track": "send a run to TensorBoard, Weights & Biases, MLflow, Comet or Trackio",
    "eval": "evaluate a run, an adapter or a model on lm-eval tasks or your own questions",
    "merge": "merge an adapter into its base model's weights",
    "export": "export a run for llama.cpp, Ollama, vLLM or MLX",
    "push": "push a run to the hub, with a model card",
    "studio": "do all of it in a browser: data, plan, training, chat",
}
_VERBS_OF_OTHERS = {"fine-tune": "train", "finetune": "train", "sft": "train", "fit": "train", "generate": "chat"}
GROUPS = {
    "Start": ("demo", "init", "convert", "studio"),
    "Before a run": ("data", "plan", "doctor", "verify"),
    "Train": ("train", "watch", "launch"),
    "See": ("runs", "report", "track"),
    "Use": ("chat", "eval", "merge", "export", "push"),
}
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
WITH_OVERRIDES = ("plan", "verify", "doctor", "train", "launch", "convert")
_NEED_A_FILE = ("convert",)
LONGEST_LINE = 700
OVERRIDE = re.compile(r"[a-z_]+(\.[a-z0-9_]+)*=")
# in the place of a configuration file: all settings are on the command line
NO_FILE = "-"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are as all others, with the example of the verb.

    `verb_words` are those of the command line that the first parser leaves to those of verbs.
    """

    verb_words: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        words = self.prog.split()[1:] or self.verb_words
        hint = f"`{' '.join(['flatout', *words])} --help` lists all options"
        if match := re.fullmatch(r"unrecognized arguments: (\S+).*", message):
            option = match[1].partition("=")[0]
            known = [*_options(self, self.verb_words)]
            message = f"there is no option {option}" if option[0] == "-" else f"unexpected argument {match[1]!r}"
            hint = _near_option(option, known) or hint
        elif match := re.fullmatch(r"argument (.+): invalid choice: '(.*)' \(choose from (.*)\)", message):
            message = f"there is no {match[1]} {match[2]!r}; choose {match[3]}".replace("'", "")
            if near := difflib.get_close_matches(match[2], re.findall(r"[\w-]+", match[3]), n=1):
                hint = f"did you mean {near[0]}?"
        elif match := re.fullmatch(r"argument (?:.*/)?(-\S+): expected one argument", message):
            shown = next(one.metavar or one.dest.upper() for one in self._actions if match[1] in one.option_strings)
            message = f"{match[1]} needs a value: {match[1]} {shown}"
        elif match := re.fullmatch(r"argument (-\S+): invalid (?:int|float) value: ('.*')", message):
            message = f"{match[1]}: expected a number, got {match[2]}"
        elif re.search(r"are required: config(, section\.name=value)?$", message):
            message, hint = "config is missing", "give a YAML file, or model=MODEL data=chats.jsonl in its place"
        elif "are required: " in message:
            message = f"{message.partition('required: ')[2].replace(', section.name=value', '')} is missing"
        raise UsageError(f"{' '.join(words) or 'flatout'}: {message}; {hint}{_example(words[:2])}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the process's exit code (0 done, 2 usage, 3 data, ... see flatout/errors.py)."""
    let_idle_threads_sleep()
    if argv is not None:
        return _run_verb(argv)
    code = _run_verb(sys.argv[1:])
    if code == PreemptedError.exit_code:
        # Python restores the default action of handled signals while it exits, and a launcher may signal again then:
        # without this, "stopped and saved" would become "killed by SIGTERM"
        for number in {*STOP_SIGNALS} - {signal.SIGINT}:
            signal.signal(number, signal.SIG_IGN)
    if sys.argv[1:2] == ["track"]:
        # the clients of trackers may wait for ever in threads and exit handlers; everything is flushed
        os._exit(code)
    return code


def _run_verb(given: Sequence[str]) -> int:
    # --max_tokens means --max-tokens
    words = (re.sub(r"^--[a-z_]+", lambda option: option[0].replace("_", "-"), word) for word in given)
    argv = overrides_first(list(words))
    with tolerant_output():
        return exit_code_of(lambda: _parse_and_run(argv), argv)


def _parse_and_run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    parser = _Parser(prog="flatout", add_help=False)
    parser.add_argument("--version", action="version", version=f"flatout {__version__}")
    if argv[0] != "--version":
        if argv[0] not in VERBS:
            _refuse_verb(argv)
        verb, what = argv[0], VERBS[argv[0]]
        # only the requested verb's file is imported, so that the overview stays instant
        module = importlib.import_module(f"flatout.cli.{verb}")
        verbs = parser.add_subparsers(dest="verb", parser_class=_Parser)
        example = "\n".join(line.strip() for line in _example([verb]).splitlines() if line)
        form = argparse.RawDescriptionHelpFormatter
        subparser = verbs.add_parser(
            verb, description=f"{what[:1].upper()}{what[1:]}.", epilog=example, formatter_class=form
        )
        module.add_arguments(subparser)
        if verb in WITH_OVERRIDES:
            _refuse_settings_as_options(argv, subparser)
        parser.verb_words = [word for word in argv[: 1 + (verb == "data")] if word[0] != "-"]
        _refuse_unknown_options(argv, parser, subparser)
    args = parser.parse_args(argv)
    return int(module.run(args))


def _options(parser: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[str]:
    """Yield the options of a parser, and of those for the verb and action in `words`."""
    for action in _arguments(parser, words):
        yield from action.option_strings


def _arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[argparse.Action]:
    """Yield what a parser, and those for the verb and action in `words`, take."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for word in {*words} & {*action.choices}:
                yield from _arguments(action.choices[word], words)


def _near_option(option: str, known: Sequence[str]) -> str | None:
    """Return the sentence that names the option which is meant, by its name here or at other trainers."""
    from flatout.config.names import OF_OTHERS

    ours = OF_OTHERS.get(option.lstrip("-").replace("-", "_"), "").partition(":")[0]
    named = f"--{ours.rpartition('.')[2].replace('_', '-')}"
    near = [named] if ours and named in known else difflib.get_close_matches(option, known, n=1)
    return f"did you mean {near[0]}?" if near else None


def _overview() -> str:
    lines = ["usage: flatout VERB ...", "", "Plan and run exact fine-tuning of transformers models."]
    for group, verbs in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {verb:<9} {VERBS[verb]}" for verb in verbs)]
    lines += ["", "`flatout VERB --help` has the options of a verb. For a start:"]
    return "\n".join([*lines, "  flatout train model=Qwen/Qwen3-0.6B data=chats.jsonl", "  flatout chat run"])


def _example(verb: Sequence[str]) -> str:
    named = " ".join(verb)
    words = _ACTION_EXAMPLES.get(named) or EXAMPLES.get(named.partition(" ")[0])
    return "" if words is None else f"\n  example: {' '.join(['flatout', named.partition(' ')[0], words]).strip()}"


def _refuse_verb(argv: Sequence[str]) -> NoReturn:
    settings = Path("runs", *argv[1:2], "config.yaml")
    if argv[0] == "resume":
        step = next_steps((shlex.join(["train", str(settings), "instead", "of", *argv[:2]]), "")) * settings.is_file()
        raise UsageError(f"there is no verb 'resume'; `flatout train` goes on with an interrupted run by itself{step}")
    near = difflib.get_close_matches(argv[0], VERBS, n=1)
    near = [_VERBS_OF_OTHERS[argv[0]]] if argv[0] in _VERBS_OF_OTHERS else near
    if near:
        step = next_steps((f"{near[0]} instead of {argv[0]}", ""))
        raise UsageError(f"there is no verb {argv[0]!r}; did you mean {near[0]}?{step}")
    hint = "; write a verb first, such as train" if argv[0].endswith((".yaml", ".yml")) or "=" in argv[0] else ""
    raise UsageError(f"there is no verb {argv[0]!r}{hint}; the verbs are {', '.join(VERBS)}")


def _refuse_settings_as_options(argv: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Raise UsageError for `--lr 1e-4` of other trainers, with the command that sets it here."""
    known = [option for action in parser._actions for option in action.option_strings]
    from flatout.config.names import dotted_names, needed_with, our_name

    for word, value in pairwise(argv[1:]):
        if word in dotted_names() and "=" not in value:
            step = next_steps((shlex.join([f"{word}={value}", "instead", "of", word, value]), ""))
            raise UsageError(f"{word} {value}: a setting is one word, {word}={value}{step}")
    for word, equals, value in zip(argv[1:], argv[2:], argv[3:], strict=False):
        if equals == "=" and word in dotted_names():
            step = next_steps((shlex.join([f"{word}={value}", "instead", "of", word, "=", value]), ""))
            raise UsageError(f"{word} = {value}: a setting is one word, {word}={value}{step}")
    for index, word in enumerate(argv):
        option, equals, value = word.partition("=")
        if not option.startswith("--") or any(one.startswith(option) for one in known):
            continue
        after = argv[index + 1] if index + 1 < len(argv) and not argv[index + 1].startswith("--") else None
        value = value if equals else "true" if after is None else after
        if (ours := our_name(option[2:].replace("-", "_"), value, is_option=True)) is None:
            continue
        if ours.setting is None:
            raise UsageError(f"there is no option {option}; {ours.why}")
        if after is None and not equals and ours.value == "true":
            raise UsageError(f"{option} is a setting here; write {ours.setting}=VALUE")
        change, used = f"{ours.setting}={ours.value}", [word] if equals or after is None else [word, after]
        needed = needed_with([change], _settings_of(argv))
        step = next_steps((shlex.join([change, *needed, "instead", "of", *used]), ""))
        raise UsageError(f"{option} is a setting here: {change}{f' ({ours.why})' if ours.why else ''}{step}")


def _settings_of(argv: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a command line by dotted name, unchecked, without those of a file that cannot be read."""
    from flatout.config.read import flatten, load_values, merge_overrides
    from flatout.config.shortcuts import long_forms

    values: dict[str, Any] = {}
    for word in argv[1:]:
        if word.endswith((".yaml", ".yml")):
            with suppress(FlatoutError):
                values = load_values(Path(word))
    return dict(flatten(long_forms(merge_overrides(values, [word for word in argv if OVERRIDE.match(word)])[0])))


def _refuse_unknown_options(argv: Sequence[str], parser: _Parser, subparser: argparse.ArgumentParser) -> None:
    """Raise UsageError for an option that the verb does not have, even if a required argument is missing."""
    known = [*_options(subparser, argv)]
    before = argv[0]
    actions = [*_arguments(subparser, argv)]
    if any(isinstance(action, argparse._SubParsersAction) and not {*argv} & {*action.choices} for action in actions):
        return  # the action comes first
    for index, word in enumerate(argv):
        option, equals, value = word.partition("=")
        if word == "--":
            return
        if option[:2] != "--" or any(one.startswith(option) for one in known):
            continue
        used = [word] if equals else list(argv[index : index + 2])
        for action in (one for one in actions if not one.option_strings and (equals or len(used) == 2)):
            shown = "the file" if action.dest in ("config", "file") else str(action.metavar or action.dest.upper())
            if option in (f"--{action.dest}", "--config" if shown == "the file" else f"--{shown.lower()}"):
                step = next_steps((shlex.join([value or used[-1], "instead", "of", *used]), ""))
                raise UsageError(f"there is no option {option}; write {shown} right after {before}{step}")
            before = shown
        parser.error(f"unrecognized arguments: {word}")


def exit_code_of(run: Callable[[], int], words: Sequence[str] | None = None) -> int:
    """Return what `run` returns, or the exit code of its FlatoutError, which is printed.

    With the `words` of the command line, it ends with the next commands.
    """
    try:
        try:
            return run()
        except Exception as error:
            if isinstance(error, FlatoutError) or (refused := host_memory_error(error)) is None:
                raise
            raise refused from error
    except FlatoutError as error:
        # without control characters, which files can contain, or endless lines
        text = str(error)
        if words is not None:
            from flatout.config.spelling import Caller, spelled  # lazy, so that --help stays instant

            text = spelled(text, Caller("command", [word for word in words if word != NO_FILE]))
        shown = [
            line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} ... ({len(line):,} characters)"
            for line in printable(redacted(text)).split("\n")
        ]
        print("error: " + "\n".join(shown), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def overrides_first(argv: list[str]) -> list[str]:
    """Move `section.name=value` words right after the configuration, wherever they are among the options.

    argparse takes positional arguments only as one block: `plan run.yaml --ranks 2 lora.rank=8` would be an error.
    Without a configuration file, NO_FILE stands in its place.
    """
    if not argv or argv[0] not in WITH_OVERRIDES:
        return argv
    overrides = [word for word in argv[1:] if OVERRIDE.match(word)]
    rest = [word for word in argv[1:] if not OVERRIDE.match(word)]
    is_named = argv[0] in _NEED_A_FILE or any(word.endswith((".yaml", ".yml", ".py")) for word in rest)
    if overrides and not is_named and (not rest or rest[0].startswith("-")):
        rest = [NO_FILE, *rest]
    return [argv[0], rest[0], *overrides, *rest[1:]] if rest and rest[0][:2] != "--" else argv


if __name__ == "__main__":
    sys.exit(main())
