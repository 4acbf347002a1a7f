"""`flatout VERB`: finds the verb's file, runs it, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence

from flatout import __version__
from flatout.errors import FlatoutError
from flatout.io.host_memory import host_memory_error
from flatout.io.redact import printable, redacted
from flatout.track.tolerant_stream import tolerant_output

# verb -> what it does; flatout/cli/<verb>.py has add_arguments(parser) and run(args) -> exit code
VERBS = {
    "demo": "generate data and a tiny model, train, evaluate and chat, in minutes",
    "init": "write a commented configuration that runs unmodified",
    "convert": "translate a configuration of Axolotl, LLaMA-Factory, TRL or TrainingArguments",
    "data": "build, show or list tokenized data sets",
    "plan": "print what a run will do, without a GPU",
    "verify": "prove that packing, accumulation, ranks and strategies do not change this run's step",
    "doctor": "check the machine, the run folder and the disks before a run",
    "train": "fine-tune",
    "watch": "show a running or finished run: progress, loss, speed, ranks, events",
    "launch": "write an sbatch script or a Kubernetes manifest for a run",
    "bench": "measure tokens per second and memory of a configuration or model on this machine",
    "report": "write a page about a run, or several runs beside each other",
    "chat": "chat with a run, an adapter or a model",
    "track": "send a run to TensorBoard, Weights & Biases, MLflow, Comet or Trackio",
    "eval": "score a run, an adapter or a model on tasks and on own questions",
    "merge": "merge an adapter into its base model's weights",
    "export": "write a run for llama.cpp, Ollama, vLLM or MLX",
    "push": "push a run to the hub, with a model card",
    "studio": "do all of it in a browser: data, plan, training, chat",
}
WITH_OVERRIDES = ("plan", "verify", "doctor", "train", "launch", "bench", "convert")
LONGEST_LINE = 700
OVERRIDE = re.compile(r"[a-z_]+(\.[a-z0-9_]+)*=")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the process's exit code (0 done, 2 usage, 3 data, ... see flatout/errors.py)."""
    if argv is not None:
        return _run_verb(argv)
    code = _run_verb(sys.argv[1:])
    if sys.argv[1:2] == ["track"]:
        # the clients of trackers may wait for ever in threads and exit handlers; everything is flushed
        os._exit(code)
    return code


def _run_verb(given: Sequence[str]) -> int:
    # --max_tokens means --max-tokens
    words = (re.sub(r"^--[a-z_]+", lambda option: option[0].replace("_", "-"), word) for word in given)
    argv = overrides_first(list(words))
    parser = argparse.ArgumentParser(prog="flatout", description="Exact, planned, flat-out fine-tuning.")
    parser.add_argument("--version", action="version", version=f"flatout {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, what in VERBS.items():
        subparser = verbs.add_parser(verb, help=what, description=what[:1].upper() + what[1:] + ".")
        # import only the requested verb's file, so that --help stays instant
        if argv and verb == argv[0]:
            importlib.import_module(f"flatout.cli.{verb}").add_arguments(subparser)
    with tolerant_output():
        args = parser.parse_args(argv)
        return exit_code_of(lambda: importlib.import_module(f"flatout.cli.{args.verb}").run(args))


def exit_code_of(run: Callable[[], int]) -> int:
    """Return what `run` returns, or the exit code of its FlatoutError, which is printed."""
    try:
        try:
            return run()
        except Exception as error:
            if isinstance(error, FlatoutError) or (refused := host_memory_error(error)) is None:
                raise
            raise refused from error
    except FlatoutError as error:
        # without control characters, which files can contain, or endless lines
        shown = [
            line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} ... ({len(line):,} characters)"
            for line in printable(redacted(str(error))).split("\n")
        ]
        print("error: " + "\n".join(shown), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def overrides_first(argv: list[str]) -> list[str]:
    """Move `section.name=value` words right after the configuration, wherever they are among the options.

    argparse takes positional arguments only as one block: `plan run.yaml --ranks 2 lora.rank=8` would be an error.
    """
    if not argv or argv[0] not in WITH_OVERRIDES:
        return argv
    overrides = [word for word in argv if OVERRIDE.match(word)]
    rest = [word for word in argv if not OVERRIDE.match(word)]
    return [*rest[:2], *overrides, *rest[2:]] if rest[1:] and not rest[1].startswith("-") else argv


if __name__ == "__main__":
    sys.exit(main())
