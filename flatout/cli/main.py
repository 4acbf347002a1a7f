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
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from flatout import __version__
from flatout.cli.parser import Parser, arguments_of, example_of, options_of
from flatout.environment import let_idle_threads_sleep
from flatout.errors import FlatoutError, PreemptedError, UsageError, exits_refused, next_steps, path_error
from flatout.io.host_memory import host_memory_error
from flatout.io.redact import printable, redacted
from flatout.io.stop_signals import SIGNALS as STOP_SIGNALS
from flatout.io.stop_signals import end_threads_at_exit
from flatout.track.tolerant_stream import tolerant_output

# verb -> what it does; flatout/cli/<verb>.py has add_arguments(parser) and run(args) -> exit code
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
LONGEST_LINE = 700
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
        module = importlib.import_module(f"flatout.cli.{verb}")
        verbs = parser.add_subparsers(dest="verb", parser_class=Parser)
        example = "\n".join(line.strip() for line in example_of([verb]).splitlines() if line)
        form = argparse.RawDescriptionHelpFormatter
        subparser = verbs.add_parser(
            verb, description=f"{what[:1].upper()}{what[1:]}.", epilog=example, formatter_class=form
        )
        module.add_arguments(subparser)
        parser.typed = subparser.typed = argv
        if verb in WITH_OVERRIDES:
            _refuse_settings_as_options(argv, subparser)
        parser.verb_words = [word for word in argv[: 1 + (verb == "data")] if word[:1] != "-"]
        _refuse_unknown_options(argv, parser, subparser)
    args = parser.parse_args(argv)
    with exits_refused():
        return int(module.run(args))


def _overview() -> str:
    lines = ["usage: flatout VERB ...", "", "Plan and run exact fine-tuning of transformers models."]
    for group, verbs in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {verb:<9} {VERBS[verb]}" for verb in verbs)]
    lines += ["", "`flatout VERB --help` has the options of a verb. For a start:"]
    return "\n".join([*lines, "  flatout train model=Qwen/Qwen3-0.6B data=chats.jsonl", "  flatout chat run"])


def _refuse_verb(argv: Sequence[str]) -> NoReturn:
    from flatout.config.folders import is_run_folder  # lazy, so that --help stays instant

    run = Path(*argv[1:2])
    settings = (run if is_run_folder(run) else Path("runs") / run) / "config.yaml"
    if argv[0] in ("resume", "continue", "restart"):
        known = sorted(file.parent.name for file in Path("runs").glob("*/config.yaml") if is_run_folder(file.parent))
        if argv[1:] and not settings.is_file() and known:
            raise UsageError(
                f"there is no run {argv[1]}, and no verb {argv[0]!r}: training a run's config.yaml continues it; the "
                f"runs here: {', '.join(known[:8])}"
            )
        step = next_steps((shlex.join(["train", str(settings), "instead", "of", *argv[:2]]), "")) * settings.is_file()
        raise UsageError(
            f"there is no verb {argv[0]!r}; `flatout train` continues an interrupted run automatically{step}"
        )
    if how := next((how for others, how in _WITHOUT_A_VERB.items() if argv[0].lower() in others.split()), None):
        raise UsageError(f"there is no verb {argv[0]!r}: {how}")
    named = [ours for ours, others in _VERBS_OF_OTHERS.items() if argv[0].lower() in others.lower().split()]
    if near := named or difflib.get_close_matches(argv[0].lower(), VERBS, n=1):
        step = next_steps((f"{near[0]} instead of {argv[0]}", ""))
        needed = {"eval": "--tasks arc_easy", "export": "--to gguf --out out"}.get(near[0])
        if needed and len(argv) == 2:
            step = next_steps((shlex.join([near[0], argv[1], *needed.split(), "instead", "of", *argv]), "for example"))
        raise UsageError(f"there is no verb {argv[0]!r}; did you mean {near[0]}?{step}")
    words = [*argv[0].split(" "), *argv[1:]]
    at = next((at for at, word in enumerate(words) if word in VERBS and (at == 0 or words[at - 1] == "flatout")), None)
    if at is not None:
        step = next_steps((shlex.join([*words[at:], "instead", "of", *argv]), ""))
        raise UsageError(f"there is no verb {argv[0]!r}; write flatout once, and a verb and its words behind it{step}")
    if argv[0].endswith((".yaml", ".yml")) or "=" in argv[0]:
        step = next_steps((shlex.join(["train", argv[0], "instead", "of", argv[0]]), ""))
        raise UsageError(f"there is no verb {argv[0]!r}; write a verb first, such as train{step}")
    raise UsageError(f"there is no verb {argv[0]!r}; the verbs are {', '.join(VERBS)}; `flatout --help` explains them")


