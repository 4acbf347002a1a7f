"""How much one forward pass may hold, and what is computed again for it: a pure function of sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from flatout.config.schema import Config, Recompute
from flatout.errors import ResourceError
from flatout.plan.devices import GIB, Device
from flatout.plan.memory import MemoryEstimate, MemoryModel, MicroBatchSize, Precision, head_tile_rows
from flatout.plan.shape import ModelShape
from flatout.plan.spread import ALONE, CUTS_WEIGHTS, Spread, spread_of
from flatout.plan.steps import RunPlan

# without a GPU: enough for full matrix products, little enough for any computer
CPU_MICRO_BATCH_TOKENS = 8192
# micro-batches of this size keep a GPU busy: a heavier level is never taken to make them larger
BUSY_TOKENS = 8192
# share of the memory left to the allocator's waste, other kernels' workspaces and the estimate's error
MARGIN = 0.06
# steps, evenly spread over the run, that stand for all of them
NUM_STEPS_SEEN = 500
# sizes are whole multiples, so that a few MB more or less of free memory do not change the cutting
TOKENS_MULTIPLE = 512
LONGEST_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """A run's tokens: its longest sample, the most of one step on one rank, and means for what a pass holds."""

    longest_sample: int
    rank_step_tokens: int
    label_share: float
    mean_length: float

    @classmethod
    def of(cls, plan: RunPlan) -> TokenStatistics:
        """Of a plan under any token budget; the largest step is sought among `NUM_STEPS_SEEN`."""
        lengths = plan.samples.lengths
        num_tokens = int(lengths.sum())
        largest = max(
            sum(batch.num_tokens for batch in rank)
            for step in plan.sampled_steps(NUM_STEPS_SEEN)
            for rank in step.ranks
        )
        label_share = int(plan.samples.num_labels.sum()) / num_tokens
        longest = int(np.max(lengths))
        # the step of the longest sample need not be among those seen
        return cls(longest, max(largest, longest), label_share, num_tokens / len(lengths))

    def micro_batch(self, num_tokens: int) -> MicroBatchSize:
        """A typical micro-batch of so many tokens."""
        num_documents = -(-num_tokens // max(1, int(self.mean_length)))
        return MicroBatchSize(num_tokens, int(num_tokens * self.label_share), num_documents)


@dataclass(frozen=True, slots=True)
class MemoryDecision:
    """What was decided and why. `model` and `budget_bytes` are None without a GPU.

    `accumulates`: some rank's step has several micro-batches.
    """

    micro_batch_tokens: int
    recompute: Recompute
    reason: str
    model: MemoryModel | None = None
    budget_bytes: int | None = None
    accumulates: bool = True

    @property
    def head_tile_rows(self) -> int:
        return head_tile_rows(self.recompute)

    @property
    def turned_weights(self) -> bool:
        """Whether fp8 weights are kept turned as well, instead of being turned in every backward pass."""
        return self.model is not None and self.model.turned_weights

    def estimate(self, size: MicroBatchSize) -> MemoryEstimate | None:
        """The peak with micro-batches of this size; None without a GPU."""
        return self.model.estimate(size, self.recompute, accumulates=self.accumulates) if self.model else None


def memory_model(config: Config, shape: ModelShape, device: Device, spread: Spread = ALONE) -> MemoryModel:
    """The memory of this run on one of its GPUs: precision `auto` as it computes, compiled where the run will be."""
    chosen = config.model.precision
    precision: Precision = ("bf16" if device.has_bf16 else "fp32") if chosen == "auto" else chosen
    half = precision in ("bf16", "fp16")
    compiled = config.compile == "auto" and half and not config.deterministic and not shape.num_experts
    compiled = compiled and spread.compiles
    return MemoryModel(config, shape, precision, compiled, spread)


def choose(
    config: Config,
    shape: ModelShape,
    tokens: TokenStatistics,
    device: Device | None,
    spread: Spread = ALONE,
) -> MemoryDecision:
    """The largest useful micro-batch, and the lightest level that holds one which keeps the GPU busy.

    Levels are tried from the lightest on until micro-batches of `BUSY_TOKENS` fit, or the longest sample where it is
    longer, or a rank's whole step where that is smaller; when none does, the heaviest stands. At that level the
    micro-batch grows until memory or a whole step of one rank is full. Settings that are given are kept. On the CPU:
    8,192 tokens and none. Raises ResourceError when the longest sample does not fit at the heaviest level.
    """
    given = config.batch.micro_batch_tokens
    if device is None:
        level = _without_compiler(config.recompute) if config.recompute != "auto" else "none"
        num_tokens = given or max(CPU_MICRO_BATCH_TOKENS, tokens.longest_sample)
        return MemoryDecision(num_tokens, level, f"{num_tokens:,} tokens a micro-batch, recompute {level}: no GPU")
    model = memory_model(config, shape, device, spread)
    budget = budget_bytes(config, device)
    whole_step = config.full.update == "backward"
    most, enough = _most_and_enough(config, tokens)
    for level in _levels(config, model):
        fits = largest_fit(model, level, tokens, budget, most)
        if fits >= enough:
            break
    if not given and (fits < tokens.longest_sample or (whole_step and fits < most)):
        raise _too_small(model, level, tokens.micro_batch(most if whole_step else tokens.longest_sample), device)
    return _decision(model, level, fits, tokens, device)


def use_spare(
    decision: MemoryDecision, config: Config, tokens: TokenStatistics, device: Device | None, plan: RunPlan
) -> MemoryDecision:
    """The same with something kept that saves time, where memory is left for it: turned copies of fp8 weights (one byte
    a weight), or the gathered weights of a sharded full fine-tuning until its step's last backward pass (all of them).

    Memory is left where the level stays, micro-batches of it still keep the GPU busy, and the smaller token budget cuts
    the steps of `plan` (laid out by `decision`) into no more of them.
    """
    model = decision.model
    if model is None or device is None:
        return decision

    def keeping(other: MemoryModel) -> MemoryDecision | None:
        most, enough = _most_and_enough(config, tokens)
        fits = largest_fit(other, decision.recompute, tokens, budget_bytes(config, device), most)
        kept = _decision(other, decision.recompute, fits, tokens, device)
        cut = plan.laid_out(kept.micro_batch_tokens, plan.layout.cost, lockstep=plan.layout.lockstep)
        return None if fits < enough or _num_micro_batches(cut) > _num_micro_batches(plan) else kept

    if model.turnable_bytes:
        if (kept := keeping(replace(model, turned_weights=True))) is None:
            return replace(decision, reason=f"{decision.reason}; fp8 weights are turned in every pass")
        return replace(kept, reason=f"{kept.reason}; fp8 weights turned once, {model.turnable_bytes / GIB:.1f} GiB")
    frees = model.spread.strategy in CUTS_WEIGHTS and model.spread.frees_weights
    if frees and config.method == "full" and config.sharding.reshard_after_forward == "auto":
        kept = keeping(replace(model, spread=replace(model.spread, frees_weights=False)))
        if kept is not None:
            return replace(kept, reason=f"{kept.reason}; gathered weights stay within a step")
    return decision


def _num_micro_batches(plan: RunPlan) -> int:
    return sum(len(rank) for step in plan.sampled_steps(NUM_STEPS_SEEN) for rank in step.ranks)


def _most_and_enough(config: Config, tokens: TokenStatistics) -> tuple[int, int]:
    """The most tokens that a micro-batch of this run needs to hold, and how many are enough for a level."""
    given = config.batch.micro_batch_tokens
    most = min(given or tokens.rank_step_tokens, tokens.rank_step_tokens)
    if given or config.full.update == "backward":
        return most, most
    return most, min(most, max(BUSY_TOKENS, tokens.longest_sample))


def _decision(
    model: MemoryModel, level: Recompute, fits: int, tokens: TokenStatistics, device: Device
) -> MemoryDecision:
    num_tokens = model.config.batch.micro_batch_tokens or max(fits, tokens.longest_sample)
    budget = budget_bytes(model.config, device)
    reason = (
        f"{num_tokens:,} tokens a micro-batch, recompute {level}: {budget / GIB:.1f} GiB of {device.name} hold "
        f"{fits:,} tokens, a step has at most {tokens.rank_step_tokens:,} a rank"
    )
    if level == "offload":
        reason += f"; {model.inputs_bytes(num_tokens) / GIB:.1f} GiB wait in host memory"
    return MemoryDecision(num_tokens, level, reason, model, budget, num_tokens < tokens.rank_step_tokens)


def choose_spread(
    config: Config, shape: ModelShape, tokens: TokenStatistics, device: Device | None, *, num_ranks: int, num_nodes: int
) -> Spread:
    """The strategy that is asked for, or with `auto`: ddp where a GPU holds all state beside a busy micro-batch
    without `offload`; else hsdp with a replica a node, or fsdp on one node. Raises UsageError as `spread_of`."""
    ranks = {"num_ranks": num_ranks, "num_nodes": num_nodes}
    if config.strategy != "auto" or num_ranks == 1:
        asked = "single" if config.strategy == "auto" else config.strategy
        return spread_of(config, asked, **ranks, why="as asked")
    if device is None:
        return spread_of(config, "ddp", **ranks, why="no GPU whose memory could be short")
    if why := config.reason_against_sharding:
        return spread_of(config, "ddp", **ranks, why=f"sharding does not work with {why}")
    model, budget = memory_model(config, shape, device), budget_bytes(config, device)
    enough = min(tokens.rank_step_tokens, max(BUSY_TOKENS, tokens.longest_sample))
    state = model.estimate(MicroBatchSize(0, 0, 0), "layers")
    facts = f"weights, gradients and optimizer take {state.state_bytes / GIB:.1f} GiB"
    beside = f"{enough:,} tokens on {device.name}"
    if largest_fit(model, "layers", tokens, budget, enough) >= enough:
        return spread_of(config, "ddp", **ranks, why=f"{facts}, which fit beside {beside}")
    even = num_nodes > 1 and num_ranks > num_nodes
    return spread_of(config, "hsdp" if even else "fsdp", **ranks, why=f"{facts}, which do not fit beside {beside}")


def budget_bytes(config: Config, device: Device) -> int:
    """Bytes that tensors may take: the device's, or fewer by `memory`, less the margin."""
    limit = device.memory_bytes if config.memory == "auto" else min(device.memory_bytes, int(config.memory * GIB))
    return int(limit * (1 - MARGIN))


def largest_fit(model: MemoryModel, recompute: Recompute, tokens: TokenStatistics, budget: int, most: int) -> int:
    """The most tokens of one micro-batch, up to `most`, whose estimate is within the budget; 0 when none is."""

    def fits(count: int) -> bool:
        accumulates = count < tokens.rank_step_tokens
        return model.estimate(tokens.micro_batch(count), recompute, accumulates=accumulates).total_bytes <= budget

    # a whole step at once may need less than parts of it, which add up their gradients
    size = most if fits(most) else _most(fits, most - 1)
    if size == most:
        return size
    return max(size // TOKENS_MULTIPLE * TOKENS_MULTIPLE, min(size, tokens.longest_sample))


def longest_document_tokens(
    config: Config,
    shape: ModelShape,
    device: Device,
    label_share: float,
    spread: Spread = ALONE,
) -> int:
    """The longest single document that the run could train on with this GPU, at the heaviest level it may use."""
    model = memory_model(config, shape, device, spread)
    tokens = TokenStatistics(1, LONGEST_TOKENS, label_share, float(LONGEST_TOKENS))
    return largest_fit(model, _levels(config, model)[-1], tokens, budget_bytes(config, device), LONGEST_TOKENS)


def _most(fits: Callable[[int], bool], most: int) -> int:
    """The largest count in [0, most] that fits, by halving; larger counts never fit when a smaller one does not."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _levels(config: Config, model: MemoryModel) -> tuple[Recompute, ...]:
    if config.recompute != "auto":
        return (config.recompute if model.compiled else _without_compiler(config.recompute),)
    # what `lean` and `partial` keep is the compiler's choice
    return ("none", "lean", "partial", "layers", "offload") if model.compiled else ("none", "layers", "offload")


def _without_compiler(level: Recompute) -> Recompute:
    return "layers" if level in ("lean", "partial") else level


def _too_small(model: MemoryModel, level: Recompute, size: MicroBatchSize, device: Device) -> ResourceError:
    config = model.config
    need = model.estimate(size, level).total_bytes / (1 - MARGIN)
    lean = "base.storage: nf4" if config.method == "lora" else "method: lora, optim.name: adamw8bit"
    what = "a whole step (full.update: backward)" if config.full.update == "backward" else "the longest sample"
    return ResourceError(
        f"{what} has {size.num_tokens:,} tokens, which need about {need / GIB:.1f} GiB with recompute: {level}, and "
        f"{device.name} may use {budget_bytes(config, device) / (1 - MARGIN) / GIB:.1f}; lower data.max_tokens, "
        f"set {lean}, or take a GPU with more memory"
    )
