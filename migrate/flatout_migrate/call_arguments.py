"""What the arguments of Unsloth's and TRL's calls become, besides those of TrainingArguments."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from enum import Enum
from typing import Any

from flatout import Callback
from flatout_migrate import translation as t
from flatout_migrate.training_arguments import NULLABLE
from flatout_migrate.translation import Became, Given, RefusedError, Rule

_TABLE = t.read_table("unsloth")
# what get_peft_model trains without being told
PEFT_DEFAULTS: Mapping[str, Any] = _TABLE["defaults of get_peft_model"]
_ENDS = ("embed_tokens", "lm_head")
COLLATORS: tuple[str, ...] = tuple(_TABLE["collators"].split())


def _targets(given: Given) -> Became:
    value, experts = given.all.get("target_modules"), [*(given.all.get("target_parameters") or ())]
    if value is None and not experts:
        raise RefusedError("name linear layers of the decoder, or write all-linear")
    if isinstance(value, str):
        return Became({"lora.targets": [value, *experts] if experts else value})
    return Became({"lora.targets": sorted({*(value or ())} - {*_ENDS}) + experts, **saved(given).settings})


def saved(given: Given) -> Became:
    """Translate modules_to_save, with embeddings and head that are among target_modules: they are trained in full."""
    targets = given.all.get("target_modules")
    ends = [] if isinstance(targets, str | None) else [name for name in _ENDS if name in targets]
    names = [*dict.fromkeys([*(given.all.get("modules_to_save") or ()), *ends])]
    tying = bool(given.all.get("ensure_weight_tying"))
    return Became({"lora.modules_to_save": names, "lora.keep_tied": tying} if names else {})


def _collator(given: Given) -> Became:
    if type(given.value).__name__ not in COLLATORS or getattr(given.value, "mlm", False):
        raise RefusedError("batches are made without padding; use train_on_responses_only for masks")
    return Became()


def _callbacks(given: Given) -> Became:
    settings: dict[str, Any] = {}
    for callback in given.value:
        if type(callback).__name__ == "EarlyStoppingCallback":
            settings["eval.patience"] = callback.early_stopping_patience
            settings["eval.min_delta"] = callback.early_stopping_threshold
        elif not isinstance(callback, Callback):
            raise RefusedError(f"{type(callback).__name__} would never be called; derive it from flatout.Callback")
    return Became(settings)


def layers(given: Given) -> Became:
    """Translate layers_to_transform: a layer, or several."""
    return Became({"lora.layers": [given.value] if isinstance(given.value, int) else given.value or None})


own_optimizer = t.by_cases([{"if": {"value": (None, (None, None))}}, {"refused": "write optim= instead"}])
ARGUMENTS = t.rules_of("unsloth")


def settings_of(
    given: Mapping[str, Any],
    call: str,
    defaults: Mapping[str, Any] | None = None,
    num_gpus: int = 1,
    table: Mapping[str, Rule] = ARGUMENTS,
) -> dict[str, Any]:
    """Return flatout's settings by a table of arguments; warn of those that differ in some cases.

    Raises ProblemsError that names every argument that flatout cannot honour.
    """
    nullable = NULLABLE | {"target_modules"}
    became = t.translate(given, table, defaults=defaults, nullable=nullable, num_gpus=num_gpus)
    for one in became.outcomes:
        if one.check and not one.is_default:
            warnings.warn(f"{call}: {one.name}: {one.note}", stacklevel=3)
    return became.checked(call)


def changed_fields(options: Any, **needed: Any) -> dict[str, Any]:
    """Return the fields of another library's dataclass that differ from its defaults, and those that are needed."""
    fresh = type(options)(**needed)
    names = [name for name in type(options).__dataclass_fields__ if hasattr(fresh, name)]
    values = {name: getattr(options, name) for name in names if getattr(options, name) != getattr(fresh, name)}
    return {name: value.value if isinstance(value, Enum) else value for name, value in {**values, **needed}.items()}
