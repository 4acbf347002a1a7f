"""Keywords that stand for a setting in Python: `Config(model=..., lr=1e-4)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from flatout.config.data import DataConfig
from flatout.config.model import ModelConfig
from flatout.config.objective import ObjectiveConfig
from flatout.config.track import TrackConfig
from flatout.errors import UsageError

# sections with a short form
LONG_FORMS: Mapping[str, Callable[[Any], Any]] = {
    "model": ModelConfig.long_form,
    "data": DataConfig.long_form,
    "objective": ObjectiveConfig.long_form,
    "track": TrackConfig.long_form,
}
# keyword of Config(...) and flatout.train(...) -> the setting
SHORTCUTS = {
    "rank": "lora.rank",
    "alpha": "lora.alpha",
    "dropout": "lora.dropout",
    "targets": "lora.targets",
    "storage": "base.storage",
    "samples_per_step": "batch.samples_per_step",
    "micro_batch_tokens": "batch.micro_batch_tokens",
    "epochs": "batch.epochs",
    "max_steps": "batch.max_steps",
    "lr": "optim.lr",
    "weight_decay": "optim.weight_decay",
    "max_tokens": "data.max_tokens",
    "loss_type": "data.loss_type",
}


def long_forms(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without short forms of sections."""
    return {**values, **{name: long(values[name]) for name, long in LONG_FORMS.items() if name in values}}


def expand(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with each keyword of SHORTCUTS in its section, and without short forms of sections.

    Raises UsageError for a setting that is given twice.
    """
    expanded = long_forms({name: value for name, value in values.items() if name not in SHORTCUTS})
    for name in values.keys() & SHORTCUTS.keys():
        section, _, setting = SHORTCUTS[name].partition(".")
        given = expanded.get(section, {})
        if isinstance(given, BaseModel):
            given = given.model_dump(exclude_unset=True)
        if not isinstance(given, Mapping):
            continue  # no section: refused as such
        if setting in given:
            raise UsageError(f"{name} and {SHORTCUTS[name]} are both given; keep one")
        expanded[section] = {**given, setting: values[name]}
    return expanded
