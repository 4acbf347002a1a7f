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
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from flatout import __version__
from flatout.api.commands import exit_code_of
from flatout.cli.parser import Parser, example_of, hint_for, options_of
from flatout.environment import let_idle_threads_sleep
from flatout.errors import Fix, PreemptedError, UsageError, exits_refused, install_beside
from flatout.io.stop_signals import SIGNALS as STOP_SIGNALS
from flatout.io.stop_signals import end_threads_at_exit
from flatout.track.tolerant_stream import tolerant_output

# verb -> what it does; flatout/cli/<verb>.py, or the entry point of a verb of GUESTS, has add_arguments(parser) and
# run(args) -> exit code
VERBS = {
    "demo": "generate data and a tiny model, train, evaluate and chat, in minutes",
    "init": "write a commented config file that runs unmodified",
    "convert": "translate a config or script from Axolotl, LLaMA-Factory, ms-swift, TRL or Unsloth",
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
_VERBS_OF_OTHERS = {
    "train": "fine-tune finetune sft dpo fit tune run",
    "chat": "generate infer inference predict ask prompt",
    "init": "new create config",
    "data build": "dataset prepare preprocess tokenize",
    "data show": "show preview inspect view head",
    "plan": "check validate estimate lint dry-run",
    "report": "compare plot",
    "eval": "evaluate test score bench benchmark",
    "export": "gguf quantize save deploy serve convert-gguf",
    "push": "upload publish",
    "runs": "list ls history",
    "studio": "ui webui web gui dashboard",
    "watch": "log logs status tail",
    "--version": "version -v -V",
}
_WITHOUT_A_VERB = {
    "stop kill cancel abort": "press Ctrl-C where the run was started, or send SIGTERM to the pid in its .lock",
    "delete rm remove clean": "a run is a folder, so rm -r deletes it",
}
GROUPS = {
    "Start": ("demo", "init", "convert", "studio"),
    "Before a run": ("data", "plan", "doctor", "verify"),
    "Train": ("train", "watch", "launch"),
    "See": ("runs", "report", "track"),
    "Use": ("chat", "eval", "merge", "export", "push"),
}
WITH_OVERRIDES = ("plan", "verify", "doctor", "train", "launch", "convert")
_NEED_A_FILE = ("convert",)
# verb of another distribution, in its entry points of the group `flatout.verbs` -> its folder in a clone
GUESTS = {"convert": "migrate"}
OVERRIDE = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z0-9_]+)*=")
# in the place of a configuration file: all settings are on the command line
NO_FILE = "-"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the process's exit code (0 done, 2 usage, 3 data, ... see flatout/errors.py)."""
    let_idle_threads_sleep()
    if argv is not None:
        return _run_verb(argv)
    exit_with = end_threads_at_exit()
    exit_with(code := _run_verb(sys.argv[1:]))
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
    if argv[:1] in (["help"], ["--help"], ["-h"]) and argv[1:2] and argv[1] in VERBS:
        argv = [*argv[1:], "--help"]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    parser = Parser(prog="flatout", add_help=False)
    parser.add_argument("--version", action="version", version=f"flatout {__version__}")
    if argv[0] != "--version":
        if argv[0] not in VERBS:
            _refuse_verb(argv)
        verb, what = argv[0], VERBS[argv[0]]
        # only the requested verb's file is imported, so that the overview stays instant
        module = verb_module(verb)
        verbs = parser.add_subparsers(dest="verb", parser_class=Parser)
        example = "\n".join(line.strip() for line in example_of([verb]).splitlines() if line)
        form = argparse.RawDescriptionHelpFormatter
        subparser = verbs.add_parser(
            verb, description=f"{what[:1].upper()}{what[1:]}.", epilog=example, formatter_class=form
        )
        module.add_arguments(subparser)
        if verb in WITH_OVERRIDES:
            _refuse_settings_as_options(argv, subparser)
        parser.verb_words = [word for word in argv[: 1 + (verb == "data")] if word[:1] != "-"]
        _refuse_unknown_options(argv, subparser)
    args = parser.parse_args(argv)
    with exits_refused():
        return int(module.run(args))


