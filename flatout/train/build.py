"""Build a run from its plan; each stage prints one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch

from flatout.checkpoint.optimizer_state import state_sizes
from flatout.checkpoint.read import SavedCheckpoint
from flatout.checkpoint.write import Checkpoints
from flatout.checkpoint.write_async import Saver, available_host_bytes, choose_saver
from flatout.config.schema import Config
from flatout.environment import ask_for_deterministic_cublas, keep_compiled_kernels
from flatout.models.attention import prepare as prepare_attention
from flatout.models.blocks import decoder_layers
from flatout.models.compile.layers import CompileOutcome, compile_layers, import_compiler
from flatout.models.compile.recompute import apply_recompute, compiling_with
from flatout.models.head import PackedLoss, prepare_head
from flatout.models.load.model import LoadedModel
from flatout.models.lora.fused import FusedLayers, fuse_layers
from flatout.models.lora.layer import trainable_parameters
from flatout.models.rope import reads_lengths_on_host
from flatout.optim.build import layer_norm_parameters, make_optimizer
from flatout.parallel.fault_tolerance.peer_watch import PeerWatch
from flatout.parallel.rank import Rank
from flatout.parallel.shards import global_shape, is_sharded, local_box
from flatout.parallel.strategies.choose import choose_device, connect
from flatout.parallel.strategies.protocol import Strategy
from flatout.track.tracker import Tracker
from flatout.train.busy_clock import BusyClock
from flatout.train.feed import Feed
from flatout.train.graph_sizes import (
    NOT_COMPILED,
    count_sizes,
    cuda_graphs_unsupported_reason,
    planned_size_buckets,
    record_graphs,
)
from flatout.train.planning import PlannedRun, tokenizer_name
from flatout.train.prepare_model import prepare_model
from flatout.train.resume import restore
from flatout.train.state import Run


def build_run(
    config: Config,
    planned: PlannedRun,
    checkpoints: Checkpoints,
    saved: SavedCheckpoint | None,
    tracker: Tracker,
    rank: Rank,
    watch: PeerWatch | None = None,
) -> Run:
    """Build model, strategy, optimizer and feed, and restore what was `saved`. Raises a FlatoutError.

    Fusing LoRA moves frozen weights, so compile after it; flat adapters move, so record CUDA graphs after them.
    """
    device = choose_device(config.wanted_device, rank)
    set_determinism(config, device)
    with compiler_imported_beside(config, device, tracker):
        loaded = prepare_model(config, planned, device, tracker)
    fused = fuse_adapters(loaded, config, planned, tracker)
    if apply_recompute(loaded.model, planned.memory.recompute):
        tracker.stage("recompute", "the embedding waits on the host")
    no_graphs = cuda_graphs_unsupported_reason(config, planned, device, on_host=reads_lengths_on_host(loaded.model))
    size_buckets = planned_size_buckets(config, planned, device, rank.index) if no_graphs is None else ()
    feed = Feed(planned.store, device, max_documents=planned.plan.max_documents, size_buckets=size_buckets)
    loss = PackedLoss(loaded.model, tile_rows=planned.memory.head_tile_rows)
    strategy, wrapped_loss, optimizer = shard_state(loss, loaded, config, planned, rank, device, tracker)
    compiled = compile_model(loaded, loss, wrapped_loss, config, planned, feed, rank, tracker)
    named = trainable_parameters(loaded.model)
    save_sizes = sizes_to_save(config, rank, named)
    run = Run(
        config=config,
        rank=rank,
        device=device,
        tracker=tracker,
        plan=planned.plan,
        feed=feed,
        eval_plan=planned.eval_plan,
        eval_feed=make_eval_feed(planned, device),
        model=loaded.model,
        loss=wrapped_loss,
        dtype=loaded.dtype,
        autocast=loaded.autocast,
        tokenizer_name=tokenizer_name(config),
        named_parameters=named,
        strategy=strategy,
        optimizer=optimizer,
        scaler=torch.amp.GradScaler(device.type, enabled=loaded.dtype == torch.float16),
        checkpoints=checkpoints,
        saver=make_saver(config, checkpoints, tracker, device, sum(save_sizes)),
        fingerprints=planned.fingerprints,
        memory=planned.memory,
        fused_lora=fused,
        watch=watch or PeerWatch(config.faults, tracker.event),
        busy=BusyClock(device),
    )
    if saved is not None:
        restore(run, saved)
    run.model.train()
    tracker.stage("graphs", record_graphs(run, no_graphs or (None if compiled.is_complete else NOT_COMPILED)))
    run.saver.reserve(save_sizes)
    return run


def set_determinism(config: Config, device: torch.device) -> None:
    """With `deterministic`, replace or refuse CUDA kernels that are not bitwise reproducible; the CPU's always are."""
    on_gpu = config.deterministic and device.type == "cuda"
    if on_gpu:
        ask_for_deterministic_cublas()
    torch.use_deterministic_algorithms(on_gpu)


@contextmanager
def compiler_imported_beside(config: Config, device: torch.device, tracker: Tracker) -> Iterator[None]:
    """Import the compiler on a thread while the body runs, and join it at the end.

    It is joined before anything else is imported: concurrent imports can see partially initialized modules.
    """
    if device.type != "cuda" or config.compile == "off":
        yield
        return
    tracker.stage("compile", f"kernels are kept in {keep_compiled_kernels()}")
    thread = import_compiler()
    yield
    thread.join()


