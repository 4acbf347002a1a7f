"""From a plan to a run, in the order things happen; one printed line each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import cast

import torch
from transformers import PreTrainedModel

from flatout.config.schema import Config
from flatout.errors import CheckpointError
from flatout.models.attention import prepare as prepare_attention
from flatout.models.blocks import decoder_layers
from flatout.models.compile import compile_layers, import_compiler
from flatout.models.export import load_adapter
from flatout.models.fp8_training import use_fp8_products
from flatout.models.head import PackedLoss, prepare_head
from flatout.models.joined import JoinedLayers, join_layers
from flatout.models.load import LoadedModel, load_model, weight_dtype_of
from flatout.models.lora import add_lora, freeze, trainable_parameters
from flatout.models.recompute import HostEmbedding, apply_recompute, compiling_with
from flatout.models.selftest import check_packing
from flatout.models.shard_load import WaitingWeights
from flatout.parallel.connect import choose_device, connect
from flatout.parallel.rank import Rank, ask_for_deterministic_cublas, keep_compiled_kernels
from flatout.parallel.shards import is_sharded, local_box, whole_shape
from flatout.parallel.strategy import KeepsState, Strategy
from flatout.parallel.watch import Watch
from flatout.plan.shape import num_params
from flatout.plan.spread import CUTS_WEIGHTS, Spread
from flatout.track.record import Tracker
from flatout.train.busy import BusyClock
from flatout.train.checkpoint import Checkpoints
from flatout.train.feed import Feed
from flatout.train.graphs import NOT_COMPILED, count_sizes, planned_ladder, reason_against, record_graphs
from flatout.train.optim import load_optimizer_state, make_optimizer, state_sizes
from flatout.train.planning import Planned, tokenizer_name
from flatout.train.rng import load_rng_state
from flatout.train.saver import Saver, available_host_bytes, choose_saver
from flatout.train.state import Progress, Run
from flatout.train.stored import Stored


def set_up(
    config: Config,
    planned: Planned,
    checkpoints: Checkpoints,
    snapshot: Stored | None,
    tracker: Tracker,
    rank: Rank,
    watch: Watch | None = None,
) -> Run:
    """Model, adapter, self-test, strategy, optimizer, resume position. Raises a FlatoutError naming what is wrong."""
    device = choose_device(config.wanted_device, rank)
    make_deterministic(config, device)
    compiler_imported = warm_compiler(config, device, tracker)
    loaded = prepare_model(config, planned, device, tracker)
    compiler_imported()
    joined = join_adapters(loaded.model, config, planned, tracker)
    no_graphs = reason_against(config, planned, device)
    ladder = planned_ladder(config, planned, device, rank.index) if no_graphs is None else ()
    feed = Feed(planned.store, device, max_documents=planned.plan.max_documents, ladder=ladder)
    apply_recompute(loaded.model, planned.memory.recompute)
    whole = PackedLoss(loaded.model, tile_rows=planned.memory.head_tile_rows)
    strategy, loss, optimizer = spread_state(whole, loaded, config, planned.spread, rank, device, tracker)
    named = trainable_parameters(loaded.model)
    sizes = sizes_to_save(config, rank, named)
    compiled = compile_with_recompute(loaded, whole, loss, config, planned, feed, rank)
    tracker.stage("compile", compiled)
    num_trained = sum(torch.Size(whole_shape(parameter)).numel() for parameter in named.values())
    tracker.stage("optimizer", f"{config.optim.name} over {num_trained:,} parameters, {config.schedule.kind} schedule")
    run = Run(
        config=config,
        rank=rank,
        device=device,
        tracker=tracker,
        plan=planned.plan,
        feed=feed,
        eval_plan=planned.eval_plan,
        eval_feed=eval_feed(planned, device),
        model=loaded.model,
        loss=loss,
        dtype=loaded.dtype,
        autocast=loaded.autocast,
        tokenizer_name=tokenizer_name(config),
        named_parameters=named,
        strategy=strategy,
        optimizer=optimizer,
        scaler=torch.amp.GradScaler(device.type, enabled=loaded.dtype == torch.float16),
        checkpoints=checkpoints,
        saver=saver_of(config, checkpoints, tracker, device, sum(sizes)),
        fingerprints=planned.fingerprints,
        memory=planned.memory,
        joined=joined,
        watch=watch or Watch(config.faults, tracker.event),
        busy=BusyClock(device),
    )
    if snapshot is not None:
        restore(run, snapshot)
    run.model.train()
    tracker.stage("graphs", record_graphs(run, no_graphs or (NOT_COMPILED if compiled.startswith("off") else None)))
    run.saver.reserve(sizes)
    return run


def warm_compiler(config: Config, device: torch.device, tracker: Tracker) -> Callable[[], None]:
    """Import the compiler on a thread, with its kernels in the cache folder, where layers are compiled.

    Returns what waits for it, to be called before others import much: two threads may find each other's modules half
    made.
    """
    if device.type != "cuda" or config.compile == "off":
        return lambda: None
    tracker.stage("compile", f"kernels are kept in {keep_compiled_kernels()}")
    return import_compiler().join


def sizes_to_save(config: Config, rank: Rank, named: Mapping[str, torch.nn.Parameter]) -> list[int]:
    """About the bytes of each tensor that this rank saves; replicas other than the first have nothing to copy."""
    return state_sizes(named, config.optim) if rank.is_first or any(map(is_sharded, named.values())) else []


def saver_of(config: Config, checkpoints: Checkpoints, tracker: Tracker, device: torch.device, num_bytes: int) -> Saver:
    """How this run saves a state of about `num_bytes` on this rank."""
    return choose_saver(
        config.checkpoint.asynchronous,
        checkpoints,
        tracker,
        device=device,
        num_bytes=num_bytes,
        available_bytes=available_host_bytes(),
    )


def spread_state(
    loss: PackedLoss,
    loaded: LoadedModel,
    config: Config,
    spread: Spread,
    rank: Rank,
    device: torch.device,
    tracker: Tracker,
) -> tuple[Strategy, PackedLoss, torch.optim.Optimizer]:
    """Join the other ranks, give each its part of the state, in place, and make the optimizer over it."""
    strategy = connect(
        rank,
        device,
        config,
        strategy=spread.strategy,
        num_replicas=spread.num_replicas,
        frees_weights=spread.frees_weights,
        compute=loaded.dtype if loaded.autocast else None,
        dtype=loaded.dtype,
    )

    def optimizer_of_parts() -> torch.optim.Optimizer:
        if loaded.waiting is not None:
            loaded.waiting.load(local_box, offload=spread.offload)
            tracker.stage("model", "each rank read its part of the weights")
        flat = config.method == "lora" and not spread.lockstep
        return make_optimizer(trainable_parameters(loaded.model), config.optim, seed=config.seed, flat=flat)

    forward, optimizer = strategy.prepare(loss, decoder_layers(loaded.model), optimizer_of_parts)
    line = f"{type(strategy).__name__}: {rank.world} rank(s) on {device.type}"
    if spread.lockstep and config.base.storage != "model":
        cut = f"cut into {spread.num_shards} parts and gathered layer by layer"
        line += f"; {config.base.storage} weights are {cut if spread.frees_weights else 'whole on every rank'}"
    tracker.stage("strategy", line)
    # a wrapper is called and answers as the loss itself
    return strategy, cast(PackedLoss, forward), optimizer


def join_adapters(model: PreTrainedModel, config: Config, planned: Planned, tracker: Tracker) -> JoinedLayers:
    """LoRA layers of one input as one product; nothing for full fine-tuning and for weights that are cut."""
    if config.method == "full":
        return JoinedLayers([])
    if planned.spread.lockstep:
        tracker.stage("joined", f"off: {planned.spread.strategy} cuts each layer's weights for itself")
        return JoinedLayers([])
    joined = join_layers(model, fp8=config.base.computes_in_fp8, turned=planned.memory.turned_weights)
    tracker.stage("joined", joined.report)
    return joined


def compile_with_recompute(
    loaded: LoadedModel,
    loss: PackedLoss,
    wrapper: PackedLoss,
    config: Config,
    planned: Planned,
    feed: Feed,
    rank: Rank,
) -> str:
    """Compile the layers as they were cut; where nothing is compiled, lean and partial become layers, as the line says.

    `loss` and `wrapper` are as for `compile_layers`. What attention and the head make or load for each size comes here
    too.
    """
    recompute = planned.memory.recompute
    mode = config.compile if planned.spread.compiles else "off"
    with compiling_with(recompute):
        line = compile_layers(
            loaded, mode, num_borders=feed.num_borders, fp8=config.computes_in_fp8, loss=loss, wrapper=wrapper
        )
    if feed.num_borders is not None and not line.startswith("off"):
        sizes = count_sizes(planned.plan, rank.index, ladder=feed.ladder)
        line += prepare_attention(loaded.attention, sizes, feed.num_borders)
        with torch.autocast(loaded.model.device.type, dtype=loaded.dtype, enabled=loaded.autocast):
            prepare_head(loaded.model, planned.memory.head_tile_rows)
    if isinstance(loaded.model.get_input_embeddings(), HostEmbedding):
        line += "; the embedding waits on the host"
    if recompute in ("lean", "partial") and line.startswith("off"):
        apply_recompute(loaded.model, "layers")
        line += f"; so recompute is layers instead of {recompute}"
    return line


def eval_feed(planned: Planned, device: torch.device) -> Feed | None:
    """The evaluation set's feed; None without one."""
    if planned.eval_store is None or planned.eval_plan is None:
        return None
    counts = (len(batch.sample_ids) for batches in planned.eval_plan.ranks for batch in batches)
    return Feed(planned.eval_store, device, max_documents=max(counts))


