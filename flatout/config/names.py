"""Names that people bring from transformers, TRL, PEFT, Axolotl, LLaMA-Factory and torchtune, and ours for them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from flatout.config.schema import Config
from flatout.config.shortcuts import SHORTCUTS

# ours, or what has no value of theirs: ours with its value -> their names
_OTHER_NAMES = {
    "base.storage: fp8": "load_in_8bit",
    "base.storage": "quant_type quantization quantization_config",
    "base.storage: nf4": "load_in_4bit qlora use_qlora",
    "batch.epochs": "epoch epochs num_epochs num_train_epochs",
    "batch.layout: packed": "packing sample_packing",
    "batch.samples_per_step": "batch_size gradient_accumulation_steps micro_batch_size per_device_train_batch_size "
    "train_batch_size",
    "batch.shuffle": "shuffle_dataset",
    "checkpoint.every_steps": "save_steps save_strategy saves_per_epoch",
    "checkpoint.keep": "save_total_limit",
    "data.loss_type": "assistant_only_loss completion_only_loss train_on_inputs train_on_prompt",
    "data.max_tokens": "cutoff_len max_length max_seq_len max_seq_length seq_length sequence_len",
    "data.num_procs": "dataset_num_proc num_proc preprocessing_num_workers",
    "data.num_samples": "max_samples",
    "data.sources": "dataset dataset_name dataset_path datasets train_dataset train_file",
    "data.template": "chat_template chat_template_path prompt_template",
    "data.tokenizer": "tokenizer_name tokenizer_name_or_path",
    "deterministic": "full_determinism",
    "eval.best": "metric_for_best_model",
    "eval.data": "eval_dataset validation_file",
    "eval.every_steps": "eval_steps eval_strategy evals_per_epoch evaluation_strategy",
    "eval.fraction": "test_split_size val_set_size val_size",
    "eval.patience": "early_stopping_patience",
    "gpus": "n_gpu n_gpus nproc_per_node num_gpus num_processes",
    "log_every_steps": "logging_steps",
    "lora.alpha": "lora_alpha",
    "lora.dora": "use_dora",
    "lora.dropout": "lora_dropout",
    "lora.rank": "lora_r lora_rank r",
    "lora.rslora": "use_rslora",
    "lora.targets": "lora_target lora_target_modules target_modules",
    "method": "adapter finetuning_type",
    "model.attention": "attn_implementation",
    "model.freeze_projector": "freeze_aligner freeze_multi_modal_projector",
    "model.freeze_vision_tower": "freeze_vit",
    "model.name": "base_model model_id model_name model_name_or_path pretrained_model_name_or_path",
    "model.precision: bf16": "bf16",
    "model.precision: fp16": "fp16",
    "model.precision": "dtype mixed_precision torch_dtype",
    "model.revision": "model_revision",
    "name": "run_name",
    "optim.beta1": "adam_beta1",
    "optim.beta2": "adam_beta2",
    "optim.eps": "adam_epsilon",
    "optim.lr": "learning_rate lr",
    "optim.max_grad_norm": "clip_grad_norm gradient_clipping max_norm",
    "optim.name": "optim optimizer",
    "recompute": "gradient_checkpointing use_gradient_checkpointing",
    "run_dir": "out_dir output output_dir save_dir",
    "schedule.kind": "lr_scheduler lr_scheduler_type scheduler",
    "schedule.warmup_ratio": "warmup_ratio",
    "schedule.warmup_steps": "num_warmup_steps warmup warmup_steps",
    "seed": "random_seed",
    "strategy": "distributed_strategy parallelism",
    "track.project": "wandb_project",
    "track.to": "report_to",
}
OF_OTHERS = {other: ours for ours, others in _OTHER_NAMES.items() for other in others.split()}
# what there is instead of settings of others that no setting of ours stands for
_INSTEAD = {
    "adam_betas": "set optim.beta1 and optim.beta2",
    "betas": "set optim.beta1 and optim.beta2",
    "callbacks": "pass callbacks=[...] to flatout.train in Python (docs/python.md)",
    "columns": "columns belong to a source: data: {sources: [{path: FILE, columns: {instruction: question}}]}; "
    "--yes takes those that are proposed",
    "compute_metrics": "an objective names its metrics, which eval.best judges by; `flatout eval` scores answers",
    "data_collator": "nothing is collated: samples are packed without padding (batch.layout)",
    "dataloader_num_workers": "samples are read from a memory map, which needs no workers; leave it out",
    "device_map": "training does not spread a model's layers over GPUs, since all but one GPU would wait; "
    "set strategy: fsdp (or zero3) and start one process per GPU; --device-map is for flatout chat",
    "do_eval": "set eval.fraction: 0.05, and the run evaluates",
    "do_train": "`flatout train` trains; leave it out",
    "group_by_length": "samples are packed without padding; leave it out",
    "load_best_model_at_end": "the best weights are always in best/; leave it out",
    "overwrite_output_dir": "--restart (restart=True in Python) starts over and moves the old folder aside",
    "push_to_hub": "`flatout push RUN REPO` does it after the run",
    "resume": "the same command resumes by itself; leave it out",
    "remove_unused_columns": "columns that are not read are named and left out; leave it out",
    "resume_from_checkpoint": "the same command resumes by itself; leave it out",
    "tokenizer": "set data.tokenizer to a hub id or folder; the model's own is used otherwise",
    "trust_remote_code": "code of model repositories is never run; leave it out",
    "use_cache": "training keeps no cache of keys and values; leave it out",
}
# values of others, by our setting
_VALUES: dict[str, dict[str, str]] = {
    "model.precision": {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "true": "bf16"},
    "base.storage": {
        **dict.fromkeys(("4bit", "int4", "bnb", "bitsandbytes", "4"), "nf4"),
        **dict.fromkeys(("8bit", "int8", "8"), "fp8"),
    },
    "device": {"gpu": "cuda", "cuda:0": "gpus: [0]", "0": "gpus: [0]"},
    "method": {
        **{"qlora": "base.storage: nf4", "dora": "lora.dora: true", "sft": "lora", "peft": "lora"},
        **dict.fromkeys(("freeze", "fft", "full_finetuning", "none"), "full"),
    },
    "schedule.kind": {
        "cosine_with_restarts": "cosine",
        "constant_with_warmup": "constant",
        "warmup_stable_decay": "wsd",
    },
    "strategy": {"deepspeed_zero2": "zero2", "deepspeed_zero3": "zero3", "fsdp2": "fsdp", "dp": "ddp"},
    "optim.name": {
        **dict.fromkeys(("adam", "adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw_32bit"), "adamw"),
        **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw8bit"),
    },
    "model.attention": dict.fromkeys(("flash_attention_2", "flash_attention_3", "flash", "eager"), "auto"),
    "recompute": {"true": "full", "false": "none", "unsloth": "auto"},
    "track.to": {"none": "[]"},
}
_WHY = {
    "batch.samples_per_step": "samples of one optimizer step over all ranks: per device x accumulation x ranks",
}


@dataclass(frozen=True, slots=True)
class OurName:
    """Our setting and its value, as YAML, for a name of others; `setting` is None where `why` says what is instead."""

    setting: str | None
    value: str = ""
    why: str = ""


def our_name(name: str, value: str = "", *, is_option: bool = False) -> OurName | None:
    """Return what stands for a name of others, a keyword, or a name that is nearly one of ours; None if nothing does.

    `name` may have sections, such as batch.size. `value` is YAML. What is nearly a setting counts for keys, but not for
    an option, which may be another verb's.
    """
    leaf = name.rsplit(".", 1)[-1]
    if leaf in _INSTEAD:
        return OurName(None, why=_INSTEAD[leaf])
    ours = OF_OTHERS.get(leaf) or OF_OTHERS.get(name.replace(".", "_")) or SHORTCUTS.get(name)
    if ours is None:
        names = list(dotted_names())
        same = [full for full in names if full.rsplit(".", 1)[-1] == leaf]
        near = [name] if name in names else difflib.get_close_matches(name, names, n=1, cutoff=0.75) or same
        near = near or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        if not near or (is_option and near[0] != name and near != same):
            return None
        ours = near[0]
    return our_value(ours, value)


def our_value(ours: str, value: str) -> OurName:
    """Return our setting with our form of a value of others; `ours` may have a value that replaces theirs."""
    setting, _, fixed = ours.partition(": ")
    if not fixed and (known := _VALUES.get(setting, {}).get(value.lower())):
        setting, _, fixed = known.rpartition(": ") if ": " in known else (setting, "", known)
    translated = fixed or value
    if setting == "data.sources" and not translated.startswith("["):
        setting = "data"
    return OurName(setting, translated, _WHY.get(setting, ""))


def knows_value(setting: str, value: str) -> bool:
    """Whether a value is one of others for which we have another."""
    return value.lower() in _VALUES.get(setting, {})


def as_yaml(value: Any) -> str:
    """Return a plain value as YAML on one line."""
    return (
        yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000).removesuffix("...\n").strip()
    )


@cache
def dotted_names() -> tuple[str, ...]:
    """Return every setting's dotted name, such as `lora.rank`."""
    return tuple(_names_of(Config, ""))


def _names_of(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _names_of(kind, f"{prefix}{name}.")
