"""TrainingArguments and SFTConfig in flatout's settings: every name ends as translated, already so, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flatout.errors import ProblemsError
from flatout_migrate.training_arguments import SFT_DEFAULTS, translate_training_arguments


def settings_of(**given: Any) -> dict[str, Any]:
    translation = translate_training_arguments(given, defaults={})
    assert not translation.problems()
    return translation.flat


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({"learning_rate": "2e-5"}, {"optim.lr": 2e-5}),  # YAML reads 2e-5 as text
        ({"max_steps": -1, "num_train_epochs": 2}, {"batch.epochs": 2.0}),
        ({"max_steps": 60}, {"batch.max_steps": 60}),
        ({"max_grad_norm": 0}, {"optim.max_grad_norm": None}),
        ({"max_grad_norm": None}, {"optim.max_grad_norm": None}),
        ({"optim": "paged_adamw_8bit"}, {"optim.name": "adamw8bit"}),
        ({"optim": "sgd", "adam_beta1": 0.9, "adam_beta2": 0.95}, {"optim.name": "sgd", "optim.beta1": 0.0}),
        ({"warmup_steps": 10, "warmup_ratio": 0.1}, {"schedule.warmup_steps": 10}),
        ({"warmup_ratio": 0.1}, {"schedule.warmup_ratio": 0.1}),
        ({"warmup_steps": 0.05}, {"schedule.warmup_ratio": 0.05}),
        (
            {"lr_scheduler_type": "constant", "warmup_steps": 9},
            {"schedule.kind": "constant", "schedule.warmup_steps": 0},
        ),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 1e-3, "lr_scheduler_kwargs": {"min_lr": 1e-4}},
            {"schedule.kind": "cosine", "optim.lr": 1e-3, "schedule.min_lr_ratio": 0.1},
        ),
        ({"save_strategy": "no", "save_steps": 100}, {"checkpoint.every_steps": None}),
        ({"save_steps": 0.25}, {"checkpoint.every_steps": 0.25}),
        ({"save_strategy": "epoch", "num_train_epochs": 4}, {"checkpoint.every_steps": 0.25, "batch.epochs": 4.0}),
        ({"save_total_limit": None}, {"checkpoint.keep": 1_000_000}),
        ({"eval_steps": 100}, {}),  # without eval_strategy, nothing is evaluated there
        ({"eval_strategy": "steps", "eval_steps": 100}, {"eval.every_steps": 100}),
        ({"eval_strategy": "steps", "logging_steps": 7}, {"eval.every_steps": 7, "log_every_steps": 7}),
        ({"bf16": True, "fp16": False}, {"model.precision": "bf16"}),
        ({"fp16": True}, {"model.precision": "fp16"}),
        ({"bf16": "auto"}, {}),
        ({"report_to": ["wandb", "comet_ml"]}, {"track.to": ["wandb", "comet"]}),
        ({"report_to": "none"}, {"track.to": []}),
        ({"run_name": "my run/1"}, {"name": "my-run-1"}),
        ({"fsdp": "full_shard auto_wrap offload"}, {"strategy": "fsdp", "sharding.offload": True}),
        ({"fsdp": "shard_grad_op auto_wrap"}, {"strategy": "zero2"}),
        ({"fsdp": ["hybrid_shard", "auto_wrap"], "fsdp_config": {"fsdp_use_orig_params": True}}, {"strategy": "hsdp"}),
        ({"fsdp": "", "fsdp_config": {"xla": False}}, {}),
        ({"deepspeed": "zero3.json"}, {"strategy": "deepspeed", "deepspeed": "zero3.json"}),
        ({"max_length": None}, {"data.max_tokens": None}),
        ({"packing": True, "packing_strategy": "bfd_split"}, {"data.too_long": "split"}),
        ({"assistant_only_loss": True}, {"data.loss_type": "response_only"}),
        ({"seed": 1, "data_seed": 1}, {"seed": 1}),
        ({"use_cpu": True}, {"device": "cpu"}),
        (
            {"early_stopping_patience": 3, "early_stopping_threshold": 0.01},
            {"eval.patience": 3, "eval.min_delta": 0.01},
        ),
        ({"gradient_checkpointing": True, "dataloader_num_workers": 4, "group_by_length": True}, {}),
    ],
)
def test_settings(given: dict[str, Any], settings: dict[str, Any]) -> None:
    assert settings_of(**given) == settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha: noise on embeddings"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor: label smoothing"),
        ({"optim": "adafactor"}, "optim: 'adafactor' is not supported"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type: 'polynomial' is not supported"),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 1}}, "num_cycles: 1 is not supported"),
        ({"fsdp": "full_shard", "fsdp_config": {"fancy": 1}}, "fancy is not supported"),
        ({"save_strategy": "epoch", "max_steps": 10}, "only the data tells the steps of an epoch"),
        ({"data_seed": 3}, "data_seed: one seed decides"),
        ({"packing_strategy": "wrapped"}, "packing_strategy: 'wrapped' is not supported"),
        ({"loss_type": "dft"}, "loss_type: only nll"),
        ({"learning_rate": "fast"}, "learning_rate is 'fast'; expected a number"),
        ({"max_length": 1024, "max_seq_length": 2048}, "max_length sets data.max_tokens to 1024"),
        ({"learning_rat": 1e-4}, "learning_rat: unknown here; did you mean learning_rate?"),
        ({"push_to_hub": True}, "push_to_hub: push the finished run"),
        ({"model_init_kwargs": {"device_map": "auto"}}, "device_map: unknown here"),
    ],
)
def test_what_flatout_cannot_honour_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    translation = translate_training_arguments(given, defaults={})
    assert message in "\n".join(translation.problems())
    with pytest.raises(ProblemsError, match=r"train.py: \d problem"):
        translation.checked("train.py")


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
