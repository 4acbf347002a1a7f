"""What of a model is trained, and what a start would refuse of it, found without any weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from flatout.checkpoint.optimizer_state import state_sizes
from flatout.config.schema import Config
from flatout.data.tokenizer import new_token_ids
from flatout.environment import checks_again
from flatout.errors import ResourceError
from flatout.io.durable_io import DurableIO
from flatout.io.kept_facts import KeptFacts, code_identity, find_facts, keep_facts
from flatout.models.attention import choose_attention
from flatout.models.experts.router import Routers, prepare_biases
from flatout.models.load.inference import saved_scoring
from flatout.models.load.model import read_config, resolve_precision, weight_dtype_of
from flatout.models.load.source import check_source, read_model_config
from flatout.models.lora.adapter import adapter_config, adapter_parameters, load_adapter
from flatout.models.lora.layer import add_lora, freeze, freeze_unreached, hidden_matrices, trainable_parameters
from flatout.models.lora.saved import rows_of_tokens
from flatout.models.scoring import ONE_SCORE
from flatout.models.trained_fp8 import find_float8
from flatout.objectives.protocol import Objective
from flatout.trainer.model_shape import build_empty

CPU = torch.device("cpu")
READ_BY_PEFT: dict[str, int] = {}
"""What `prove_read_by_peft` has found in this process."""


def make_trainable(
    model: PreTrainedModel,
    config: Config,
    token_ids: Sequence[int],
    report: Callable[[str, str], None] = lambda stage, line: None,
) -> None:
    """Add LoRA adapters, or freeze parameters for full fine-tuning; `report` gets a line of each stage.

    LoRA also trains the rows of the new `token_ids`. Parameters that only pictures use are frozen, too, unless
    model.freeze_vision_tower or model.freeze_projector is false.
    """
    parts = config.model.trained_parts
    if config.method == "lora":
        rows = rows_of_tokens(model, config.lora, token_ids)
        for line in add_lora(model, config.lora, seed=config.seed, rows=rows, parts=parts):
            report("lora", line)
        if config.lora.continue_from is not None:
            load_adapter(model, config.lora.continue_from)
            report("lora", f"continues from {config.lora.continue_from}")
    elif config.freeze:
        report("freeze", freeze(model, config.freeze))
    if config.experts.bias_update:
        prepare_biases(model)
    if unreached := freeze_unreached(model, parts):
        report("freeze", unreached)


def prove_read_by_peft(model: PreTrainedModel, config: Config) -> int:
    """Return how many layers PEFT needs as `target_parameters` to read the adapter, now and not after the last step.

    That follows from shapes, settings and packages, and takes a second or two, so it is remembered for later starts.
    Raises UsageError as `adapter_config` does.
    """
    shape = _without(model.config.to_dict(), ("_name_or_path", "dtype"))  # alike on the meta device
    key: dict[str, Any] = {
        **code_identity(),
        "model": json.dumps(shape, default=str, sort_keys=True),
        "settings": json.dumps(config.lora.model_dump(mode="json")),
        "tensors": {name: list(tensor.shape) for name, tensor in adapter_parameters(model).items()},
    }
    if (name := json.dumps(key)) not in READ_BY_PEFT:
        known = None if checks_again() else find_facts("adapter", key)
        if known is None:
            spelled = adapter_config(model, config.lora, base_name=config.model.name)
            known = KeptFacts({"num_by_weight": len(spelled["target_parameters"] or ())}, "")
            keep_facts("adapter", key, known.facts)
        READ_BY_PEFT[name] = int(known.facts["num_by_weight"])
    return READ_BY_PEFT[name]


def _without(value: Any, names: Sequence[str]) -> Any:
    """Return a value without the entries of these names in its dicts."""
    if not isinstance(value, dict):
        return value
    return {name: _without(one, names) for name, one in value.items() if name not in names}


def check_start(config: Config, objective: Objective, *, on_cpu: bool, reads_peft: bool) -> PreTrainedModel:
    """Return the trained model without weights, on the meta device.

    Raise what loading the model and setting up what is trained would raise, by the same code.

    That is of the weights' files, what is quantized, LoRA's targets, modules and new tokens, adapters to continue from,
    frozen parameters, routers and float8. `on_cpu` adds what a CPU cannot do, `reads_peft` whether PEFT can read the
    adapter, which takes a second; a start proves that on its model.
    """
    name, revision, is_lora = config.model.name, config.model.revision, config.method == "lora"
    check_source(name, revision, needs_weights=config.model.init == "pretrained")
    text = read_config(name, revision, config.base.storage if is_lora else "model", None).get_text_config()
    if on_cpu:
        dtype = weight_dtype_of(config.method, config.full, resolve_precision(config.model.precision, CPU))
        choose_attention(config.model.attention, text, device=CPU, dtype=dtype)
    reference = config.objective.reference.adapter
    labels = None
    if objective.reads == "scores":
        adapter = config.lora.continue_from or reference
        scoring = saved_scoring(adapter) if adapter else None
        labels = scoring.labels if scoring else ONE_SCORE
    token_ids, num_rows = new_token_ids(config.data, name)
    values = read_model_config(name, revision)
    model = build_empty(values, f"{name}/config.json", labels=labels, num_rows=num_rows)
    make_trainable(model, config, token_ids)
    if is_lora:
        if reads_peft:
            prove_read_by_peft(model, config)
        if reference is not None:
            load_adapter(model, reference)
    Routers(model, config.experts)
    # with a trained tower, the plan refuses it on any device
    if config.full.compute != "model" and not config.model.trained_parts:
        find_float8(model, config.full.compute, compile_mode=config.compile, on_cpu=on_cpu)
    return model


def require_disk(config: Config, model: PreTrainedModel, *, on_cpu: bool) -> None:
    """Raise ResourceError if the disk cannot hold a checkpoint and the results of a run that begins.

    `model` is what `check_start` returns. Where only the GPU decides on a dtype, the narrowest one counts.
    """
    if any((config.folder / "checkpoints").glob("step-*")):
        return
    precision, is_lora = config.model.precision, config.method == "lora"
    dtype = torch.bfloat16 if precision == "auto" and not on_cpu else resolve_precision(precision, CPU)
    # adapters are trained and exported in fp32
    trained_dtype = (
        torch.promote_types(dtype, torch.float32) if is_lora else weight_dtype_of("full", config.full, dtype)
    )
    trained = {name: nn.Parameter(one.to(trained_dtype)) for name, one in trainable_parameters(model).items()}
    checkpoint_bytes = sum(state_sizes(trained, config.optim, hidden_matrices(model)))
    num_bytes_each = (trained_dtype if is_lora else dtype).itemsize
    final_bytes = num_bytes_each * sum(one.numel() for one in (trained.values() if is_lora else model.parameters()))
    wanted = {"no checkpoint": checkpoint_bytes, "no final/ beside a checkpoint": checkpoint_bytes + final_bytes}
    for what, num_bytes in wanted.items():
        try:
            DurableIO().require_free(config.folder, num_bytes)
        except ResourceError as error:
            raise ResourceError(f"{what} of this run could be saved: {error.text}") from error
