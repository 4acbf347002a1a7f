"""Load a run's model, prove it, and set up what is trained; each stage prints one line."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from threading import Thread
from typing import TypeVar

import torch

from flatout.config.schema import Config
from flatout.data.token_store import TokenStore
from flatout.environment import CAPABILITY, ask_for_deterministic_cublas, keep_compiled_kernels, named_capability
from flatout.errors import Fix, UsageError
from flatout.models.blocks import decoder_layers
from flatout.models.compile.layers import import_compiler
from flatout.models.gradient_paths import freeze_named, unreached_parameters
from flatout.models.load.model import LoadedModel, Loading, load_model, weight_dtype_of
from flatout.models.load.sharded import DeferredWeights
from flatout.models.masters import Dither
from flatout.models.pictures import batch_of, check_pictures, read_with_own_attention
from flatout.models.selftest import prove_layout
from flatout.parallel.control_group import ControlGroup
from flatout.track.callback import Reporter
from flatout.trainer.picture_inputs import PictureMaker, processor_of, require_trainable
from flatout.trainer.planned_run import PlannedRun
from flatout.trainer.state import Setup
from flatout.trainer.trainable import make_trainable, prove_read_by_peft

T = TypeVar("T")


def load_trainable(setup: Setup) -> LoadedModel:
    """Load the model, check that its layout is exact on it, and set up its trained parameters; collective.

    If ranks load only their shards, the weights stay in their files and the check runs on the first layers. With
    `deterministic`, CUDA kernels that are not bitwise reproducible are replaced or refused; the CPU's always are.
    """
    config, planned, device, reporter = setup.config, setup.planned, setup.device, setup.reporter
    _prepare_device(config, device)
    importing = _choose_kernels(config, device, reporter)
    waits = weights_wait_in_files(config, planned, device)
    if waits and config.lora.init_path is not None:
        why = "lora.init_path reads whole weights, of which each rank loads its shard only"
        raise UsageError(why, [Fix({"strategy": "ddp"})])
    reporter.phase("loading weights")
    how = Loading(
        on_host=waits,
        is_padded=planned.plan.batch_layout.is_padded,
        num_rows=planned.data.num_rows,
        keep_dense=config.lora.modules_to_save,
        context_ranks=planned.parallel_layout.context_ranks,
        scoring=planned.scoring,
    )
    loaded = load_model(
        config.model, method=config.method, device=device, seed=config.seed, full=config.full, base=config.base, how=how
    )
    for line in loaded.report:
        reporter.stage("model", line)
    dtype = weight_dtype_of(config.method, config.full, loaded.dtype)
    reporter.phase("self-test")
    if not waits:
        loaded, line = _prove(setup, loaded)
        reporter.stage("self-test", line)
    elif config.method == "lora" and loaded.model.dtype != dtype:
        loaded.model.to(dtype)  # adapters take the base's dtype
    _set_up_trained(setup, loaded)
    dither = _dither_masters(loaded, config, reporter, waits)
    if waits:
        weights = DeferredWeights(loaded.model, device=device, dtype=dtype, dither=dither)
        loaded = replace(loaded, deferred_weights=weights)
        with loaded.present():
            num_layers = len(decoder_layers(loaded.model))
            loaded, line = _prove(setup, loaded)
            reporter.stage("self-test", f"first {num_layers} layers: {line}")
    if frozen := freeze_named(loaded.model, _unreached_parameters(setup, loaded)):
        reporter.stage("freeze", frozen)
    if importing is not None:
        reporter.phase("importing the compiler")
        # before anything else is imported: concurrent imports can see partially initialized modules
        importing.join()
    return loaded


def _prove(setup: Setup, loaded: LoadedModel) -> tuple[LoadedModel, str]:
    """Prove layout and pictures as `selftest.py` and `pictures.py` do; return the model, and a line about it.

    If the proof fails on one rank, it fails on all: they must plan again.
    """
    config, group, pictured = setup.config, setup.checkpoints.group, _pictured_store(setup.planned)
    if pictured is not None and read_with_own_attention(loaded.model, loaded.dtype):
        if (named := config.model.attention) != "auto":
            raise UsageError(
                f"model.attention: {named} is causal, but {loaded.model.config.model_type} reads pictures both ways",
                [Fix({"model.attention": "auto"})],
            )
        loaded = replace(loaded, attention="transformers")

    def prove() -> tuple[LoadedModel, str]:
        longest, any_attention = _longest(setup.planned), config.model.attention == "auto"
        shares = setup.planned.plan.shares_prefixes
        return prove_layout(loaded, longest=longest, any_attention=any_attention, shares_prefixes=shares)

    proved, line = _on_all_ranks(group, prove)
    if pictured is not None:
        store = pictured
        require_trainable(setup.planned.data.settings, store, setup.planned.parallel_layout)

        def check() -> str:
            with closing(PictureMaker(processor_of(store), proved.model)) as maker:
                return check_pictures(proved, maker.probes(0), maker.probes(1), maker.with_images)

        setup.reporter.stage("self-test", _on_all_ranks(group, check))
    return proved, line


def _set_up_trained(setup: Setup, loaded: LoadedModel) -> None:
    """Make the model trainable, and prove that PEFT will read an adapter: now, and not after the last step."""
    config, reporter = setup.config, setup.reporter
    if config.method == "lora":
        reporter.phase("adding adapters")
    make_trainable(loaded.model, config, setup.planned.data.new_token_ids, reporter.stage)
    if config.method != "lora":
        return
    if by_weight := prove_read_by_peft(loaded.model, config):
        line = f"{by_weight} layers are exported as target_parameters, which PEFT needs for this model"
        reporter.stage("lora", line)


def _unreached_parameters(setup: Setup, loaded: LoadedModel) -> list[str]:
    """Return the names of trained parameters that no gradient reaches, see `models/gradient_paths.py`."""
    pictured, longest = _pictured_store(setup.planned), _longest(setup.planned)

    def search() -> list[str]:
        if pictured is None:
            return unreached_parameters(loaded, longest=longest)
        # what reads pictures is reached through them
        with closing(PictureMaker(processor_of(pictured), loaded.model)) as maker:
            seen = batch_of(maker.probes(0), maker.with_images, is_padded=loaded.is_padded)
            return unreached_parameters(loaded, longest=longest, seen=seen)

    return _on_all_ranks(setup.checkpoints.group, search)


def _on_all_ranks(group: ControlGroup, work: Callable[[], T]) -> T:
    """Return this rank's result of `work`, or raise on all ranks if it failed on one."""
    results: list[T] = []
    group.run_on_all_ranks(lambda: results.append(work()))
    return results[0]


def _longest(planned: PlannedRun) -> int:
    return max(int(store.lengths.max()) for store in planned.stores)


def _pictured_store(planned: PlannedRun) -> TokenStore | None:
    """Return the first set of the run that has pictures."""
    return next((store for store in planned.stores if store.num_pictures), None)


def _choose_kernels(config: Config, device: torch.device, reporter: Reporter) -> Thread | None:
    """Report where kernels come from; return the thread that imports the compiler, if there will be one."""
    importing = None
    if device.type == "cuda" and config.compile != "off":
        reporter.stage("compile", f"kernels are cached in {keep_compiled_kernels()}")
        importing = import_compiler()
    if device.type == "cuda" and (named := named_capability()):
        reporter.stage("kernels", f"chosen as on compute capability {named[0]}.{named[1]}: {CAPABILITY} is set")
    return importing


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
