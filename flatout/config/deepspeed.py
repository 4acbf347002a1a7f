"""Merges a user's DeepSpeed JSON with flatout's settings, which fill in open entries; contradictions are errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from flatout.config.optim import OPTIMIZERS
from flatout.errors import Fix, SettingError

AUTO = "auto"
# defaults at stage 3: a bucket of 5e8 fp32 gradients, and up to 1e9 gathered bf16 weights
STAGE_3_BUFFERS_BYTES = 4 * 500_000_000 + 2 * 1_000_000_000
DEFAULT: Mapping[str, Any] = {"zero_optimization": {"stage": 2}}
# what is sent unless the JSON says otherwise
_DEFAULTS = {
    "log_level": "warning",
    "timers.throughput.enabled": False,
    "zero_optimization": {"stage": 2},
    # sums over micro-batches: the JSON may choose a narrower dtype; DeepSpeed's default is that of the weights
    "data_types.grad_accum_dtype": "fp32",
}
# DeepSpeed features that replace flatout's own, or change the planned steps: dotted name -> what to do instead
_REFUSED = {
    "activation_checkpointing": "set recompute instead",
    "autotuning": "remove it; micro-batches are planned from memory",
    "compression_training": "remove it",
    "curriculum_learning": "remove it; batch.shuffle sets the order of samples",
    "data_efficiency": "remove it; batch.shuffle sets the order of samples",
    "expert_parallel": "remove it",
    "pipeline": "remove it",
    "sequence_parallel_size": "remove it",
    "tensor_parallel": "remove it",
    "compile": "set compile instead",
    "zero_optimization.zenflow": "remove it; it delays updates past their step",
    "zero_optimization.stage3_module_granularity_threshold": "remove it; DeepSpeed's backward pass fails with it",
}
_SECTIONS = (
    "zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param", "optimizer",
    "optimizer.params", "scheduler", "scheduler.params", "bf16", "fp16", "torch_autocast", "data_types", "timers",
    "timers.throughput",
)  # fmt: skip
# flatout's optimizer and schedule take their places: nothing in them is sent
_REPLACED = {"optimizer": "flatout's optimizer", "scheduler": "flatout's schedule"}
_SCHEDULES = {"constant": ("WarmupLR",), "linear": ("WarmupDecayLR",), "cosine": ("WarmupCosineLR",)}
# a flatout.config.schema.Config; that file imports this one
Settings = Any


class Owned(NamedTuple):
    """An entry that a setting decides: the JSON may omit it, or have auto or one of `same`."""

    name: str
    ours: str
    """What decides it."""
    shown: Any
    """The setting's value, as the user wrote it."""
    same: tuple[Any, ...] = ()
    sent: Any = None
    """What DeepSpeed gets, if it gets the entry."""


def stage_of(given: Mapping[str, Any] | None) -> int:
    """Return the ZeRO stage of a JSON's content."""
    stage = (DEFAULT if given is None else given).get("zero_optimization", DEFAULT["zero_optimization"])
    return stage.get("stage", 0) if isinstance(stage, Mapping) else 0


def offloads(given: Mapping[str, Any] | None) -> bool:
    """Return whether optimizer state is kept outside the GPU."""
    return bool((_get(given or {}, "zero_optimization.offload_optimizer.device") or "none") != "none")


