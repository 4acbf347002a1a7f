"""A beginner's mistakes as they are typed: the exit code, a part of the sentence, and the next command where it is sure."""
# ruff: noqa: E501  (a mistake is a line)

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import flatout
from flatout.api.start import resolve_config
from flatout.cli.main import VERBS, WITH_OVERRIDES, main
from flatout.config.read import load_config, make_config
from flatout.config.schema import Config
from flatout.errors import FlatoutError


def chat(number: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"q {number}"}, {"role": "assistant", "content": f"a {number}"}]}


FILES = {
    "chats.jsonl": "".join(json.dumps(chat(number)) + "\n" for number in range(8)),
    "qa.csv": "Question,Response\n" + "".join(f"q {number},a {number}\n" for number in range(8)),
    "odd.csv": "alpha,beta\n1,2\n",
    "bad.jsonl": '{"messages": [\n',
    "empty.jsonl": "",
    "role.jsonl": json.dumps({"messages": [{"role": "bot", "content": "x"}]}) + "\n",
    "doc.pdf": "%PDF",
    "adapter.bin": "x",
    "unspaced.yaml": "model:org/x\ndata: chats.jsonl\n",
    "sections.yaml": "model: model\nlora.rank: 8\n",
    "zero.json": "{}",
    "run.yaml": "model: model\ndata: chats.jsonl\ndevice: cpu\n",
    # runs that were moved
    "there/moved/run.json": '{"run_id": "0123456789abcdef"}',
    "there/moved/config.yaml": "model: {name: work/base}\n",
    "there/moved/final/adapter_config.json": "{}",
    "there/work/base/config.json": "{}",
    "there/alone/run.json": '{"run_id": "0123456789abcdef"}',
    "there/alone/config.yaml": "model: {name: /nowhere/base}\n",
    "there/alone/final/adapter_config.json": "{}",
    "tab.yaml": "model:\n\tname: x\n",
    "list.yaml": "- a\n- b\n",
    "typo.yaml": "model: model\nlora: {rnak: 8}\n",
    "theirs.yaml": "model_name_or_path: x\nlearning_rate: 1e-4\nper_device_train_batch_size: 4\n",
    "twice.yaml": "model: a\nmodel: b\n",
    "no_model.yaml": "data: chats.jsonl\n",
    "odd.yaml": "model: model\ndata: odd.csv\ndevice: cpu\n",
    "batches.yaml": "model: model\nper_device_train_batch_size: 8\ngradient_accumulation_steps: 4\ngpus: [0, 1]\n",
    "pair.jsonl": json.dumps({"prompt": "q", "chosen": "a"}) + "\n",
    "slips.jsonl": json.dumps({"prompt": "q", "choosen": "a", "rejectd": "b"}) + "\n",
    "winner.jsonl": json.dumps({"question": "q", "winner": "a", "loser": "b"}) + "\n",
    "semicolon.csv": "instruction;output\na;b\n",
    "dash.yaml": "model: model\ndata: chats.jsonl\noptim:\n  - lr: 1e-4\n",
    "one.yaml": "model: [model]\ndata: chats.jsonl\n",
    "indent.yaml": "model: model\n data: chats.jsonl\n",
    "quote.yaml": "model: 'model\ndata: chats.jsonl\n",
    "equals.yaml": "model=model\ndata=chats.jsonl\n",
    "tune.yaml": "model:\n  _component_: torchtune.models.llama3\n",
    "model.gguf": "x",
    "runs/run/run.json": '{"run_id": "0123456789abcdef"}',
    "runs/run/train.log": "",
    "runs/run/metrics.jsonl": "",
    "runs/run/config.yaml": "model: model\n",
}

