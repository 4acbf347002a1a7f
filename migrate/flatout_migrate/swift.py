"""Commands and YAML files of ms-swift: `swift sft`, `swift pt`, and `swift rlhf` with the losses of TRL's trainers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from flatout_migrate import training_arguments as hf
from flatout_migrate import translation as t
from flatout_migrate.preference import defaults_of, row_format, rules_of_method
from flatout_migrate.translation import Became, Command, Given, RefusedError, Translation
from flatout_migrate.trl import with_experts

# its rlhf_type -> TRL's trainer and its one loss; loss_type names one of several
METHODS: Mapping[str, tuple[str, str]] = t.read_table("preference")["ms-swift"]
_TYPES = ("train_type", "tuner_type", "sft_type")
_DATA_SET = re.compile(r"(?:(?P<hub>(?i:hf|ms))::)?(?P<path>.+?)(?::(?P<subset>[^:#]+))?(?:#(?P<count>\d+))?")
_OF_MODELSCOPE = "an id of ModelScope there, of the Hugging Face hub here"
_WITHOUT_REFERENCE = ("cpo", "orpo", "reward")


def translate(command: Command, num_gpus: int) -> Translation:
    """Translate the options of `swift sft`, `swift pt` or `swift rlhf`, by the defaults of ms-swift 3.8 and later."""
    given = command.values
    if command.system == "ms-swift":
        return _translate_rlhf(given, num_gpus)
    defaults = {**hf.TRANSFORMERS_DEFAULTS, **_defaults(given, num_gpus), "truncation_strategy": "delete"}
    is_pretraining = command.system == "ms-swift-pt"
    defaults |= {"use_chat_template": False, "loss_scale": "all"} if is_pretraining else {"template": "default"}
    table = t.rules_of("swift") | t.rules_of("swift/of answers")
    return t.translate(given, table, defaults=defaults, nullable=hf.NULLABLE, num_gpus=num_gpus)


def _translate_rlhf(given: Mapping[str, Any], num_gpus: int) -> Translation:
    kind = str(given.get("rlhf_type", "dpo"))
    method, loss = METHODS.get(kind, ("dpo", ""))
    own = t.defaults_of("swift", {**given, "rlhf_type": kind}, "defaults of rlhf")
    defaults = {**defaults_of(method, given), "rlhf_type": kind, **_defaults(given, num_gpus), **own}
    if loss:
        del defaults["loss_type"]
    others: list[Mapping[str, Any]] = [{"if": {"value": [loss]}}, {"refused": f"{kind} has one loss; remove it"}]
    fixed = {"loss_type": t.by_cases(others)} if loss else {}
    table = t.rules_of("swift") | rules_of_method(method, loss) | t.rules_of("swift/of rlhf") | fixed
    return t.translate(given, table, defaults=defaults, nullable=hf.NULLABLE, num_gpus=num_gpus)


def _is_lora(given: Mapping[str, Any]) -> bool:
    return all(given.get(name) in (None, "lora") for name in _TYPES)


def _defaults(given: Mapping[str, Any], num_gpus: int) -> dict[str, Any]:
    """Return what all its trainers do without being told."""
    # what is no number is refused with the option's name, by the rule of all options
    own_size = str(given.get("per_device_train_batch_size") or 1)
    size = (int(own_size) if own_size.isdigit() else 1) * num_gpus
    method = {"method": "lora" if _is_lora(given) else "full"}
    defaults = t.defaults_of("swift", {**given, **method}) | {"gradient_accumulation_steps": math.ceil(16 / size)}
    if given.get("split_dataset_ratio"):
        defaults |= {"eval_strategy": given.get("save_strategy", "steps"), "eval_steps": given.get("save_steps", 500)}
    return defaults


def _rlhf_type(given: Given) -> Became:
    if given.value not in METHODS:
        raise RefusedError(f"{given.value!r:.40} is not supported; flatout has {', '.join(METHODS)}")
    method, loss = METHODS[given.value]
    return rules_of_method(method, loss)["loss_type"](given) if loss else Became(note="loss_type names the loss")


def _model(given: Given) -> Became:
    note = _OF_MODELSCOPE if hf.is_hub_id(str(given.value)) and not given.all.get("use_hf") else ""
    return Became({"model.name": given.value}, note, check=bool(note))


def sources(given: Given) -> Became:
    """Translate `HF::path:subset#rows`, once or several times; without HF:: or MS::, `use_hf` says which hub."""
    method, _ = METHODS.get(str(given.all.get("rlhf_type")), ("", ""))
    values = given.value if isinstance(given.value, list) else [given.value]
    sources, settings, notes = [], dict[str, Any](), dict[str, None]()
    for text in map(str, values):
        match = _DATA_SET.fullmatch(text)
        hub, path, subset, count = match.groups() if match else (None, text, None, None)
        of_modelscope = hub.lower() == "ms" if hub else hf.is_hub_id(path) and not given.all.get("use_hf")
        if subset and "/" in subset:
            raise RefusedError(f"{text}: name each subset in an entry of its own")
        if path.endswith("self-cognition"):
            raise RefusedError(f"{text}: write your model_name and model_author into its rows, and name that file")
        source = {"path": path, **({"subset": subset} if subset else {})}
        if count and len(values) > 1:
            if not hf.is_hub_id(path):
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
    names = {name: t.names_of(given.all.get(name) or []) for name in ("adapters", "ref_adapters")}
    method, _ = METHODS.get(str(given.all.get("rlhf_type")), ("dpo", ""))
    if len(names[given.name]) > 1:
        raise RefusedError("one adapter is trained on; merge the others into the model first")
    if method not in _WITHOUT_REFERENCE and names["adapters"] != names["ref_adapters"]:
        raise RefusedError(
            "the reference is the model as it begins: name one folder as adapters and ref_adapters, or merge it first"
        )
    return Became({"lora.continue_from": names["adapters"][0]} if names["adapters"] else {})


def _targets(given: Given) -> Became:
    if given.all.get("target_parameters"):
        return with_experts(given, "target_modules", "target_parameters")
    names = [name.strip() for name in t.names_of(given.all.get("target_modules") or "all-linear")]
    return Became({"lora.targets": "all-linear" if names == ["all-linear"] else names})


def _deepspeed(given: Given) -> Became:
    named = re.fullmatch(r"(?:default-)?zero([0-3])(_offload)?", str(given.value))
    if named is None:
        return hf.deepspeed_file(given)
    offload = {"sharding.offload": True} if named[2] else {}
    return Became({"strategy": "ddp" if named[1] == "0" else f"zero{named[1]}", **offload})


def _loss_scale(given: Given) -> Became:
    scales = str(given.value).split("+")
    if more := set(scales) - {"default", "all", "ignore_empty_think"}:
        raise RefusedError(f"{min(more)} is not supported: each token of every answer carries the same loss")
    return Became(
        {"data.loss_type": "all" if "all" in scales else "response_only"}
        | ({"data.empty_reasoning": "mask"} if "ignore_empty_think" in scales else {})
    )
