"""Commands and YAML files of ms-swift: `swift sft`, `swift pt`, and `swift rlhf` with the losses of TRL's trainers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout_migrate import training_arguments as hf
from flatout_migrate import translation as t
from flatout_migrate.preference import defaults_of, row_format, rules_of_method
from flatout_migrate.translation import Became, Given, RefusedError, Rule, Translation
from flatout_migrate.trl import OWN_TEMPLATE, SHARED, held_out, lora_rules, names_of, template, with_experts

# its rlhf_type -> TRL's trainer and its one loss; loss_type names one of several
METHODS: Mapping[str, tuple[str, str]] = {
    "dpo": ("dpo", ""), "cpo": ("cpo", ""), "simpo": ("cpo", "simpo"), "orpo": ("orpo", "orpo"),
    "kto": ("kto", "kto"), "rm": ("reward", "reward"),
}  # fmt: skip
_TYPES = ("train_type", "tuner_type", "sft_type")
_DATA_SET = re.compile(r"(?:(?P<hub>(?i:hf|ms))::)?(?P<path>.+?)(?::(?P<subset>[^:#]+))?(?:#(?P<count>\d+))?")
_OF_MODELSCOPE = "an id of ModelScope there, of the Hugging Face hub here"
_FILES = (".json", ".jsonl", ".csv", ".parquet", ".txt")
_WITHOUT_REFERENCE = ("cpo", "orpo", "reward")


def translate_swift(given: Mapping[str, Any], num_gpus: int = 1) -> Translation:
    """Translate the options of `swift rlhf`, by the defaults of ms-swift 3.8 and later."""
    kind = str(given.get("rlhf_type", "dpo"))
    method, loss = METHODS.get(kind, ("dpo", ""))
    is_lora = _is_lora(given)
    defaults = {name: value for name, value in defaults_of(method, given).items() if name != "loss_type" or not loss}
    defaults |= {"rlhf_type": kind, **_defaults(given, num_gpus)}
    defaults |= {"simpo_gamma": 1.0} if method == "cpo" else {}
    defaults |= {"beta": 2.0} if kind == "simpo" else {}
    fixed = {"loss_type": t.only((loss,), f"{kind} has one loss; remove it")} if loss else {}
    table = {**SWIFT, **rules_of_method(method, loss), **_OWN, **lora_rules(lambda _: is_lora), **_lora(is_lora)}
    table |= {**_RLHF, **fixed}
    return t.translate(given, table, defaults=defaults, nullable=hf.NULLABLE, num_gpus=num_gpus)


def translate_swift_sft(given: Mapping[str, Any], num_gpus: int = 1, *, is_pretraining: bool = False) -> Translation:
    """Translate the options of `swift sft`, or of `swift pt`, by the defaults of ms-swift 3.8 and later."""
    is_lora = _is_lora(given)
    defaults = {**hf.TRANSFORMERS_DEFAULTS, **_defaults(given, num_gpus), "truncation_strategy": "delete"}
    defaults |= {"use_chat_template": False, "loss_scale": "all"} if is_pretraining else {"template": "default"}
    table = {**SWIFT, **_OWN, **lora_rules(lambda _: is_lora), **_lora(is_lora), **_SFT}
    return t.translate(given, table, defaults=defaults, nullable=hf.NULLABLE, num_gpus=num_gpus)


def _is_lora(given: Mapping[str, Any]) -> bool:
    return all(given.get(name, "lora") == "lora" for name in _TYPES)


def _defaults(given: Mapping[str, Any], num_gpus: int) -> dict[str, Any]:
    """Return what all its trainers do without being told."""
    is_lora = _is_lora(given)
    # what is no number is refused with the option's name, by the rule of all options
    own_size = str(given.get("per_device_train_batch_size") or 1)
    size = (int(own_size) if own_size.isdigit() else 1) * num_gpus
    defaults: dict[str, Any] = {
        "learning_rate": 1e-4 if is_lora else 1e-5, "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": math.ceil(16 / size), "max_length": None, "weight_decay": 0.1,
        "adam_beta2": 0.95, "lr_scheduler_type": "cosine", "save_steps": 500,
    }  # fmt: skip
    defaults |= {"train_type": "lora"} if is_lora and not any(name in given for name in _TYPES) else {}
    defaults |= {"lora_rank": 8, "lora_alpha": 32, "lora_dropout": 0.05} if is_lora else {}
    if given.get("split_dataset_ratio"):
        defaults |= {"eval_strategy": given.get("save_strategy", "steps"), "eval_steps": given.get("save_steps", 500)}
    return defaults


def _kind(given: Given) -> Became:
    if given.value not in METHODS:
        raise RefusedError(f"{given.value!r:.40} is not supported; flatout has {', '.join(METHODS)}")
    _, loss = METHODS[given.value]
    return TRAINED[given.value](given) if loss else Became(note="loss_type names the loss")


# rlhf_type -> the settings of its one loss
TRAINED: Mapping[str, Rule] = {
    kind: rules_of_method(method, loss)["loss_type"] for kind, (method, loss) in METHODS.items() if loss
}


def _model(given: Given) -> Became:
    note = _OF_MODELSCOPE if _is_id(str(given.value)) and not given.all.get("use_hf") else ""
    return Became({"model.name": given.value}, note, check=bool(note))


def _is_id(name: str) -> bool:
    """Return whether a name is that of a hub, and no file or folder."""
    return name.count("/") == 1 and not (name.startswith(".") or Path(name).exists() or Path(name).suffix in _FILES)


def _sources(given: Given) -> Became:
    """Translate `HF::path:subset#rows`, once or several times; without HF:: or MS::, `use_hf` says which hub."""
    method, _ = METHODS.get(str(given.all.get("rlhf_type")), ("", ""))
    values = given.value if isinstance(given.value, list) else [given.value]
    sources, settings, notes = [], dict[str, Any](), dict[str, None]()
    for text in map(str, values):
        match = _DATA_SET.fullmatch(text)
        hub, path, subset, count = match.groups() if match else (None, text, None, None)
        of_modelscope = hub.lower() == "ms" if hub else _is_id(path) and not given.all.get("use_hf")
        if subset and "/" in subset:
            raise RefusedError(f"{text}: name each subset in an entry of its own")
        if path.endswith("self-cognition"):
            raise RefusedError(f"{text}: write your model_name and model_author into its rows, and name that file")
        source = {"path": path, **({"subset": subset} if subset else {})}
        if count and len(values) > 1:
            if not _is_id(path):
                raise RefusedError(f"{text}: data.num_samples counts the rows of all data sets; cut the files instead")
            source["split"] = f"train[:{count}]"
        elif count:
            settings["data.num_samples"] = int(count)
        notes |= {"which rows are drawn differs": None} if count else {}
        notes |= {_OF_MODELSCOPE: None} if of_modelscope else {}
        sources.append({**source, "system": given.all["system"]} if given.all.get("system") else source)
    judged = {"format": row_format(method)} if method else {}
    return Became(
        {"data.sources": [{**source, **judged} for source in sources], **settings}, "; ".join(notes), check=bool(notes)
    )


def _adapters(given: Given) -> Became:
    names = {name: names_of(given.all.get(name) or []) for name in ("adapters", "ref_adapters")}
    method, _ = METHODS.get(str(given.all.get("rlhf_type")), ("dpo", ""))
    if len(names[given.name]) > 1:
        raise RefusedError("one adapter is trained on; merge the others into the model first")
    if method not in _WITHOUT_REFERENCE and names["adapters"] != names["ref_adapters"]:
        raise RefusedError(
            "the reference is the model as it begins: name one folder as adapters and ref_adapters, or merge it first"
        )
    return Became({"lora.continue_from": names["adapters"][0]} if names["adapters"] else {})


def _reference(given: Given) -> Became:
    if given.value not in (None, given.all.get("model")):
        raise RefusedError("the reference is the model before training; remove it")
    return Became(note="the model before training, as here")


def _targets(given: Given) -> Became:
    if given.all.get("target_parameters"):
        return with_experts("target_modules", "target_parameters")(given)
    names = [name.strip() for name in names_of(given.all.get("target_modules") or "all-linear")]
    return Became({"lora.targets": "all-linear" if names == ["all-linear"] else names})


def _deepspeed(given: Given) -> Became:
    named = re.fullmatch(r"(?:default-)?zero([0-3])(_offload)?", str(given.value))
    if named is None:
        return hf.deepspeed_file(given)
    offload = {"sharding.offload": True} if named[2] else {}
    return Became({"strategy": "ddp" if named[1] == "0" else f"zero{named[1]}", **offload})


def _bits(given: Given) -> Became:
    method, bits = given.all.get("quant_method", "bnb"), given.all.get("quant_bits")
    if method == "bnb" and bits in (None, 4):
        return Became({"base.storage": "nf4"} if bits else {})
    if method in ("bnb", "fp8") and bits in (None, 8):
        return Became({"base.storage": "fp8"}, "8-bit floats", check=method == "bnb")
    raise RefusedError(f"{given.value!r:.40} is not supported; write quant_method bnb with quant_bits 4")


def _lora(is_lora: bool) -> dict[str, Rule]:
    unread = t.any_value("read only with LoRA")
    own = {**t.each("target_modules target_parameters", _targets), **t.rules_of("swift", "of LoRA")}
    return own if is_lora else dict.fromkeys(own, unread)


def _loss_scale(given: Given) -> Became:
    scales = str(given.value).split("+")
    if more := set(scales) - {"default", "all", "ignore_empty_think"}:
        raise RefusedError(f"{min(more)} is not supported: each token of every answer carries the same loss")
    return Became(
        {"data.loss_type": "all" if "all" in scales else "response_only"}
        | ({"data.empty_reasoning": "mask"} if "ignore_empty_think" in scales else {})
    )


def _templates(given: Given) -> Became:
    """Translate the template: ms-swift has copies of its own, and a system prompt of its own where rows have none."""
    if given.value != "default":
        return template({})(given)
    return Became({}, f"{OWN_TEMPLATE}, also for rows without a system prompt", check=True)


SWIFT: Mapping[str, Rule] = {**hf.TRAINING_ARGUMENTS, **SHARED, **t.rules_of("swift")}
_OWN: Mapping[str, Rule] = {
    "rlhf_type": _kind,
    "model": _model,
    **t.each(" ".join(_TYPES), t.one_of("method", {"lora": "lora", "full": "full"}, "flatout trains lora and full")),
    "dataset": _sources,
    "split_dataset_ratio": held_out,
    "val_dataset": hf.evaluated_apart,
    **hf.evaluation(lambda values: values.get("split_dataset_ratio")),
    "strict": lambda given: Became({} if given.value else {"data.on_bad_row": "skip"}),
    **t.each("adapters ref_adapters", _adapters),
    **t.each("ref_model ref_model_revision ref_model_type", _reference),
    "deepspeed": _deepspeed,
    **t.each("quant_method quant_bits", _bits),
}
_RLHF: Mapping[str, Rule] = {
    **t.rules_of("swift", "of rlhf"),
    "max_length": t.to("data.max_tokens", note="a pair with a longer answer is left out whole"),
}
_SFT: Mapping[str, Rule] = {
    **t.rules_of("swift", "of answers"),
    "loss_scale": _loss_scale,
    "template": _templates,
    "use_chat_template": lambda given: Became({} if given.value else {"data.template": "plain"}),
}