# what is typed after `flatout`, the exit code, a part of the error, and the command that it ends with, also with its
# comment where that must be there
Row = tuple[str, int, str] | tuple[str, int, str, str]
# fmt: off
COMMANDS: list[Row] = [
    ("tain run.yaml", 2, "there is no verb 'tain'; did you mean train?", "train run.yaml"),
    ("fine-tune run.yaml", 2, "there is no verb 'fine-tune'; did you mean train?", "train run.yaml"),
    ("Train run.yaml", 2, "there is no verb 'Train'; did you mean train?", "train run.yaml"),
    ("run.yaml", 2, "there is no verb 'run.yaml'; write a verb first, such as train", "train run.yaml"),
    ("train", 2, "train: no file or setting is given; give a YAML file, or settings in its place, such as model=Qwen/Qwen3-0.6B data=chats.jsonl", "train model=Qwen/Qwen3-0.6B data=chats.jsonl"),
    ("plan", 2, "plan: no file or setting is given; give a YAML file, or settings in its place, such as model=Qwen/Qwen3-0.6B data=chats.jsonl", "plan model=Qwen/Qwen3-0.6B data=chats.jsonl"),
    ("init --data missing.jsonl new.yaml", 3, "missing.jsonl: no such file or folder", "init --data chats.jsonl --model Qwen/Qwen3-0.6B new.yaml"),
    ("init --data missing.jsonl --model model new.yaml", 3, "missing.jsonl: no such file or folder", "init --data chats.jsonl --model model new.yaml"),
    ("init --data *.parquet --model model new.yaml", 3, "*.parquet: no data file matches", "init --data chats.jsonl --model model new.yaml"),
    ("init --data ~nobodyx/rows.jsonl --model model new.yaml", 3, "~nobodyx/rows.jsonl: there is no user nobodyx; files here include chats.jsonl, pair.jsonl, role.jsonl, slips.jsonl", "init --data chats.jsonl --model model new.yaml"),
    ("plan ~nobodyx/run.yaml", 2, "~nobodyx/run.yaml: there is no user nobodyx; did you mean run.yaml?", "plan run.yaml"),
    ("data show chats.jsonl", 3, "chats.jsonl contains rows and is not a built data set; the one built as chats is", "data show chats"),
    ("data show ./chats.jsonl", 3, "./chats.jsonl contains rows and is not a built data set; the one built as chats is", "data show chats"),
    ("data show ./chts.jsonl", 3, "./chts.jsonl: no such file, and no data set of that name; did you mean", "data show chats.jsonl"),
    ("data show qa.csv", 3, "qa.csv contains rows and is not a built data set; build one with `flatout data bu"),
    ("train run.yml", 2, "run.yml: no such file; did you mean run.yaml?", "train run.yaml"),
    ("train run", 2, "run is a run; its settings are in runs/run/config.yaml", "train runs/run/config.yaml"),
    ("train runs/run", 2, "runs/run is a run; its settings are in runs/run/config.yaml", "train runs/run/config.yaml"),
    ("train chats.jsonl", 2, "chats.jsonl holds rows, not settings; pass it as data=chats.jsonl", "train model=Qwen/Qwen3-0.6B data=chats.jsonl"),
    ("train tab.yaml", 2, "tab.yaml: line 2 begins with a tab; YAML allows only spaces: write two in its place"),
    ("train list.yaml", 2, "list.yaml: expected sections such as `model:`, found a list; `flatout init new.yaml` writes one"),
    ("train typo.yaml", 2, "lora.rnak: unknown key; did you mean lora.rank?", "in typo.yaml: lora: {rank: 8}"),
    ("train theirs.yaml", 2, "theirs.yaml: 3 problems", "convert theirs.yaml --to ours.yaml"),
    ("train twice.yaml", 2, "twice.yaml: line 2: key 'model' is given twice; keep one"),
    ("train no_model.yaml", 2, "model: missing; every run needs it, such as `model: Qwen/Qwen3-0.6B` in a file", "train no_model.yaml model=Qwen/Qwen3-0.6B"),
    ("train runs", 2, "runs holds runs; to continue one, give its settings: runs/run/config.yaml", "train runs/run/config.yaml"),
    ("train run.yaml lora.rank 32", 2, "lora.rank 32: a setting is one word, lora.rank=32", "train run.yaml lora.rank=32"),
    ("train run.yaml lora.rank=0", 2, "lora.rank: input should be greater than or equal to 1, got 0", "train run.yaml lora.rank=16"),
    ("train run.yaml lora.rank=3.5", 2, "lora.rank: expected a whole number, got 3.5; set lora.rank=4", "train run.yaml lora.rank=4"),
    ("train run.yaml lora.rnk=8", 2, "lora.rnk: unknown key; did you mean lora.rank?", "train run.yaml lora.rank=8"),
    ("train run.yaml rank=8", 2, "rank: unknown key; did you mean lora.rank?", "train run.yaml lora.rank=8"),
    ("train run.yaml r=8", 2, "r: unknown key; did you mean lora.rank?", "train run.yaml lora.rank=8"),
    ("train run.yaml lora_r=8", 2, "lora_r: unknown key; did you mean lora.rank?", "train run.yaml lora.rank=8"),
    ("train run.yaml lora.r=8", 2, "lora.r: unknown key; did you mean lora.rank?", "train run.yaml lora.rank=8"),
    ("train run.yaml optim.learning_rate=1e-4", 2, "optim.learning_rate: unknown key; did you mean optim.lr?", "train run.yaml optim.lr=1e-4"),
    ("train run.yaml optim.lr=fast", 2, "optim.lr: expected a number, got 'fast'; set optim.lr=0.0002 (the default)", "train run.yaml optim.lr=0.0002"),
    ("train run.yaml optim.lr=-1", 2, "optim.lr: input should be greater than 0, got -1", "train run.yaml optim.lr=0.0002"),
    ("train run.yaml optim.lr=1e-4,", 2, "got '1e-4,'; set optim.lr=1e-4", "train run.yaml optim.lr=1e-4"),
    ("train run.yaml lr=1e-4 epochs=3", 2, "epochs: unknown key; did you mean batch.epochs?", "train run.yaml optim.lr=1e-4 batch.epochs=3"),
    ("train run.yaml --lr 1e-4", 2, "--lr is a setting here: optim.lr=1e-4", "train run.yaml optim.lr=1e-4"),
    ("train run.yaml --learning-rate=2e-4", 2, "--learning-rate is a setting here: optim.lr=2e-4", "train run.yaml optim.lr=2e-4"),
    ("train run.yaml --epochs 3", 2, "--epochs is a setting here: batch.epochs=3", "train run.yaml batch.epochs=3"),
    ("train run.yaml --num_train_epochs 3", 2, "--num-train-epochs is a setting here: batch.epochs=3", "train run.yaml batch.epochs=3"),
    ("train run.yaml --batch-size 8", 2, "--batch-size is a setting here: batch.samples_per_step=8 (samples per optimizer step: batch per GPU x accumulation x GPUs)", "train run.yaml batch.samples_per_step=8"),
    ("train run.yaml --per_device_train_batch_size 8", 2, "--per-device-train-batch-size is a setting here: batch.samples_per_step=8 (8 per GPU x 1 accumulated x 1 GPU =", "train run.yaml batch.samples_per_step=8"),
    ("train run.yaml --gradient_accumulation_steps 8", 2, "--gradient-accumulation-steps is a setting here: batch.samples_per_step=32 (for example 4 per GPU x 8 accumulated x 1 GPU = 32 samples per step)", "train run.yaml batch.samples_per_step=32"),
    ("train run.yaml --model x", 2, "--model is a setting here: model=x", "train run.yaml model=x"),
    ("train run.yaml --data chats.jsonl", 2, "--data is a setting here: data=chats.jsonl", "train run.yaml data=chats.jsonl"),
    ("train run.yaml --output_dir out", 2, "--output-dir is a setting here: run_dir=out", "train run.yaml run_dir=out"),
    ("train run.yaml --name other", 2, "--name is a setting here: name=other", "train run.yaml name=other"),
    ("train run.yaml --seed 3", 2, "--seed is a setting here: seed=3", "train run.yaml seed=3"),
    ("train run.yaml --max-steps 10", 2, "--max-steps is a setting here: batch.max_steps=10", "train run.yaml batch.max_steps=10"),
    ("train run.yaml --gpus 2", 2, "--gpus is a setting here: gpus=2", "train run.yaml gpus=2"),
    ("train run.yaml --resume", 2, "there is no option --resume", "train run.yaml"),
    ("train run.yaml --load_in_4bit", 2, "--load-in-4bit is a setting here: base.storage=nf4", "train run.yaml base.storage=nf4"),
    ("train run.yaml --bf16", 2, "--bf16 is a setting here: model.precision=bf16", "train run.yaml model.precision=bf16"),
    ("train run.yaml --qlora", 2, "--qlora is a setting here: base.storage=nf4", "train run.yaml base.storage=nf4"),
    ("train run.yaml --trust_remote_code", 2, "there is no option --trust-remote-code", "train run.yaml"),
    ("train run.yaml --push_to_hub", 2, "there is no option --push-to-hub", "train run.yaml"),
    ("train run.yaml --config run.yaml", 2, "there is no option --config; write the file right after train", "train run.yaml"),
    ("train --config run.yaml", 2, "there is no option --config; write the file right after train", "train run.yaml"),
    ("train run.yaml method=qlora", 2, "method: input should be 'lora' or 'full', got 'qlora'; set base.storage=nf4", "train run.yaml base.storage=nf4"),
    ("train run.yaml method=dora", 2, "method: input should be 'lora' or 'full', got 'dora'; set lora.dora=true", "train run.yaml lora.dora=true"),
    ("train run.yaml method=sft", 2, "method: input should be 'lora' or 'full', got 'sft'; supervised fine-tuning is the default; leave it out", "train run.yaml"),
    ("train run.yaml load_in_4bit=true", 2, "load_in_4bit: unknown key; did you mean base.storage: nf4?", "train run.yaml base.storage=nf4"),
    ("train model=tiny data=chats.jsonl load_in_4bit=true", 2, "load_in_4bit: unknown key; did you mean base.storage: nf4?", "train model=tiny data=chats.jsonl base.storage=nf4"),
    ("train run.yaml load_in_8bit=true", 2, "(8-bit integers are not offered; fp8 is the nearest)", "train run.yaml base.storage=fp8"),
    ("train run.yaml base.storage=4bit", 2, "base.storage: input should be 'model', 'fp8' or 'nf4', got '4bit'; set base.storage=nf4", "train run.yaml base.storage=nf4"),
    ("train run.yaml base.storage=int8", 2, "set base.storage=fp8 (8-bit integers are not offered; fp8 is the nearest)", "train run.yaml base.storage=fp8"),
    ("train run.yaml quantization=nf4", 2, "quantization: unknown key; did you mean base.storage?", "train run.yaml base.storage=nf4"),
    ("train run.yaml model.precision=bfloat16", 2, "model.precision: input should be 'auto', 'bf16', 'fp16', 'fp32' or 'fp64', got 'bfloat16';", "train run.yaml model.precision=bf16"),
    ("train run.yaml model.precision=float16", 2, "model.precision: input should be 'auto', 'bf16', 'fp16', 'fp32' or 'fp64', got 'float16'; ", "train run.yaml model.precision=fp16"),
    ("train run.yaml torch_dtype=bfloat16", 2, "torch_dtype: unknown key; did you mean model.precision: bf16?", "train run.yaml model.precision=bf16"),
    ("train run.yaml bf16=true", 2, "bf16: unknown key; did you mean model.precision: bf16?", "train run.yaml model.precision=bf16"),
    ("train run.yaml fp16=true", 2, "fp16: unknown key; did you mean model.precision: fp16?", "train run.yaml model.precision=fp16"),
    ("train run.yaml optim=adamw_torch", 2, "optim: expected a section with settings, got 'adamw_torch'; set optim.name=adamw", "train run.yaml optim.name=adamw"),
    ("train run.yaml optim.name=adamw_8bit", 2, "optim.name: input should be 'adamw', 'adamw8bit' or 'sgd', got 'adamw_8bit'; set optim.nam", "train run.yaml optim.name=adamw8bit"),
    ("train run.yaml optim.name=lion", 2, "optim.name: input should be 'adamw', 'adamw8bit' or 'sgd', got 'lion'", "train run.yaml optim.name=adamw"),
    ("train run.yaml schedule.kind=cosine_with_restarts", 2, "schedule.kind: input should be 'constant', 'linear', 'cosine' or 'wsd', got 'cosine_with_r", "train run.yaml schedule.kind=cosine"),
    ("train run.yaml lr_scheduler_type=cosine", 2, "lr_scheduler_type: unknown key; did you mean schedule.kind?", "train run.yaml schedule.kind=cosine"),
    ("train run.yaml warmup_steps=10", 2, "warmup_steps: unknown key; did you mean schedule.warmup_steps?", "train run.yaml schedule.warmup_steps=10"),
    ("train run.yaml schedule.warmup_steps=10 schedule.warmup_ratio=0.1", 2, "schedule: warmup_steps and warmup_ratio are both given; keep one", "train run.yaml schedule.warmup_steps=10"),
    ("train run.yaml batch.size=4", 2, "batch.size: unknown key; did you mean batch.samples_per_step? (samples per optimizer step: batch per GPU x accumulation x GPUs)", "train run.yaml batch.samples_per_step=4"),
    ("train run.yaml batch_size=4", 2, "batch_size: unknown key; did you mean batch.samples_per_step? (samples per optimizer step: batch per GPU x accumulation x GPUs)", "train run.yaml batch.samples_per_step=4"),
    ("train run.yaml batch.samples_per_step=0", 2, "batch.samples_per_step: input should be greater than or equal to 1, got 0", "train run.yaml batch.samples_per_step=32"),
    ("train run.yaml max_steps=10", 2, "max_steps: unknown key; did you mean batch.max_steps?", "train run.yaml batch.max_steps=10"),
    ("train run.yaml batch.epochs=0", 2, "batch.epochs: input should be greater than 0, got 0", "train run.yaml batch.epochs=1.0"),
    ("train run.yaml data.max_length=512", 2, "data.max_length: unknown key; did you mean data.max_tokens?", "train run.yaml data.max_tokens=512"),
    ("train run.yaml max_seq_length=512", 2, "max_seq_length: unknown key; did you mean data.max_tokens?", "train run.yaml data.max_tokens=512"),
    ("train run.yaml packing=true", 2, "packing: unknown key; did you mean batch.layout: packed?", "train run.yaml batch.layout=packed"),
    ("train run.yaml data.sources=nope.jsonl", 2, "data.sources: expected a list, got 'nope.jsonl'; set data=nope.jsonl", "train run.yaml data=nope.jsonl"),
    ("train run.yaml data=nope.jsonl", 3, "nope.jsonl: no such file or folder; files here include chats.jsonl, pair.jsonl, role.jsonl, slips.jsonl", "train run.yaml data=chats.jsonl"),
    ("train run.yaml data=qa.cvs", 3, "qa.cvs: no such file, and no data set of that name; did you mean qa.csv?", "train run.yaml data=qa.csv"),
    ("train run.yaml data=qq.csv", 3, "qq.csv: no such file or folder; did you mean qa.csv?", "train run.yaml data=qa.csv"),
    ("train run.yaml model=./modle", 2, "model.name: there is no folder ./modle; give a folder or a hub id such as Qwen/Qwen3-0.6B; did you mean model?", "train run.yaml model=model"),
    ("train model", 2, "model is a model, not a YAML file; pass it as model=model", "train model=model data=chats.jsonl"),
    ("train run.yaml data=chts.jsonl", 3, "chts.jsonl: no such file or folder; did you mean chats.jsonl?", "train run.yaml data=chats.jsonl"),
    ("train run.yaml data=doc.pdf", 3, "doc.pdf: not a known file type"),
    ("train run.yaml data=empty.jsonl", 3, "empty.jsonl: no rows: all of its files are empty"),
    ("train run.yaml data=bad.jsonl", 3, "bad.jsonl: no rows: its only row is bad: bad.jsonl:1:15: expected a value, but the JSON ends here; complete it"),
    ("train run.yaml data=odd.csv", 3, "odd.csv:1: no known format has these columns", "train run.yaml 'data={name: odd, sources: [{path: odd.csv, columns: {instruction: alpha, output: beta}}]}'"),
    ("train run.yaml data=qa.csv", 3, "qa.csv:1: no known format has these columns; set columns: {instruction: Question, output: ", "train run.yaml data=qa.csv --yes"),
    ("train run.yaml data=unknown_set", 3, "no data set 'unknown_set", "train run.yaml data=chats  # for example"),
    ("train run.yaml model=nope/", 2, "there is no folder nope/, and it is not a hub id such as Qwen/Qwen3-0.6B; model here: model", "train run.yaml model=model"),
    ("train run.yaml model=model.gguf", 2, "there is no folder model.gguf; a model is a folder with config.json, or a hub id such as Qwen/Qwen3-0.6B; a GG", "train run.yaml model=model"),
    ("train run.yaml model=./runs", 2, "./runs has no config.json", "train run.yaml model=model"),
    ("train run.yaml model.trust_remote_code=true", 2, "model.trust_remote_code: code of model repositories is never run", "train run.yaml"),
    ("train run.yaml device_map=auto", 2, "device_map: training does not spread a model's layers over GPUs; leave it out, or for several GPUs add gpus=[0,1] and strategy=fsdp", "train run.yaml"),
    ("train run.yaml compute_metrics=accuracy", 2, "compute_metrics: metric functions of your own are not supported; leave it out; to score a run: `flatout eval RUN --tasks arc_easy`", "train run.yaml"),
    ("train run.yaml gradient_checkpointing=true", 2, "gradient_checkpointing: unknown key; did you mean recompute: full?", "train run.yaml recompute=full"),
    ("train run.yaml attn_implementation=flash_attention_2", 2, "attn_implementation: unknown key; did you mean model.attention: auto? (auto takes the fastest exact implementation that works here)", "train run.yaml model.attention=auto"),
    ("train run.yaml model.attention=flash_attention_2", 2, "model.attention: input should be 'auto', 'fa4', 'cudnn', 'varlen', 'sdpa' or 'plain', got ", "train run.yaml model.attention=auto"),
    ("train run.yaml lora.targets=q_porj", 2, "lora.targets: 'q_porj' matches no linear layer of this model; did you mean q_proj, v_proj,", "train run.yaml 'lora.targets=[q_proj]'"),
    ("train run.yaml target_modules=[q_proj]", 2, "target_modules: unknown key; did you mean lora.targets?", "train run.yaml 'lora.targets=[q_proj]'"),
    ("train run.yaml eval.every_steps=10", 2, "eval: every_steps needs rows to evaluate on; set eval.fraction=0.05, or eval.data to a data set", "train run.yaml eval.every_steps=10 eval.fraction=0.05"),
    ("train run.yaml eval_steps=10", 2, "eval_steps: unknown key; did you mean eval.every_steps?", "train run.yaml eval.every_steps=10 eval.fraction=0.05"),
    ("train run.yaml eval_steps=10 eval.fraction=0.1", 2, "did you mean eval.every_steps?", "train run.yaml eval.every_steps=10 eval.fraction=0.1"),
    ("train run.yaml --eval-steps 10", 2, "--eval-steps is a setting here", "train run.yaml eval.every_steps=10 eval.fraction=0.05"),
    ("train run.yaml eval.fraction=20", 2, "eval.fraction: input should be less than or equal to 0.5, got 20; set eval.fraction=0.2 (a share, not percent: 20% is 0.2)", "train run.yaml eval.fraction=0.2"),
    ("train run.yaml save_steps=100", 2, "save_steps: unknown key; did you mean checkpoint.every_steps?", "train run.yaml checkpoint.every_steps=100"),
    ("train run.yaml report_to=wandb", 2, "report_to: unknown key; did you mean track.to?", "train run.yaml track.to=wandb"),
    ("train run.yaml track=wandbb", 2, "  - track: input should be 'tensorboard', 'wandb', 'mlflow', 'comet' or 'trackio', got 'wandbb'; set track=wandb", "train run.yaml track=wandb"),
    ("train run.yaml gpus=0", 2, "gpus: expected 1 to 1,024 GPUs, got 0; for the first GPU only set gpus=[0], for none device=cpu", "train run.yaml 'gpus=[0]'"),
    ("train run.yaml gpus=two", 2, "gpus: expected a number of GPUs or a list of GPU ids, got 'two'; set gpus=2 (how many; `nvidia-smi -L` lists yours)", "train run.yaml gpus=2"),
    ("train run.yaml device=gpu", 2, "device: input should be 'auto', 'cpu' or 'cuda', got 'gpu'; set device=cuda", "train run.yaml device=cuda"),
    ("train run.yaml device=cuda:0", 2, "device: input should be 'auto', 'cpu' or 'cuda', got 'cuda:0'; set device=cuda and gpus=[0]", "train run.yaml device=cuda 'gpus=[0]'"),
    ("train run.yaml device=cuda:1", 2, "set device=cuda and gpus=[1]", "train run.yaml device=cuda 'gpus=[1]'"),
    ("train run.yaml device=cuda", 6, "device: cuda needs a GPU, but ", "train run.yaml device=cpu"),
    ("train run.yaml strategy=fdsp", 2, "strategy: input should be 'auto', 'single', 'ddp', 'zero1', 'zero2', 'zero3', 'fsdp', 'hsd", "train run.yaml strategy=fsdp"),
    ("train run.yaml strategy=deepspeed_zero3", 2, "strategy: input should be 'auto', 'single', 'ddp', 'zero1', 'zero2', 'zero3', 'fsdp', 'hsd", "train run.yaml strategy=zero3"),
    ("train run.yaml deepspeed=zero3.json", 2, "zero3.json: the file is missing; for a stage without a file set strategy=zero3 and leave deepspeed out", "train run.yaml strategy=zero3"),
    ("train run.yaml freeze=embed", 2, "freeze: expected a list, got 'embed'; it is for method=full only, LoRA freezes every base weight anyway; leave it out", "train run.yaml"),
    ("train run.yaml full.weights=bf16", 2, "full is only for method=full; keep one: leave full.weights out, or choose method=full", "train run.yaml"),
    ("train run.yaml objective=sft", 2, "objective: kind 'sft' is unknown; set objective=cross_entropy", "train run.yaml objective=cross_entropy"),
    ("train run.yaml run_dir=.", 2, "run_dir: . is the current folder, or holds it; set run_dir=runs/run-2, or another folder", "train run.yaml run_dir=runs/run-2"),
    ('train run.yaml name="my run"', 2, "name: use letters, digits, dots, dashes and underscores, at most 64, got 'my run'; set nam", "train run.yaml name=my-run"),
    ("train run.yaml --restart --resume", 2, "--restart starts over, and without it a run continues automatically; choose one", "train run.yaml"),
    ("train run.yaml --dry-run", 2, "--dry-run needs --tmux; use `flatout plan` to see what a run will do", "plan run.yaml"),
    ("plan run.yaml --device 5090ti", 2, "device '5090ti' is unknown; choose one of b200, h200", "plan run.yaml --device 5090"),
    ("plan run.yaml --gpu 4090", 2, "plan: there is no option --gpu", "plan run.yaml --device 4090"),
    ("plan run.yaml --ranks 0", 2, "--ranks is 0; expected 1 to 100,000", "plan run.yaml --ranks 1"),
    ("init q.yaml --model model --data odd.csv", 3, "odd.csv:1: no known format has these columns; map yours, such as columns: {instruction: alpha, output: beta},", "init q.yaml --model model --data odd.csv --column=instruction=alpha --column=output=beta"),
    ("init q.yaml --model model --data qa.csv --column Question", 2, "--column 'Question': write FLATOUT_NAME=YOUR_COLUMN, such as instruction=question", "init q.yaml --model model --data qa.csv"),
    ("init q.yaml --column instruction=Question", 2, "--column needs --data, whose columns it renames", "init q.yaml --column instruction=Question --data qa.csv --model Qwen/Qwen3-0.6B"),
    ("init q.yaml --model model --data qa.csv --column Question=instruction", 3, "qa.csv: columns: 'Question' is not a column of any format; flatout's name comes first: instruction=Question", "init q.yaml --model model --data qa.csv --column instruction=Question"),
    ("init q.yaml --model model --data bad.jsonl", 3, "bad.jsonl:1"),
    ("data", 2, "data: ACTION is not given; give one of build, show, template, list", "data build chats.jsonl --tokenizer Qwen/Qwen3-0.6B --name chats"),
    ("data bild chats.jsonl", 2, "data build: there is no ACTION bild; did you mean build?"),
    ("data build", 2, "data build: PATH_OR_ID, --tokenizer, --name are not given; write them, such as chats.jsonl --tokenizer Qwen/Qwen3-0.6B --name chats", "data build chats.jsonl --tokenizer Qwen/Qwen3-0.6B --name chats"),
    ("data build chats.jsonl", 2, "data build: --tokenizer, --name are not given; write them, such as --tokenizer Qwen/Qwen3-0.6B --name chats", "data build chats.jsonl --tokenizer Qwen/Qwen3-0.6B --name chats"),
    ("data build chats.jsonl --name chats", 2, "data build: --tokenizer is not given; write it, such as --tokenizer Qwen/Qwen3-0.6B", "data build chats.jsonl --name chats --tokenizer Qwen/Qwen3-0.6B"),
    ('data build chats.jsonl --tokenizer model --name "my chats"', 2, "--name: use letters, digits, dots, dashes and underscores, at most 64, got 'my chats'; set", "data build chats.jsonl --tokenizer model --name my-chats"),
    ("data build chats.jsonl --tokenizer model --name chats --max-length 512", 2, "data build: there is no option --max-length; did you mean --max-tokens?", "data build chats.jsonl --tokenizer model --name chats --max-tokens 512"),
    ("data build chats.jsonl --tokenizer model --name chats --max-tokens many", 2, "data build: --max-tokens: expected a number, got 'many'", "data build chats.jsonl --tokenizer model --name chats --max-tokens 2048"),
    ("data build qa.csv --tokenizer model --name qa", 3, "qa.csv:1: no known format has these columns; set columns: {instruction: Question, output: ", "data build qa.csv --tokenizer model --name qa --column=instruction=Question --column=output=Response"),
    ("data build qa.csv --tokenizer model --name qa --column Question=instruction --column output=Response", 3, "qa.csv: columns: 'Question' is not a column of any format", "data build qa.csv --tokenizer model --name qa --column instruction=Question --column output=Response"),
    ("data build qa.csv --tokenizer model --name qa --column Question", 2, "--column 'Question': write FLATOUT_NAME=YOUR_COLUMN, such as instruction=question", "data build qa.csv --tokenizer model --name qa"),
    ("data build qa.csv --tokenizer model --name qa --columns instruction=Question", 2, "data build: there is no option --columns; did you mean --column?", "data build qa.csv --tokenizer model --name qa --column instruction=Question"),
    ("data build chats.jsonl --tokenizer model --name chats --loss-type answers", 2, "--loss-type: input should be 'response_only' or 'all', got 'answers'", "data build chats.jsonl --tokenizer model --name chats --loss-type response_only"),
    ("data build chats.jsonl --tokenizer model --name chats --template chatlm", 3, "there is no template 'chatlm'; known: chatml, llama-3, qwen3, gemma, mistral, phi, zephyr, alpaca, plain, or a .jinja file; did you mean chatml?", "data build chats.jsonl --tokenizer model --name chats --template chatml"),
    ("data build chats.jsonl --tokenizer model --name chats --format json", 2, "--format: input should be 'auto', 'alpaca', 'sharegpt', 'messages', 'prompt_completion', '", "data build chats.jsonl --tokenizer model --name chats --format auto"),
    ("data show nope", 3, "no data set 'nope'", "data show chats"),
    ("data list now", 2, "data list: unexpected argument 'now'", "data list"),
    ("data show", 2, "data show: NAME is not given; write it, such as chats", "data show chats"),
    ("runs nope", 2, "there is no folder nope; give a folder of runs", "runs"),
    ("runs --sort accuracy", 2, "runs: there is no --sort accuracy; choose started, name, state, model, data, steps, loss, ", "runs --sort loss"),
    ("chat", 2, "chat: RUN_OR_ADAPTER_OR_MODEL is not given; write it, such as model", "chat model"),
    ("eval", 2, "not given; write it, such as model --tasks arc_easy", "eval model --tasks arc_easy"),
    ("chat runn", 2, "there is no run runn; did you mean run? (on the hub: OWNER/runn)", "chat run"),
    ("chat run", 2, "runs/run has no final/: the run is not finished"),
    ("chat adapter.bin", 2, "adapter.bin is a file; name the folder of a run, an adapter or a model", "chat model"),
    ("chat model.gguf", 2, "model.gguf is a GGUF file, which flatout writes and does not read; chat with it by `llama-cli -m model.gguf` o", "chat model"),
    ("chat run --prompt hi --temperature -1", 2, "--temperature is -1; expected 0 (greedy), or at least 0.001", "chat run --prompt hi --temperature 0"),
    ("chat run --promt hi", 2, "chat: there is no option --promt; did you mean --prompt?", "chat run --prompt hi"),
    ("report", 2, "report: RUN is not given; write it, such as run", "report run"),
    ("report nope", 2, "nope: no such folder, and no run of that name; the run here is run", "report run"),
    ("watch", 2, "watch: RUN is not given; write it, such as run", "watch run"),
    ("watch nope", 2, "nope: no such folder, and no run of that name; the run here is run", "watch run"),
    ("merge run", 2, "merge: --out is not given; write it, such as --out merged", "merge run --out merged"),
    ("merge run --out merged", 2, "runs/run has no final/: the run is not finished"),
    ("export run", 2, "export: --to, --out are not given; write them, such as --to gguf --out gguf", "export run --to gguf --out gguf"),
    ("export run --to llamacpp --out x", 2, "--to is 'llamacpp'; expected one of gguf, ollama, vllm, mlx", "export run --to gguf --out x"),
    ("export run --to llama.cpp --out x", 2, "--to is 'llama.cpp'; expected one of gguf, ollama, vllm, mlx", "export run --to gguf --out x"),
    ("export run --to gguff --out x", 2, "--to is 'gguff'; expected one of gguf, ollama, vllm, mlx", "export run --to gguf --out x"),
    ("export run --out x", 2, "export: --to is not given; write it, such as --to gguf", "export run --out x --to gguf"),
    ("push run", 2, "push: REPO is not given; write it, such as my-model --private", "push run my-model --private  # for example; without --private everybody can see it"),
    ("push", 2, "push: RUN, REPO are not given; write them, such as run my-model --private", "push run my-model --private"),
    ("push run --private", 2, "push: REPO is not given; write it, such as my-model", "push run --private my-model"),
    ("push run --repo me/x", 2, "there is no option --repo; write REPO right after RUN", "push run me/x"),
    ("push run --repo=me/x", 2, "there is no option --repo; write REPO right after RUN", "push run me/x"),
    ("eval run", 2, "nothing to score: give --tasks, --answers FILE or --rows FILE", "eval run --tasks arc_easy"),
    ("eval run --task arc_easy", 2, "runs/run has no final/: the run is not finished"),
    ("init run.yaml", 2, "run.yaml: already exists; choose a different file, such as run-2.yaml, or remove it", "init run-2.yaml"),
    ("convert run.yaml", 2, "run.yaml is already in flatout's form; nothing to convert", "train run.yaml"),
    ("convert nope.yaml", 2, "nope.yaml: no such file; other trainers' files here: batches.yaml, theirs.yaml", "convert batches.yaml --to ours.yaml"),
    ("launch run.yaml", 2, "launch: give --slurm or --kubernetes; one of them is needed", "launch run.yaml --slurm"),
    ("launch run.yaml --slurm --kubernetes", 2, "launch: --slurm and --kubernetes are both given; keep one", "launch run.yaml --slurm"),
    ("doctor nope.yaml", 2, "nope.yaml: no such file; files here include run.yaml, batches.yaml, dash.yaml, equals.yaml; `flatout init nope.yaml` writes one", "doctor run.yaml"),
    ("verify run.yaml --ranks -1", 2, "--ranks is -1; expected at least 1", "verify run.yaml --ranks 1"),
    ("studio --prt 3", 2, "studio: there is no option --prt; did you mean --port?", "studio --port 3"),
    ("demo x y", 2, "demo: unexpected argument 'x'", "demo"),
    ("train run.yaml --lr", 2, "--lr is a setting here; write optim.lr=VALUE", "train run.yaml optim.lr=0.0002"),
    ("train run.yaml freeze=embed method=full", 2, "freeze: expected a list, got 'embed'; set freeze=[embed]", "train run.yaml 'freeze=[embed]' method=full"),
    ("data build chats.jsonl --tokenizer model --name chats --loss-type al", 2, "--loss-type: input should be 'response_only' or 'all', got 'al'; set --loss-type all", "data build chats.jsonl --tokenizer model --name chats --loss-type all"),
    ("train run.yaml 'data.columns={instruction: question}'", 2, "data.columns: it belongs to a source; set data.sources=[{path: chats.jsonl, columns: {instruction: question}}]", "train run.yaml 'data.sources=[{path: chats.jsonl, columns: {instruction: question}}]'"),
    ("data build chts.jsonl --tokenizer model --name x", 3, "chts.jsonl: no such file or folder; did you mean chats.jsonl?", "data build chats.jsonl --tokenizer model --name x"),
    ("train run.yaml data.sources=chats.jsonl gpus=x", 2, "gpus: expected a number of GPUs or a list of GPU ids, got 'x'; for example, give gpus=2, or gpus=[0,1]", "train run.yaml gpus=2 data=chats.jsonl  # for example"),
    ("chat rn", 2, "there is no run rn; did you mean run? (on the hub: OWNER/rn)", "chat run"),
    ("train model=model dta=chats.jsonl", 2, "dta: unknown key; did you mean data?", "train model=model data=chats.jsonl"),
    ("train model=model data=qa.csv --yes --bogus", 2, "train: there is no option --bogus", "train model=model data=qa.csv --yes"),
    ("train run.yaml gpus=2 device=cuda", 6, "gpus needs a GPU, but ", "train run.yaml device=cpu"),
    ("train run.yaml name=run run_dir=model", 2, "run_dir: model holds the run's model or data; set run_dir=runs/run-2, or another folder", "train run.yaml name=run run_dir=runs/run-2"),
    ("train run.yaml batch.layout=padded", 2, "batch.layout: input should be 'auto', 'packed' or 'rows', got 'padded'; set batch.layout=rows", "train run.yaml batch.layout=rows"),
    ("train run.yaml recompute=everything", 2, "recompute: input should be 'auto', 'none', 'selective', 'budget', 'full' or 'offload', got", "train run.yaml recompute=full"),
    ("train run.yaml objective.kind=ppo", 2, "objective.kind: kind 'ppo' trains on answers that the model writes meanwhile (rollouts), which flatout does not do; leave it out, or for rows with chosen and rejected answers set objective=dpo; known: cross_entropy (ordinary fine-tuning), w", "train run.yaml objective=dpo"),
    ("train run.yaml eval.prompts=hello", 2, "eval: prompts needs rows to evaluate on; set eval.fraction=0.05, or eval.data to a data set", "train run.yaml eval.prompts=hello eval.fraction=0.05"),
    ("train run.yaml checkpoint.keep=0", 2, "checkpoint.keep: input should be greater than or equal to 1, got 0", "train run.yaml checkpoint.keep=2"),
    ("train run.yaml max_grad_norm=1", 2, "max_grad_norm: unknown key; did you mean optim.max_grad_norm?", "train run.yaml optim.max_grad_norm=1"),
    ("train run.yaml optim.betas=[0.9,0.99]", 2, "optim.betas: they are two settings: set optim.beta1=0.9 and optim.beta2=0.99", "train run.yaml optim.beta1=0.9 optim.beta2=0.99"),
    ("train run.yaml logging_steps=1", 2, "logging_steps: unknown key; did you mean log_every_steps?", "train run.yaml log_every_steps=1"),
    ("train run.yaml dataset=chats.jsonl", 2, "dataset: unknown key; did you mean data?", "train run.yaml data=chats.jsonl"),
    ("train run.yaml tokenizer=model", 2, "tokenizer: unknown key; did you mean data.tokenizer?", "train run.yaml data.tokenizer=model"),
    ("train run.yaml wandb_project=x", 2, "wandb_project: unknown key; did you mean track.project?", "train run.yaml track.project=x track.to=wandb"),
    ("train run.yaml compile=yes", 2, "compile: input should be 'auto' or 'off', got yes; set compile=auto", "train run.yaml compile=auto"),
    ("train run.yaml num_gpus=2", 2, "num_gpus: unknown key; did you mean gpus?", "train run.yaml gpus=2"),
    ("train run.yaml --nproc_per_node=2", 2, "--nproc-per-node is a setting here: gpus=2", "train run.yaml gpus=2"),
    ("train run.yaml --deepspeed zero.json", 2, "--deepspeed is a setting here: deepspeed=zero.json", "train run.yaml deepspeed=zero.json strategy=deepspeed"),
    ("train run.yaml --rdzv a:1", 2, "--rdzv and --node-rank need --nnodes (the number of nodes)", "train run.yaml --rdzv a:1 --nnodes 2"),
    ("train run.yaml --nnodes two", 2, "--nnodes is 'two'; expected a number such as 2, or MIN:MAX such as 1:2", "train run.yaml --nnodes 2"),
    ("train run.yaml --tmux", 2, "train: --tmux needs a value; write --tmux NAME"),
    ("plan run.yaml --step 99", 2, "--step is 99; expected 0, as this run has one step only", "plan run.yaml --step 0"),
    ("merge run --output x", 2, "merge: there is no option --output; did you mean --out?", "merge run --out x"),
    ("eval run --answers", 2, "eval: --answers needs a value; write --answers FILE"),
    ("train run.yaml objective.kind=sft", 2, "set objective.kind=cross_entropy", "train run.yaml objective.kind=cross_entropy"),
    ("train run.yaml lora.rank = 8", 2, "lora.rank = 8: a setting is one word, lora.rank=8", "train run.yaml lora.rank=8"),
    ("train run.yaml optim.lr=0,0001", 2, "got '0,0001'; set optim.lr=0.0001", "train run.yaml optim.lr=0.0001"),
    ("train run.yaml lora.targets=q_porj,v_proj", 2, "lora.targets: 'q_porj' matches no linear layer of this model", "train run.yaml 'lora.targets=[q_proj,v_proj]'"),
    ("train data=chats.jsonl", 2, "model: missing; every run needs it", "train data=chats.jsonl model=Qwen/Qwen3-0.6B"),
    ("train unspaced.yaml", 2, "unspaced.yaml: line 1: write a space after `model:`"),
    ("train sections.yaml", 2, "lora.rank: in a file, a section holds its settings: lora: {rank: 8}", "in sections.yaml: lora: {rank: 8}"),
    ("resume run", 2, "there is no verb 'resume'; `flatout train` continues an interrupted run automatically", "train runs/run/config.yaml"),
    ("resume runs/run", 2, "there is no verb 'resume'; `flatout train` continues an interrupted run automatically", "train runs/run/config.yaml"),
    ("stop run", 2, "there is no verb 'stop': press Ctrl-C where the run was started, or send SIGTERM to the pid in its .lock"),
    ("rm run", 2, "there is no verb 'rm': a run is a folder, so rm -r deletes it"),
    ("serve run", 2, "there is no verb 'serve'; did you mean export?", "export run --to gguf --out out  # for example"),
    ("compare run run", 2, "there is no verb 'compare'; did you mean report?", "report run run"),
    ("preview chats", 2, "there is no verb 'preview'; did you mean data show?", "data show chats"),
    ("check run.yaml", 2, "there is no verb 'check'; did you mean plan?", "plan run.yaml"),
    ("chat there/moved --prompt hi", 2, "its base model is the folder work/base, which is not here; name it with --base", "chat there/moved --prompt hi --base there/work/base"),
    ("merge there/alone --out x", 2, "its base model is the folder /nowhere/base, which is not here; name it with --base", "merge there/alone --out x --base FOLDER  # where that model is now"),
    ("resume nope", 2, "there is no run nope, and no verb 'resume': training a run's config.yaml continues it; the runs here: run"),
    ("train run.yaml gpus=cpu", 2, "gpus: expected a number of GPUs or a list of GPU ids, got 'cpu'; set device=cpu", "train run.yaml device=cpu"),
    ("train run.yaml gpus=all", 2, "gpus: expected a number of GPUs or a list of GPU ids, got 'all'; write how many, for example set gpus=2 (`nvidia-smi -L` lists yours)", "train run.yaml gpus=2  # for example"),
    ("train run.yaml gpus=-1", 2, "gpus: expected 1 to 1,024 GPUs, got -1; for the first GPU only set gpus=[0], for none device=cpu", "train run.yaml 'gpus=[0]'"),
    ("train run.yaml gpus=0,0", 2, "gpus: a GPU is listed twice, got '0,0'; set gpus=[0]", "train run.yaml 'gpus=[0]'"),
    ("train run.yaml --gpu 0", 2, "--gpu is a setting here: gpus=[0]", "train run.yaml 'gpus=[0]'"),
    ("train run.yaml eval.every_steps=often", 2, "eval.every_steps: expected how many steps, or a share of the run below 1, got 'often'; set eval.every_steps=0.", "train run.yaml eval.every_steps=0.1 eval.fraction=0.05"),
    ("train run.yaml batch.shuffle=maybe", 2, "batch.shuffle: expected true or false, got 'maybe'; set batch.shuffle=true (the default)", "train run.yaml batch.shuffle=true"),
    ("train run.yaml lora.rank=", 2, "lora.rank: expected a whole number, got nothing; set lora.rank=16 (the default)", "train run.yaml lora.rank=16"),
    ("train run.yaml lora.rank==8", 2, "lora.rank: expected a whole number, got '=8'; set lora.rank=8", "train run.yaml lora.rank=8"),
    ("train run.yaml data.template=chatlm", 3, "there is no template 'chatlm'; known: chatml, llama-3, qwen3, gemma, mistral, phi, zephyr, alpaca, plain, or a .jinja file; did you mean chatml?", "train run.yaml data.template=chatml"),
    ("train run.yaml data.split=test", 2, "data.split: it belongs to a source; set data.sources=[{path: chats.jsonl, split: test}]", "train run.yaml 'data.sources=[{path: chats.jsonl, split: test}]'"),
    ("train run.yaml data=chats.jsonl,qa.csv", 3, "chats.jsonl,qa.csv: no such file; give several files as a list", "train run.yaml 'data=[chats.jsonl, qa.csv]'"),
    ("train run.yaml data=chats.jsonl qa.csv", 2, "qa.csv holds rows; pass it as data=[chats.jsonl,qa.csv]", "train run.yaml 'data=[chats.jsonl,qa.csv]'"),
    ("train run.yaml data=chats.jsonl data=qa.csv", 2, "data: given more than once; to use all of them, set data=[chats.jsonl, qa.csv]", "train run.yaml 'data=[chats.jsonl, qa.csv]'"),
    ("train odd.yaml", 3, "odd.csv:1: no known format has these columns; map yours, such as columns: {instruction: alpha, output: beta},", "in odd.yaml: data: {name: odd, sources: [{path: odd.csv, columns: {instruction: alpha, output: beta}}]}"),
    ("plan run.yaml data=odd.csv", 3, "odd.csv:1: no known format has these columns; map yours, such as columns: {instruction: alpha, output: beta},", "plan run.yaml 'data={name: odd, sources: [{path: odd.csv, columns: {instruction: alpha, output: beta}}]}'"),
    ("train run.yaml objective=DPO", 2, "objective: kind 'DPO' is unknown; set objective=dpo (objective.path names a loss of your own)", "train run.yaml objective=dpo"),
    ("train run.yaml objective=dpo", 3, 'chats.jsonl:1: objective dpo needs a chosen and a rejected answer in each row; 8 of 8 have one answer; write rows such as {"prompt": ..., "chosen": ..', "train run.yaml objective=cross_entropy  # ordinary fine-tuning, not pairs"),
    ("train run.yaml objective=dr_grpo", 2, "objective: kind 'dr_grpo' trains on answers that the model writes meanwhile (rollouts), which flatout does not do; leave it out, or for rows with chosen", "train run.yaml objective=dpo"),
    ("train run.yaml objective=grpo", 2, "objective: kind 'grpo' trains on answers that the model writes meanwhile (rollouts), which flatout does not do; leave it out, or for rows with chosen and rejected answers set objective=dpo; known: cross_entropy (ordinary fine-tuning), weigh", "train run.yaml objective=dpo"),
    ("train run.yaml rl=dpo", 2, "rl: unknown key; did you mean objective?", "train run.yaml objective=dpo"),
    ("train run.yaml beta=0.1", 2, "beta: it is a field of dpo, which needs rows with chosen and rejected answers: set objective={kind: dpo, beta: 0.1}", "train run.yaml 'objective={kind: dpo, beta: 0.1}'"),
    ("train run.yaml loss_type=sigmoid", 2, "loss_type: unknown key; did you mean objective: dpo?", "train run.yaml objective=dpo"),
    ("train run.yaml eval=0.1", 2, "eval: expected a section with settings, got 0.1; set eval.fraction=0.1", "train run.yaml eval.fraction=0.1"),
    ("train run.yaml lora=32", 2, "lora: expected a section with settings, got 32; set lora.rank=32", "train run.yaml lora.rank=32"),
    ("train run.yaml checkpoint=best", 2, "checkpoint: expected a section with settings, such as checkpoint.every_steps=500, got 'best'", "train run.yaml"),
    ("train run.yaml fsdp=true", 2, "fsdp: unknown key; did you mean strategy: fsdp?", "train run.yaml strategy=fsdp"),
    ("train run.yaml push=true", 2, "push: leave it out; after the run, use `flatout push RUN REPO`", "train run.yaml"),
    ("train run.yaml images=pics", 2, 'images: leave it out, and name the pictures in each row: {"messages": [...], "images": ["pics/cat.jpg"]} (docs/pictures.md)', "train run.yaml"),
    ("train run.yaml neftune_noise_alpha=5", 2, "neftune_noise_alpha: unknown key; leave it out (`flatout init --all` writes all known keys)", "train run.yaml"),
    ("train run.yaml deepspeed=zero2", 2, "deepspeed: zero2: the file is missing; for a stage without a file set strategy=zero2 and leave deepspeed out", "train run.yaml strategy=zero2"),
    ("train run.yaml -lr 1e-4", 2, "--lr is a setting here: optim.lr=1e-4", "train run.yaml optim.lr=1e-4"),
    ("train run.yaml lr 1e-4", 2, "lr 1e-4: a setting is one word, optim.lr=1e-4", "train run.yaml optim.lr=1e-4"),
    ("train run.yaml optim.lr:1e-4", 2, "optim.lr:1e-4: write = instead of :, optim.lr=1e-4", "train run.yaml optim.lr=1e-4"),
    ("train run.yaml model", 2, "model is a model; pass it as model=model", "train run.yaml model=model"),
    ("train run.yaml chats.jsonl", 2, "chats.jsonl holds rows; pass it as data=chats.jsonl", "train run.yaml data=chats.jsonl"),
    ("train --model model --data chats.jsonl", 2, "--model is a setting here: model=model; --data is a setting here: data=chats.jsonl", "train model=model data=chats.jsonl"),
    ("train model=model", 3, "no data is named; for example, set data=chats", "train model=model data=chats"),
    ("train run.yaml --lr 1e-4 --epochs 3", 2, "--lr is a setting here: optim.lr=1e-4; --epochs is a setting here: batch.epochs=3", "train run.yaml optim.lr=1e-4 batch.epochs=3"),
    ("train run.yaml per_device_train_batch_size=8 gpus=2", 2, "per_device_train_batch_size: unknown key; did you mean batch.samples_per_step: 16? (8 per GPU x 1 accumulated x 2 GPUs = 16 samples per step)", "train run.yaml batch.samples_per_step=16 gpus=2"),
    ("train run.yaml per_device_train_batch_size=8 gradient_accumulation_steps=4 gpus=0,1", 2, "per_device_train_batch_size: unknown key; did you mean batch.samples_per_step: 64? (8 per GPU x 4 accumulated x 2 GPUs = 64 samples per step)", "train run.yaml batch.samples_per_step=64 gpus=0,1"),
    ("train run.yaml --per_device_train_batch_size 8 --gradient_accumulation_steps 4 --gpus 2", 2, "--per-device-train-batch-size is a setting here: batch.samples_per_step=64 (8 per GPU x 4 accumulated x 2 GPUs", "train run.yaml batch.samples_per_step=64 gpus=2"),
    ("train batches.yaml", 2, "per_device_train_batch_size: unknown key; did you mean batch.samples_per_step: 64? (8 per GPU x 4 accumulated x 2 GPUs = 64 samples per step)", "in batches.yaml: batch: {samples_per_step: 64}"),
    ("train run.yaml eval_strategy=epoch", 2, "eval_strategy: unknown key; did you mean eval.fraction: 0.05? (a run of one epoch evaluates before its first step and at its end; a run of 3 epochs evaluates after each with eval.every_steps=0.333)", "train run.yaml eval.fraction=0.05"),
    ("train run.yaml lora.targets=xx", 2, "lora.targets: 'xx' matches no linear layer of this model; it has down_proj, gate_proj, k_proj, lm_head, o_proj", "train run.yaml 'lora.targets=[all-linear]'"),
    ("plan run.yaml --device 24", 2, "device '24' is unknown; choose one of b200, h200, h100, a100-80, a100-40, l40s, 5090, 4090, 3090, a10g, l4, t4", "plan run.yaml --device 24GB"),
    ("version", 2, "there is no verb 'version'; did you mean --version?", "--version"),
    ("list", 2, "there is no verb 'list'; did you mean runs?", "runs"),
    ("evaluate run", 2, "there is no verb 'evaluate'; did you mean eval?", "eval run --tasks arc_easy"),
    ("merge nope --out merged", 2, "nope: no such folder, and no run of that name; the run here is run (not finished); resume it: flatout train runs/run/config.yaml"),
    ("merge model --out merged", 2, "model has no adapter to merge: it is a plain model already; use it as it is"),
    ("merge run --out", 2, "merge: --out needs a value; write --out OUT", "merge run --out merged"),
    ("export run --to gguf", 2, "export: --out is not given; write it, such as --out gguf", "export run --to gguf --out gguf"),
    ("export run --to GGUF --out x", 2, "--to is 'GGUF'; expected one of gguf, ollama, vllm, mlx", "export run --to gguf --out x"),
    ("export model --to gguf --out x --quantize q4", 2, "--quantize q4: needs llama.cpp's llama-quantize", "export model --to gguf --out x --quantize q8_0  # 8 bits"),
    ("push nope me/x", 2, "nope: no such folder, and no run of that name; the run here is run (not finished); resume it: flatout train runs/run/config.yaml"),
    ("push run me/x --best_model", 2, "push: there is no option --best-model; did you mean --best?", "push run me/x --best"),
    ("chat other.gguf", 2, "there is no file other.gguf; name the folder of a run, an adapter or a model, or a hub id; model here: model", "chat model"),
    ("chat chats.jsonl", 2, "chats.jsonl is a file; name the folder of a run, an adapter or a model; model here: model", "chat model"),
    ("chat run.yaml", 2, "run.yaml is a file; name the folder of a run, an adapter or a model; model here: model", "chat model"),
    ("chat runs", 2, "runs is the folder of all runs; name a finished one, or a model; model here: model", "chat model"),
    ('chat model "hello there"', 2, "hello there: no run or model here has that name; pass a message with --prompt", "chat model --prompt 'hello there'"),
    ("chat model --max_tokens 50 --prompt hi", 2, "chat: there is no option --max-tokens; did you mean --max-new-tokens?", "chat model --max-new-tokens 50 --prompt hi"),
    ("chat model --top-p 2 --prompt hi", 2, "--top-p is 2; expected more than 0, at most 1", "chat model --top-p 1 --prompt hi"),
    ("chat model --image nopic.png --prompt hi", 3, "--image nopic.png: no such file"),
    ("chat model --image chats.jsonl --prompt hi", 3, "--image chats.jsonl: its file is text; expected a picture in one of PNG"),
    ("chat model --device gpu --prompt hi", 2, "chat: there is no --device gpu; did you mean cuda?", "chat model --device cuda --prompt hi"),
    ("chat --model model --prompt hi", 2, "there is no option --model; write RUN_OR_ADAPTER_OR_MODEL right after chat", "chat model --prompt hi"),
    ("runs run", 2, "run is a run, not a folder of runs; to see it, watch it", "watch run"),
    ("runs --sort date", 2, "runs: there is no --sort date; did you mean started?", "runs --sort started"),
    ("report run.yaml", 3, "run.yaml is not a run folder but a file; name a run; the run here is run", "report run"),
    ("watch runs", 2, "runs is the folder of all runs; name a run; the run here is run", "watch run"),
    ("studio 8080", 2, "studio: unexpected argument '8080'; write --port 8080", "studio --port 8080"),
    ("studio --port http", 2, "studio: --port: expected a number, got 'http'; `flatout studio --help` lists all options", "studio --port 8765"),
    ("studio --port 80808", 2, "--port is 80808; expected a free port such as 8765, at most 65535", "studio --port 8765"),
    ("eval run --questions q.csv", 2, "eval: there is no option --questions; did you mean --answers?", "eval run --answers q.csv"),
    ("track run --wandb", 2, "track: there is no option --wandb; did you mean --to wandb?", "track run --to wandb"),
    ("convert", 2, "convert: FILE is not given; write it, such as batches.yaml", "convert batches.yaml"),
    ("convert chats.jsonl", 2, "chats.jsonl holds rows, not settings; pass it to train as data=chats.jsonl", "train model=Qwen/Qwen3-0.6B data=chats.jsonl"),
    ("convert theirs.yaml ours.yaml", 2, "the file to write is an option: --to ours.yaml", "convert theirs.yaml --to ours.yaml"),
    ("launch run.yaml --slurm --nodes two", 2, "launch: --nodes: expected a number, got 'two'; `flatout launch --help` lists all options", "launch run.yaml --slurm --nodes 2"),
    ("launch run.yaml --sbatch", 2, "launch: there is no option --sbatch; did you mean --slurm?", "launch run.yaml --slurm"),
    ("data build chats.jsonl,qa.csv --tokenizer model --name x", 3, "chats.jsonl,qa.csv: no such file; give several files as a list", "data build chats.jsonl qa.csv --tokenizer model --name x"),
    ("data build odd.csv --tokenizer model --name odd", 3, "odd.csv:1: no known format has these columns; map yours, such as columns: {instruction: alpha, output: beta},", "data build odd.csv --tokenizer model --name odd --column=instruction=alpha --column=output=beta"),
    ("data build chats.jsonl --model model --name x", 2, "data build: there is no option --model; did you mean --tokenizer?", "data build chats.jsonl --tokenizer model --name x"),
    ("data build --data chats.jsonl --tokenizer model --name x", 2, "there is no option --data; write PATH_OR_ID right after build", "data build chats.jsonl --tokenizer model --name x"),
    ("data template", 2, "data template: TEMPLATE_OR_MODEL is not given; write it, such as Qwen/Qwen3-0.6B", "data template Qwen/Qwen3-0.6B"),
    ("data template chatlm", 2, "there is no template chatlm; did you mean chatml?", "data template chatml --tokenizer Qwen/Qwen3-0.6B"),
    ("data template chatml", 2, "chatml is a template; give --tokenizer MODEL (its end-of-turn token is used)", "data template chatml --tokenizer Qwen/Qwen3-0.6B"),
    ("init --data chats.jsonl", 2, "--data chats.jsonl: also give --model; only data sets in data/data_config.json record a model", "init --data chats.jsonl --model Qwen/Qwen3-0.6B"),
    ("init new.yaml --dataset chats.jsonl --model model", 2, "init: there is no option --dataset; did you mean --data?", "init new.yaml --data chats.jsonl --model model"),
    ("init new.yml data=chats.jsonl model=model", 2, "init: unexpected argument 'data=chats.jsonl'; write --data chats.jsonl", "init new.yml --data chats.jsonl --model model"),
    ("train run.yaml objective=dpo objective.bta=0.2", 2, "objective.bta: dpo has no such field; did you mean beta?", "train run.yaml objective=dpo objective.beta=0.2"),
    ("train run.yaml objective.beta=0.1", 2, "objective.beta: cross_entropy has no fields; it is a field of dpo, which needs rows with chosen and rejected answers", "train run.yaml 'objective={kind: dpo, beta: 0.1}'"),
    ("train run.yaml gpus=[0;1]", 2, "gpus: a GPU id is a number, got ['0;1']; separate ids by commas: set gpus=[0,1]", "train run.yaml 'gpus=[0,1]'"),
    ("train run.yaml gpus=2.5", 2, "gpus: expected a whole number of GPUs, got 2.5; set gpus=2", "train run.yaml gpus=2"),
    ("train run.yaml track.to=wandb,tensorboard", 2, "track.to: input should be 'tensorboard', 'wandb', 'mlflow', 'comet' or 'trackio', got 'wandb,tensorboard'; set", "train run.yaml 'track.to=[wandb,tensorboard]'"),
    ("train run.yaml eval.fraction=10%", 2, "eval.fraction: expected a number, got '10%'; set eval.fraction=0.1 (a share)", "train run.yaml eval.fraction=0.1"),
    ("train run.yaml eval.fraction=1", 2, "eval.fraction: input should be less than or equal to 0.5, got 1; set eval.fraction=0.05 (for example)", "train run.yaml eval.fraction=0.05"),
    ("train run.yaml schedule.warmup_steps=5%", 2, "schedule.warmup_steps: expected a whole number, got '5%'; set schedule.warmup_ratio=0.05 (a share)", "train run.yaml schedule.warmup_ratio=0.05"),
    ("train run.yaml batch.max_steps=0", 2, "batch.max_steps: input should be greater than or equal to 1, got 0; set batch.max_steps=100 (for example)", "train run.yaml batch.max_steps=100"),
    ("train run.yaml checkpoint.allow_change=lr", 2, "checkpoint.allow_change: expected a list, got 'lr'; set checkpoint.allow_change=[optim.lr]", "train run.yaml 'checkpoint.allow_change=[optim.lr]'"),
    ("train run.yaml optim.max_grad_norm=off", 2, "optim.max_grad_norm: expected a number, got off; set optim.max_grad_norm=null", "train run.yaml optim.max_grad_norm=null"),
    ("train run.yaml base.storage=nf4 method=full", 2, "base is only for method=lora, as full trains the weights themselves; keep one: leave base.storage out, or choose method=lora", "train run.yaml method=full"),
    ("train run.yaml lora.rank=8 method=full", 2, "keep one: leave lora.rank out, or choose method=lora", "train run.yaml method=full"),
    ("train run.yaml eval.patience=3", 2, "eval: patience needs every_steps: set eval.every_steps=0.1", "train run.yaml eval.patience=3 eval.every_steps=0.1 eval.fraction=0.05"),
    ("train run.yaml model=", 2, "model= is empty; leave it out", "train run.yaml"),
    ("push ruse me/x", 2, "ruse: no such folder, and no run of that name; the run here is run (not finished); resume it: flatout train runs/run/config.yaml"),
    ("push runs/rune me/x", 2, "runs/rune: no such folder, and no run of that name; did you mean run?"),
    ("train run.yaml data=null", 2, "data=null is empty; leave it out", "train run.yaml"),
    ("train run.yaml data=", 2, "data= is empty; leave it out", "train run.yaml"),
    ("train run.yaml sharding.offload=true", 2, "sharding.offload needs a strategy that shards, not auto; set strategy=fsdp", "train run.yaml sharding.offload=true strategy=fsdp"),
    ("train run.yaml --profile many", 2, "train: --profile: expected a number, got 'many'; `flatout train --help` lists all options", "train run.yaml --profile 3"),
    ("plan run.yaml --cpu", 2, "plan: there is no option --cpu; did you mean --device cpu?", "plan run.yaml --device cpu"),
    ("chat model --compare base --prompt hi", 2, "--compare base: model has no adapter; leave it out", "chat model --prompt hi"),
    ("launch run.yaml --slurm --time 2h", 2, "--time is '2h', which is not Slurm's format: 90 (minutes), 12:00:00 or 2-00:00:00 (two days)", "launch run.yaml --slurm --time 2:00:00"),
    ("launch run.yaml --slurm --time soon", 2, "--time is 'soon', which is not Slurm's format"),
    ("launch run.yaml --slurm --time=2days", 2, "--time is '2days', which is not Slurm's format", "launch run.yaml --slurm --time 2-00:00:00"),
    ("merge run merged", 2, "merge: --out is not given; write it, such as --out merged", "merge run --out merged"),
    ("export run gguf", 2, "export: --to, --out are not given; write them, such as --to gguf --out gguf", "export run --to gguf --out gguf"),
    ("watch run run", 2, "watch: unexpected argument 'run'; leave it out"),
    ("data show chats -n -1", 2, "-n is -1; expected a number of samples such as 3; -n 1000000 shows all of most sets", "data show chats -n 3  # for example"),
    ("runs --note run", 2, "runs: --note needs a value; write --note RUN TEXT"),
    ("runs --tag nope good", 2, "nope: no such folder, and no run of that name; the run here is run (not finished)"),
    ("init nodir/x.yaml --data chats.jsonl --model model", 2, "nodir/x.yaml: there is no folder nodir; create it: mkdir -p nodir"),
    ("init a.yaml b.yaml", 2, "init: unexpected argument 'b.yaml'; leave it out", "init a.yaml"),
    ("convert theirs.yaml --to run.yaml", 2, "run.yaml: already exists; choose a different file, such as run-2.yaml, or remove it", "convert theirs.yaml --to run-2.yaml"),
    ("report run --format pdf", 2, "report: there is no --format pdf; choose html, md, json", "report run --format html"),
    ("eval run --limit 0 --tasks x", 2, "--limit is 0; expected at least 1; leave it out for all samples", "eval run --tasks x"),
    # false of others' names is not our fixed value
    ("train run.yaml load_in_4bit=false", 2, "load_in_4bit: unknown key; did you mean base.storage: model? (the model's own precision)", "train run.yaml base.storage=model"),
    ("train run.yaml packing=false", 2, "packing: unknown key; did you mean batch.layout: rows? (without packing)", "train run.yaml batch.layout=rows"),
    ("train run.yaml --no-packing", 2, "--no-packing is a setting here: batch.layout=rows", "train run.yaml batch.layout=rows"),
    ("train run.yaml --use_peft", 2, "--use-peft is a setting here: method=lora", "train run.yaml method=lora"),
    # a name of others with a value that is refused, too
    ("train run.yaml lr=0", 2, "did you mean optim.lr?\n  - optim.lr: input should be greater than 0, got 0; set optim.lr=0.0002 (the default)", "train run.yaml optim.lr=0.0002"),
    ("train run.yaml save_total_limit=0", 2, "did you mean checkpoint.keep?\n  - checkpoint.keep: input should be greater than or equal to 1, got 0; set checkpoint.keep=2 (the default)", "train run.yaml checkpoint.keep=2"),
    ("train run.yaml warmup=10%", 2, "did you mean schedule.warmup_ratio: 0.1? (10% is 0.1)", "train run.yaml schedule.warmup_ratio=0.1"),
    ("train run.yaml --warmup 0.1", 2, "--warmup is a setting here: schedule.warmup_ratio=0.1", "train run.yaml schedule.warmup_ratio=0.1"),
    ("train run.yaml schedule=cosine_decay", 2, "set schedule.kind=cosine", "train run.yaml schedule.kind=cosine"),
    # numbers as people write them
    ("train run.yaml data.max_tokens=4k", 2, "got '4k'; set data.max_tokens=4096", "train run.yaml data.max_tokens=4096"),
    ("train run.yaml lora.rank=1e1", 2, "got '1e1'; set lora.rank=10", "train run.yaml lora.rank=10"),
    ("train run.yaml batch.epochs=1/2", 2, "got '1/2'; set batch.epochs=0.5", "train run.yaml batch.epochs=0.5"),
    ("train run.yaml checkpoint.every_steps=5%", 2, "set checkpoint.every_steps=0.05 (a share)", "train run.yaml checkpoint.every_steps=0.05"),
    ("train run.yaml log_every_steps=0", 2, "set log_every_steps=1 (the default)", "train run.yaml log_every_steps=1"),
    ("train run.yaml data=chats.jsonl[:100]", 2, "set data=chats.jsonl and data.num_samples=100", "train run.yaml data=chats.jsonl data.num_samples=100"),
    ("train run.yaml data=*.nope", 3, "*.nope: no data file matches; files here include chats.jsonl", "train run.yaml data=chats.jsonl  # for example"),
    ("train run.yaml objective={kind: dpo, beta: 0.2}", 2, "a value with spaces is one word in quotes", "train run.yaml 'objective={kind: dpo, beta: 0.2}'"),
    ("train run.yaml token=x", 2, "log in once by `hf auth login`", "train run.yaml"),
    ("train run.yaml model=https://hub.example/org/name", 2, "there is no folder https://hub.example/org/name", "train run.yaml model=org/name"),
    # YAML
    ("train dash.yaml", 2, "set optim.lr=1e-4 (without the dash)", "in dash.yaml: optim: {lr: 1e-4}"),
    ("train one.yaml", 2, "got ['model']; set model=model", "train one.yaml model=model"),
    ("train indent.yaml", 2, "indent.yaml: line 2: begin it as far left as its neighbours"),
    ("train quote.yaml", 2, "quote.yaml: line 1: close the quote"),
    ("train equals.yaml", 2, "equals.yaml: line 1: write `model: ` in place of `model=`"),
    ("convert tune.yaml", 2, "tune.yaml is torchtune's, which is not translated"),
    # pairs
    ("train run.yaml objective=dpo data=pair.jsonl", 3, "pair.jsonl:1: a pair has two answers, but 'chosen' stands alone: also write 'rejected' in each row"),
    ("train run.yaml objective=dpo data=slips.jsonl", 3, "found 'choosen' for chosen and 'rejectd' for rejected", "train run.yaml objective=dpo data=slips.jsonl --yes"),
    ("train run.yaml objective=dpo data=winner.jsonl", 3, "set columns: {prompt: question, chosen: winner, rejected: loser}", "train run.yaml objective=dpo data=winner.jsonl --yes"),
    ("train run.yaml data=semicolon.csv", 3, "the header separates columns with ';'; save it with ',' between columns"),
    # words
    ("train model chats.jsonl", 2, "chats.jsonl holds rows", "train model=model data=chats.jsonl"),
    ("train chats.jsonl model", 2, "model is a model", "train model=model data=chats.jsonl"),
    ("train run.yaml theirs.yaml", 2, "theirs.yaml: settings come from one file, here run.yaml; leave it out", "train run.yaml"),
    ("'train run.yaml'", 2, "there is no verb 'train run.yaml'; write flatout once", "train run.yaml"),
    ("python -m flatout train run.yaml", 2, "there is no verb 'python'; write flatout once", "train run.yaml"),
    ("train run.yaml --restart=yes", 2, "train: --restart takes no value, got 'yes'; write --restart", "train run.yaml --restart"),
    # options: none that is only a little alike, no value of one that is left out
    ("chat model --step 1 --prompt hi", 2, "there is no option --step; leave it out", "chat model --prompt hi"),
    ("chat model --extra chats.jsonl --prompt hi", 2, "there is no option --extra; leave it out", "chat model --prompt hi"),
    ("chat model --adapter runs/run --prompt hi", 2, "there is no option --adapter", "chat runs/run --prompt hi"),
    ("chat model --gpu 0 --prompt hi", 2, "there is no option --gpu; write CUDA_VISIBLE_DEVICES=0 before flatout\n", "CUDA_VISIBLE_DEVICES=0 flatout chat model --prompt hi"),
    ("eval model --gpu=1 --tasks x", 2, "write CUDA_VISIBLE_DEVICES=1 before flatout\n", "CUDA_VISIBLE_DEVICES=1 flatout eval model --tasks x"),
    ("chat model --gpus 2 --prompt hi", 2, "it takes the first GPU, or another by CUDA_VISIBLE_DEVICES before flatout; leave it out", "chat model --prompt hi"),
    ("chat model --base runs --prompt hi", 2, "--base runs: model has no adapter, it is a whole model; leave --base out", "chat model --prompt hi"),
    ("chat model --temperature hot --prompt hi", 2, "--temperature: expected a number, got 'hot'", "chat model --temperature 1 --prompt hi"),
    ("convert theirs.yaml --out x.yaml", 2, "did you mean --to?", "convert theirs.yaml --to x.yaml"),
    ("eval run answers.jsonl", 2, "write --answers answers.jsonl", "eval run --answers answers.jsonl"),
    ("eval run --data answers.jsonl", 2, "did you mean --answers?", "eval run --answers answers.jsonl"),
    ("push run my model", 2, "push: unexpected argument 'model'; a repository's name has no spaces"),
    ("push run me/x --public", 2, "a repository is public unless --private is given; leave it out", "push run me/x"),
    ("push run me/x --private=true", 2, "--private takes no value", "push run me/x --private"),
    ("studio --host 0.0.0.0", 2, "only this machine reaches it", "studio"),
    ("track nope --to wandb", 2, "nope: no such folder, and no run of that name; the run here is run (not finished)"),
    ("runs --sort -loss", 2, "runs: '-loss' begins with a dash, so it reads as an option; write --sort loss --reverse", "runs --sort loss --reverse"),
    ("runs --sort -accuracy", 2, "runs: --sort needs a value", "runs --sort loss  # for example"),
    ("runs --sort --reverse", 2, "runs: --sort needs a value", "runs --sort loss --reverse  # for example"),
    ("chat model --prompt -hi", 2, "'-hi' begins with a dash, so it reads as an option; write --prompt=-hi", "chat model --prompt=-hi"),
    ("plan run.yaml --device H100x8", 2, "--device H100x8: write --device h100 --ranks 8", "plan run.yaml --device h100 --ranks 8"),
    ("plan run.yaml --ranks 8 --device 8xA100", 2, "--device 8xA100: write --device a100-80 --ranks 8", "plan run.yaml --device a100-80 --ranks 8"),
    ("plan run.yaml --ranks two", 2, "--ranks: expected a number, got 'two'", "plan run.yaml --ranks 1"),
    ("launch run.yaml --slurm --nodes 0", 2, "--nodes is 0; expected at least 1", "launch run.yaml --slurm --nodes 1"),
    ("launch run.yaml --slurm --time 24h30m", 2, "which is not Slurm's format", "launch run.yaml --slurm --time 24:30:00"),
    ("export run --to gguf --out x --quantize 4bit", 2, "expected one of q8_0", "export run --to gguf --out x --quantize q4_k_m  # 4 bits"),
]
# the arguments of flatout.train, a part of the error, and the call that it ends with
CALLS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"learning_rate": 0.0001}, "did you mean optim.lr?", "flatout.train(..., lr=0.0001)"),
    ({"num_train_epochs": 3}, "did you mean batch.epochs?", "flatout.train(..., epochs=3)"),
    ({"per_device_train_batch_size": 4}, "did you mean batch.samples_per_step?", "flatout.train(..., samples_per_step=4)"),
    ({"load_in_4bit": True}, "did you mean base.storage: nf4?", 'flatout.train(..., storage="nf4")'),
    ({"method": "qlora"}, "got 'qlora'; set storage=\"nf4\"", 'flatout.train(..., storage="nf4")'),
    ({"max_seq_length": 512}, "did you mean data.max_tokens?", "flatout.train(..., max_tokens=512)"),
    ({"lora_alpha": 16, "r": 8}, "did you mean lora.rank?", "flatout.train(..., alpha=16, rank=8)"),
    ({"gradient_checkpointing": True}, "did you mean recompute: full?", 'flatout.train(..., recompute="full")'),
    ({"eval_steps": 10}, "did you mean eval.every_steps?", 'flatout.train(..., eval={"every_steps": 10, "fraction": 0.05})'),
    ({"run_name": "x"}, "did you mean name?", 'flatout.train(..., name="x")'),
    ({"compute_metrics": len}, "metric functions of your own are not supported; leave it out", None),
    ({"overwrite_output_dir": True}, "restart=True in Python", None),
    ({"resume_from_checkpoint": True}, "resume_from_checkpoint: the same command or call resumes automatically; leave it out", None),
    ({"lora": {"r": 8}}, "lora.r: unknown key; did you mean lora.rank?", "flatout.train(..., rank=8)"),
    ({"gpus": "two"}, "gpus: expected a number of GPUs or a list of GPU ids, got 'two'; set gpus=2 (how many; `nvidia-smi -L` lists yours)", "flatout.train(..., gpus=2)"),
    ({"data": "chts.jsonl"}, "did you mean chats.jsonl?", None),
    ({"data": "qa.csv"}, "no known format has these columns", 'flatout.train(..., data={"name": "qa", "sources": [{"path": "qa.csv", "columns": {"instruction": "Question", "output": "Response"}}]})'),
    ({"learning_rate": 0.0001, "per_device_train_batch_size": 8, "gpus": 2}, "learning_rate: unknown key; did you mean optim.lr?", "flatout.train(..., lr=0.0001, samples_per_step=16)"),
    ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "gpus": [0, 1]}, "per_device_train_batch_size: unknown key; did you mean batch.samples_per_step: 64? (8 per GPU x 4 accumulated x 2 GPUs = 64 samples per step)", "flatout.train(..., samples_per_step=64)"),
    ({"betas": [0.9, 0.99]}, 'betas: they are two settings: set optim={"beta1": 0.9} and optim={"beta2": 0.99}', 'flatout.train(..., optim={"beta1": 0.9, "beta2": 0.99})'),
    ({"lr": "1e-4x"}, "optim.lr: expected a number, got '1e-4x'; set lr=1e-4", "flatout.train(..., lr=1e-4)"),
    ({"gpus": "all"}, "gpus: expected a number of GPUs or a list of GPU ids, got 'all'; write how many, for example set gpus=2 (`nvidia-smi -L` lists yours)", "flatout.train(..., gpus=2)"),
    ({"data": {"path": "chats.jsonl"}}, "data.path: unknown key; did you mean data?", 'flatout.train(..., data="chats.jsonl")'),
    ({"data": "chats.jsonl,qa.csv"}, "chats.jsonl,qa.csv: no such file; give several files as a list", 'flatout.train(..., data=["chats.jsonl", "qa.csv"])'),
    ({"data": "odd.csv"}, "odd.csv:1: no known format has these columns; map yours, such as columns: {instruction: alpha, output: beta},", 'flatout.train(..., data={"name": "odd", "sources": [{"path": "odd.csv", "columns": {"instruction": "alpha", "output": "beta"}}]})'),
    ({"data": [{"question": "a", "answer": "b"}]}, "no known format has these columns; rename the keys of your rows: question to instruction, answer to output", 'flatout.train(..., data=[{"instruction": row["question"], "output": row["answer"]} for row in data])'),
    ({"data": ["chats.jsonl", "nope.jsonl"]}, "nope.jsonl: no such file or folder; files here include chats.jsonl, pair.jsonl, role.jsonl, slips.jsonl", None),
    ({"objective": "grpo"}, "objective: kind 'grpo' trains on answers that the model writes meanwhile (rollouts), which flatout does not do; leave it out, or for rows with chosen and rejected answers set objective=\"dpo\"; known: cross_entropy (ordinary fine-tuning), wei", 'flatout.train(..., objective="dpo")'),
    ({"model": "model.gguf"}, "there is no folder model.gguf; a model is a folder with config.json, or a hub id such as Qwen/Qwen3-0.6B; a GG", None),
    ({"lora": 16}, "lora: expected a section with settings, got 16; set rank=16", "flatout.train(..., rank=16)"),
    ({"callbacks": [print]}, "callbacks must be flatout.Callback objects, got print; write class My(flatout.Callback): ... and pass callbacks=[My()]", None),
    ({"device": "cuda:0"}, "device: input should be 'auto', 'cpu' or 'cuda', got 'cuda:0'; set device=\"cuda\" and gpus=[0]", 'flatout.train(..., device="cuda", gpus=[0])'),
    ({"train_dataset": "chats.jsonl"}, "train_dataset: unknown key; did you mean data?", 'flatout.train(..., data="chats.jsonl")'),
    ({"data": []}, "data has no rows; give at least one", None),
    ({"data": [{"instruction": "a", "output": None}]}, "as 'output' is null: give it a value or remove the row", None),
    ({"data": [{"prompt": "a", "chosen": "b"}], "objective": "dpo"}, "'chosen' stands alone: also write 'rejected'", None),
    ({"data": [{"messages": [{"role": "user", "content": "q"}]}]}, "1 of 1 rows have no answer to learn from (none, an empty one, or train: false): row 1 of your data; add one to each, such as an assistant's message", None),
    ({"data": [chat(1), {"messages": [{"role": "user", "content": "q"}]}]}, 'or set {"data": {"on_bad_row": "skip"}} as the first argument', 'flatout.train({"data": {"on_bad_row": "skip"}}, ...)'),
    ({"callbacks": print}, "callbacks must be flatout.Callback objects, got print", None),
    ({"objective": {"beta": 0.1}}, 'set objective={"kind": "dpo", "beta": 0.1}', 'flatout.train(..., objective={"kind": "dpo", "beta": 0.1})'),
    ({"load_in_4bit": False}, "load_in_4bit: unknown key; did you mean base.storage: model? (the model's own precision)", 'flatout.train(..., storage="model")'),
]
# fmt: on


