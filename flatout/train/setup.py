"""From a plan to a run, in the order things happen; one printed line each."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from flatout.config.schema import Config, Recompute
from flatout.errors import CheckpointError
from flatout.models.blocks import decoder_layers
from flatout.models.compile import compile_layers, start_compiler
from flatout.models.export import load_adapter
from flatout.models.fp8_training import use_fp8_products
from flatout.models.joined import JoinedLayers, join_layers
from flatout.models.load import LoadedModel, load_model
from flatout.models.lora import add_lora, freeze, trainable_parameters
from flatout.models.recompute import HostEmbedding, apply_recompute, compiling_with
from flatout.models.selftest import check_packing
from flatout.parallel.connect import choose_device, connect
from flatout.parallel.rank import Rank, ask_for_deterministic_cublas, keep_compiled_kernels
from flatout.track.record import Tracker
from flatout.train.checkpoint import Checkpoints, Snapshot
from flatout.train.feed import Feed
from flatout.train.graphs import reason_against, record_graphs
from flatout.train.optim import load_optimizer_state, make_optimizer
from flatout.train.planning import Planned, tokenizer_name
from flatout.train.rng import load_rng_state
from flatout.train.state import Progress, Run


def set_up(
    config: Config, planned: Planned, checkpoints: Checkpoints, snapshot: Snapshot | None, tracker: Tracker, rank: Rank
) -> Run:
    """Model, adapter, self-test, strategy, optimizer, resume position. Raises a FlatoutError naming what is wrong."""
    device = choose_device(config.device, rank)
    make_deterministic(config, device)
    compiler = None
    if device.type == "cuda" and config.compile == "auto":
        tracker.stage("compile", f"kernels are kept in {keep_compiled_kernels()}")
        compiler = start_compiler(device)
    loaded = prepare_model(config, device, tracker)
    joined = join_adapters(loaded.model, config, tracker)
    no_graphs = reason_against(config, planned, device)
    coarse = no_graphs is None
    feed = Feed(planned.store, device, max_documents=planned.plan.max_documents, coarse=coarse)
    if compiler is not None:
        compiler.join()
    compiled = compile_with_recompute(loaded, config, planned.memory.recompute, feed.num_borders)
    tracker.stage("compile", compiled)
    strategy = connect(rank, device)
    strategy.prepare(loaded.model, decoder_layers(loaded.model))
    tracker.stage("strategy", f"{type(strategy).__name__}: {rank.world} rank(s) on {device.type}")
    named = trainable_parameters(loaded.model)
    optimizer = make_optimizer(named, config.optim, seed=config.seed, flat=config.method == "lora")
    num_trained = sum(parameter.numel() for parameter in named.values())
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
        dtype=loaded.dtype,
        autocast=loaded.autocast,
        tokenizer_name=tokenizer_name(config),
        named_parameters=named,
        strategy=strategy,
        optimizer=optimizer,
        scaler=torch.amp.GradScaler(device.type, enabled=loaded.dtype == torch.float16),
        checkpoints=checkpoints,
        fingerprints=planned.fingerprints,
        memory=planned.memory,
        joined=joined,
    )
    if snapshot is not None:
        restore(run, snapshot)
    run.model.train()
    if no_graphs is None and compiled.startswith("off"):
        no_graphs = "layers are not compiled"
    tracker.stage("graphs", f"off: {no_graphs}" if no_graphs else record_graphs(run))
    return run


def join_adapters(model: PreTrainedModel, config: Config, tracker: Tracker) -> JoinedLayers:
    """LoRA layers of one input as one product; nothing for full fine-tuning."""
    if config.method == "full":
        return JoinedLayers([])
    joined = join_layers(model, fp8=config.base.computes_in_fp8)
    tracker.stage("joined", joined.report)
    return joined


def compile_with_recompute(loaded: LoadedModel, config: Config, recompute: Recompute, num_borders: int | None) -> str:
    """Compile the layers at this level; where nothing is compiled, lean and partial become layers, as the line says."""
    apply_recompute(loaded.model, recompute)
    with compiling_with(recompute):
        fp8 = config.base.computes_in_fp8 or config.full.compute == "fp8"
        line = compile_layers(loaded, config.compile, num_borders=num_borders, fp8=fp8)
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


def prepare_model(config: Config, device: torch.device, tracker: Tracker) -> LoadedModel:
    """Load the model, put adapters in or freeze what is asked, and prove that packing is exact on it."""
    loaded = load_model(
        config.model, method=config.method, device=device, seed=config.seed, full=config.full, base=config.base
    )
    for line in loaded.report:
        tracker.stage("model", line)
    tracker.stage("self-test", check_packing(loaded))
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


def restore(run: Run, snapshot: Snapshot) -> None:
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


def restore_weights(run: Run, snapshot: Snapshot) -> None:
    """Put a snapshot's weights into the model. Raises CheckpointError when names or shapes differ."""
    weights = snapshot.tensors["model"]
    if odd := sorted(set(weights) ^ set(run.named_parameters)):
        raise CheckpointError(
            f"the checkpoint of step {snapshot.step} trains other parameters than this run, such as {odd[0]} "
            f"({len(odd)} differ); use the settings it was made with, or another run_dir"
        )
    for name, parameter in run.named_parameters.items():
        if weights[name].shape != parameter.shape:
            raise CheckpointError(
                f"{name} has shape {tuple(weights[name].shape)} in the checkpoint of step {snapshot.step}, "
                f"{tuple(parameter.shape)} in this run; use the settings it was made with, or another run_dir"
            )
        parameter.data.copy_(weights[name])