def make_deterministic(config: Config, device: torch.device) -> None:
    """With `deterministic`, CUDA kernels that do not repeat to the bit are replaced or refused; CPU always repeats."""
    on_gpu = config.deterministic and device.type == "cuda"
    if on_gpu:
        ask_for_deterministic_cublas()
    torch.use_deterministic_algorithms(on_gpu)


def loads_in_parts(config: Config, planned: Planned, device: torch.device) -> bool:
    """Whether a GPU is given only its rank's part of the weights: where they are cut and might not fit on it whole.

    Quantised weights that are cut always wait in host memory, layer by layer. Float8 and DoRA layers are made from
    whole ones on the GPU, and random weights that are not quantised are drawn whole.
    """
    if planned.spread.strategy not in CUTS_WEIGHTS or planned.memory.recompute == "offload":
        return False
    if config.method == "lora" and config.base.storage != "model":
        return not config.lora.dora
    if config.model.init != "pretrained" or config.full.compute != "model":
        return False
    bytes_each = 4 if config.method == "full" and config.full.weights == "fp32" else 2
    return (
        device.type != "cuda"
        or 2 * bytes_each * num_params(planned.shape) > torch.cuda.get_device_properties(device).total_memory
    )


def prepare_model(config: Config, planned: Planned, device: torch.device, tracker: Tracker) -> LoadedModel:
    """Load the model, put adapters in or freeze what is asked, and prove that packing is exact on it.

    Loaded in parts, its weights stay in their files, and it is proved on the first layers.
    """
    in_parts = loads_in_parts(config, planned, device)
    loaded = load_model(
        config.model,
        method=config.method,
        device=device,
        seed=config.seed,
        full=config.full,
        base=config.base,
        on_host=in_parts,
    )
    for line in loaded.report:
        tracker.stage("model", line)
    if in_parts:
        return _leave_in_files(loaded, config, device, tracker)
    tracker.stage("self-test", check_packing(loaded))
    return _put_trained_parts_in(loaded, config, tracker)