@pytest.fixture(scope="module")
def world(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("beginner")
    shutil.copytree(tiny.model_dir, root / "model")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    before = Path.cwd()
    os.chdir(root)
    assert main(["data", "build", "chats.jsonl", "--tokenizer", "model", "--name", "chats"]) == 0
    os.chdir(before)
    return root


@pytest.mark.parametrize("row", COMMANDS, ids=[row[0] for row in COMMANDS])
def test_a_mistake_is_told_with_the_next_command(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], row: Row
) -> None:
    typed, code, said, *command = row
    if "needs a GPU" in said and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.chdir(world)
    capsys.readouterr()
    assert main(shlex.split(typed)) == code
    error = capsys.readouterr().err
    error = error[error.index("error: ") :]
    assert said in error
    assert "Traceback" not in error
    proposed = re.findall(r"^  (?:flatout|(?=in |[A-Z_]+=)) ?(.*)$", error, re.MULTILINE)
    assert [step if "  # " in "".join(command) else step.partition("  # ")[0] for step in proposed] == command


PROPOSED = sorted({command.partition("  # ")[0] for _, _, _, *steps in COMMANDS for command in steps})


def test_nothing_is_published_to_everybody_under_a_name_that_nobody_typed() -> None:
    pushes = [(row[0], step) for row in COMMANDS for step in row[3:] if step.startswith("push ")]
    assert len(pushes) > 5
    assert all("--private" in step or step.split()[2] in re.split("[ =]", typed) for typed, step in pushes)


