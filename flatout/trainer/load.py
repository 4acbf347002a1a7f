"""Load a run's model, prove it, and set up what is trained; each stage prints one line."""

from __future__ import annotations

from dataclasses import replace

import torch

from flatout.config.schema import Config
from flatout.environment import CAPABILITY, ask_for_deterministic_cublas, keep_compiled_kernels, named_capability
from flatout.errors import Fix, UsageError
from flatout.models.blocks import decoder_layers
from flatout.models.compile.layers import import_compiler
from flatout.models.experts.router import prepare_biases
from flatout.models.gradient_paths import freeze_named
from flatout.models.load.model import LoadedModel, Loading, load_model, weight_dtype_of
from flatout.models.load.sharded import DeferredWeights
from flatout.models.lora.adapter import load_adapter
from flatout.models.lora.layer import add_lora, freeze, freeze_unreached
from flatout.models.lora.saved import rows_of_tokens
from flatout.models.masters import Dither
from flatout.track.callback import Reporter
from flatout.trainer.planned_run import PlannedRun
from flatout.trainer.proofs import Proofs
from flatout.trainer.state import Setup


def load_trainable(setup: Setup, proofs: Proofs) -> LoadedModel:
    """Load the model, check that its layout is exact on it, and set up its trained parameters.

    If ranks load only their shards, the weights stay in their files and the check runs on the first layers. With
    `deterministic`, CUDA kernels that are not bitwise reproducible are replaced or refused; the CPU's always are.
    """
    config, planned, device, reporter = setup.config, setup.planned, setup.device, setup.reporter
    _prepare_device(config, device)
    importing = None
    if device.type == "cuda" and config.compile != "off":
        reporter.stage("compile", f"kernels are cached in {keep_compiled_kernels()}")
        importing = import_compiler()
    if device.type == "cuda" and (named := named_capability()):
        reporter.stage("kernels", f"chosen as on compute capability {named[0]}.{named[1]}: {CAPABILITY} is set")
    waits = weights_wait_in_files(config, planned, device)
    _require_whole_weights(config, waits)
    reporter.phase("loading weights")
    loaded = load_model(
        config.model,
        method=config.method,
        device=device,
        seed=config.seed,
        full=config.full,
        base=config.base,
        how=Loading(
            on_host=waits,
            is_padded=planned.plan.batch_layout.is_padded,
            num_rows=planned.data.num_rows,
            keep_dense=config.lora.modules_to_save,
            context_ranks=planned.parallel_layout.context_ranks,
            scoring=planned.scoring,
        ),
    )
    for line in loaded.report:
        reporter.stage("model", line)
    dtype = weight_dtype_of(config.method, config.full, loaded.dtype)
    reporter.phase("self-test")
    if not waits:
        loaded, line = proofs.prove_layout(loaded)
        reporter.stage("self-test", line)
    elif config.method == "lora" and loaded.model.dtype != dtype:
        loaded.model.to(dtype)  # adapters take the base's dtype
    make_trainable(loaded, setup, proofs)
    dither = _dither_masters(loaded, config, reporter, waits)
    if waits:
        loaded = replace(
            loaded, deferred_weights=DeferredWeights(loaded.model, device=device, dtype=dtype, dither=dither)
        )
        with loaded.present():
            num_layers = len(decoder_layers(loaded.model))
            loaded, line = proofs.prove_layout(loaded)
            reporter.stage("self-test", f"first {num_layers} layers: {line}")
    if frozen := freeze_named(loaded.model, proofs.unreached_parameters(loaded)):
        reporter.stage("freeze", frozen)
    if importing is not None:
        reporter.phase("importing the compiler")
        # before anything else is imported: concurrent imports can see partially initialized modules
        importing.join()
    return loaded


def _prepare_device(config: Config, device: torch.device) -> None:
    if is_deterministic := config.deterministic and device.type == "cuda":
        ask_for_deterministic_cublas()
    torch.use_deterministic_algorithms(is_deterministic)
    if device.type == "cuda":
        # torch's cuDNN backward over 64 patches that see each other gives NaN where all scores are below -88
        torch.backends.cuda.enable_cudnn_sdp(False)
        # the thread of the backward pass gets its CUDA context from its first kernel; torch warns if that is a product
        torch.ones(1, device=device, requires_grad=True).mul(2).sum().backward()


def _dither_masters(loaded: LoadedModel, config: Config, reporter: Reporter, waits: bool) -> Dither:
    """Move fp32 masters of 16-bit weights within their rounding; in full fine-tuning, weights that wait once read."""
    dither = Dither(loaded.model, compute=loaded.dtype if loaded.autocast else None, seed=config.seed)
    if not (waits and config.method == "full"):
        dither.apply_to(loaded.model)
    if dither.dtypes:
        count = f"{len(dither.dtypes)} of 16-bit weights"
        reporter.stage("masters", f"{count} start at random within the rounding, so that small updates are not lost")
    return dither


def weights_wait_in_files(config: Config, planned: PlannedRun, device: torch.device) -> bool:
    """Whether each rank reads only its shard: if weights or experts are split and might not fit on one GPU whole.

    Always for quantized sharded weights, which are held in host memory, layer by layer. Never for float8 and DoRA
    layers, which are made from whole weights on the GPU, nor for unquantized random weights, which are drawn whole.
    """
    layout = planned.parallel_layout
    if not (layout.shards_weights or layout.expert_ranks > 1) or planned.memory.recompute == "offload":
        return False
    if config.method == "lora" and config.base.storage != "model":
        return layout.shards_weights and not config.lora.dora
    if config.model.init != "pretrained" or config.full.compute != "model":
        return False
    if device.type != "cuda":
        return layout.shards_weights
    bytes_per_weight = 4 if config.method == "full" and config.full.weights == "fp32" else 2
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    return 2 * bytes_per_weight * planned.shape.num_params > total_bytes


def _require_whole_weights(config: Config, waits: bool) -> None:
    if waits and config.lora.init_path is not None:
        why = "lora.init_path reads whole weights, of which each rank loads its shard only"
        raise UsageError(why, [Fix({"strategy": "ddp"})])


def make_trainable(loaded: LoadedModel, setup: Setup, proofs: Proofs) -> None:
    """Add LoRA adapters, or freeze parameters for full fine-tuning.

    LoRA also trains the rows of new tokens. Parameters that only pictures use are frozen, too, unless
    model.freeze_vision_tower or model.freeze_projector is false.
    """
    model = loaded.model
    config, reporter = setup.config, setup.reporter
    if config.method == "lora":
        reporter.phase("adding adapters")
        rows = rows_of_tokens(model, config.lora, setup.planned.data.new_token_ids)
        for line in add_lora(model, config.lora, seed=config.seed, rows=rows, parts=config.model.trained_parts):
            reporter.stage("lora", line)
        if text := proofs.prove_adapter(loaded):
            reporter.stage("lora", text)
        if config.lora.continue_from is not None:
            load_adapter(model, config.lora.continue_from)
            reporter.stage("lora", f"continues from {config.lora.continue_from}")
    elif config.freeze:
        reporter.stage("freeze", freeze(model, config.freeze))
    if config.experts.bias_update:
        prepare_biases(model)
    if unreached := freeze_unreached(model, config.model.trained_parts):
        reporter.stage("freeze", unreached)
