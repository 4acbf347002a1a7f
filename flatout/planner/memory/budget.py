"""Choose the tokens of a micro-batch, the recompute level and the strategy from sizes and available memory."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

import numpy as np

from flatout.config.schema import Recompute
from flatout.errors import Fix, ResourceError
from flatout.io.host_memory import available_host_bytes
from flatout.planner.cost import make_cost
from flatout.planner.devices import GIB, Device
from flatout.planner.host_bound import HOST_S_PER_LAYER, reachable_flops_per_s
from flatout.planner.memory.estimate import MemoryModel, Precision
from flatout.planner.memory.sizes import Correction, MemoryEstimate, MicroBatchSize
from flatout.planner.parallel_layout import SINGLE_RANK, ParallelLayout, resolve_layout
from flatout.planner.settings import PlanSettings
from flatout.planner.shape import ModelShape
from flatout.planner.steps.training_plan import NUM_STEPS_SEEN, TrainingPlan

# without a GPU: enough for efficient matrix products; fewer where memory is short
CPU_MICRO_BATCH_TOKENS, CPU_SMALLER = 8192, (4096, 2048, 1024)
SMALLER = "set batch.micro_batch_tokens=2048, recompute=full or data.max_tokens=1024"
# computes in fp32, and without the compiler
CPU = Device("the CPU", 0, has_bf16=False, has_fp8=False)
# a pass over gathered weights takes as long as this many tokens at least; strategies are compared with such passes
BUSY_TOKENS = 8192
# What a pass costs besides its tokens, as a number of tokens, and each time that it moves all weights beside its
# products: against 4 FLOPs a weight and token, that takes as long as 100 to 170 tokens on GPUs of 2020 to 2025. On an
# H200, a pass of Qwen3-8B in NF4 costs 330 tokens in all: 17,357 tokens/s in 2.7 passes a step and 15,483 in 9.7. With
# experts, of which a token computes few, both cost as many times more as there are weights for each computed one
PASS_TOKENS, MOVING_TOKENS = 100, 120
# what a level costs besides the layers' second forward pass, as a share of the rest. Qwen3-8B in bf16 on H200s has
# 17,362 tokens/s with `budget`, and 17,874 without in another session
LEVEL_SHARES = {"none": 0.0, "selective": 0.015, "budget": 0.035, "full": 0.0, "offload": 0.05}
# share of the memory reserved for allocator waste, other kernels' workspaces and estimation error
MARGIN = 0.06
# gathered weights that are kept may cost this many times as many passes
MORE_PASSES = 1.125
# sizes are multiples of this, so that a few MB more or less of free memory do not change the plan
TOKENS_MULTIPLE = 512
LONGEST_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """The counts of a run's tokens that are computed: without shared prefixes, and with the padding of rows."""

    longest_sample: int
    """That of the largest unit, where units have several samples."""
    rank_step_tokens: int
    """The most of one step on one rank."""
    label_share: float
    mean_length: float
    largest_row_pass: int | None = None
    """The largest pass of padded rows without a budget; None: packed."""
    unit_samples: int = 1
    """The most samples of a unit."""

    @property
    def largest_pass_tokens(self) -> int:
        """The tokens of the largest pass without a budget: packed, a rank's whole step."""
        return self.largest_row_pass or self.rank_step_tokens

    @classmethod
    def of(cls, plan: TrainingPlan) -> TokenStatistics:
        """Take the statistics of a plan with any token budget; looks for the largest step among `NUM_STEPS_SEEN`."""
        num_tokens, longest = int(plan.samples.lengths.sum()), int(plan.part_tokens.max())
        ranks = [
            [batch.num_padded_tokens for batch in rank]
            for step in plan.sampled_steps(NUM_STEPS_SEEN)
            for rank in step.by_rank
        ]
        largest = max(map(sum, ranks))
        row_pass = max(longest, *(max(rank, default=0) for rank in ranks)) if plan.batch_layout.is_padded else None
        num_computed = num_tokens * (1.0 - plan.shared_share)
        label_share = int(plan.samples.num_label_tokens.sum()) / num_computed
        # the sampled steps may not include the longest sample
        unit_samples = 1 if plan.unit_offsets is None else int(np.diff(plan.unit_offsets).max())
        mean_length = num_computed / len(plan.samples)
        return cls(longest, max(largest, longest), label_share, mean_length, row_pass, unit_samples)

    def micro_batch(self, num_tokens: int) -> MicroBatchSize:
        """Return the size of a typical micro-batch of `num_tokens` tokens."""
        num_documents = -(-num_tokens // max(1, int(self.mean_length)))
        return MicroBatchSize(num_tokens, int(num_tokens * self.label_share), num_documents)


@dataclass(frozen=True, slots=True)
class MemoryDecision:
    """The chosen settings and the reason."""

    micro_batch_tokens: int
    recompute: Recompute
    reason: str
    model: MemoryModel | None = None
    budget_bytes: int | None = None
    """None without a GPU, as the model."""
    accumulates: bool = True
    """Whether some rank has several micro-batches in a step."""

    @property
    def longest_pass_tokens(self) -> int:
        """The most tokens of a pass: a given or, without a GPU, the chosen micro-batch; otherwise what fits in memory.

        A run of short steps has micro-batches far below what fits. Ranks that share micro-batches do not share passes
        that answer prompts, so a GPU's limit is that of its share.
        """
        model, budget = self.model, self.budget_bytes
        if model is None or budget is None:
            return self.micro_batch_tokens
        if model.settings.batch.micro_batch_tokens:
            return self.micro_batch_tokens // model.parallel_layout.context_ranks

        def exceeds(count: int) -> bool:
            size = MicroBatchSize(count * model.parallel_layout.context_ranks, num_label_tokens=1, num_documents=1)
            return model.estimate(size, self.recompute, accumulates=self.accumulates).total_bytes > budget

        own_tokens = self.micro_batch_tokens // model.parallel_layout.context_ranks
        return max(own_tokens, bisect_left(range(LONGEST_TOKENS), True, key=exceeds) - 1)

    def estimate(self, size: MicroBatchSize) -> MemoryEstimate | None:
        """Estimate the peak with micro-batches of this size; None without a GPU."""
        return self.model.estimate(size, self.recompute, accumulates=self.accumulates) if self.model else None


def memory_model(
    settings: PlanSettings, shape: ModelShape, device: Device, parallel_layout: ParallelLayout = SINGLE_RANK
) -> MemoryModel:
    """Return the memory model of this run on one of its GPUs, with `auto` precision and compilation resolved."""
    chosen = settings.precision
    precision: Precision = ("bf16" if device.has_bf16 else "fp32") if chosen == "auto" else chosen
    half = precision in ("bf16", "fp16")
    compiled = settings.compiles and half
    compiled = compiled and (not shape.has_experts or (shape.groups_experts and settings.groups_experts))
    compiled = compiled and parallel_layout.compiles
    own_shape = shape.on_one_of(settings.expert_ranks)
    return MemoryModel(
        settings, own_shape, precision, compiled, parallel_layout,
        corrections=device.corrections, on_cpu=device is CPU,
    )  # fmt: skip


def choose_micro_batch(
    settings: PlanSettings,
    shape: ModelShape,
    tokens: TokenStatistics,
    device: Device | None,
    parallel_layout: ParallelLayout = SINGLE_RANK,
) -> MemoryDecision:
    """Choose the recompute level at which a step is fastest, with the largest micro-batch that fits at it.

    Of two that cost the same by `step_tokens`, the lighter. If the longest sample (or a given micro-batch) fits at
    none, the heaviest is used. Given settings are kept; on the CPU see `_choose_on_cpu`. Raises ResourceError if the
    longest sample does not fit at the heaviest level.
    """
    configured = settings.batch.micro_batch_tokens
    if device is None:
        return _choose_on_cpu(settings, shape, tokens, parallel_layout)
    if settings.computes_in_fp8 and not device.has_fp8:
        raise ResourceError(
            f"{_fp8_setting(settings)} needs a GPU with float8 arithmetic (compute capability 8.9 or newer), which "
            f"{device.name} does not have",
            [Fix({}, "leave it out")],
        )
    model = memory_model(settings, shape, device, parallel_layout)
    choices = [_decide(model, level, tokens, device) for level in _levels(settings, shape, compiled=model.compiled)]
    fitting = [choice for choice in choices if choice[1] >= choice[2]]
    decision, fit_tokens, _ = min(
        fitting, key=lambda choice: step_tokens(choice[0], tokens, device), default=choices[-1]
    )
    level, whole_step = decision.recompute, settings.full.update == "backward"
    num_tokens = tokens.rank_step_tokens if whole_step else tokens.longest_sample
    if fit_tokens < num_tokens and not configured:
        need = model.estimate(tokens.micro_batch(num_tokens), level).total_bytes / (1 - MARGIN)
        if settings.method == "lora":
            fixes = [Fix({"base.storage": "nf4"})]
        else:
            # a class of a person's own is named by optim.path
            own = {} if settings.optimizer.make else {"optim.path": None}
            fixes = [Fix({"method": "lora"})]
            fixes += [Fix({**own, "optim.name": "adamw8bit"})] * settings.optimizer.outgrows_8_bits
        single = "the longest sample" if tokens.unit_samples == 1 else "the largest unit"
        what = "a whole step (full.update=backward)" if whole_step else single
        if settings.precision == "auto" and model.precision == "fp32":
            half = replace(settings, precision="fp16")
            size = memory_model(half, shape, device, parallel_layout).estimate(tokens.micro_batch(num_tokens), level)
            fixes.insert(0, Fix({"model.precision": "fp16"}, f"{size.total_bytes / (1 - MARGIN) / GIB:.1f} GiB"))
        fixes += [Fix({"strategy": "fsdp"}, "shards its state over several GPUs")] * (not parallel_layout.shards_state)
        share = "" if whole_step else ", or share samples among ranks (context.parallel)"
        has = budget_bytes(settings, device) / (1 - MARGIN)
        raise ResourceError(
            f"{what} has {num_tokens:,} tokens, which need about {need / GIB:.1f} GiB with recompute={level}; "
            f"{device.name} has {has / GIB:.1f}",
            [*fixes, Fix({}, f"lower data.max_tokens{share}")],
        )
    return decision


def cpu_budget(settings: PlanSettings, *, is_alone: bool) -> int | None:
    """Return the bytes that a process on the CPU may use: `memory`, else what is free; None if neither is known.

    What is free may differ between ranks, which must plan alike, so it only counts for a process that `is_alone`.
    """
    free = available_host_bytes() if is_alone else None
    given = None if settings.memory == "auto" else int(settings.memory * GIB)
    return min((one for one in (free, given) if one is not None), default=None)


def _choose_on_cpu(
    settings: PlanSettings, shape: ModelShape, tokens: TokenStatistics, layout: ParallelLayout
) -> MemoryDecision:
    """Choose 8,192 tokens (or the longest sample) without recompute; less, then with recompute, if memory is short.

    If nothing fits, the smallest is taken, as the estimate may be too high. Raises ResourceError if that is more than
    `memory`.
    """
    configured, levels = settings.batch.micro_batch_tokens, _levels(settings, shape, compiled=False)
    levels = tuple(level for level in levels if level != "offload") or levels
    most = configured or max(CPU_MICRO_BATCH_TOKENS, tokens.longest_sample)
    counts = [most] if configured else [most, *(max(count, tokens.longest_sample) for count in CPU_SMALLER)]
    model, is_alone = memory_model(settings, shape, CPU, layout), layout.strategy == "single"
    budget = cpu_budget(settings, is_alone=is_alone)

    def needed(level: Recompute, count: int) -> int:
        size = tokens.micro_batch(min(count, tokens.largest_pass_tokens))
        return model.estimate(size, level, accumulates=count < tokens.rank_step_tokens).total_bytes

    choices = [(level, count) for level in levels for count in dict.fromkeys(counts)]
    fitting = [choice for choice in choices if budget is None or needed(*choice) <= budget]
    level, count = (fitting or choices[-1:])[0]
    reason = f"{count:,} tokens per micro-batch, recompute {model.describe(level)}: no GPU"
    if budget is not None and (level, count) != choices[0]:
        reason += f"; this takes about {needed(level, count) / GIB:.1f} GiB of {budget / GIB:.1f}"
    if settings.memory != "auto" and needed(level, count) > settings.memory * GIB:
        gib = math.ceil(10 * needed(level, count) / GIB) / 10
        raise ResourceError(
            f"memory is {settings.memory:g}, but this run takes about {gib:g} GiB on the CPU "
            f"at {count:,} tokens a pass",
            [Fix({"memory": gib}, "or lower data.max_tokens")],
        )
    return MemoryDecision(count, level, reason)


def _fp8_setting(settings: PlanSettings) -> str:
    if settings.method == "full":
        return f"full.compute: {settings.full.compute}"
    if settings.base.backward == "fp8":
        return "base.backward: fp8"
    return "base.storage: fp8" if settings.base.storage == "fp8" else "base.compute: fp8"


def spend_spare_memory(
    decision: MemoryDecision, settings: PlanSettings, tokens: TokenStatistics, device: Device | None, plan: TrainingPlan
) -> MemoryDecision:
    """Keep all gathered weights of sharded full fine-tuning until the last backward pass of a step if memory is spare.

    It is if the recompute level stays the same, micro-batches still keep the GPU busy, and the smaller token budget
    makes the micro-batches of `plan` (laid out by `decision`) at most `MORE_PASSES` times as many.
    """
    model = decision.model
    if model is None or device is None:
        return decision
    layout = model.parallel_layout
    gathers_twice = settings.method == "full" and layout.shards_weights and layout.reshard_after_forward
    if not gathers_twice or settings.sharding.reshard_after_forward != "auto":
        return decision
    other = replace(model, parallel_layout=replace(layout, reshard_after_forward=False))

    def num_micro_batches(plan: TrainingPlan) -> int:
        return sum(len(rank) for step in plan.sampled_steps(NUM_STEPS_SEEN) for rank in step.by_rank)

    other_layout, fit_tokens, _ = _decide(other, decision.recompute, tokens, device)
    enough_tokens = min(tokens.largest_pass_tokens, max(BUSY_TOKENS * settings.context_ranks, tokens.longest_sample))
    cut = plan.with_layout(
        other_layout.micro_batch_tokens,
        plan.batch_layout.cost,
        lockstep=plan.batch_layout.lockstep,
        expert_ranks=plan.batch_layout.expert_ranks,
    )
    if fit_tokens >= enough_tokens and num_micro_batches(cut) <= MORE_PASSES * num_micro_batches(plan):
        return replace(other_layout, reason=f"{other_layout.reason}; gathered weights are kept within a step")
    return decision


def _decide(
    model: MemoryModel, level: Recompute, tokens: TokenStatistics, device: Device
) -> tuple[MemoryDecision, int, int]:
    """Return the decision at one recompute level, the tokens that fit, and how many must fit."""
    settings, configured = model.settings, model.settings.batch.micro_batch_tokens
    enough_tokens = most_tokens = min(configured or tokens.largest_pass_tokens, tokens.largest_pass_tokens)
    if not configured and settings.full.update == "step":
        enough_tokens = min(most_tokens, tokens.longest_sample)
    fit_tokens = usable_tokens = largest_fit(model, level, tokens, device, most_tokens)
    if enough_tokens < most_tokens:
        usable_tokens = min(usable_tokens, max(enough_tokens, _indexed_tokens(model)))
    num_tokens = configured or max(usable_tokens, tokens.longest_sample)
    budget = budget_bytes(settings, device)
    reason = (
        f"{num_tokens:,} tokens per micro-batch, recompute {model.describe(level)}: {budget / GIB:.1f} GiB of "
        f"{device.name} hold {fit_tokens:,} tokens, a step has at most {tokens.rank_step_tokens:,} per rank"
    )
    if usable_tokens < fit_tokens:
        reason += "; tensors of more tokens would need 64-bit indices"
    if (measured := model.correction_of(level)) != Correction():
        reason += f"; measured passes take {measured}"
    if settings.precision == "auto" and not device.has_bf16:
        reason += "; in fp32, as it has no bf16: model.precision=fp16 takes about half of the memory and is faster"
    if level == "offload":
        reason += f"; {model.inputs_bytes(num_tokens) / GIB:.1f} GiB of layer inputs are kept in host memory"
    accumulates = num_tokens < tokens.rank_step_tokens
    return MemoryDecision(num_tokens, level, reason, model, budget, accumulates), usable_tokens, enough_tokens


def _indexed_tokens(model: MemoryModel) -> int:
    """Return the most tokens of a compiled micro-batch whose widest tensor (gate and up) has fewer than 2^31 values.

    Larger tensors need 64-bit indices: the compiler makes slower kernels for them in the first step that has one.
    """
    widest = max(layer.mlp_elements * 2 // 3 for layer in model.shape.layers)
    tokens = (2**31 - 1) // max(widest, model.shape.hidden_size) // TOKENS_MULTIPLE * TOKENS_MULTIPLE
    return tokens * model.settings.context_ranks if model.compiled else LONGEST_TOKENS


def choose_parallel_layout(
    settings: PlanSettings,
    shape: ModelShape,
    tokens: TokenStatistics,
    device: Device | None,
    *,
    num_ranks: int,
    num_nodes: int,
) -> ParallelLayout:
    """Choose the strategy as requested, or with `auto` by whether a GPU fits all state.

    `auto` is ddp if a GPU fits all state and a busy micro-batch without `offload`; otherwise hsdp with one replica per
    node, or fsdp on one node. Raises UsageError like `resolve_layout`.
    """
    ranks = {"num_ranks": num_ranks, "num_nodes": num_nodes}
    if settings.strategy != "auto" or num_ranks == 1:
        asked = "single" if settings.strategy == "auto" else settings.strategy
        return resolve_layout(settings, asked, **ranks, why="as configured")
    if device is None:
        return resolve_layout(settings, "ddp", **ranks, why="no GPU whose memory limits it")
    model = memory_model(settings, shape, device, replace(SINGLE_RANK, context_ranks=settings.context_ranks))
    busy_tokens = min(tokens.largest_pass_tokens, max(BUSY_TOKENS * settings.context_ranks, tokens.longest_sample))
    state = model.estimate(MicroBatchSize(0, 0, 0), "full")
    facts = f"weights, gradients and optimizer take {state.state_bytes / GIB:.1f} GiB"
    work = f"{busy_tokens:,} tokens on {device.name}"
    if largest_fit(model, "full", tokens, device, busy_tokens) >= busy_tokens:
        return resolve_layout(settings, "ddp", **ranks, why=f"{facts}, which fits with {work}")
    if why := settings.reason_against_sharding:
        cannot = f"{facts}, which does not fit with {work}, but sharding does not work with {why}"
        return resolve_layout(settings, "ddp", **ranks, why=cannot)
    even = num_nodes > 1 and num_ranks > num_nodes and settings.expert_ranks == 1
    return resolve_layout(settings, "hsdp" if even else "fsdp", **ranks, why=f"{facts}, which does not fit with {work}")


def budget_bytes(settings: PlanSettings, device: Device) -> int:
    """Return the bytes that tensors may use: the device's memory, limited by `memory`, less the margin."""
    limit = device.memory_bytes if settings.memory == "auto" else min(device.memory_bytes, int(settings.memory * GIB))
    return int(limit * (1 - MARGIN))


def largest_fit(model: MemoryModel, recompute: Recompute, tokens: TokenStatistics, device: Device, limit: int) -> int:
    """Return the most tokens of a micro-batch, up to `limit`, whose estimate is within the budget; 0 if none is."""
    budget = budget_bytes(model.settings, device)

    def fits(count: int) -> bool:
        accumulates = count < tokens.rank_step_tokens
        return model.estimate(tokens.micro_batch(count), recompute, accumulates=accumulates).total_bytes <= budget

    # a whole step at once may need less than several micro-batches, which accumulate gradients
    if fits(limit):
        return limit
    size = bisect_left(range(1, limit), True, key=lambda count: not fits(count))
    return max(size // TOKENS_MULTIPLE * TOKENS_MULTIPLE, min(size, tokens.longest_sample))


def longest_document_tokens(
    settings: PlanSettings, shape: ModelShape, device: Device, label_share: float, layout: ParallelLayout = SINGLE_RANK
) -> int:
    """Return the longest single document that this GPU could train on, at the heaviest allowed recompute level."""
    model = memory_model(settings, shape, device, layout)
    tokens = TokenStatistics(LONGEST_TOKENS, LONGEST_TOKENS, label_share, float(LONGEST_TOKENS))
    heaviest = _levels(settings, shape, compiled=model.compiled)[-1]
    return largest_fit(model, heaviest, tokens, device, LONGEST_TOKENS)


def step_tokens(decision: MemoryDecision, tokens: TokenStatistics, device: Device) -> float:
    """Return how many tokens without recompute take as long as a step, in which passes cost something themselves."""
    model, level = decision.model, decision.recompute
    assert model is not None
    settings, shape = model.settings, model.shape
    again = shape.num_recomputed(level) / shape.num_layers
    # kept layers beside others that recompute are as with `budget`
    share = LEVEL_SHARES["budget"] * (1 - again) * model.compiled if isinstance(level, int) else LEVEL_SHARES[level]
    # FLOPs of a weight and token: 2 in a forward pass, 6 in training, 4 where weights have no gradients
    share += again * 2 / (6 if settings.method == "full" else 4)
    # a pass adds gradients of all weights to those of other passes, or dequantizes the weights for each product
    moves = 2.0 if settings.method == "full" else 2 + again if settings.base.storage == "nf4" else 0.0
    num_tokens = pass_tokens = float(tokens.rank_step_tokens)
    if decision.micro_batch_tokens < num_tokens:
        # samples stay whole, so passes are less full by half of one
        pass_tokens = max(decision.micro_batch_tokens - tokens.mean_length / 2, decision.micro_batch_tokens / 2)
    linears = (linear for layer in shape.layers for linear in (*layer.linears, *layer.experts))
    num_weights = sum(linear.num_experts * linear.num_weights for linear in linears)
    per_used = num_weights / sum(layer.num_active_weights for layer in shape.layers)
    gpu_tokens = pass_tokens * (1 + share) + per_used * (PASS_TOKENS + moves * MOVING_TOKENS)
    if model.parallel_layout.shards_weights:
        gpu_tokens = max(gpu_tokens, BUSY_TOKENS)
    records = level in ("none", "selective") or (level != "offload" and not shape.has_experts)
    if records and settings.may_record_graphs and model.compiled and not model.parallel_layout.lockstep:
        return num_tokens / pass_tokens * gpu_tokens
    # a pass takes no less than the host needs to launch its kernels
    length = tokens.mean_length
    token_s = float(make_cost(settings, shape).flops(length, length * tokens.label_share)) / length
    token_s /= reachable_flops_per_s(device.name, fp8=settings.computes_in_fp8)
    return num_tokens / pass_tokens * max(gpu_tokens, shape.num_layers * HOST_S_PER_LAYER / token_s)


def _levels(settings: PlanSettings, shape: ModelShape, *, compiled: bool) -> tuple[Recompute, ...]:
    """Return the levels to try, lightest first; `selective` and `budget` need compiled layers."""
    asked = settings.recompute
    if asked == "auto":
        partial = ("selective", "budget") if compiled else ()
        return ("none", *partial, *range(1, shape.num_layers), "full", "offload")
    if isinstance(asked, int):
        return (asked if asked < shape.num_layers else "full",)
    return ("full" if asked in ("selective", "budget") and not compiled else asked,)