@pytest.mark.parametrize("command", [command for command in PROPOSED if not command.startswith(("in ", "--"))])
def test_a_proposed_command_is_not_refused(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    words = shlex.split(command.rpartition(" flatout ")[2])
    verb = words[0]

    def checked(args: argparse.Namespace) -> int:
        if verb in WITH_OVERRIDES and verb != "convert":
            load_config(args.config, args.overrides)
        return 0

    monkeypatch.setattr(importlib.import_module(f"flatout.cli.{verb}"), "run", checked)
    monkeypatch.chdir(world)
    assert main(words) == 0, capsys.readouterr().err


def test_a_proposed_line_of_a_file_is_not_refused(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    lines = [command.partition(": ")[2] for command in PROPOSED if command.startswith("in ")]
    assert len(lines) > 2
    for line in lines:
        make_config({"model": "model", **yaml.safe_load(line)})


ROW = {"question": "q", "answer": "a"}


def test_a_proposed_call_is_not_refused(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(*_: object, **settings: Any) -> Config:
        return resolve_config(None, {"model": "model", **settings}, data=settings.pop("data", "chats.jsonl"))

    monkeypatch.chdir(world)
    proposed = [call for _, _, call in CALLS if call is not None]
    assert all(eval(call, {"flatout": SimpleNamespace(train=checked), "data": [ROW]}).model for call in proposed)  # noqa: S307


@pytest.mark.parametrize("verb", list(VERBS))
def test_an_empty_word_ends_no_verb_in_a_traceback(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """As of a shell's variable that is not set; the verb alone is as before."""
    monkeypatch.setattr(importlib.import_module(f"flatout.cli.{verb}"), "run", lambda args: 0)
    monkeypatch.chdir(world)
    for words in ([verb, ""], [verb, "run", "", ""]):
        assert main(words) in (0, 2, 3), words
        assert "Traceback" not in capsys.readouterr().err


def test_only_files_are_proposed(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No folder or pipe with the ending of a file; a file is."""
    for folder in ("a.yaml", "a.jsonl"):
        (tmp_path / folder).mkdir()
    os.mkfifo(tmp_path / "b.jsonl")
    os.mkfifo(tmp_path / "b.yaml")
    model = str(world / "model")
    missing = (
        ["convert", "no.yaml"],
        ["train", "no.yaml"],
        ["init", "--data", "no.jsonl", "--model", model, "new.yaml"],
    )
    monkeypatch.chdir(tmp_path)
    for words in missing:
        assert main(words) in (2, 3)
        error = capsys.readouterr().err
        assert not re.search(r"\b[ab]\.(yaml|jsonl)", error), error
    (tmp_path / "c.jsonl").write_text(FILES["chats.jsonl"])
    (tmp_path / "c.yaml").write_text(FILES["theirs.yaml"])
    for words in missing:
        assert main(words) in (2, 3)
        assert "  # for example" in (error := capsys.readouterr().err)
        assert re.search(r"\bc\.(yaml|jsonl)", error)
    assert main(["init", ".", "--model", model, "--data", "c.jsonl"]) == 2
    assert "is a folder; name a file in it, such as run.yaml" in capsys.readouterr().err


def test_targets_are_a_list_also_without_brackets() -> None:
    assert Config(model="m", targets="q_proj, v_proj").lora.targets == ["q_proj", "v_proj"]
    assert Config(model="m", targets=r".*layers\.\d{1,2}\.q_proj").lora.targets == r".*layers\.\d{1,2}\.q_proj"


def test_a_home_that_is_there_is_found(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(world))
    assert main(["init", "--data", "~/chats.jsonl", "--model", str(world / "model"), str(tmp_path / "new.yaml")]) == 0


def test_the_table_has_120_mistakes() -> None:
    assert len({row[0] for row in COMMANDS}) + len(CALLS) >= 120


@pytest.mark.parametrize(("given", "said", "call"), CALLS, ids=[" ".join(given) for given, _, _ in CALLS])
def test_python_is_told_in_python(
    world: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], said: str, call: str | None
) -> None:
    monkeypatch.chdir(world)
    with pytest.raises(FlatoutError) as raised:
        flatout.train(**{"model": "model", "data": "chats.jsonl", "device": "cpu", **given})
    assert said in str(raised.value)
    lines = str(raised.value).splitlines()
    calls = [line.partition("  # ")[0].strip() for line in lines if line.startswith("  flatout.")]
    assert call is None or calls == [call]
