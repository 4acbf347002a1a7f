"""What the calls of a Python script that trains with TRL, transformers or Unsloth become."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flatout import UsageError
from flatout_migrate import translation as t
from flatout_migrate.call_arguments import ARGUMENTS, COLLATORS, PEFT_DEFAULTS
from flatout_migrate.copied import Copied
from flatout_migrate.grpo import COPIED, is_of_trl
from flatout_migrate.preference import defaults_of, refuse_rollouts, row_format, rules_of_method
from flatout_migrate.script import Call, Script
from flatout_migrate.training_arguments import NULLABLE, SFT_DEFAULTS, TRANSFORMERS_DEFAULTS
from flatout_migrate.translation import Command, RefusedError, Translation, Unread
from flatout_migrate.trl import judged, template

_TABLE = t.read_table("scripts")
# a trainer or its arguments -> TRL's method, "" for supervised training
_TRAINERS: Mapping[str, str] = {f"{name}Trainer": method for name, method in _TABLE["trainers"].items()}
_CONFIGS = {f"{name}Config": method for name, method in _TABLE["trainers"].items() if name not in ("Unsloth", "")}
_PLAIN_CONFIGS = {"TrainingArguments", "UnslothTrainingArguments"}
_UNSLOTH = ("FastLanguageModel", "FastModel", "FastVisionModel")
_MODELS = ("ForCausalLM", "ForImageTextToText", "ForConditionalGeneration", "ForSequenceClassification")
_SCORING = "ForSequenceClassification.from_pretrained"
_PLACES = {name: places.split() for names, places in _TABLE["places"].items() for name in names.split()}
_NOT_RUN = {name for names in _TABLE["not run"]["cases"] for name in names.split()}
_HARMLESS, _OBJECTS = {*_TABLE["harmless"].split()}, {*_TABLE["objects"].split()}


chat_template = template({name: name for name in _TABLE["templates"].split()})


def read_script(file: Path) -> Command:
    """Return the arguments of a script's calls by name, the names of the calls, and the code that rewards need.

    The script is never run. Raises UsageError for a file without a trainer that is known here.
    """
    script = Script(file)
    calls = script.calls()
    names = {call.name for call in calls}
    refuse_rollouts(str(file), *sorted(names))
    trainers, known = sorted(name for name in names if name.endswith("Trainer")), ", ".join(_TRAINERS)
    if len(trainers) > 1 or not {*trainers} <= {*_TRAINERS}:
        raise UsageError(f"{file}: calls {' and '.join(trainers)}; one of {known} can be read")
    if not names & {*_TRAINERS, *_CONFIGS, *_PLAIN_CONFIGS}:
        if "flatout" in script.modules:
            raise UsageError(f"{file} imports flatout, so it needs no translation; see docs/front-doors.md")
        raise UsageError(f"{file}: calls none of {known}, whose arguments can be read without running it")
    arguments = _Arguments(script, calls)
    return Command(arguments.given, "script", calls=names, code=arguments.copied.text())


def translate(command: Command, num_gpus: int) -> Translation:
    """Translate what `read_script` found, by the defaults of the libraries whose calls these are."""
    given, calls, known = dict(command.values), command.calls, {**_CONFIGS, **_TRAINERS}
    method, is_unsloth = max(known.get(name, "") for name in calls), any(name.startswith(_UNSLOTH) for name in calls)
    defaults = defaults_of(method, given, is_unsloth=is_unsloth) if method else {**SFT_DEFAULTS}
    defaults |= TRANSFORMERS_DEFAULTS if not method and calls & _PLAIN_CONFIGS else {}
    of_method = rules_of_method(method) | t.rules_of("scripts/of methods") if method else {}
    table = ARGUMENTS | t.rules_of("scripts") | of_method
    if str(rows := given.get("map", "")).startswith(COPIED):
        table |= judged(rows) | t.rules_of("scripts/of copied rows")
    elif method:
        table |= judged(row_format(method))
    named = {"LoraConfig": "LoraConfig" in calls, "FastVisionModel": "FastVisionModel.from_pretrained" in calls}
    defaults |= t.defaults_of("scripts", {**given, **named, "is_unsloth": is_unsloth})
    if {"max_length", "max_seq_length"} & {*given}:  # the trainer's counts, else the model's, else a default
        unread = "max_seq_length" if "max_length" in given else "max_length"
        defaults.pop(unread, None)
        given.pop(unread, None)
    defaults = {**(PEFT_DEFAULTS if defaults.pop("get_peft_model", False) else {}), **defaults}
    if "finetune_vision_layers" in defaults:
        table |= t.rules_of("scripts/of pictures")
    return t.translate(given, table, defaults=defaults, nullable=NULLABLE | {"target_modules"}, num_gpus=num_gpus)


class _Arguments:
    """Collects the arguments of all calls that are known; what is not known of one is Unread."""

    def __init__(self, script: Script, calls: list[Call]) -> None:
        self.script, self.given, self._where = script, dict[str, Any](), dict[str, str]()
        self.copied = Copied(script)
        # GRPO trains no model that scores: such a call loads a reward
        rewards = _SCORING if any(call.name == "GRPOTrainer" for call in calls) else ()
        for call in (one for one in calls if not one.name.endswith(rewards)):
            name, line = call.name, call.node.lineno
            if name in _PLACES or name.removesuffix(".from_pretrained").endswith(_MODELS):
                self._read(call, _PLACES.get(name, ["model_name_or_path"]))
            elif name == "train_on_responses_only":
                self._put("assistant_only_loss", True, line, call.condition)
            elif name in _NOT_RUN:
                self.given[name] = f"line {line}"
            elif name.endswith((".from_pretrained", "Config")) and name not in _HARMLESS:
                self.given[name] = Unread(f"line {line}: this call is not known here")
        for one in (one for one in script.classes if {script.name_of(base) for base in one.bases} & _TRAINERS.keys()):
            self.given[one.name] = Unread(f"line {one.lineno}: it is not run; pass an objective to flatout.train")
        self._read_rows([call for call in calls if call.name == "load_dataset"])
        self._copy_map([call.node for call in calls if call.name == "map" and "reward_funcs" in self.given])
        for target, value in script.attributes():
            if target.attr in _NOT_RUN:
                self.given[target.attr] = f"line {target.lineno}"
            elif target.attr not in _HARMLESS | _OBJECTS:
                self._put(target.attr, script.value(value), target.lineno)

    def _put(self, name: str, value: Any, line: int, condition: str = "") -> None:
        where, name = f"line {line}", _TABLE["aliases"].get(name, name)
        if condition and not isinstance(value, Unread):
            value = Unread(f"{where}: set only {condition}; leave one branch in the file")
        before = self.given.get(name, value)
        if isinstance(before, Unread) or isinstance(value, Unread):
            value = before if isinstance(before, Unread) else value
        elif before != value:
            value = Unread(f"{self._where[name]} and {where} give different values; keep one")
        self.given[name], self._where[name] = value, where

    def _arguments(self, call: Call, places: list[str]) -> Iterator[tuple[str, ast.expr]]:
        """Yield the arguments of a call by name; those of a `**` are put as they are."""
        for place, node in enumerate(call.node.args):
            if place >= len(places) or isinstance(node, ast.Starred):
                unread = Unread(f"line {node.lineno}: write the argument with its name")
                self._put(f"{call.name}[{place}]", unread, node.lineno)
            elif places[place] != "_":
                yield places[place], node
        for each in call.node.keywords:
            if each.arg:
                yield each.arg, each.value
                continue
            values = self.script.value(each.value)
            named = values if isinstance(values, dict) else {f"**{ast.unparse(each.value):.40}": values}
            for name, value in named.items():
                self._put(name, value, each.value.lineno, call.condition)

    def _read(self, call: Call, places: list[str]) -> None:
        is_trainer, is_transformers = call.name in _TRAINERS, call.name.endswith(".from_pretrained")
        for name, node in self._arguments(call, places):
            value: Any = self.script.value(node)
            made = self.script.bound_to(node)
            made_by = self.script.name_of(made.func) if isinstance(made, ast.Call) else ""
            if name == "callbacks" and isinstance(made, ast.List):
                others = [
                    one for one in made.elts if not ast.unparse(self.script.bound_to(one)).startswith("EarlyStop")
                ]
                value = self.script.value(made) if others else []
            elif name == "data_collator" and made_by in COLLATORS and "mlm=True" not in ast.unparse(made):
                continue
            elif name == "eval_dataset":
                value = value is not None
            elif name == "reward_funcs":
                value = self._rewards(made if isinstance(made, ast.List | ast.Tuple) else node)
            is_object = is_trainer and isinstance(value, Unread) and name in ("model", "ref_model", "peft_config")
            if name in _OBJECTS or is_object:
                continue
            if is_transformers and not call.name.startswith(_UNSLOTH):
                name = {"dtype": "torch_dtype"}.get(name, name)
                name = places[0] if name == "pretrained_model_name_or_path" else name
            self._put(
                "model_name_or_path" if is_trainer and name == "model" else name, value, node.lineno, call.condition
            )

    def _rewards(self, node: ast.expr) -> list[Any] | Unread:
        """Return the names of reward functions, and {model: NAME} for a model that scores."""
        names = list[Any]()
        for part in node.elts if isinstance(node, ast.List | ast.Tuple) else [node]:
            try:
                names.append(self._reward_model(part) or self._reward_function(part))
            except RefusedError as why:
                return Unread(f"line {part.lineno}: {why}")
        return names

    def _reward_model(self, part: ast.expr) -> dict[str, Any] | None:
        """Return {model: NAME} for a name, or a call that loads one; None for a function. Raises RefusedError."""
        made = self.script.bound_to(part)
        if not isinstance(made, ast.Call):
            return {"model": name} if isinstance(name := self.script.value(made), str) else None
        if not ast.unparse(made.func).endswith(_SCORING):
            return None
        named = {one.arg or "**": self.script.value(one.value) for one in made.keywords}
        model = self.script.value(made.args[0]) if made.args else named.pop("pretrained_model_name_or_path", None)
        if other := named.keys() - {"num_labels", "dtype", "torch_dtype", "device_map"}:
            raise RefusedError(f"{min(other)} of a reward model is not read; write the model that it makes to a folder")
        if named.get("num_labels", 1) != 1:
            raise RefusedError("a reward model has one score here; write num_labels=1")
        return {"model": model}

    def _reward_function(self, part: ast.expr) -> str:
        """Return FILE.py:NAME; a function of the script is copied, as its file would train. Raises RefusedError."""
        name = self.script.name_of(part)
        file = self.script.file.parent / f"{self.script.imported.get(name, '').replace('.', '/')}.py"
        if not isinstance(part, ast.Name):
            raise RefusedError(f"{ast.unparse(part):.60} has no name; write def at the top of the file")
        if file.is_file():
            return f"{file}:{name}"
        if not is_of_trl(name):
            self.copied.keep(part.id)
        return f"{COPIED}{part.id if not is_of_trl(name) else name}"

    def _copy_map(self, calls: list[ast.Call]) -> None:
        """Make the function of the one `map` of the rows their converter; what cannot be one stays refused."""
        if len({ast.unparse(ast.Tuple([*call.args, *call.keywords])) for call in calls}) != 1:  # type: ignore[list-item]
            return
        removed = next((one.value for one in calls[0].keywords if one.arg == "remove_columns"), None)
        known = {one.arg for one in calls[0].keywords} <= {"remove_columns", "num_proc", "desc"}
        if known and len(calls[0].args) == 1 and (removed is None or ast.unparse(removed).endswith(".column_names")):
            with suppress(RefusedError):
                name = self.copied.keep_rows(calls[0].args[0], is_whole=removed is not None)
                self.given["map"] = f"{COPIED}{name}"

    def _read_rows(self, calls: list[Call]) -> None:
        """Read the data set that is trained on: the one whose split is not for evaluation."""
        names = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
        for call in calls:
            line = call.node.lineno
            one = {name: self.script.value(node) for name, node in self._arguments(call, ["path", "name"])}
            split = one.get("split")
            if isinstance(split, str) and split.split("[")[0].split("_")[0] in _TABLE["other splits"].split():
                self._put("eval_dataset", True, line)
                continue
            files = one.get("data_files")
            if (
                isinstance(one.get("path"), str)
                and one["path"] in _TABLE["kinds of files"].split()
                and files is not None
            ):
                files = files.get("train", files) if isinstance(files, dict) else files
                each = files if isinstance(files, list) else [files]
                one = {"datasets": files if isinstance(files, Unread) else [{"path": file} for file in each]}
            for name, value in one.items():
                self._put(names.get(name, name), value, line, call.condition)
