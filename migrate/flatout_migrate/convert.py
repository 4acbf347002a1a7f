"""`flatout convert`: translates a configuration of another trainer, with a line on what became of each name."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from flatout import Fix, UsageError
from flatout.api.commands import require_yaml, rows, write_new
from flatout.api.settings import (
    ROW_TYPES,
    Config,
    dump_config,
    make_config,
    near_path,
    read_json,
    read_overrides,
    read_yaml,
)
from flatout_migrate.command import read_command
from flatout_migrate.grpo import name_copied
from flatout_migrate.preference import GRPO, refuse_rollouts
from flatout_migrate.script_calls import read_script
from flatout_migrate.translation import Command, Translation, read_table

# system -> names that its files have, and other systems' files do not
_MARKS = {system: {*names.split()} for system, names in read_table("systems")["marks"].items()}
_MODULES: Mapping[str, str] = read_table("systems")["modules"]
_SYSTEMS = [name for name in _MODULES if name != "script"]
# names without which a file says nothing that can be trained
_NEEDED = frozenset(read_table("systems")["needed"].split())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    what = "YAML or JSON of the other trainer, a script with its `trl` or `swift` command, or Python (it is not run)"
    parser.add_argument("file", type=Path, help=what)
    parser.add_argument("overrides", nargs="*", metavar="SETTING=VALUE", help="settings of flatout to add or change")
    parser.add_argument("--to", type=Path, metavar="OUT.yaml", help="new file to write (otherwise YAML is printed)")
    system = f"system of FILE, if not recognized: {', '.join(_SYSTEMS)}"
    parser.add_argument("--from", dest="system", choices=_SYSTEMS, metavar="SYSTEM", help=system)
    parser.add_argument("--gpus", type=int, help="number of GPUs that FILE is written for (as the script says, or 1)")
    parser.add_argument("--without", default="", metavar="NAME,...", help="names of FILE to leave out")


def run(args: argparse.Namespace) -> int:
    """Print what became of each name, and write or print the YAML. Returns 0.

    Raises ProblemsError with every name that is refused, or every setting that does not fit the others.
    """
    if args.to is not None:
        require_yaml(args.to)
    command = _read(args.file)
    given = command.values
    left_out = [name for name in args.without.split(",") if name]
    for name in left_out:
        _remove(given, name, args.file)
    system = (
        args.system or command.system or next((name for name, marks in _MARKS.items() if marks & given.keys()), None)
    )
    refuse_rollouts(str(args.file), *given)
    refuse_rollouts(str(args.file), *(given.get(name) for name in ("rl", "rlhf_type", "stage")), also=GRPO)
    # the rounds of GRPO, which a file with epochs does not tell
    if rounds := re.search(r"\brollout\.rounds=(\d+)\b", " ".join(args.overrides)):
        given["rounds"] = int(rounds[1])
    if system is None:
        raise _of_no_system(args.file, given)
    _find_deepspeed(given, args.file.parent)
    if args.gpus is None and not command.num_ranks.isdigit():
        raise UsageError(
            f"{args.file}: only the shell knows the ranks, {command.num_ranks}; give --gpus N, of all nodes"
        )
    num_gpus = int(command.num_ranks) if args.gpus is None else args.gpus
    if num_gpus < 1:
        raise UsageError(f"{args.file}: {num_gpus} GPUs; give --gpus N, of all nodes, at least 1")
    module = import_module(f"flatout_migrate.{_MODULES[system]}")
    translation = module.translate(replace(command, system=system, folder=args.file.parent), num_gpus)
    # what needs a decision stands first
    outcomes = sorted(translation.outcomes, key=lambda outcome: outcome.kind != "refused")
    table = [(outcome.name + " (default)" * outcome.is_default, outcome.describe()) for outcome in outcomes]
    table += [(name, "left out") for name in left_out]
    table += [
        (name, f"not converted: it does not train{ours and f'; see {ours}'}") for name, ours in command.beside.items()
    ]
    print(rows(table, 32), file=sys.stdout if args.to else sys.stderr)
    settings = translation.checked(str(args.file), _without(translation, given, args.without))
    settings, beside = _files_beside(settings, command.code, args)
    settings, overrides = _with_rows(settings, args.overrides)
    config = make_config(settings, overrides, origin=str(args.file), folder=args.file.parent)
    checks = [f"CHECK {outcome.name}: {outcome.note}" for outcome in translation.outcomes if outcome.check]
    intro = [f"Translated by `flatout convert` from {args.file} ({system}).", *checks]
    comment = "".join(textwrap.fill(line, 118, initial_indent="# ", subsequent_indent="#   ") + "\n" for line in intro)
    if args.to is None:
        print(comment + dump_config(config, only_given=True), end="")
        return 0
    write_new(args.to, comment + dump_config(config, only_given=True))
    for path, text in beside.items():
        write_new(path, text)
    print(f"wrote {args.to}; next: flatout plan {shlex.quote(str(args.to))}")
    return 0


def _files_beside(
    settings: dict[str, Any], code: str, args: argparse.Namespace
) -> tuple[dict[str, Any], dict[Path, str]]:
    """Return the settings with the paths of files that stand beside the YAML, and the texts of these files."""
    template = settings.get("data", {}).get("template") or ""
    template = template if "{%" in template else ""
    if args.to is None and (template or code):
        what = "chat template is" if template else "rewards are"
        raise UsageError(f"{args.file}: the {what} written to a file beside the YAML: give --to OUT.yaml")
    files = dict[Path, str]()
    if template:
        files[path := args.to.with_suffix(".jinja")] = template
        settings["data"]["template"] = str(path)
    if code:
        files[path := args.to.with_name(f"{args.to.stem}_rewards.py")] = code
        name_copied(settings, path)
    return settings, files


def _with_rows(settings: dict[str, Any], overrides: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings with the rows of a `data=FILE`, which are read as the translated ones, and the others."""
    rows_given = [text for text in overrides if text.startswith("data=")]
    if len(rows_given) != 1:
        return settings, overrides
    data = read_overrides(rows_given)["data"]
    return {**settings, "data": {**settings.get("data", {}), **data}}, [
        one for one in overrides if one not in rows_given
    ]


