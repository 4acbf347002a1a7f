"""Build a run from its plan; each stage prints one line."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from flatout.checkpoint.optimizer_state import state_sizes
from flatout.checkpoint.read import SavedCheckpoint
from flatout.checkpoint.write_async import choose_saver
from flatout.config.schema import Config, Recompute
from flatout.errors import Fix, PackingError, SharedPrefixError, counted
from flatout.io.host_memory import map_blocks
from flatout.models.attention import prepare as prepare_attention
from flatout.models.attention import register_over_ranks
from flatout.models.blocks import decoder_layers
from flatout.models.collectives import RankGroup
from flatout.models.compile.layers import CompileOptions, CompileOutcome, compile_layers
from flatout.models.compile.recompute import apply_recompute, compiling_with, recomputes_by_layer
from flatout.models.context.shard import ContextShard
from flatout.models.experts.block import experts_modules
from flatout.models.experts.parallel import slice_experts
from flatout.models.experts.router import Routers
from flatout.models.load.model import LoadedModel
from flatout.models.lora.fused import FusedLayers, fuse_layers
from flatout.models.lora.layer import hidden_matrices, trainable_parameters
from flatout.models.model_with_loss import ModelWithLoss, prepare_head
from flatout.models.selftest import check_shard
from flatout.models.trained_fp8 import compute_scales_after_updates, convert_backward_to_float8, convert_to_float8
from flatout.optim.build import layer_norm_parameters, make_optimizer
from flatout.parallel.fault_tolerance.peer_watch import PeerWatch
from flatout.parallel.rank import Rank
from flatout.parallel.shards import flat_offset_of, is_sharded, local_shard_of, mark_slice
from flatout.parallel.strategies.protocol import Strategy, strategy_class
from flatout.planner.memory.estimate import MAPPED_BLOCK_BYTES, head_tile_rows
from flatout.planner.parallel_layout import ParallelLayout
from flatout.track.callback import Reporter
from flatout.trainer.batch_loader import BatchLoader
from flatout.trainer.graph_sizes import NOT_COMPILED, count_sizes, plan_graphs, record_graphs
from flatout.trainer.load import load_trainable
from flatout.trainer.memory_check import MemoryCheck
from flatout.trainer.passes import free_memory
from flatout.trainer.picture_inputs import PictureMaker
from flatout.trainer.planned_run import EvalSet, PlannedDataSet, PlannedRun
from flatout.trainer.rank_meter import RankMeter
from flatout.trainer.reference_logprobs import compute_reference
from flatout.trainer.resume import restore
from flatout.trainer.state import Setup, TrainingRun


def build_run(
    setup: Setup, saved: SavedCheckpoint | None = None, memory_check: MemoryCheck | None = None
) -> TrainingRun:
    """Build model, strategy, optimizer and loader, and restore what was `saved`. Raises a FlatoutError.

    A run that starts at step 0 measures passes with `memory_check`.
    """
    measures = memory_check if saved is None else None
    run = assemble_run(setup) if measures is None else assemble_measured(setup, measures)
    # of the model as it stands at step 0, also in a run that resumes
    compute_reference(run, compares=saved is None)
    if saved is not None:
        restore(run, saved)
    run.reporter.phase("recording graphs")
    run.reporter.stage("graphs", record_graphs(run))
    run.saver.reserve()
    return run


def assemble_measured(setup: Setup, memory_check: MemoryCheck) -> TrainingRun:
    """Measure passes of `assemble_run`, and assemble again until the plan fits them; each kind is measured once."""
    device = setup.device
    while True:
        bytes_before_model = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        run = assemble_run(setup)
        measured, needs_replan = memory_check.check(run, bytes_before_model)
        setup = replace(setup, planned=replace(run.planned, device=measured))
        if needs_replan:
            setup = setup.planned_again(measured, run.planned.inexact_reasons)
        if setup.planned.pass_settings == run.planned.pass_settings:
            memory_check.record(measured)
            memory = replace(setup.planned.memory, recompute=run.memory.recompute)
            return replace(run, planned=setup.planned, memory=memory)
        run.close()
        del run
        if device.type == "cuda":
            # compiled graphs belong to the model that is dropped
            torch.compiler.reset()
        free_memory(device)


def assemble_run(setup: Setup) -> TrainingRun:
    """Return the run at step 0, without CUDA graphs.

    Fusing LoRA moves frozen weights, so compile after it; flat adapters move, so record CUDA graphs after them.
    """
    loaded, setup = load_or_replan(setup)
    config, planned, rank, device, reporter = setup.config, setup.planned, setup.rank, setup.device, setup.reporter
    fused = replace_layers(loaded, config, planned, reporter)
    why_no_graphs, size_buckets = plan_graphs(config, planned, loaded.model, device, rank.index)
    loaders = make_loaders(setup, loaded.model, size_buckets)
    loss = make_loss(loaded, planned, config, reporter)
    strategy, wrapped_loss, optimizer = shard_state(setup, loaded, loss)
    compiled, recompute = compile_model(setup, loaded, (loss, wrapped_loss), loaders[0])
    named, matrices = trainable_parameters(loaded.model), hidden_matrices(loaded.model)
    # replicas after the first save nothing
    sizes = state_sizes(named, config.optim, matrices) if rank.is_first or any(map(is_sharded, named.values())) else []
    saver = choose_saver(config.checkpoint.asynchronous, setup.checkpoints, reporter, device=device, sizes=sizes)
    run = TrainingRun(
        config=config,
        rank=rank,
        device=device,
        reporter=reporter,
        planned=planned,
        loaders=loaders,
        model=loaded.model,
        loss_module=wrapped_loss,
        dtype=loaded.dtype,
        autocast=loaded.autocast,
        named_parameters=named,
        strategy=strategy,
        optimizer=optimizer,
        scaler=torch.amp.GradScaler(device.type, enabled=loaded.dtype == torch.float16),
        checkpoints=setup.checkpoints,
        saver=saver,
        memory=replace(planned.memory, recompute=recompute),
        fused_lora=fused,
        watch=setup.watch or PeerWatch(config.faults, reporter.event),
        rank_meter=RankMeter(device),
        aux_loss=loss.aux_loss,
        why_no_graphs=why_no_graphs or (None if compiled.is_complete else NOT_COMPILED),
    )
    run.model.train()
    return run


def load_or_replan(setup: Setup) -> tuple[LoadedModel, Setup]:
    """Load the model; return it with the set-up, planned again if shared prefixes or packing are inexact."""
    while True:
        batch, planned = setup.config.batch, setup.planned
        try:
            return load_trainable(setup), setup
        except PackingError as error:
            is_sharing = isinstance(error, SharedPrefixError)
            setting = batch.share_prefix if is_sharing else batch.layout
            if setting != "auto" or planned.plan.batch_layout.is_padded:
                raise
            inexact = {"sharing" if is_sharing else "packing": error.text}
        # here no frame of the failed check holds the model any more
        free_memory(setup.device)
        setup = setup.planned_again(planned.device, planned.inexact_reasons._replace(**inexact))


def replace_layers(loaded: LoadedModel, config: Config, planned: PlannedRun, reporter: Reporter) -> FusedLayers:
    """Make layers that compute in fp8, and fuse LoRA layers with the same input into one product.

    Nothing is fused in full fine-tuning and with sharded weights.
    """
    reporter.phase("preparing layers")
    if config.full.compute != "model":
        shards = planned.parallel_layout.shards_state
        line = convert_to_float8(loaded.model, config.full.compute, compile_mode=config.compile, shards=shards)
        slow = "; on one H100 it was no faster than bf16: full.compute=fp8_rowwise took 1/1.19 of the time"
        reporter.stage("fp8", line + slow if config.full.compute == "fp8" else line)
    if config.method == "full":
        return FusedLayers([])
    if config.base.backward == "fp8":
        reporter.stage("fp8", convert_backward_to_float8(loaded.model))
    if planned.parallel_layout.shards_state or loaded.deferred_weights is not None:
        why = f"{planned.parallel_layout.strategy} shards each layer's weights separately"
        why = why if planned.parallel_layout.shards_state else "weights are still in their files"
        reporter.stage("fused", f"off: {why}")
        return FusedLayers([])
    fused = fuse_layers(loaded.model, fp8=config.base.computes_in_fp8)
    reporter.stage("fused", fused.report)
    return fused


def make_loaders(setup: Setup, model: PreTrainedModel, size_buckets: Sequence[int]) -> tuple[BatchLoader, ...]:
    """Return the loaders of `PlannedRun.data_sets`, in their order."""
    planned, scoring, kl_pairs = setup.planned, setup.planned.scoring, setup.planned.kl_pairs
    shard, loss_columns = context_shard(planned.parallel_layout, setup.rank), planned.objective.batch_columns
    of_steps: dict[str, Any] = {"size_buckets": size_buckets, **planned.plan.batch_bounds}
    if kl_pairs is not None:
        # equal bounds, so that compiled layers take both
        of_steps["max_documents"] = max(of_steps["max_documents"], kl_pairs.plan.batch_bounds["max_documents"])

    def loader_of(data_set: PlannedDataSet) -> BatchLoader:
        columns, options = loss_columns, of_steps
        if isinstance(data_set, EvalSet):
            # it asks which sample each label token is of
            columns, options = loss_columns or (), {"max_documents": data_set.max_documents}
        stored = None if columns is None else tuple(name for name in columns if name in data_set.store.extra)
        loader = BatchLoader(data_set.store, setup.device, shard, columns=stored, **options)
        loader.pictures = PictureMaker.of(data_set.store, model)
        loader.padding_id = scoring.padding_id if scoring else None
        return loader

    return tuple(map(loader_of, planned.data_sets))


def make_loss(loaded: LoadedModel, planned: PlannedRun, config: Config, reporter: Reporter) -> ModelWithLoss:
    """Return the loss of packed batches, which reads the routers of a model with experts if they are known."""
    loss = ModelWithLoss(loaded.model, tile_rows=head_tile_rows(planned.memory.recompute), objective=planned.objective)
    routers = Routers(loaded.model, config.experts)
    if routers.layers:
        loss.aux_loss = routers
        reporter.stage("experts", routers.line)
    return loss


def shard_state(
    setup: Setup, loaded: LoadedModel, loss: ModelWithLoss
) -> tuple[Strategy, ModelWithLoss, torch.optim.Optimizer]:
    """Connect to the other ranks, shard the state, and return the strategy, the loss to call, and the optimizer."""
    config, planned, rank, device, reporter = setup.config, setup.planned, setup.rank, setup.device, setup.reporter
    if apply_recompute(loaded.model, planned.memory.recompute):
        reporter.stage("recompute", "the embedding table is in CPU memory")
    if device.type == "cpu" and planned.memory.recompute not in ("none", "selective", "budget"):
        map_blocks(MAPPED_BLOCK_BYTES)
    reporter.phase("setting up strategy and optimizer")
    layout = planned.parallel_layout
    strategy = strategy_class(layout.strategy)(rank, device, config, layout, loaded.dtype, loaded.autocast)
    setup_context_parallel(loaded, strategy, context_shard(layout, rank), config, reporter)
    mark_slices = shard_experts(loaded, strategy, reporter)

    def optimizer_of_shards() -> torch.optim.Optimizer:
        if loaded.deferred_weights is not None:
            loaded.deferred_weights.load(local_shard_of, offload=layout.offload)
            mark_slices()
            reporter.stage("model", "each rank read its shard of the weights")
        flat = config.method == "lora" and not layout.lockstep
        named, layer_norms = trainable_parameters(loaded.model), layer_norm_parameters(loaded.model)
        return make_optimizer(
            named, config.optim, layer_norms=layer_norms, seed=config.seed, flat=flat, offset_of=flat_offset_of,
            matrices=hidden_matrices(loaded.model),
        )  # fmt: skip

    wrapped, optimizer = strategy.prepare(loss, decoder_layers(loaded.model), optimizer_of_shards)
    loss.aux_loss.hold_buffers()
    if config.full.compute == "fp8" and layout.shards_state and not layout.offload:
        compute_scales_after_updates(loaded.model, optimizer)
    line = f"{type(strategy).__name__}: {counted(rank.world, 'rank')} on {device.type}"
    if layout.shards_state and config.base.storage != "model":
        in_shards = f"in {layout.num_shards} shards, gathered layer by layer"
        where = in_shards if layout.reshard_after_forward else "whole on every rank"
        line += f"; {config.base.storage} weights are {where}"
    reporter.stage("strategy", line)
    trained = trainable_parameters(loaded.model).values()
    num_trained = sum(math.prod(strategy.whole_shape(parameter)) for parameter in trained)
    line = f"{config.optim.path or config.optim.name} over {num_trained:,} parameters, {config.schedule.kind} schedule"
    line += f", B at {config.optim.lr_ratio:g} times the rate" if config.optim.lr_ratio != 1 else ""
    when = ", updates in the backward pass" if config.full.update == "backward" else ""
    reporter.stage("optimizer", line + when)
    # a wrapper is called like the loss
    return strategy, cast(ModelWithLoss, wrapped), optimizer


def compile_model(
    setup: Setup, loaded: LoadedModel, losses: tuple[ModelWithLoss, ModelWithLoss], loader: BatchLoader
) -> tuple[CompileOutcome, Recompute]:
    """Compile the layers after sharding; without one graph for each, all but `none` fall back to `full`.

    `losses` are the loss and what training calls. Attention and the head also prepare their kernels here. Returns what
    compiled, and the level at which the layers recompute.
    """
    config, planned, reporter = setup.config, setup.planned, setup.reporter
    reporter.phase("compiling")
    recompute = planned.memory.recompute
    mode = config.compile if planned.parallel_layout.compiles else "off"
    # finding it plans hundreds of steps, which runs that compile nothing need not wait for
    largest = None if mode == "off" or loader.num_boundaries is None else planned.plan.largest_pass
    with compiling_with(recompute):
        options = CompileOptions(
            num_boundaries=loader.num_boundaries,
            num_shared_boundaries=loader.num_shared_boundaries,
            shard=loader.shard,
            largest_pass_tokens=0 if largest is None else largest[2].num_padded_tokens,
            fp8=config.computes_in_fp8,
            has_pictures=loader.pictures is not None,
            gather=setup.checkpoints.group.all_gather,
        )
        compiled = compile_layers(loaded, mode, options, *losses)
    if config.compile != "off" and not planned.parallel_layout.compiles:
        compiled = replace(compiled, reason=f"not with strategy {planned.parallel_layout.strategy}")
    reporter.stage("compile", compiled.line)
    if loader.num_boundaries is not None and compiled.num_compiled:
        rank_index = planned.parallel_layout.data_parallel_rank_of(setup.rank.index)
        sizes = count_sizes(planned.plan, rank_index, size_buckets=loader.size_buckets)
        if planned.kl_pairs is not None:
            sizes += count_sizes(planned.kl_pairs.plan, rank_index, size_buckets=loader.size_buckets)
        if num_graphs := prepare_attention(loaded.attention, sizes, loader.num_boundaries):
            reporter.stage("compile", f"{num_graphs} {loaded.attention} graphs for the plan's sizes")
        with loaded.casting():
            prepare_head(loaded.model, head_tile_rows(planned.memory.recompute))
    model, why = planned.memory.model, None
    if isinstance(recompute, int) and not recomputes_by_layer(loaded.model):
        why = "needs layers that can each be told to recompute"
    elif recompute in ("selective", "budget") or (isinstance(recompute, int) and model is not None and model.compiled):
        why = None if compiled.is_complete else "needs each layer to be one graph"
    if why is not None:
        apply_recompute(loaded.model, "full")
        reporter.stage("recompute", f"full instead of {recompute}, which {why}")
        recompute = "full"
    return compiled, recompute


def context_shard(layout: ParallelLayout, rank: Rank) -> ContextShard | None:
    """Return which shard of each micro-batch a rank takes; None if it takes them whole."""
    num_ranks = layout.context_ranks
    return ContextShard(num_ranks, rank.index % num_ranks) if num_ranks > 1 else None


def setup_context_parallel(
    loaded: LoadedModel, strategy: Strategy, shard: ContextShard | None, config: Config, reporter: Reporter
) -> None:
    """Let the model attend to the keys of all ranks that share a micro-batch, and check on small ones that it does.

    Collective. Raises PackingError on every rank if a shard's hidden states differ from those of whole documents.
    """
    if shard is None:
        return
    assert strategy.context_mesh is not None
    assert loaded.attention != "transformers", "only rows have it"
    group = RankGroup(strategy.context_mesh.get_group("context").group_name, shard.num_shards, shard.rank)
    loaded.model.set_attn_implementation(register_over_ranks(loaded.attention, group))
    with loaded.present():
        # of all ranks, as each must raise if one does
        errors = torch.zeros(strategy.rank.world, dtype=torch.float64, device=loaded.model.device)
        errors[strategy.rank.index], limit = check_shard(loaded, shard, fp8=config.computes_in_fp8)
    if not (worst := strategy.sum_values(errors).max().item()) <= limit:
        raise PackingError(
            f"model type {loaded.model.config.model_type}: hidden states of a rank's shard of the tokens differ from "
            f"those of whole documents by {worst:.1e} (limit {limit:.1e})",
            [Fix({"context.parallel": 1})],
        )
    reporter.stage("context", f"{shard.num_shards} ranks share each micro-batch; equal to whole within {worst:.1e}")


def shard_experts(loaded: LoadedModel, strategy: Strategy, reporter: Reporter) -> Callable[[], None]:
    """Keep this rank's experts alone if several ranks share them; return what marks the slices, also called here.

    It must be called again after parameters were replaced. Raises UsageError as `slice_experts` does.
    """
    if (mesh := strategy.expert_mesh) is None:
        return lambda: None
    group = RankGroup(mesh.get_group("expert").group_name, mesh.size(1), mesh.get_local_rank("expert"))
    slices = slice_experts(loaded.model, group)
    if loaded.deferred_weights is not None:
        loaded.deferred_weights.narrow(slices, group.size, group.rank)
    modules: Any = experts_modules(loaded.model).values()
    numbers = sorted({module.num_experts for module in modules})
    counts = " or ".join(f"{number}, {number // group.size} of them" for number in numbers)
    reporter.stage("experts", f"each layer has {counts} on this rank; {group.size} ranks share them")

    def mark() -> None:
        for name, dim in slices.items():
            path, _, leaf = name.rpartition(".")
            mark_slice(getattr(loaded.model.get_submodule(path), leaf), mesh, dim)

    mark()
    return mark
