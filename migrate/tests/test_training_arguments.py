"""TrainingArguments and SFTConfig in flatout's settings; conversions.jsonl has the arguments one by one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from flatout_migrate.training_arguments import NULLABLE, SFT_DEFAULTS, TRANSFORMERS_DEFAULTS
from flatout_migrate.translation import Translation, rules_of, translate


def translate_training_arguments(
    given: Mapping[str, Any], num_gpus: int = 1, defaults: Mapping[str, Any] = TRANSFORMERS_DEFAULTS
) -> Translation:
    return translate(given, rules_of("training_arguments"), defaults=defaults, nullable=NULLABLE, num_gpus=num_gpus)


def test_the_batch_is_multiplied_by_the_gpus() -> None:
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    translation = translate_training_arguments(given, num_gpus=8)
    assert translation.settings["batch"]["samples_per_step"] == 64
    assert [outcome.describe() for outcome in translation.outcomes if outcome.name in given] == [
        "batch.samples_per_step: 64 (4 x 2 x 8 GPUs)"
    ] * 2


def test_a_packed_row_is_not_a_sample() -> None:
    translation = translate_training_arguments({"per_device_train_batch_size": 4, "packing": True})
    assert [outcome.name for outcome in translation.outcomes if outcome.check] == ["per_device_train_batch_size"]


@pytest.mark.parametrize(("given", "factor"), [({}, "model"), ({"router_aux_loss_coef": 0.02}, 0.02)])
def test_the_loss_of_routers_is_trl_s(given: dict[str, float], factor: object) -> None:
    assert translate_training_arguments(given, defaults=SFT_DEFAULTS).flat["experts.balance_loss"] == factor
    assert "experts.balance_loss" not in translate_training_arguments({}).flat


def test_defaults_of_the_other_system_apply_where_nothing_is_given() -> None:
    translation = translate_training_arguments({"learning_rate": 1e-4}, defaults=SFT_DEFAULTS)
    assert translation.flat == {
        "optim.lr": 1e-4, "batch.epochs": 3.0, "batch.samples_per_step": 8, "schedule.warmup_steps": 0,
        "data.max_tokens": 1024, "data.too_long": "truncate", "data.loss_type": "all", "experts.balance_loss": "model",
    }  # fmt: skip
    assert "learning_rate" not in {outcome.name for outcome in translation.outcomes if outcome.is_default}


def test_every_field_of_transformers_is_known() -> None:
    transformers = pytest.importorskip("transformers")
    dumped = json.loads(transformers.TrainingArguments(output_dir="out").to_json_string())
    translation = translate_training_arguments(dumped)
    assert not translation.problems()
    assert {outcome.name for outcome in translation.outcomes} >= dumped.keys()