def _read(file: Path) -> Command:
    """Return the names and values of a file, and the system and ranks if the file is a command that names them."""
    if file.suffix in ROW_TYPES:
        raise UsageError(f"{file} holds rows, not settings; pass it to train as data={file}")
    if not file.exists():
        of_others = [one for one in sorted(file.parent.glob("*.y*ml")) if is_of_others(one)]
        listing = f"; other trainers' files here: {', '.join(map(str, of_others[:4]))}" if of_others else ""
        raise UsageError(f"{file}: no such file{near_path(file) or listing}")
    if file.suffix == ".json":
        values = read_json(file)
        if not isinstance(values, dict):
            raise UsageError(f"{file}: expected a JSON object of names and values; rows are data, not settings")
        return Command(values)
    if file.suffix in (".py", ".ipynb"):
        return read_script(file)
    return read_command(file) if file.suffix == ".sh" else Command(read_yaml(file))


def _of_no_system(file: Path, given: Mapping[str, Any]) -> UsageError:
    if "_component_" in str(given):
        return UsageError(
            f"{file} is torchtune's, which is not translated; start from a new file: flatout init new.yaml"
        )
    if given and given.keys() <= Config.model_fields.keys():
        return UsageError(f"{file} is already in flatout's form; `flatout train {shlex.quote(str(file))}` runs it")
    return UsageError(f"{file}: cannot tell which trainer it is for; give --from {'|'.join(_SYSTEMS)}")


def is_of_others(file: Path) -> bool:
    """Whether a path is a file with settings that only another trainer has."""
    if not file.is_file():
        return False
    names = re.findall(r"^(\w+):", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    return bool(set().union(*_MARKS.values()) & {*names})


def _find_deepspeed(given: dict[str, Any], folder: Path) -> None:
    """Name the DeepSpeed file by a path from here, if it is beside the file that names it."""
    name = given.get("deepspeed")
    if isinstance(name, str) and not Path(name).exists() and (folder / name).is_file():
        given["deepspeed"] = str(folder / name)


def _without(translation: Translation, given: Mapping[str, Any], left_out: str) -> list[Fix]:
    """Return the fix that leaves out every refused name; none if one of them stands inside another, or is needed."""
    refused = [outcome.name for outcome in translation.outcomes if outcome.kind == "refused"]
    if any(name not in given or name in _NEEDED for name in refused):
        return []
    return [Fix({"--without": ",".join(filter(None, [left_out, *refused]))}, "drops these settings")]


def _remove(given: dict[str, Any], name: str, file: Path) -> None:
    """Remove a dotted name. Raises UsageError if it is not there."""
    *sections, last = name.split(".")
    for section in sections:
        given = given.get(section, {})
    if last not in given:
        raise UsageError(f"--without {name}: {file} has no such name")
    del given[last]
