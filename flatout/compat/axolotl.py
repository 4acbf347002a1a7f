"""Configurations of Axolotl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flatout.compat import translation as t
from flatout.compat.preference import RL, RL_NAMES, RL_ROWS, RL_TEMPLATES, defaults_of, row_format, rules_of_method
from flatout.compat.training_arguments import (
    MODEL_ARGUMENTS,
    PACKED,
    TRAINING_ARGUMENTS,
    evaluated_apart,
    evaluation,
    interval,
    warmup,
)
from flatout.compat.translation import Became, Given, RefusedError, Rule, Translation
from flatout.compat.trl import SHARED, held_out, lora_rules, names_of, template
from flatout.config.data import KeyMeaning
from flatout.data.rows.formats.turn_flags import TRAIN_KEYS

_TEMPLATES = {"chatml": "chatml", "llama3": "llama-3", "alpaca": "alpaca", "tokenizer_default": None}
_PLUGINS = ("cut_cross_entropy", "liger", "kernels")
_NEW_ROWS = "the rows of new tokens are always trained here; other special tokens are the tokenizer's own"
_WARMUP = "3 % of the run as here, but there at most 100 steps"
_ALPACA = "headings of Alpaca, but no introduction, and the input is part of the instruction"
# names of an equal meaning in transformers
_SAME = {
    "micro_batch_size": "per_device_train_batch_size", "num_epochs": "num_train_epochs", "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type", "wandb_name": "run_name", "adam_eps": "adam_epsilon",
    "peft_use_rslora": "use_rslora", "peft_use_dora": "use_dora",
}  # fmt: skip


def translate_axolotl(given: Mapping[str, Any], num_gpus: int = 1) -> Translation:
    """Translate a YAML of Axolotl."""
    given = _with_one_template(given)
    defaults: dict[str, Any] = {
        "adapter": "none", "num_epochs": 1, "lr_scheduler": "cosine", "micro_batch_size": 1, "sequence_len": 512,
        "excess_length_strategy": "drop",
    }  # fmt: skip
    for what in ("save", "eval"):
        if given.get("max_steps") is None and not any(
            given.get(name) for name in (f"{what}_steps", f"{what}_strategy", f"{what}s_per_epoch")
        ):
            defaults[f"{what}_strategy"] = "epoch"
    if given.get("warmup_steps") is None and given.get("warmup_ratio") is None:
        defaults["warmup_ratio"] = None
    if _is_lora(given):
        defaults |= {"lora_r": 8, "lora_alpha": 8}
    if given.get("fsdp_config") and not given.get("fsdp"):
        defaults["fsdp"] = "full_shard"
    table, aliases = AXOLOTL, _SAME
    if given.get("rl") in RL:
        method, loss = RL[given["rl"]]
        usual = defaults_of(method, {"loss_type": loss})
        defaults |= {name: usual[name] for name in ("beta", "cpo_alpha", "simpo_gamma") if name in usual}
        table, aliases = {**AXOLOTL, **_judged(method, loss)}, {**_SAME, **RL_NAMES}
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


def _judged(method: str, loss: str) -> dict[str, Rule]:
    """Return the rules of rl: its loss, and its data sets."""
    rules = rules_of_method(method, loss)
    del rules["max_length"], rules["metric_for_best_model"]
    entry = {
        **_DATASET, "field_chosen": t.to("columns.chosen"),
        "field_rejected": t.to("columns.rejected"),
    }  # fmt: skip

    def sources(given: Given) -> Became:
        settings: dict[str, Any] = {"data.sources": []}
        for each in given.value:
            template, _, rows = str(each.get("type")).partition(".")
            own = {"default"} | ({"argilla"} if given.all["rl"] == "orpo" else set())
            if template not in RL_TEMPLATES or rows not in (RL_ROWS if RL_TEMPLATES[template] else own):
                raise RefusedError(f"type {each.get('type')!r:.60} is not supported; write data.sources, with columns")
            source = t.inner({name: value for name, value in each.items() if name != "type"}, entry).settings
            settings["data.sources"].append({**source, "format": row_format(method)})
            if (ours := RL_TEMPLATES[template]) and settings.setdefault("data.template", ours) != ours:
                raise RefusedError("types of different templates: convert them apart")
        return Became(settings)

    return {
        **rules,
        "rl": rules["loss_type"],
        "datasets": sources,
        "excess_length_strategy": t.any_value("what is too long is left out whole"),
    }


def _is_lora(values: Mapping[str, Any]) -> bool:
    return values.get("adapter") in ("lora", "qlora")


def _kinds(values: Mapping[str, Any]) -> set[str]:
    return {str(entry.get("type")) for entry in values["datasets"]}


def _sources(given: Given) -> Became:
    sources = {"data.sources": [t.inner(entry, _DATASET).settings for entry in given.value]}
    kinds = _kinds(given.all)
    if len(kinds) > 1 and kinds & {"alpaca", "completion"}:
        raise RefusedError(
            "alpaca has a prompt of its own there, and completion is cut into windows: convert them apart"
        )
    return Became(sources | {"data.template": "alpaca"}, _ALPACA, check=True) if "alpaca" in kinds else Became(sources)


def _too_long(given: Given) -> Became:
    if "datasets" in given.all and _kinds(given.all) == {"completion"}:
        return Became({"data.too_long": "split"}, "completion is cut into windows")
    ours = {"drop": "drop", "truncate": "truncate", "raise": "error"}
    return t.one_of("data.too_long", ours, f"write {', '.join(ours)}")(given)


def _meaning(meaning: KeyMeaning) -> Rule:
    """Say what the key of a turn that the value names means, unless flatout knows it."""
    known = (*TRAIN_KEYS, "train_detail", "training_detail")
    return lambda given: Became({} if given.value in known else {f"keys.{given.value}": meaning})


_FORMATS = {"alpaca": "alpaca", "chat_template": "messages", "completion": "text", "input_output": "segments"}
# an entry of `datasets` -> one of data.sources
_DATASET: Mapping[str, Rule] = {
    "path": t.to("path"),
    "name": t.to("subset"),
    "split": t.to("split"),
    "revision": t.to("revision"),
    "type": t.one_of("format", _FORMATS, f"write {', '.join(_FORMATS)}, or data.sources"),
    "field": t.to("columns.text"),
    "field_messages": t.to("columns.messages"),
    "field_tools": t.to("columns.tools"),
    "message_field_role": t.to("columns.role"),
    "message_field_content": t.to("columns.content"),
    "message_property_mappings": t.nested({"role": t.to("columns.role"), "content": t.to("columns.content")}),
    "roles": lambda given: Became({f"roles.{theirs}": ours for ours, names in given.value.items() for theirs in names}),
    "roles_to_train": t.only((["assistant"], ["assistant", "gpt"]), "every assistant turn is trained on, no other"),
    **t.each("train_on_eos train_on_eot", t.only(("turn",), "the last token of each answer carries loss")),
    **t.each("field_thinking template_thinking_key", t.only(("thinking", "reasoning_content"), "write thinking")),
    "message_field_training": _meaning("train"),
    "message_field_training_detail": _meaning("train_detail"),
    "chat_template": t.only(("tokenizer_default",), "set data.template for all sets"),
    "ds_type": t.only(("json", "csv", "parquet", "arrow", "text"), "write json, csv, parquet, arrow or text"),
    **t.each("drop_system_message trust_remote_code", t.off("not supported; remove it")),
}


def _per_epoch(setting: str) -> Rule:
    def rule(given: Given) -> Became:
        if setting.startswith("eval") and not given.all.get("val_set_size"):
            return Became(note="no rows are held out")
        if not (times := given.number() * given.number("num_train_epochs", 1)):
            return Became(note="0 there means the default")
        return Became({setting: 1 / times if times > 1 else None}, "as a share of the run")

    return rule


def _adapter(given: Given) -> Became:
    if given.value not in ("lora", "qlora", "none", ""):
        raise RefusedError(f"{given.value!r:.40} is not supported; write lora or qlora, or none for full fine-tuning")
    is_4bit = {"base.storage": "nf4"} if given.value == "qlora" else {}
    return Became({"method": "lora" if _is_lora(given.all) else "full", **is_4bit})


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
        return Became({"batch.samples_per_step": int(given.number("batch_size")) * given.num_gpus}, PACKED, check=True)
    return TRAINING_ARGUMENTS["gradient_accumulation_steps"](given)


def _modules(given: Given) -> Became:
    modules = given.all.get("lora_target_modules") or ()
    if not (given.all.get("lora_target_linear") and _is_lora(given.all)) or {"lm_head", "embed_tokens"} & {*modules}:
        return _LORA["lora_target_modules"](given)
    experts = names_of(given.all.get("lora_target_parameters") or [])
    return Became({"lora.targets": ["all-linear", *experts] if experts else "all-linear"})


def _class_name(given: Given) -> Became:
    if not str(given.value).endswith(("ForCausalLM", "ForConditionalGeneration", "Tokenizer", "TokenizerFast")):
        raise RefusedError(f"{given.value} is not supported; only models of text (and pictures) are")
    return Became(note="read from the model's folder")


_LORA = lora_rules(_is_lora)


def _pictures_frozen(given: Given) -> Became:
    names = ("model.freeze_vision_tower", "model.freeze_projector")
    return Became(dict.fromkeys(names, False)) if given.value is False else Became(note="the tower stays frozen")


AXOLOTL: Mapping[str, Rule] = {
    **TRAINING_ARGUMENTS,
    **SHARED,
    **_LORA,
    **t.rules_of("axolotl"),
    "test_datasets": evaluated_apart,
    "freeze_mm_modules": _pictures_frozen,
    **t.each("model_config overrides_of_model_config", t.nested(
        {"output_router_logits": t.switch({"experts.balance_loss": "model"})})),
    **t.each("lora_target_modules lora_target_linear lora_target_parameters", _modules),
    **t.each("batch_size per_device_train_batch_size gradient_accumulation_steps", _batch),
    "warmup_ratio": lambda given: warmup(given) if given.value is not None else Became({}, _WARMUP, check=True),
    "revision_of_model": MODEL_ARGUMENTS["revision"],
    **t.each("model_type tokenizer_type", _class_name),
    "adapter": _adapter,
    "datasets": _sources,
    "chat_template": template(_TEMPLATES),
    "chat_template_jinja": template({}),
    "excess_length_strategy": _too_long,
    "train_on_inputs": lambda given: Became({"data.loss_type": "all" if given.value else "response_only"}),
    "val_set_size": held_out,
    "saves_per_epoch": _per_epoch("checkpoint.every_steps"),
    "evals_per_epoch": _per_epoch("eval.every_steps"),
    **evaluation(lambda values: values.get("val_set_size")),
    **t.each("save_steps save_strategy", interval("checkpoint.every_steps", "save_strategy", "save_steps")),
    "plugins": _plugins,
    "special_tokens": _special_tokens,
    "wandb_project": lambda given: Became({"track.to": ["wandb"], "track.project": given.value} if given.value else {}),
    "tokens": t.to("data.new_tokens", list, _NEW_ROWS, check=True),
    "peft_layers_to_transform": lambda given: Became({"lora.layers": given.value} if _is_lora(given.all) else {}),
}  # fmt: skip