def check(config: Settings) -> None:
    """Raise ValueError naming each entry that contradicts a setting, before anything is read or loaded."""
    if config.strategy != "deepspeed":
        if config.deepspeed is not None:
            text = f"deepspeed needs a strategy of its own, not {config.strategy}"
            raise SettingError(text, Fix({"strategy": "deepspeed"}))
        return
    if config.sharding != type(config.sharding)():
        raise ValueError("sharding has no effect with strategy: deepspeed; set it in the DeepSpeed JSON")
    own_state = ", since it keeps fp32 weights and moments of its own"
    beside = config.lora.modules_to_save or (config.method == "lora" and config.data.added_tokens)
    against = {
        f"optim.path{own_state}": config.optim.path,
        f"optim.name: {config.optim.name}{own_state}": not OPTIMIZERS[config.optim.name].deepspeed,
        f"full.weights: bf16{own_state}": config.full.weights == "bf16",
        f"full.compute: {config.full.compute}": config.full.compute != "model",
        f"full.hidden_states: {config.full.hidden_states}": config.full.hidden_states != "fp32",
        "lora.modules_to_save and data.new_tokens in stage 3, which empties the weights that they cast; stage 2 keeps "
        "them": beside and stage_of(config.deepspeed) == 3,
    }
    if why := next((why for why, is_given in against.items() if is_given), None):
        strategy = "ddp" if OPTIMIZERS[config.optim.name].reads_whole else "fsdp"
        raise SettingError(f"strategy: deepspeed does not work with {why}", Fix({"strategy": strategy}))
    precision = config.model.precision
    if precision == "fp64":
        fixes = (Fix({"model.precision": name}) for name in ("bf16", "fp32"))
        raise SettingError("strategy: deepspeed keeps fp32 weights", *fixes)
    if precision == "auto":
        # the device's precision is not known yet, so this check takes the JSON's
        given = config.deepspeed or {}
        is_bf16 = _get(given, "bf16.enabled") is True or _get(given, "torch_autocast.enabled")
        precision = "bf16" if is_bf16 else "fp32"
    fill(config, num_ranks=1, precision=precision)


def fill(config: Settings, *, num_ranks: int, precision: str) -> dict[str, Any]:
    """Return what DeepSpeed gets: flatout's values filled in, any other `auto` left to DeepSpeed's defaults.

    `precision` is fp32 or bf16. Raises ValueError naming each entry that contradicts a setting, and both values.
    """
    given = DEFAULT if config.deepspeed is None else config.deepspeed
    # shapes first: the other checks assume that sections are objects
    if problems := list(_misshapen(given)):
        raise ValueError("; ".join(problems))
    owned = _owned(given, config, num_ranks, precision)
    if problems := list(_problems(given, [*owned, *_replaced(config)], precision)):
        raise ValueError("; ".join(problems))
    filled = {name: value for name, value in _without_auto(given).items() if name not in _REPLACED}
    values = {name: deepcopy(value) for name, value in _DEFAULTS.items() if _get(filled, name) is None}
    for name, value in {**values, **{entry.name: entry.sent for entry in owned}}.items():
        *sections, last = name.split(".")
        holder = filled
        for section in sections:
            holder = holder.setdefault(section, {})
        holder[last] = value
    return filled


def _owned(given: Mapping[str, Any], config: Settings, num_ranks: int, precision: str) -> list[Owned]:
    """Return the entries that are sent with our values."""
    optim, samples, cuts = config.optim, config.batch.samples_per_step, "batch.micro_batch_tokens"
    clip, compress = optim.max_grad_norm or 0.0, config.comm.compress
    is_bf16, autocast = precision == "bf16", bool(_get(given, "torch_autocast.enabled"))
    sent = "bf16" if compress == "bf16" else "fp32"
    sums = "the loss, divided by the step's label tokens,"
    return [
        # DeepSpeed uses these three for reports only; each rank's number of micro-batches differs from step to step
        Owned("train_batch_size", "batch.samples_per_step", samples, (samples,), num_ranks),
        Owned("train_micro_batch_size_per_gpu", cuts, None, (), 1),
        Owned("gradient_accumulation_steps", cuts, None, (), 1),
        Owned("managed_gradient_accumulation", cuts, True, (True,), True),
        Owned("gradient_clipping", "optim.max_grad_norm", optim.max_grad_norm, (clip,), clip),
        # the mean of losses that are multiplied by the number of ranks: stage 3 cannot sum
        Owned("gradient_allreduce_op", sums, "mean", ("mean",), "mean"),
        Owned("prescale_gradients", sums, False, (False,), False),
        Owned("gradient_predivide_factor", sums, 1.0, (1.0,), 1.0),
        Owned("communication_data_type", "comm.compress", compress, (sent,), sent),
        Owned("bf16.enabled", "model.precision", precision, (is_bf16,), is_bf16 and not autocast),
        Owned("fp16.enabled", "model.precision", precision, (False,), False),
        Owned("zero_allow_untested_optimizer", "optim.name", optim.name, (True,), True),
        Owned("zero_force_ds_cpu_optimizer", "optim.name", optim.name, (False,), False),
    ]