def _leave_in_files(loaded: LoadedModel, config: Config, device: torch.device, tracker: Tracker) -> LoadedModel:
    dtype = weight_dtype_of(config.method, config.full, loaded.dtype)
    if config.method == "lora" and loaded.model.dtype != dtype:
        # adapters are made in what follows from the base's precision
        loaded.model.to(dtype)
    _put_trained_parts_in(loaded, config, tracker)
    loaded = dataclasses.replace(loaded, waiting=WaitingWeights(loaded.model, device=device, dtype=dtype))
    with loaded.present():
        shown = len(decoder_layers(loaded.model))
        tracker.stage("self-test", f"first {shown} layers: {check_packing(loaded)}")
    return loaded


def _put_trained_parts_in(loaded: LoadedModel, config: Config, tracker: Tracker) -> LoadedModel:
    if config.method == "full":
        if config.freeze:
            tracker.stage("freeze", freeze(loaded.model, config.freeze))
        if config.full.compute == "fp8":
            tracker.stage("fp8", use_fp8_products(loaded.model, compile_mode=config.compile))
        return loaded
    for line in add_lora(loaded.model, config.lora, seed=config.seed).report:
        tracker.stage("lora", line)
    if config.lora.continue_from is not None:
        load_adapter(loaded.model, config.lora.continue_from)
        tracker.stage("lora", f"goes on from {config.lora.continue_from}")
    return loaded


def restore(run: Run, snapshot: Stored) -> None:
    """Put a snapshot's whole state into the run. Raises CheckpointError when it belongs to other parameters."""
    restore_weights(run, snapshot)
    run.progress = Progress(**snapshot.facts["progress"])
    if run.progress.num_updates and not snapshot.tensors["optimizer"]:
        raise CheckpointError(f"the checkpoint of step {snapshot.step} has no optimizer state; it cannot be resumed")
    load_optimizer_state(run.optimizer, run.named_parameters, snapshot.tensors["optimizer"])
    # ranks that the checkpoint did not have start from their own seeds: dropout is seeded by position anyway
    if (states := snapshot.tensors.get(f"rng-{run.rank.index}")) is not None:
        load_rng_state(states, run.device)
    run.scaler.load_state_dict(snapshot.facts["scaler"])


def restore_weights(run: Run, snapshot: Stored) -> None:
    """Put a snapshot's weights into the model. Raises CheckpointError when names or shapes differ."""
    weights = snapshot.tensors["model"]
    if odd := sorted(set(weights) ^ set(run.named_parameters)):
        raise CheckpointError(
            f"the checkpoint of step {snapshot.step} trains other parameters than this run, such as {odd[0]} "
            f"({len(odd)} differ); use the settings it was made with, or another run_dir"
        )
    for name, parameter in run.named_parameters.items():
        if weights.shape(name) != (shape := whole_shape(parameter)):
            raise CheckpointError(
                f"{name} has shape {weights.shape(name)} in the checkpoint of step {snapshot.step}, "
                f"{shape} in this run; use the settings it was made with, or another run_dir"
            )
        if isinstance(run.optimizer, KeepsState):
            run.optimizer.set_weight(parameter, weights[name])
        else:
            weights.copy_into(name, parameter)
