"""transformers' TrainingArguments and TRL's SFTConfig, translated into flatout's settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout_migrate import translation as t
from flatout_migrate.translation import Became, Command, Given, RefusedError, Rule, Translation

_TABLE = t.read_table("training_arguments")
# what these systems do without being told, where flatout's default differs
TRANSFORMERS_DEFAULTS: Mapping[str, Any] = _TABLE["defaults"]
SFT_DEFAULTS: Mapping[str, Any] = {**TRANSFORMERS_DEFAULTS, **_TABLE["defaults of TRL"]}
# data sets that are not trained on
evaluated_apart = t.by_cases(_TABLE["evaluated apart"])
PACKED = "there, a packed row of several samples counts as one; raise this for as many tokens a step"
# names whose null is a value of its own
NULLABLE = frozenset({"max_length", "max_seq_length", "max_grad_norm", "max_completion_length", "save_total_limit"})
TRACKERS: Mapping[str, str] = _TABLE["trackers"]
_FILES = (".json", ".jsonl", ".csv", ".parquet", ".txt")
_FSDP: Mapping[str, Any] = _TABLE["fsdp"]


def translate(command: Command, num_gpus: int) -> Translation:
    """Translate a file of TrainingArguments."""
    table, defaults = t.rules_of("training_arguments"), TRANSFORMERS_DEFAULTS
    return t.translate(command.values, table, defaults=defaults, nullable=NULLABLE, num_gpus=num_gpus)


def samples_per_step(given: Given) -> Became:
    """Multiply the batch size of one GPU, the accumulated micro-batches and the number of GPUs."""
    sizes = [int(given.number(name, 1)) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")]
    samples = {"batch.samples_per_step": sizes[0] * sizes[1] * given.num_gpus}
    if any(given.all.get(name) for name in ("packing", "sample_packing", "neat_packing")):
        return Became(samples, PACKED, check=True)
    return Became(samples, f"{sizes[0]} x {sizes[1]} x {given.num_gpus} GPU{'s' * (given.num_gpus > 1)}")


def warmup(given: Given) -> Became:
    """Translate warmup_steps and warmup_ratio: steps win, and a number of steps below 1 is a ratio."""
    if given.all.get("lr_scheduler_type") == "constant":
        return Became({"schedule.warmup_steps": 0}, "constant has no warm-up there")
    steps = given.number("warmup_steps", 0)
    if steps < 1 and (ratio := steps or given.number("warmup_ratio", 0)):
        return Became({"schedule.warmup_ratio": ratio})
    return Became({"schedule.warmup_steps": int(steps)})


def interval(setting: str, kind_name: str, name: str, *, kind: str = "steps", fallback: str = "") -> Rule:
    """Translate a strategy (no, steps, epoch, best) and its steps, of which a number below 1 is a share of the run."""

    def rule(given: Given) -> Became:
        strategy = given.all.get(kind_name, kind)
        strategy = str(getattr(strategy, "value", strategy)).lower()
        if strategy in ("no", "false", "best"):
            best = "the best evaluated state is always kept" if strategy == "best" else ""
            return Became({setting: None} if setting.startswith("checkpoint") else {}, best)
        if strategy == "epoch":
            return Became({setting: _share_of_one_epoch(given)}, "each epoch, as a share of the run")
        if strategy != "steps":
            raise RefusedError(f"{strategy:.40} is not supported; write no, steps or epoch")
        steps = given.number(name if name in given.all or fallback not in given.all else fallback, 500)
        return Became({setting: steps if steps < 1 else int(steps)})

    return rule


def _share_of_one_epoch(given: Given) -> float | None:
    if given.number("max_steps", 0) > 0:
        raise RefusedError("epoch with max_steps: only the data tells the steps of an epoch; write a number of steps")
    epochs = given.number("num_train_epochs", 1)
    return 1 / epochs if epochs > 1 else None


def _schedule_arguments(given: Given) -> Became:
    settings: dict[str, Any] = {}
    for name, value in dict(given.value).items():
        inner = Given(name, value, {**given.all, name: value})
        if name in ("min_lr", "min_lr_rate"):
            peak = given.number("learning_rate") if name == "min_lr" else 1.0
            settings["schedule.min_lr_ratio"] = inner.number(name) / peak
        elif name != "num_cycles" or value != (1 if "restarts" in str(given.all.get("lr_scheduler_type")) else 0.5):
            raise RefusedError(f"{name}: {value!r:.40} is not supported; set schedule.kind and its settings")
    return Became(settings)


def report_to(given: Given) -> Became:
    """Translate names of trackers; the run folder and the report are always written."""
    names = [given.value] if isinstance(given.value, str) else list(given.value)
    names = [name for name in names if name not in ("none", "None")]
    unknown = [str(name) for name in names if name not in TRACKERS]
    note = f"no figures are sent to {', '.join(unknown)}; there are {', '.join(TRACKERS)}" if unknown else ""
    return Became({"track.to": [TRACKERS[name] for name in names if name in TRACKERS]}, note, check=bool(unknown))


def run_name(given: Given) -> Became:
    """Make a name that flatout allows: letters, digits, dots, dashes, at most 64."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(given.value)).strip("-._")[:64]
    return Became({"name": name}, "" if name == given.value else "letters, digits and . _ - only")


