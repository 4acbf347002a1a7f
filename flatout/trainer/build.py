"""Build a run from its plan; each stage prints one line."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from flatout.checkpoint.optimizer_state import state_sizes
from flatout.checkpoint.read import SavedCheckpoint
from flatout.checkpoint.write import Checkpoints
from flatout.checkpoint.write_async import Saver, available_host_bytes, choose_saver
from flatout.config.schema import Config
from flatout.data.tokenizer import new_token_ids
from flatout.environment import ask_for_deterministic_cublas, keep_compiled_kernels
from flatout.errors import PackingError
from flatout.models.attention import prepare as prepare_attention
from flatout.models.bases.fp8_backward import convert_backward_to_float8
from flatout.models.bases.fp8_training import compute_scales_after_updates, convert_to_float8
from flatout.models.bases.frozen_experts import Fp8Experts
from flatout.models.blocks import decoder_layers
from flatout.models.compile.layers import CompileOutcome, compile_layers, import_compiler
from flatout.models.compile.recompute import apply_recompute, compiling_with
from flatout.models.experts.router import Routers, prepare_biases
from flatout.models.head import PackedLoss, prepare_head
from flatout.models.load.model import LoadedModel, load_model, weight_dtype_of
from flatout.models.load.sharded import DeferredWeights
from flatout.models.lora.adapter import adapter_config, load_adapter
from flatout.models.lora.fused import FusedLayers, fuse_layers
from flatout.models.lora.layer import add_lora, freeze, freeze_unreached, trainable_parameters
from flatout.models.lora.saved import rows_of_tokens
from flatout.models.objective import CROSS_ENTROPY, Objective
from flatout.models.selftest import prove_layout
from flatout.optim.build import layer_norm_parameters, make_optimizer
from flatout.parallel.control_group import ControlGroup
from flatout.parallel.fault_tolerance.peer_watch import PeerWatch
from flatout.parallel.process_group import choose_device
from flatout.parallel.rank import Rank
from flatout.parallel.shards import flat_offset_of, is_sharded, local_shard_of
from flatout.parallel.strategies.protocol import Strategy, StrategyOptions, connect
from flatout.planner.memory.estimate import HEAD_TILE_ROWS
from flatout.track.callback import Reporter
from flatout.trainer.context_ranks import share_context, share_of
from flatout.trainer.expert_ranks import share_experts
from flatout.trainer.feed import Feed
from flatout.trainer.graph_sizes import NOT_COMPILED, count_sizes, plan_graphs, record_graphs
from flatout.trainer.planning import PlannedRun, plan_run
from flatout.trainer.rank_meter import RankMeter
from flatout.trainer.resume import restore
from flatout.trainer.state import Run


def build_run(
    config: Config,
    planned: PlannedRun,
    checkpoints: Checkpoints,
    saved: SavedCheckpoint | None,
    reporter: Reporter,
    rank: Rank,
    watch: PeerWatch | None = None,
    objective: Objective = CROSS_ENTROPY,
) -> Run:
    """Build model, strategy, optimizer and feed, and restore what was `saved`. Raises a FlatoutError.

    Fusing LoRA moves frozen weights, so compile after it; flat adapters move, so record CUDA graphs after them.
    """
    device = choose_device(config.wanted_device, rank)
    loaded, planned = load_or_replan(config, planned, checkpoints.group, reporter, rank, objective)
    fused = replace_layers(loaded, config, planned, reporter)
    no_graphs, size_buckets = plan_graphs(config, planned, loaded.model, device, rank.index)
    feed_of = partial(Feed, device=device, share=share_of(planned.parallel_layout, rank))
    feed = feed_of(planned.store, max_documents=planned.plan.max_documents, size_buckets=size_buckets)
    loss = make_loss(loaded, planned, config, objective, reporter)
    strategy, wrapped_loss, optimizer = shard_state(loss, loaded, config, planned, rank, device, reporter)
    compiled = compile_model(loaded, loss, wrapped_loss, config, planned, feed, rank, reporter)
    named = trainable_parameters(loaded.model)
    saver, sizes = make_saver(config, checkpoints, reporter, rank, device, named)
    run = Run(
        config=config,
        rank=rank,
        device=device,
        reporter=reporter,
        plan=planned.plan,
        planned=planned,
        feed=feed,
        eval_sets=planned.eval_sets,
        eval_feeds=tuple(feed_of(each.store, max_documents=each.max_documents) for each in planned.eval_sets),
        prompts=planned.prompts,
        model=loaded.model,
        loss=wrapped_loss,
        dtype=loaded.dtype,
        autocast=loaded.autocast,
        named_parameters=named,
        strategy=strategy,
        optimizer=optimizer,
        scaler=torch.amp.GradScaler(device.type, enabled=loaded.dtype == torch.float16),
        checkpoints=checkpoints,
        saver=saver,
        fingerprints=planned.fingerprints,
        memory=planned.memory,
        fused_lora=fused,
        watch=watch or PeerWatch(config.faults, reporter.event),
        rank_meter=RankMeter(device),
        divisors=planned.divisors,
        routers=loss.routers,
    )
    if saved is not None:
        restore(run, saved)
    run.model.train()
    reporter.stage("graphs", record_graphs(run, no_graphs or (None if compiled.is_complete else NOT_COMPILED)))
    run.saver.reserve(sizes)
    return run


def make_loss(
    loaded: LoadedModel, planned: PlannedRun, config: Config, objective: Objective, reporter: Reporter
) -> PackedLoss:
    """Return the loss of packed batches, which reads the routers of a model with experts if they are known."""
    loss = PackedLoss(loaded.model, tile_rows=HEAD_TILE_ROWS[planned.memory.recompute], objective=objective)
    routers = Routers(loaded.model, config.experts)
    if routers.layers:
        loss.routers = routers
        reporter.stage("experts", routers.line)
    return loss


def load_or_replan(
    config: Config, planned: PlannedRun, group: ControlGroup, reporter: Reporter, rank: Rank, objective: Objective
) -> tuple[LoadedModel, PlannedRun]:
    """Load the model; return it with its plan, which is made again with rows if packing turns out to be inexact."""
    device = choose_device(config.wanted_device, rank)
    try:
        return load_trainable(config, planned, device, reporter, group), planned
    except PackingError as error:
        if config.batch.layout != "auto" or planned.plan.layout.name == "rows":
            raise
        unpackable = str(error).partition("; ")[0]
    # here no frame of the failed check holds the model any more
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    again = plan_run(config, reporter, rank, lambda: planned.device, objective, unpackable)
    again = replace(again, fingerprints=planned.fingerprints)
    return load_trainable(config, again, device, reporter, group), again


def load_trainable(
    config: Config, planned: PlannedRun, device: torch.device, reporter: Reporter, group: ControlGroup
) -> LoadedModel:
    """Load the model, check that its layout is exact on it, and set up its trained parameters.

    If ranks load only their shards, the weights stay in their files and the check runs on the first layers. With
    `deterministic`, CUDA kernels that are not bitwise reproducible are replaced or refused; the CPU's always are.
    """
    if is_deterministic := config.deterministic and device.type == "cuda":
        ask_for_deterministic_cublas()
    torch.use_deterministic_algorithms(is_deterministic)
    importing = None
    if device.type == "cuda" and config.compile != "off":
        reporter.stage("compile", f"kernels are cached in {keep_compiled_kernels()}")
        importing = import_compiler()
    waits = weights_wait_in_files(config, planned, device)
    reporter.phase("loading weights")
    token_ids, num_rows = new_token_ids(config.data, config.model.name)
    loaded = load_model(
        config.model,
        method=config.method,
        device=device,
        seed=config.seed,
        full=config.full,
        base=config.base,
        on_host=waits,
        rows=planned.plan.layout.name == "rows",
        num_rows=num_rows,
        keep_dense=config.lora.modules_to_save,
        context_ranks=planned.parallel_layout.context_ranks,
    )
    for line in loaded.report:
        reporter.stage("model", line)
    longest = max(int(own.lengths.max()) for own in (planned.store, *(each.store for each in planned.eval_sets)))
    dtype = weight_dtype_of(config.method, config.full, loaded.dtype)
    reporter.phase("self-test")

    def prove(loaded: LoadedModel) -> tuple[LoadedModel, str]:
        found: list[tuple[LoadedModel, str]] = []
        free = config.model.attention == "auto"  # if it fails on one rank, all must take rows
        group.run_on_all_ranks(lambda: found.append(prove_layout(loaded, longest=longest, any_attention=free)))
        return found[0]

    if not waits:
        loaded, line = prove(loaded)
        reporter.stage("self-test", line)
    elif config.method == "lora" and loaded.model.dtype != dtype:
        # adapters take the base's dtype
        loaded.model.to(dtype)
    make_trainable(loaded, config, reporter, token_ids)
    if waits:
        loaded = replace(loaded, waiting=DeferredWeights(loaded.model, device=device, dtype=dtype))
        with loaded.present():
            num_layers = len(decoder_layers(loaded.model))
            loaded, line = prove(loaded)
            reporter.stage("self-test", f"first {num_layers} layers: {line}")
    if importing is not None:
        # before anything else is imported: concurrent imports can see partially initialized modules
        importing.join()
    return loaded


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


def make_trainable(loaded: LoadedModel, config: Config, reporter: Reporter, token_ids: Sequence[int]) -> None:
    """Add LoRA adapters, or freeze parameters for full fine-tuning.

    LoRA also trains the rows of `token_ids`, new tokens. Parameters that text-only inputs do not use are frozen, too.
    """
    model = loaded.model
    if config.method == "lora":
        for line in add_lora(model, config.lora, seed=config.seed, rows=rows_of_tokens(model, config.lora, token_ids)):
            reporter.stage("lora", line)
        # refuse an adapter that PEFT cannot read now, not after the last step
        spelled = adapter_config(model, config.lora, base_name=config.model.name)
        if by_weight := spelled["target_parameters"]:
            text = f"{len(by_weight)} layers are exported as target_parameters, which PEFT needs for this model"
            reporter.stage("lora", text)
        if config.lora.continue_from is not None:
            load_adapter(model, config.lora.continue_from)
            reporter.stage("lora", f"continues from {config.lora.continue_from}")
    elif config.freeze:
        reporter.stage("freeze", freeze(model, config.freeze))
    if config.experts.bias_update:
        prepare_biases(model)
    if unreached := freeze_unreached(model):
        reporter.stage("freeze", unreached)


def replace_layers(loaded: LoadedModel, config: Config, planned: PlannedRun, reporter: Reporter) -> FusedLayers:
    """Make layers that compute in fp8, and fuse LoRA layers with the same input into one product.

    Nothing is fused in full fine-tuning and with sharded weights.
    """
    reporter.phase("preparing layers")
    if config.full.compute != "model":
        shards = planned.parallel_layout.shards_state
        line = convert_to_float8(loaded.model, config.full.compute, compile_mode=config.compile, shards=shards)
        reporter.stage("fp8", line)
    if config.method == "full":
        return FusedLayers([])
    if config.base.backward == "fp8":
        reporter.stage("fp8", convert_backward_to_float8(loaded.model))
    if planned.parallel_layout.shards_state or loaded.waiting is not None:
        why = f"{planned.parallel_layout.strategy} shards each layer's weights separately"
        why = why if planned.parallel_layout.shards_state else "weights are still in their files"
        reporter.stage("fused", f"off: {why}")
        return FusedLayers([])
    fused = fuse_layers(loaded.model, fp8=config.base.computes_in_fp8, transposed=planned.memory.transposed_weights)
    reporter.stage("fused", fused.report)
    if planned.memory.transposed_weights:
        for experts in (module for module in loaded.model.modules() if isinstance(module, Fp8Experts)):
            experts.keep_transposed()
    return fused


def shard_state(
    loss: PackedLoss,
    loaded: LoadedModel,
    config: Config,
    planned: PlannedRun,
    rank: Rank,
    device: torch.device,
    reporter: Reporter,
) -> tuple[Strategy, PackedLoss, torch.optim.Optimizer]:
    """Connect to the other ranks, shard the state, and return the strategy, the loss to call, and the optimizer."""
    if apply_recompute(loaded.model, planned.memory.recompute):
        reporter.stage("recompute", "the embedding table is in host memory")
    reporter.phase("setting up strategy and optimizer")
    layout = planned.parallel_layout
    options = StrategyOptions(
        strategy=layout.strategy, num_replicas=layout.num_replicas, expert_ranks=layout.expert_ranks,
        context_ranks=layout.context_ranks, reshard_after_forward=layout.reshard_after_forward,
        compute=loaded.dtype if loaded.autocast else None, dtype=loaded.dtype,
    )  # fmt: skip
    strategy = connect(rank, device, config, options)
    share_context(loaded, strategy, share_of(layout, rank), config, reporter)
    mark_slices = share_experts(loaded, strategy, reporter)

    def optimizer_of_shards() -> torch.optim.Optimizer:
        if loaded.waiting is not None:
            loaded.waiting.load(local_shard_of, offload=layout.offload)
            mark_slices()
            reporter.stage("model", "each rank read its shard of the weights")
        flat = config.method == "lora" and not layout.lockstep
        named, layer_norms = trainable_parameters(loaded.model), layer_norm_parameters(loaded.model)
        return make_optimizer(
            named, config.optim, layer_norms=layer_norms, seed=config.seed, flat=flat, offset_of=flat_offset_of
        )

    wrapped, optimizer = strategy.prepare(loss, decoder_layers(loaded.model), optimizer_of_shards)
    if loss.routers:
        loss.routers.hold_biases()
    if config.full.compute == "fp8" and layout.shards_state and not layout.offload:
        compute_scales_after_updates(loaded.model, optimizer)
    line = f"{type(strategy).__name__}: {rank.world} rank(s) on {device.type}"
    if layout.shards_state and config.base.storage != "model":
        in_shards = f"in {layout.num_shards} shards, gathered layer by layer"
        where = in_shards if layout.reshard_after_forward else "whole on every rank"
        line += f"; {config.base.storage} weights are {where}"
    reporter.stage("strategy", line)
    trained = trainable_parameters(loaded.model).values()
    # DeepSpeed's stage 3 empties a weight and keeps its shape in `ds_shape`
    shapes = (getattr(parameter, "ds_shape", local_shard_of(parameter).shape) for parameter in trained)
    num_trained = sum(torch.Size(shape).numel() for shape in shapes)
    line = f"{config.optim.name} over {num_trained:,} parameters, {config.schedule.kind} schedule"
    when = ", updates in the backward pass" if config.full.update == "backward" else ""
    reporter.stage("optimizer", line + when)
    # a wrapper is called like the loss
    return strategy, cast(PackedLoss, wrapped), optimizer


def make_saver(
    config: Config,
    checkpoints: Checkpoints,
    reporter: Reporter,
    rank: Rank,
    device: torch.device,
    named: Mapping[str, torch.nn.Parameter],
) -> tuple[Saver, list[int]]:
    """Choose how this rank saves, and estimate each saved tensor's bytes. Raises ResourceError if the disk is full."""
    # replicas after the first save nothing
    saves = rank.is_first or any(map(is_sharded, named.values()))
    sizes = state_sizes(named, config.optim) if saves else []
    checkpoints.require_room(sum(sizes))
    saver = choose_saver(
        config.checkpoint.asynchronous,
        checkpoints,
        reporter,
        device=device,
        num_bytes=sum(sizes),
        available_bytes=available_host_bytes(),
    )
    return saver, sizes


