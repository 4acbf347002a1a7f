"""The table of all verbs. A verb's row says all that `flatout --help` shows; its file is imported when it is used."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from flatout.api.commands import Verb
from flatout.config.spelling import as_data_options, as_init_options
from flatout.errors import Fix, UsageError, reason_of


def _verb(name: str, group: str, what: str, example: str = "", **more: Any) -> Verb:
    """Return the verb whose functions `add_arguments(parser)` and `run(args)` are in flatout/cli/NAME.py."""

    def arguments(parser: ArgumentParser) -> None:
        import_module(f"flatout.cli.{name}").add_arguments(parser)

    def run(args: Namespace) -> int:
        return int(import_module(f"flatout.cli.{name}").run(args) or 0)

    return Verb(name, group, what, arguments, run, example, **more)


_ROWS = (
    _verb("demo", "Start", "generate data and a tiny model, train, evaluate and chat, in minutes"),
    _verb("init", "Start", "write a commented config file that runs unmodified",
          "run.yaml --model Qwen/Qwen3-0.6B --data chats.jsonl", spell=as_init_options),
    _verb("studio", "Start", "do all of it in a browser: data, plan, training, chat"),
    _verb("data", "Before a run", "build, show or list tokenized data sets",
          "build chats.jsonl --tokenizer Qwen/Qwen3-0.6B --name chats", spell=as_data_options),
    _verb("plan", "Before a run", "print what a run will do, without a GPU", "run.yaml --device 4090",
          takes_overrides=True),
    _verb("doctor", "Before a run", "check the machine, the run folder and the disks before a run", "run.yaml",
          takes_overrides=True),
    _verb("verify", "Before a run",
          "check that packing, ranks and strategies keep this run's step",
          "run.yaml --ranks 2", takes_overrides=True),
    _verb("train", "Train", "fine-tune", "run.yaml optim.lr=1e-4 lora.rank=32", takes_overrides=True),
    _verb("watch", "Train", "show a running or finished run: progress, loss, speed, ranks, events", "run"),
    _verb("replay", "Train", "take steps of a run again, from a checkpoint, and compare every bit",
          "run --step 40"),
    _verb("launch", "Train", "write a job for Slurm, Kubernetes or SkyPilot",
          "run.yaml --slurm --nodes 2 --out job.sh", takes_overrides=True),
    _verb("runs", "See", "list runs with their losses, times and sizes", "--sort loss"),
    _verb("rollouts", "See", "list the rounds of a run, or show answers of one with their rewards", "run --round 12"),
    _verb("report", "See", "write an HTML report of a run, or compare several runs", "run run-2"),
    _verb("track", "See", "send a run to TensorBoard, W&B, MLflow, Comet or Trackio",
          "run --to tensorboard"),
    _verb("chat", "Use", "chat with a run, an adapter or a model", "run --prompt Hello"),
    _verb("eval", "Use", "evaluate a run or a model on lm-eval tasks or your own questions",
          "run --tasks arc_easy"),
    _verb("merge", "Use", "merge an adapter into its base model's weights", "run --out merged"),
    _verb("export", "Use", "export a run for llama.cpp, Ollama, vLLM or MLX",
          "run --to gguf --out gguf --quantize q8_0"),
    _verb("push", "Use", "push a run to the hub, with a model card", "run my-model --private"),
)  # fmt: skip
VERBS: Mapping[str, Verb] = {verb.name: verb for verb in _ROWS}
"""The verbs of flatout itself, in the order of `flatout --help`."""
ENTRY_POINTS = "flatout.verbs"
GUESTS = {"convert": "migrate"}
"""Verbs of flatout's own other distributions, and the folder that has each in a clone."""


def all_verbs() -> dict[str, Verb]:
    """Return the verbs of flatout and of other distributions. Raises UsageError for one that cannot be loaded."""
    verbs = dict(VERBS)
    for verb in _added():
        if verb.name in verbs:
            raise UsageError(f"two distributions have a verb {verb.name}", [Fix({}, "uninstall one of them")])
        verbs[verb.name] = verb
    return verbs


def find_verb(name: str) -> Verb | None:
    """Return the verb of this name; other distributions are only asked for one that flatout does not have."""
    return VERBS.get(name) or all_verbs().get(name)


def _added() -> Iterator[Verb]:
    from importlib.metadata import entry_points  # lazy: a verb of flatout needs none

    for point in entry_points(group=ENTRY_POINTS):
        try:
            verb = point.load()
        except Exception as error:  # of another distribution's code
            text = f"the verb {point.name} ({point.value}) cannot be loaded: {reason_of(error)}"
            raise UsageError(text, [Fix({}, "update its distribution, or uninstall it")]) from error
        if not isinstance(verb, Verb):
            raise UsageError(f"the verb {point.name} ({point.value}) is no flatout.api.Verb")
        yield verb