def fuse_adapters(loaded: LoadedModel, config: Config, planned: PlannedRun, tracker: Tracker) -> FusedLayers:
    """Fuse LoRA layers with the same input into one product; none for full fine-tuning or sharded weights."""
    if config.method == "full":
        return FusedLayers([])
    if planned.parallel_layout.lockstep:
        tracker.stage("fused", f"off: {planned.parallel_layout.strategy} shards each layer's weights for itself")
        return FusedLayers([])
    fused = fuse_layers(loaded.model, fp8=config.base.computes_in_fp8, transposed=planned.memory.transposed_weights)
    tracker.stage("fused", fused.report)
    return fused


def shard_state(
    loss: PackedLoss,
    loaded: LoadedModel,
    config: Config,
    planned: PlannedRun,
    rank: Rank,
    device: torch.device,
    tracker: Tracker,
) -> tuple[Strategy, PackedLoss, torch.optim.Optimizer]:
    """Connect to the other ranks, shard the state in place, and make its optimizer.

    Returns the strategy, the (possibly wrapped) loss to call, and the optimizer.
    """
    layout = planned.parallel_layout
    strategy = connect(
        rank,
        device,
        config,
        strategy=layout.strategy,
        num_replicas=layout.num_replicas,
        reshard_after_forward=layout.reshard_after_forward,
        compute=loaded.dtype if loaded.autocast else None,
        dtype=loaded.dtype,
    )

    def optimizer_of_shards() -> torch.optim.Optimizer:
        if loaded.waiting is not None:
            loaded.waiting.load(local_box, offload=layout.offload)
            tracker.stage("model", "each rank read its shard of the weights")
        flat = config.method == "lora" and not layout.lockstep
        named, layer_norms = trainable_parameters(loaded.model), layer_norm_parameters(loaded.model)
        return make_optimizer(named, config.optim, layer_norms=layer_norms, seed=config.seed, flat=flat)

    wrapped, optimizer = strategy.prepare(loss, decoder_layers(loaded.model), optimizer_of_shards)
    line = f"{type(strategy).__name__}: {rank.world} rank(s) on {device.type}"
    if layout.lockstep and config.base.storage != "model":
        sharded = f"in {layout.num_shards} shards, gathered layer by layer"
        line += (
            f"; {config.base.storage} weights are {sharded if layout.reshard_after_forward else 'whole on every rank'}"
        )
    tracker.stage("strategy", line)
    trained = trainable_parameters(loaded.model).values()
    num_trained = sum(torch.Size(global_shape(parameter)).numel() for parameter in trained)
    tracker.stage("optimizer", f"{config.optim.name} over {num_trained:,} parameters, {config.schedule.kind} schedule")
    # a wrapper is called like the loss
    return strategy, cast(PackedLoss, wrapped), optimizer


def sizes_to_save(config: Config, rank: Rank, named: Mapping[str, torch.nn.Parameter]) -> list[int]:
    """Return the approximate bytes of each tensor that this rank saves; replicas after the first save nothing."""
    return state_sizes(named, config.optim) if rank.is_first or any(map(is_sharded, named.values())) else []


def make_saver(
    config: Config, checkpoints: Checkpoints, tracker: Tracker, device: torch.device, num_bytes: int
) -> Saver:
    """Choose how this rank saves a state of about `num_bytes`. Raises ResourceError if it would not fit on disk."""
    checkpoints.require_room(num_bytes)
    return choose_saver(
        config.checkpoint.asynchronous,
        checkpoints,
        tracker,
        device=device,
        num_bytes=num_bytes,
        available_bytes=available_host_bytes(),
    )


def compile_model(
    loaded: LoadedModel,
    loss: PackedLoss,
    wrapper: PackedLoss,
    config: Config,
    planned: PlannedRun,
    feed: Feed,
    rank: Rank,
    tracker: Tracker,
) -> CompileOutcome:
    """Compile the layers after sharding; unless all compile, `selective` and `budget` recompute fall back to `full`.

    `loss` and `wrapper` are as for `compile_layers`. Attention and the head also prepare their kernels here.
    """
    recompute = planned.memory.recompute
    mode = config.compile if planned.parallel_layout.compiles else "off"
    with compiling_with(recompute):
        compiled = compile_layers(
            loaded, mode, num_boundaries=feed.num_boundaries, fp8=config.computes_in_fp8, loss=loss, wrapper=wrapper
        )
    tracker.stage("compile", compiled.line)
    if feed.num_boundaries is not None and compiled.num_compiled:
        sizes = count_sizes(planned.plan, rank.index, size_buckets=feed.size_buckets)
        if num_graphs := prepare_attention(loaded.attention, sizes, feed.num_boundaries):
            tracker.stage("compile", f"{num_graphs} {loaded.attention} graphs for the plan's sizes")
        with torch.autocast(loaded.model.device.type, dtype=loaded.dtype, enabled=loaded.autocast):
            prepare_head(loaded.model, planned.memory.head_tile_rows)
    if recompute in ("selective", "budget") and not compiled.is_complete:
        apply_recompute(loaded.model, "full")
        tracker.stage("recompute", f"full instead of {recompute}, which needs compiled layers")
    return compiled


def make_eval_feed(planned: PlannedRun, device: torch.device) -> Feed | None:
    """Return the evaluation set's feed, or None without an evaluation set."""
    if planned.eval_store is None or planned.eval_plan is None:
        return None
    counts = (len(batch.sample_ids) for batches in planned.eval_plan.ranks for batch in batches)
    return Feed(planned.eval_store, device, max_documents=max(counts))