def compile_model(
    loaded: LoadedModel,
    loss: PackedLoss,
    wrapper: PackedLoss,
    config: Config,
    planned: PlannedRun,
    feed: Feed,
    rank: Rank,
    reporter: Reporter,
) -> CompileOutcome:
    """Compile the layers after sharding; unless all compile, `selective` and `budget` recompute fall back to `full`.

    `loss` and `wrapper` are as for `compile_layers`. Attention and the head also prepare their kernels here.
    """
    reporter.phase("compiling")
    recompute = planned.memory.recompute
    mode = config.compile if planned.parallel_layout.compiles else "off"
    with compiling_with(recompute):
        compiled = compile_layers(
            loaded, mode, num_boundaries=feed.num_boundaries, fp8=config.computes_in_fp8, loss=loss, wrapper=wrapper,
            share=feed.share,
        )  # fmt: skip
    reporter.stage("compile", compiled.line)
    if feed.num_boundaries is not None and compiled.num_compiled:
        place = rank.index // planned.parallel_layout.context_ranks
        sizes = count_sizes(planned.plan, place, size_buckets=feed.size_buckets)
        if num_graphs := prepare_attention(loaded.attention, sizes, feed.num_boundaries):
            reporter.stage("compile", f"{num_graphs} {loaded.attention} graphs for the plan's sizes")
        with torch.autocast(loaded.model.device.type, dtype=loaded.dtype, enabled=loaded.autocast):
            prepare_head(loaded.model, HEAD_TILE_ROWS[planned.memory.recompute])
    if recompute in ("selective", "budget") and not compiled.is_complete:
        apply_recompute(loaded.model, "full")
        reporter.stage("recompute", f"full instead of {recompute}, which needs compiled layers")
    return compiled