def _replaced(config: Settings) -> Iterator[Owned]:
    """Yield the entries of the sections that are not sent, and must be as our settings."""
    optim, schedule = config.optim, config.schedule
    yield Owned("optimizer.type", "optim.name", optim.name, OPTIMIZERS[optim.name].deepspeed)
    yield Owned("scheduler.type", "schedule.kind", schedule.kind, _SCHEDULES.get(schedule.kind, ()))
    for name, ours, value in (
        ("optimizer.params.lr", "optim.lr", optim.lr),
        ("optimizer.params.betas", "optim.beta1 and beta2", [optim.beta1, optim.beta2]),
        ("optimizer.params.momentum", "optim.beta1", optim.beta1),
        ("optimizer.params.eps", "optim.eps", optim.eps),
        ("optimizer.params.weight_decay", "optim.weight_decay", optim.weight_decay),
        ("optimizer.params.adam_w_mode", "optim.name: adamw", True),
        ("optimizer.params.torch_adam", "optim.name: adamw", True),
        ("scheduler.params.warmup_max_lr", "optim.lr", optim.lr),
        ("scheduler.params.warmup_min_lr", "the start of warm-up", 0),
        ("scheduler.params.warmup_num_steps", "schedule.warmup_steps", schedule.warmup_steps),
        ("scheduler.params.total_num_steps", "batch.max_steps", config.batch.max_steps),
        ("scheduler.params.warmup_type", "the warm-up", "linear"),
    ):
        yield Owned(name, ours, value, (value,))


def _misshapen(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each section that is not an object and each type that is not a string."""
    for name in _SECTIONS:
        if not isinstance(_get(given, name), Mapping | None):
            yield f"{name} is {_get(given, name)!r:.100}; expected an object, as in DeepSpeed's documentation"
    for name in ("optimizer.type", "scheduler.type"):
        if not isinstance(_get(given, name), str | None):
            yield f"{name} is {_get(given, name)!r:.100}; expected a name"


def _problems(given: Mapping[str, Any], owned: list[Owned], precision: str) -> Iterator[str]:
    stage = stage_of(given)
    if stage not in (1, 2, 3) or isinstance(stage, bool):
        yield f"zero_optimization.stage is {stage!r}; write 1, 2 or 3, or set strategy: ddp"
    for name, remedy in _REFUSED.items():
        if _get(given, name) not in (None, False, {}, 1):
            yield f"{name} is not supported; {remedy}"
    for entry in owned:
        value = _get(given, entry.name)
        # DeepSpeed knows AdamW and adamw
        is_same = value in entry.same or (entry.name == "optimizer.type" and str(value).lower() in entry.same)
        if value not in (None, AUTO) and not is_same:
            shown = f"is {entry.shown!r}" if entry.same else "sets it"
            yield f'{entry.name} is {value!r}, but {entry.ours} {shown}; write "auto", or remove it'
    yield from _unknown_params(given, {entry.name for entry in owned})
    if _get(given, "torch_autocast.enabled"):
        dtype = str(_get(given, "torch_autocast.dtype")).removeprefix("torch.")
        if precision != "bf16" or dtype not in ("bfloat16", "bf16"):
            yield f"torch_autocast.dtype is {dtype!r}, but model.precision is {precision!r}; remove it"


def _unknown_params(given: Mapping[str, Any], names: set[str]) -> Iterator[str]:
    for section, ours in _REPLACED.items():
        for name, value in (_get(given, f"{section}.params") or {}).items():
            if f"{section}.params.{name}" not in names and value != AUTO:
                yield f"{section}.params.{name} is {value!r}, but {ours} has no such setting; remove it"


def _get(content: Mapping[str, Any], name: str) -> Any:
    """Return the value at a dotted name, or None."""
    value: Any = content
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _without_auto(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy without `auto` and null entries, so that DeepSpeed's defaults apply."""
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in content.items()
        if value != AUTO and value is not None
    }
