"""Configurations of `trl sft` and of the alignment handbook; names of LoRA and of models that dialects share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flatout_migrate import training_arguments as hf
from flatout_migrate import translation as t
from flatout_migrate.grpo import AS_TEXT
from flatout_migrate.preference import defaults_of, method_of, row_format, rules_of_method
from flatout_migrate.translation import Became, Command, Given, RefusedError, Rule, Translation


def with_experts(given: Given, modules: str, parameters: str) -> Became:
    """Translate names of linear layers, and beside them the fused matrices of experts, as PEFT's target_parameters."""
    layers, experts = given.all.get(modules), given.all.get(parameters)
    if not experts:
        return Became({"lora.targets": layers} if layers else {})
    named = [] if layers is None else [layers] if isinstance(layers, str) else list(layers)
    return Became({"lora.targets": [*named, *t.names_of(experts)]})


def lora_targets(given: Given) -> Became:
    """Translate what LoRA is added to."""
    return with_experts(given, "lora_target_modules", "lora_target_parameters")


# a peer's copy of what the models of a family have
OWN_TEMPLATE = "the tokenizer's own template stands in for it; `flatout data template MODEL` shows that"


_FAMILIES: tuple[str, ...] = tuple(t.read_table("trl")["families of models"].split())


def _is_folder(model: str) -> bool:
    """Return whether a model is a folder whose path names no family."""
    is_path = model.count("/") != 1 or model.startswith((".", "~")) or "\\" in model
    return is_path and not any(family in model.lower() for family in _FAMILIES)


def template(names: Mapping[str, str | None]) -> Rule:
    """Translate a named template, or the text or file of one. A text is written to a file beside the configuration."""

    def rule(given: Given) -> Became:
        text = str(given.value)
        if text not in names and "{%" not in text and not text.endswith(".jinja"):
            model = str(
                given.all.get("model_name_or_path") or given.all.get("base_model") or given.all.get("model") or ""
            )
            family = re.match("[a-z]{3,}", text)
            # a checkpoint's folder tells no family
            is_its_own = family and (family[0] in model.lower() or (_is_folder(model) and family[0] in _FAMILIES))
            if is_its_own and all(kind in model.lower() for kind in re.findall("vl|vision|omni|audio", text)):
                return Became({}, OWN_TEMPLATE, check=True)
            known = ", ".join(names)
            raise RefusedError(f"{text!r:.40} is not one of {known}; leave it out to use the tokenizer's own")
        ours = names.get(text, text)
        return Became({"data.template": ours} if ours else {}, "" if ours else "the tokenizer's own")

    return rule


own_template = template({})
# names of rows to train on
OF_DATA: str = t.read_table("trl")["of data"]["functions"]["trl._sources"]


def _sources(given: Given) -> Became:
    values = given.all
    one = {"path": values.get("dataset_name"), "name": values.get("dataset_config") or _only_config(values)}
    entries = values.get("datasets") or _mixer(values) or [one | {"split": values.get("dataset_train_split", "train")}]
    text = values.get("dataset_text_field", "text")
    columns = {"columns": {"text": text}} if text != "text" else {}
    return Became(
        {"data.sources": [t.inner(entry, t.rules_of("trl/of a data set")).settings | columns for entry in entries]}
    )


def _only_config(values: Mapping[str, Any]) -> str | None:
    configs = values.get("dataset_configs") or [None]
    if len(configs) > 1 and not values.get("dataset_mixer"):
        raise RefusedError("dataset_configs: name one of one data set")
    name: str | None = configs[0]
    return name


def _mixer(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of the alignment handbook's `dataset_mixer`: a share of each set, of its splits for training.

    Raises RefusedError for a share below 1: it is the first rows there, and drawn ones here.
    """
    mixer: Mapping[str, float] = values.get("dataset_mixer") or {}
    if not mixer:
        return []
    configs = values.get("dataset_configs") or [None] * len(mixer)
    if part := [name for name, share in mixer.items() if float(share) != 1]:
        raise RefusedError(f"{part[0]}: the first rows of a data set are not taken; name the split, as train[:10%]")
    splits = [name.strip() for name in t.names_of(values.get("dataset_splits") or "train,test") if "train" in name]
    if not splits:
        raise RefusedError("dataset_splits: none has train in its name; name one, as train or train_sft")
    entries = zip(mixer, configs, strict=True)
    return [{"path": path, "name": name, "split": split} for path, name in entries for split in splits]


def _evaluated(given: Given) -> Became:
    mixture = given.all.get("dataset_mixture") or {}
    is_held_out = given.all.get("test_split_size") or mixture.get("test_split_size")
    return hf.evaluated(given) if is_held_out else Became(note="no rows are held out")


def _evaluates_there(values: Mapping[str, Any]) -> bool:
    return str(values.get("eval_strategy") or values.get("evaluation_strategy") or "no") not in ("no", "False")


def _evaluates(given: Given) -> Became:
    if not _evaluates_there(given.all) or given.all.get("dataset_mixture"):
        return Became(note="not evaluated there")
    return hf.evaluated_apart(given)


def _callbacks(given: Given) -> Became:
    if other := [name for name in t.names_of(given.value) if name != "push_to_hub_revision"]:
        raise RefusedError(f"{other[0]!r:.40} is not known; pass callbacks to flatout.train in Python")
    return Became(note="push the finished run with `flatout push`")


def translate(command: Command, num_gpus: int) -> Translation:
    """Translate a YAML of `trl sft` or of the alignment handbook, or of a trainer of preferences (`LOSSES`)."""
    given = command.values
    method = method_of(given) if command.system == "trl" else command.system.removeprefix("trl-")
    defaults = {**(defaults_of(method, given) if method else hf.SFT_DEFAULTS), **t.defaults_of("trl", given)}
    if _evaluates_there(given):
        defaults["dataset_test_split"] = "test"
    if given.get("max_seq_length"):
        defaults.pop("max_length", None)
    table = t.rules_of("trl") | (rules_of_method(method) | judged(row_format(method)) if method else {})
    return t.translate(given, table, defaults=defaults, nullable=hf.NULLABLE, num_gpus=num_gpus)


def judged(name: str) -> dict[str, Rule]:
    """Return the rules of data sets whose rows have this format."""

    def rule(given: Given) -> Became:
        became = t.rules_of("trl")[given.name](given).settings
        sources = [{**source, "format": name} for source in became.get("data.sources", ())]
        note = AS_TEXT if name == "prompts" and sources else ""
        return Became({**became, **({"data.sources": sources} if sources else {})}, note, check=bool(note))

    return t.each(OF_DATA.replace(" dataset_text_field", " dataset_mixture"), rule)