def verb_module(verb: str) -> ModuleType:
    """Import the file of a verb. Raises UsageError if the distribution that has it is not installed."""
    if verb not in GUESTS:
        return importlib.import_module(f"flatout.cli.{verb}")
    from importlib.metadata import entry_points  # lazy: no other verb needs it

    entry = next(iter(entry_points(group="flatout.verbs", name=verb)), None)
    if entry is None:
        folder = GUESTS[verb]
        raise UsageError(f"{verb} is in flatout-{folder}, which is not installed: {install_beside(folder)}")
    module: ModuleType = entry.load()
    return module


def _overview() -> str:
    lines = ["usage: flatout VERB ...", "", "Plan and run exact fine-tuning of transformers models."]
    for group, verbs in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {verb:<9} {VERBS[verb]}" for verb in verbs)]
    lines += ["", "`flatout VERB --help` has the options of a verb. For a start:"]
    return "\n".join([*lines, "  flatout train model=Qwen/Qwen3-0.6B data=chats.jsonl", "  flatout chat run"])


def _refuse_verb(argv: Sequence[str]) -> NoReturn:
    verb = argv[0]
    if verb in ("resume", "continue", "restart"):
        run = argv[1] if argv[1:] else "RUN"
        raise UsageError(
            f"there is no verb {verb!r}: training a run's config.yaml continues it, such as "
            f"`flatout train {shlex.quote(f'runs/{run}/config.yaml')}`"
        )
    if how := next((how for others, how in _WITHOUT_A_VERB.items() if verb.lower() in others.split()), None):
        raise UsageError(f"there is no verb {verb!r}: {how}")
    named = [ours for ours, others in _VERBS_OF_OTHERS.items() if verb.lower() in others.lower().split()]
    if near := named or difflib.get_close_matches(verb.lower(), VERBS, n=1):
        raise UsageError(f"there is no verb {verb!r}; did you mean {near[0]}?{example_of(near[0].split())}")
    if verb.endswith((".yaml", ".yml")) or "=" in verb:
        raise UsageError(f"there is no verb {verb!r}; write a verb first, such as train")
    raise UsageError(f"there is no verb {verb!r}; the verbs are {', '.join(VERBS)}; `flatout --help` explains them")


def _refuse_settings_as_options(argv: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Raise UsageError for options of other trainers that are settings here, such as `--lr 1e-4`, all at once."""
    from flatout.config.names import default_of, from_yaml, resolve_alias
    from flatout.config.problems import Problem, together

    known, refused = [*options_of(parser, ())], list[Problem]()
    for index, word in enumerate(argv):
        option, equals, given = (f"-{word}" if re.match(r"-[a-z]{2}", word) else word).partition("=")
        if option[:2] != "--" or option == "--" or any(one.startswith(option) for one in known):
            continue
        after = next(iter(argv[index + 1 : index + 2]), "-")
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
            refused.append(Problem(option, (fix,)))
    if refused:
        options = ", ".join(problem.text for problem in refused)
        raise UsageError(f"there is no option {options}: a setting is written without dashes", together(refused))


def _refuse_unknown_options(argv: Sequence[str], subparser: argparse.ArgumentParser) -> None:
    """Raise UsageError for an option that the verb does not have, even if a required argument is missing."""
    known = [*options_of(subparser, argv)]
    options = (word.partition("=")[0] for word in argv[: argv.index("--") if "--" in argv else None])
    for option in options:
        if option[:2] == "--" and not any(one.startswith(option) for one in known):
            raise UsageError(f"{argv[0]}: there is no option {option}; {hint_for(option, known, argv[0])}")


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
    if overrides and not is_named and rest[:1] != [NO_FILE] and (not rest or rest[0].startswith("-")):
        rest = [NO_FILE, *rest]
    return [argv[0], rest[0], *overrides, *rest[1:]] if rest and rest[0][:2] != "--" else argv


if __name__ == "__main__":
    sys.exit(main())
