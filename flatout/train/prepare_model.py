"""The model stage of a run: load, check that packing is exact, add adapters or freeze parameters."""

from __future__ import annotations

import dataclasses

import torch

from flatout.config.schema import Config
from flatout.models.bases.fp8_training import convert_to_float8
from flatout.models.blocks import decoder_layers
from flatout.models.load.model import LoadedModel, load_model, weight_dtype_of
from flatout.models.load.sharded import DeferredWeights
from flatout.models.lora.adapter import adapter_config, load_adapter
from flatout.models.lora.layer import add_lora, freeze, freeze_unreached
from flatout.models.selftest import check_packing
from flatout.track.tracker import Tracker
from flatout.train.planning import PlannedRun


def prepare_model(config: Config, planned: PlannedRun, device: torch.device, tracker: Tracker) -> LoadedModel:
    """Load the model, check that packing is exact on it, and set up its trained parameters.

    If ranks load only their shards, the weights stay in their files and the check runs on the first layers.
    """
    waits = weights_wait_in_files(config, planned, device)
    loaded = load_model(
        config.model,
        method=config.method,
        device=device,
        seed=config.seed,
        full=config.full,
        base=config.base,
        on_host=waits,
    )
    for line in loaded.report:
        tracker.stage("model", line)
    stores = [store for store in (planned.store, planned.eval_store) if store is not None]
    longest = max(int(store.lengths.max()) for store in stores)
    if not waits:
        tracker.stage("self-test", check_packing(loaded, longest=longest))
        make_trainable(loaded, config, tracker)
        return loaded
    dtype = weight_dtype_of(config.method, config.full, loaded.dtype)
    if config.method == "lora" and loaded.model.dtype != dtype:
        # adapters take the base's dtype
        loaded.model.to(dtype)
    make_trainable(loaded, config, tracker)
    loaded = dataclasses.replace(loaded, waiting=DeferredWeights(loaded.model, device=device, dtype=dtype))
    with loaded.present():
        num_layers = len(decoder_layers(loaded.model))
        tracker.stage("self-test", f"first {num_layers} layers: {check_packing(loaded, longest=longest)}")
    return loaded


def make_trainable(loaded: LoadedModel, config: Config, tracker: Tracker) -> None:
    """Add LoRA adapters, or freeze parameters and set up fp8 for full fine-tuning; freeze what text does not reach."""
    if config.method == "lora":
        _add_adapters(loaded, config, tracker)
    elif config.freeze:
        tracker.stage("freeze", freeze(loaded.model, config.freeze))
    if (line := freeze_unreached(loaded.model)) is not None:
        tracker.stage("freeze", line)
    if config.method == "full" and config.full.compute == "fp8":
        tracker.stage("fp8", convert_to_float8(loaded.model, compile_mode=config.compile))


def _add_adapters(loaded: LoadedModel, config: Config, tracker: Tracker) -> None:
    for line in add_lora(loaded.model, config.lora, seed=config.seed):
        tracker.stage("lora", line)
    # refuse an adapter that PEFT cannot read now, not after the last step
    spelled = adapter_config(loaded.model, config.lora, base_name=config.model.name)
    if by_weight := spelled["target_parameters"]:
        tracker.stage("lora", f"{len(by_weight)} layers are exported as target_parameters, as PEFT reads this model")
    if config.lora.continue_from is not None:
        load_adapter(loaded.model, config.lora.continue_from)
        tracker.stage("lora", f"goes on from {config.lora.continue_from}")


def weights_wait_in_files(config: Config, planned: PlannedRun, device: torch.device) -> bool:
    """Whether each rank reads only its shard: if weights are sharded and might not fit on one GPU unsharded.

    Always for quantized sharded weights, which are held in host memory, layer by layer. Never for float8 and DoRA
    layers, which are made from whole weights on the GPU, nor for unquantized random weights, which are drawn whole.
    """
    if not planned.parallel_layout.shards_weights or planned.memory.recompute == "offload":
        return False
    if config.method == "lora" and config.base.storage != "model":
        return not config.lora.dora
    if config.model.init != "pretrained" or config.full.compute != "model":
        return False
    if device.type != "cuda":
        return True
    bytes_per_weight = 4 if config.method == "full" and config.full.weights == "fp32" else 2
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    return 2 * bytes_per_weight * planned.shape.num_params > total_bytes