def _refuse_settings_as_options(argv: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Raise UsageError for `--lr 1e-4` of other trainers, and for settings in another form, with the command for here.

    All of them are refused at once.
    """
    from flatout.config.names import OPTIONS_OF_OTHERS, default_of, needed_with, our_name, why_of
    from flatout.config.problems import LEAVE_OUT
    from flatout.config.schema import Config
    from flatout.config.spelling import mentioned

    _refuse_pieces(argv)
    known = {**dict.fromkeys(options_of(parser, ())), **OPTIONS_OF_OTHERS.get(argv[0], {})}
    sections = {name for name, field in Config.model_fields.items() if hasattr(field.annotation, "model_fields")}
    used = list[str]()
    options = dict[str, tuple[str, str | None]]()  # by name: what was typed, and its value
    for index, word in enumerate(argv):
        word = f"-{word}" if re.match(r"-[a-z]{2}", word) else word
        option, equals, given = word.partition("=")
        if not option.startswith("--") or option == "--" or any(one.startswith(option) for one in known):
            continue
        after = next(iter(argv[index + 1 : index + 2]), "-")
        is_value = after[:1] != "-" and not OVERRIDE.match(after) and not after.endswith((".yaml", ".yml", ".py"))
        name, value = option[2:].replace("-", "_"), given if equals else after if is_value else None
        # --no-packing; a section, as of --no-eval, has no false
        is_off = name.startswith("no_") and value is None and name.removeprefix("no_") not in sections
        options[name.removeprefix("no_") if is_off else name] = (option, "false" if is_off else value)
    # the file is read only for options to translate: a rank must not wait for it before its launcher's end is its own
    settings = _settings_of(argv) if options else {}
    settings |= {name: value for name, (_, value) in options.items()}
    if "--restart" in argv and (resumes := next((name for name in options if name.startswith("resume")), None)):
        step = next_steps((shlex.join(["instead", "of", "--restart", options[resumes][0]]), "continues the run"))
        raise UsageError(f"--restart starts over, and without it a run continues automatically; choose one{step}")
    changes, said = list[str](), list[str]()
    for name, (option, value) in options.items():
        if (ours := our_name(name, "true" if value is None else value, is_option=True, settings=settings)) is None:
            continue
        used += [option, option[1:], *([] if value is None else [value])]
        if ours.setting is None and (value or LEAVE_OUT not in ours.why) and not mentioned(ours.why):
            raise UsageError(f"there is no option {option}; {ours.why}")
        if ours.setting is None:
            changes += mentioned(ours.why)
            said.append(f"there is no option {option}; {ours.why}")
        elif value is None and ours.value == "true":
            change = f"{ours.setting}={default_of(ours.setting) or 'VALUE'}"
            step = next_steps((shlex.join([change, "instead", "of", option, option[1:]]), "for example"))
            raise UsageError(f"{option} is a setting here; write {ours.setting}=VALUE{step}")
        else:
            changes.append(f"{ours.setting}={ours.value}")
            said.append(f"{option} is a setting here: {changes[-1]}" + (f" ({ours.why})" if ours.why else ""))
    if said:
        changes = [*dict.fromkeys(changes)]
        changes += needed_with(changes, settings)
        step = next_steps((shlex.join([*changes, "instead", "of", *used]), why_of(changes)))
        raise UsageError(f"{'; '.join(said)}{step}")
    _refuse_words(argv)


def _refuse_pieces(argv: Sequence[str]) -> None:
    """Raise UsageError for a value that a shell took apart at its spaces: objective={kind: dpo, beta: 0.1}."""
    at = next((at for at, word in enumerate(argv) if OVERRIDE.match(word) and _num_open(word) > 0), len(argv))
    for end in range(at + 2, len(argv) + 1):
        if _num_open(whole := " ".join(argv[at:end])) == 0:
            step = next_steps((shlex.join([whole, "instead", "of", *argv[at:end]]), ""))
            raise UsageError(f"{argv[at]}: a value with spaces is one word in quotes{step}")


def _num_open(text: str) -> int:
    return sum(text.count(letter) for letter in "[{") - sum(text.count(letter) for letter in "]}")


def _refuse_words(argv: Sequence[str]) -> None:
    """Raise UsageError for a word behind the configuration that is a setting in another form, or a file."""
    from flatout.config.names import OF_OTHERS, dotted_names, our_name
    from flatout.config.read import ROW_TYPES

    names = {*dotted_names(), *OF_OTHERS}
    for at in range(2, len(argv)):
        word, rest = argv[at], argv[at + 1 :]
        if word[:1] in ("-", "") or OVERRIDE.match(word) or (argv[at - 1][:1] == "-" and argv[at - 1] != NO_FILE):
            continue
        (name, _, value), typed = word.partition(":"), [word]
        if rest[:1] == ["="] and rest[1:]:
            typed, value = [word, *rest[:2]], rest[1]
        elif word in names and rest and rest[0][:1] != "-" and not OVERRIDE.match(rest[0]):
            typed, value = [word, rest[0]], rest[0]
        how = "write = instead of :," if typed == [word] else "a setting is one word,"
        step, what = "", f"{' '.join(typed)}: {how}"
        if name in names and value and (ours := our_name(name, value)) and ours.setting:
            step = f"{ours.setting}={ours.value}"
        elif word.endswith(ROW_TYPES):
            others = [given.removeprefix("data=") for given in argv if given.startswith("data=")]
            step = f"data=[{','.join([*others, word])}]" if others else f"data={word}"
            what = f"{word} holds rows; pass it as"
        elif Path(word, "config.json").is_file():
            step, what = f"model={word}", f"{word} is a model; pass it as"
        elif word.endswith((".yaml", ".yml")):
            step, what = _second_file(word, argv), "the file to write is an option:"
        if step:
            step, typed = _with_first(argv[1], step, typed)
            words = shlex.join([*shlex.split(step), "instead", "of", *typed])
            raise UsageError(f"{what} {step}{next_steps((words, ''))}")


def _second_file(word: str, argv: Sequence[str]) -> str:
    """Return the step for a second file: what `convert` writes. Raises UsageError for the other verbs."""
    if argv[0] == "convert":
        return f"--to {word}"
    end = next_steps((shlex.join(["instead", "of", word]), "")) if word != argv[1] else ""
    raise UsageError(f"{word}: settings come from one file, here {argv[1]}; leave it out{end}")


def _with_first(word: str, step: str, typed: list[str]) -> tuple[str, list[str]]:
    """Return a step and what it replaces, with the first word too if that is a model or rows in a file's place."""
    is_model, is_data = Path(word, "config.json").is_file(), word.endswith((".jsonl", ".csv", ".parquet"))
    if not ((is_model and step.startswith("data=")) or (is_data and step.startswith("model="))):
        return step, typed
    return f"model={word} {step}" if is_model else f"{step} data={word}", [word, *typed]


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


def _refuse_unknown_options(argv: Sequence[str], parser: Parser, subparser: argparse.ArgumentParser) -> None:
    """Raise UsageError for an option that the verb does not have, even if a required argument is missing."""
    from flatout.config.names import OPTIONS_OF_OTHERS

    known = [*options_of(subparser, argv)]
    before = argv[0]
    actions = [*arguments_of(subparser, argv)]
    if any(isinstance(action, argparse._SubParsersAction) and not {*argv} & {*action.choices} for action in actions):
        return  # the action comes first
    for index, word in enumerate(argv):
        option, equals, value = word.partition("=")
        if word == "--":
            return
        if option[:2] != "--" or any(one.startswith(option) for one in known):
            continue
        used = [word] if equals else list(argv[index : index + 2])
        takes = {name for one in actions if one.nargs != 0 for name in one.option_strings}
        plain = [one for last, one in pairwise(argv) if one[:1] != "-" and last not in {word, *takes}]
        has_all = len(plain) >= sum(not one.option_strings and one.nargs not in ("?", "*") for one in actions)
        for action in (one for one in actions if not one.option_strings and (equals or len(used) == 2)):
            shown = "the file" if action.dest in ("config", "file") else str(action.metavar or action.dest.upper())
            names = (f"--{action.dest}", "--config" if shown == "the file" else f"--{shown.lower()}")
            if option in names or OPTIONS_OF_OTHERS.get(argv[0], {}).get(option) == shown:
                # the place may be taken: `chat MODEL --adapter RUN`
                typed = plain[:1] if has_all and len(plain) == 1 else []
                step = next_steps((shlex.join([value or used[-1], "instead", "of", *typed, *used]), ""))
                raise UsageError(f"there is no option {option}; write {shown} right after {before}{step}")
            before = argv[1] if isinstance(action, argparse._SubParsersAction) else shown
        used = [
            one
            for one in used
            if not (OVERRIDE.match(one) or (Path(one).exists() and not has_all) or (one != word and one[:1] == "-"))
        ]
        parser.error(f"unrecognized arguments: {shlex.join(used)}")


def exit_code_of(run: Callable[[], int], words: Sequence[str] | None = None) -> int:
    """Return what `run` returns, or the exit code of its FlatoutError, which is printed.

    With the `words` of the command line, it ends with the next commands.
    """
    try:
        try:
            return run()
        except Exception as error:
            refused = None if isinstance(error, FlatoutError) else host_memory_error(error) or path_error(error)
            if refused is None:
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
    if overrides and not is_named and rest[:1] != [NO_FILE] and (not rest or rest[0].startswith("-")):
        rest = [NO_FILE, *rest]
    return [argv[0], rest[0], *overrides, *rest[1:]] if rest and rest[0][:2] != "--" else argv


if __name__ == "__main__":
    sys.exit(main())
