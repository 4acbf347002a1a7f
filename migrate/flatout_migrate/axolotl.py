"""Configurations of Axolotl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flatout_migrate import training_arguments as hf
from flatout_migrate import translation as t
from flatout_migrate.preference import RL, defaults_of, row_format, rules_of_method
from flatout_migrate.translation import Became, Command, Given, RefusedError, Rule, Translation
from flatout_migrate.trl import lora_targets, template

_TABLE = t.read_table("axolotl")
_PLUGINS = ("cut_cross_entropy", "liger", "kernels")
_NEW_ROWS = "the rows of new tokens are always trained here; other special tokens are the tokenizer's own"
_ALPACA = "headings of Alpaca, but no introduction, and the input is part of the instruction"


def translate(command: Command, num_gpus: int) -> Translation:
    """Translate a YAML of Axolotl."""
    given = _with_one_template(command.values)
    defaults, table, aliases = t.defaults_of("axolotl", given), t.rules_of("axolotl"), _TABLE["aliases"]
    defaults |= {"fsdp": "full_shard"} if given.get("fsdp_config") and not given.get("fsdp") else {}
    if given.get("rl") in RL:
        method, loss = RL[given["rl"]]
        usual = defaults_of(method, {"loss_type": loss})
        defaults |= {name: usual[name] for name in ("beta", "cpo_alpha", "simpo_gamma") if name in usual}
        rules = rules_of_method(method, loss)
        del rules["max_length"], rules["metric_for_best_model"]
        table = table | rules | {"rl": rules["loss_type"]} | t.rules_of("axolotl/of rl")
        aliases = {**aliases, **_TABLE["aliases of rl"]}
    return t.translate(given, table, defaults=defaults, num_gpus=num_gpus, aliases=aliases)


def _with_one_template(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the same with the template that all data sets name as that of the file, unless it has another."""
    entries = given.get("datasets")
    if not isinstance(entries, list) or not entries or not all(isinstance(each, Mapping) for each in entries):
        return given
    own = {str(each.get("chat_template")) for each in entries}
    if len(own) > 1 or own & {"None", "tokenizer_default"} or given.get("chat_template", *own) not in own:
        return given
    rest = [{name: value for name, value in each.items() if name != "chat_template"} for each in entries]
    return {**given, "chat_template": own.pop(), "datasets": rest}


def judged_sources(given: Given) -> Became:
    """Translate the data sets of rl."""
    entry, settings = t.rules_of("axolotl/of judged rows"), dict[str, Any]({"data.sources": []})
    templates: dict[str, str | None] = _TABLE["templates of rl"]
    method, _ = RL[given.all["rl"]]
    for each in given.value:
        template, _, rows = str(each.get("type")).partition(".")
        own = {"default"} | ({"argilla"} if method == "orpo" else set())
        if template not in templates or rows not in (_TABLE["rows of rl"] if templates[template] else own):
            raise RefusedError(f"type {each.get('type')!r:.60} is not supported; write data.sources, with columns")
        source = t.inner({name: value for name, value in each.items() if name != "type"}, entry).settings
        settings["data.sources"].append({**source, "format": row_format(method)})
        if (ours := templates[template]) and settings.setdefault("data.template", ours) != ours:
            raise RefusedError("types of different templates: convert them apart")
    return Became(settings)


def _is_lora(values: Mapping[str, Any]) -> bool:
    return values.get("adapter") in ("lora", "qlora")


def _kinds(values: Mapping[str, Any]) -> set[str]:
    return {str(entry.get("type")) for entry in values["datasets"]}


def _sources(given: Given) -> Became:
    sources = {"data.sources": [t.inner(entry, t.rules_of("axolotl/of a data set")).settings for entry in given.value]}
    kinds = _kinds(given.all)
    if len(kinds) > 1 and kinds & {"alpaca", "completion"}:
        raise RefusedError(
            "alpaca has a prompt of its own there, and completion is cut into windows: convert them apart"
        )
    return Became(sources | {"data.template": "alpaca"}, _ALPACA, check=True) if "alpaca" in kinds else Became(sources)


def _too_long(given: Given) -> Became:
    if "datasets" in given.all and _kinds(given.all) == {"completion"}:
        return Became({"data.too_long": "split"}, "completion is cut into windows")
    return t.rules_of("axolotl/of lengths")["excess_length_strategy"](given)


def meaning(given: Given) -> Became:
    """Say what the key of a turn that the value names means, unless flatout knows it."""
    means = given.name.removeprefix("message_field_").replace("training", "train")
    return Became({} if given.value in _TABLE["known flags of a turn"].split() else {f"keys.{given.value}": means})


def roles(given: Given) -> Became:
    """Translate the names of each role."""
    return Became({f"roles.{theirs}": ours for ours, names in given.value.items() for theirs in names})


def _per_epoch(setting: str) -> Rule:
    def rule(given: Given) -> Became:
        if setting.startswith("eval") and not given.all.get("val_set_size"):
            return Became(note="no rows are held out")
        if not (times := given.number() * given.number("num_train_epochs", 1)):
            return Became(note="0 there means the default")
        return Became({setting: 1 / times if times > 1 else None}, "as a share of the run")

    return rule


def _plugins(given: Given) -> Became:
    if other := [name for name in given.value if not any(f".{known}." in name for known in _PLUGINS)]:
        raise RefusedError(f"{other[0]} is not supported; remove it")
    return Became(note="kernels of the same formulas")


def _special_tokens(given: Given) -> Became:
    if not given.value.keys() - {"pad_token"}:
        return Became(note="there is no padding")
    if more := given.value.get("additional_special_tokens"):
        return Became({"data.new_special_tokens": list(more)}, _NEW_ROWS, check=True)
    return Became(note="the tokenizer's own tokens are used: they have to be these", check=True)


def _batch(given: Given) -> Became:
    if "batch_size" in given.all and "gradient_accumulation_steps" not in given.all:
        return Became(
            {"batch.samples_per_step": int(given.number("batch_size")) * given.num_gpus}, hf.PACKED, check=True
        )
    return hf.samples_per_step(given)


def _modules(given: Given) -> Became:
    modules = given.all.get("lora_target_modules") or ()
    if not (given.all.get("lora_target_linear") and _is_lora(given.all)) or {"lm_head", "embed_tokens"} & {*modules}:
        return lora_targets(given) if _is_lora(given.all) else Became(note="read only with LoRA")
    experts = t.names_of(given.all.get("lora_target_parameters") or [])
    return Became({"lora.targets": ["all-linear", *experts] if experts else "all-linear"})


chat_template = template(_TABLE["templates"])


def _tokens(given: Given) -> Became:
    return Became({"data.new_tokens": list(given.value)}, _NEW_ROWS, check=True)


saves_per_epoch, evals_per_epoch = _per_epoch("checkpoint.every_steps"), _per_epoch("eval.every_steps")