def fsdp(given: Given) -> Became:
    """Translate `fsdp` (true, or words such as full_shard) and the `fsdp_config` beside it."""
    words = set(re.findall(r"[a-z_]+", str(given.all.get("fsdp") or "").lower())) - {"auto_wrap", "false"}
    config = given.all.get("fsdp_config") or {}
    if not words:
        return Became(note="off, as here")
    if not isinstance(config, Mapping):
        raise RefusedError("a path is not read here; write the entries of fsdp_config out")
    config = {name.removeprefix("fsdp_"): value for name, value in config.items()}
    words |= {str(config["sharding_strategy"]).lower()} if config.get("sharding_strategy") else set()
    if unknown := sorted(words - {*_FSDP["words"], "offload"}) or sorted(config.keys() - {*_FSDP["config"].split()}):
        raise RefusedError(f"{unknown[0]} is not supported; set strategy=ddp, zero2, fsdp or hsdp")
    words = words & {"offload"} | {"shard_grad_op"} if config.get("reshard_after_forward") == "SHARD_GRAD_OP" else words
    strategy = next((ours for word, ours in _FSDP["words"].items() if word in words), "fsdp")
    settings: dict[str, Any] = {"strategy": strategy}
    if config.get("reshard_after_forward") is False:
        settings["sharding.reshard_after_forward"] = False
    if "offload" in words or config.get("offload_params") is True:
        settings["sharding.offload"] = True
    return Became(settings)


def deepspeed_file(given: Given) -> Became:
    """Translate the path of a DeepSpeed file; of one that is not here, the stage of ZeRO that its name tells."""
    value = given.value
    stage = re.search(r"z(?:ero)?[_-]?([0-3])", Path(str(value)).stem.lower())
    if not isinstance(value, str) or not value or stage is None or Path(value).exists():
        return t.rules_of("training_arguments")["deepspeed"](given)
    offload = {"sharding.offload": True} if "offload" in value else {}
    note = f"{value} is not here, its name says ZeRO stage {stage[1]}"
    return Became({"strategy": "ddp" if stage[1] == "0" else f"zero{stage[1]}", **offload}, note, check=True)


def held_out(given: Given) -> Became:
    """Translate a share of the rows to hold out; numbers of rows are refused."""
    if (share := given.number()) > 0.5:
        raise RefusedError(f"{share:g} rows: write the share of the data set, up to 0.5, or build a set for eval.data")
    return Became({"eval.fraction": share})


def is_hub_id(name: str) -> bool:
    """Return whether a name is that of a hub, and no file or folder."""
    is_file = Path(name).exists() or Path(name).suffix in _FILES
    return name.count("/") == 1 and not name.startswith(".") and not is_file


evaluated = interval("eval.every_steps", "eval_strategy", "eval_steps", kind="no", fallback="logging_steps")
logged = interval("log_every_steps", "logging_strategy", "logging_steps")
saved = interval("checkpoint.every_steps", "save_strategy", "save_steps")
