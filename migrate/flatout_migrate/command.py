"""The command of TRL or ms-swift in a shell script: its options and their values, as the shell would pass them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from flatout import UsageError
from flatout.api.settings import read_yaml
from flatout_migrate.preference import SYSTEMS, refuse_rollouts
from flatout_migrate.shell import assignments, commands_of, plain, replaced
from flatout_migrate.translation import Command, read_table

# a trainer's command -> the system that `flatout convert` translates; TRL has a script of each name too
_KNOWN: Mapping[str, str] = {**read_table("systems")["commands"], **{name.replace("-", " "): name for name in SYSTEMS}}
# commands of these programs that train nothing -> what does the same here
_BESIDE: Mapping[str, str] = read_table("systems")["commands beside"]
_PROGRAMS = {command.split()[0] for command in _KNOWN}
# how many ranks a launcher starts, and the sizes of pictures that ms-swift reads from its environment
_RANKS = re.compile(r"(?:NPROC_PER_NODE=|--(?:nproc[_-]per[_-]node|num_processes|num_gpus)[= ])(\S+)")
_NODES = re.compile(r"(?:NNODES=|--nnodes[= ])(?!1\b)(\S+)")
_PICTURES = {"MAX_PIXELS", "VIDEO_MAX_PIXELS", "IMAGE_MAX_TOKEN_NUM", "VIDEO_MAX_TOKEN_NUM"}


def read_command(file: Path) -> Command:
    """Return the options of the one trainer that a script starts, with those of its `--config`.

    Raises UsageError for no trainer or several, and for a value that only the shell knows.
    """
    started, environment, launch = list[tuple[str, list[str]]](), dict[str, str](), ""
    script, unsure = commands_of(file)
    for words in script:
        environment |= dict(assignments(words))
        one = _trainer(words)
        if one is None:
            continue
        started.append(one)
        if one[0] not in _BESIDE:
            before = words[: len(words) - len(one[1])]
            environment |= {name: value for word in before for name, value in assignments([word])}
            # before this command alone, or once in the script
            own = {name for word in before for name, _ in assignments([word])}
            environment |= {name: f"${name}" for name in (unsure - own) & environment.keys()}
            exported = [f"{name}={plain(value)}" for name, value in environment.items()]
            launch = " ".join([*map(plain, before), *exported])
    beside = {name: _BESIDE[name] for name, _ in started if name in _BESIDE}
    commands = [one for one in started if one[0] not in beside] or started[:1]
    if len(commands) > 1:
        names = " and ".join(name for name, _ in commands)
        raise UsageError(f"{file}: starts {names}; a configuration is of one run: leave one of them in the file")
    name, words = commands[0] if commands else ("", [])
    refuse_rollouts(str(file), *name.split())
    if name not in _KNOWN:
        what = f"{name} is not supported" if commands else "starts no trainer"
        raise UsageError(
            f"{file}: {what}; expected a command such as `trl dpo --model_name_or_path ...` or `swift sft --model ...`"
        )
    values = {name.lower(): plain(environment[name]) for name in _PICTURES & environment.keys()}
    values |= _options(file, name, words)
    if "config" in values:
        config = values.pop("config")
        if not isinstance(config, str):
            raise UsageError(f"{file}: --config: expected one file, found {config!r:.60}")
        values = {**read_yaml(file.parent / config), **values}
    nodes, ranks = _NODES.search(launch), _RANKS.search(launch)
    unknown = "in the --config_file of accelerate" if "--config_file" in launch else "1"
    return Command(values, _KNOWN[name], nodes[0] if nodes else ranks[1] if ranks else unknown, beside)


def _options(file: Path, command: str, words: list[str]) -> dict[str, Any]:
    """Return the options after a command and their values. Raises UsageError for what only the shell knows."""
    given: dict[str, list[str]] = {}
    option = command
    for quoted in words:
        word = plain(quoted)
        if word.startswith("--"):
            option, equals, word = word.partition("=")
            given[option] = [word] if equals else []
        elif option in given:
            given[option].append(word)
        else:
            raise UsageError(f"{file}: {option} {word}: expected an option such as --learning_rate")
        if unknown := replaced(quoted):
            raise UsageError(f"{file}: {option}: the shell replaces {unknown}; write what it stands for")
    return {option[2:]: _value(file, option, texts) for option, texts in given.items()}


def _trainer(words: list[str]) -> tuple[str, list[str]] | None:
    """Return the name of the trainer that a command starts, and the words after it; None if it starts none."""
    paths = [Path(plain(word)) for word in words]
    for at, path in enumerate(paths):
        if path.suffix == ".py" and path.parent.name == "cli" and f"swift {path.stem}" in _KNOWN:
            return f"swift {path.stem}", words[at + 1 :]
        if path.suffix == ".py" and f"trl {path.stem}" in _KNOWN:
            return f"trl {path.stem}", words[at + 1 :]
        if at and paths[at - 1].name == "-m" and path.name.startswith("swift.cli."):
            return f"swift {path.suffix[1:]}", words[at + 1 :]
        if at and paths[at - 1].name in _PROGRAMS:
            return f"{paths[at - 1].name} {path.name}", words[at + 1 :]
    return None


def _value(file: Path, option: str, texts: list[str]) -> Any:
    """Return the value of an option: true without a text, a list of several."""
    try:
        values = [yaml.safe_load(text) for text in texts]
    except (yaml.YAMLError, ValueError):
        joined = " ".join(texts)
        raise UsageError(f"{file}: {option}: {joined!r:.60} is not valid YAML; quote it once more for YAML") from None
    return True if not values else values if len(values) > 1 else values[0]
