"""The named rows: what is measured, on which shape, with which settings; and the ratios that are asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from flatout.errors import UsageError

from .samples import CHAT, REASONING

LENGTHS = {"chat": CHAT, "reasoning": REASONING}
SAMPLES_PER_STEP = CHAT.samples_per_group
_NAME = re.compile(r"(?P<base>[^@]+)(@(?P<gpus>[1-9]\d*)(x(?P<samples>[1-9]\d*))?)?")


@dataclass(frozen=True, slots=True)
class Row:
    """One measured configuration. `settings` are the trainer's own; ours are {"overrides": [...]}.

    The `samples_per_step` of an optimizer step are split over `num_gpus` processes. Their number is a multiple of the
    group size of `lengths`, a key of LENGTHS. `aliases` are names it had before.
    """

    name: str
    system: str
    shape: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    num_gpus: int = 1
    lengths: Literal["chat", "reasoning"] = "chat"
    samples_per_step: int = SAMPLES_PER_STEP
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """A target: `row` reaches at least `min_ratio` times the tokens/s of `peer`.

    `min_tokens_per_s` is a floor of its own, `max_gib` a ceiling on the peak; null sets none.
    """

    row: str
    peer: str
    min_ratio: float
    min_tokens_per_s: float | None = None
    max_gib: float | None = None


@dataclass(frozen=True, slots=True)
class Peers:
    """Rows of other trainers, from `rows.json` of a folder that also holds the program which runs them."""

    trainer: str
    rows: tuple[Row, ...]
    targets: tuple[Target, ...] = ()


def _ours(name: str, shape: str, *overrides: str, aliases: tuple[str, ...] = ()) -> Row:
    return Row(name, "flatout", shape, {"overrides": list(overrides)}, aliases=aliases)


def _reasoning(name: str, shape: str, *overrides: str) -> Row:
    return replace(_ours(name, shape, *overrides), lengths="reasoning", samples_per_step=REASONING.samples_per_group)


_EXPERTS = "lora.targets=[q_proj,k_proj,v_proj,o_proj,gate_up_proj,down_proj]"

OURS = (
    _ours("tiny", "tiny", "batch.micro_batch_tokens=8192"),
    _ours("8b-auto", "qwen3-8b"),
    _ours("8b-bf16", "qwen3-8b", "batch.micro_batch_tokens=24000", "recompute=none"),
    _ours(
        "8b-bf16-fp8-backward",
        "qwen3-8b",
        *("base.backward=fp8", "batch.micro_batch_tokens=24000", "recompute=none"),
    ),
    _ours("8b-fp8", "qwen3-8b", "base.storage=fp8", "batch.micro_batch_tokens=24000", "recompute=none"),
    _ours("8b-nf4", "qwen3-8b", "base.storage=nf4", "batch.micro_batch_tokens=24000", "recompute=none"),
    _ours(
        "8b-nf4-fp8",
        "qwen3-8b",
        *("base.storage=nf4", "base.compute=fp8", "batch.micro_batch_tokens=24000", "recompute=none"),
    ),
    _ours(
        "8b-nf4-6gib",
        "qwen3-8b",
        *("base.storage=nf4", "batch.micro_batch_tokens=2048", "recompute=offload"),
        aliases=("8b-lean",),
    ),
    # 12 of 48 layers, which every trainer can load from a disk of 64 GB
    _ours("30b-a3b-12l-bf16", "qwen3-30b-a3b-12-layers", "batch.micro_batch_tokens=24000", _EXPERTS),
    _ours("30b-a3b-12l-fp8", "qwen3-30b-a3b-12-layers", "base.storage=fp8", "batch.micro_batch_tokens=24000", _EXPERTS),
    _ours("0.6b-bf16", "qwen3-0.6b", "batch.micro_batch_tokens=32768", "recompute=none"),
    _ours("0.6b-auto", "qwen3-0.6b"),
    _ours("llama-1b-bf16", "llama-3.2-1b", "batch.micro_batch_tokens=32768", "recompute=none"),
    _reasoning("llama-8b-reasoning-bf16", "llama-3.1-8b"),
    _reasoning("llama-8b-reasoning-fp8", "llama-3.1-8b", "base.storage=fp8"),
    _ours("gemma-1b-bf16", "gemma-3-1b", "batch.micro_batch_tokens=32768", "recompute=none"),
)


def read_peers(folder: Path) -> Peers:
    """The rows of `folder/rows.json`. Raises UsageError for a file that is missing or malformed."""
    path = folder / "rows.json"
    try:
        return TypeAdapter(Peers).validate_json(path.read_bytes(), strict=False)
    except (OSError, ValidationError) as error:
        raise UsageError(f"--peers: {path} cannot be used: {error}") from error


def read_parity(path: Path) -> dict[str, bool]:
    """Whether each mode passed the parity gate, from the file that benchmarks/parity.py wrote. Raises UsageError."""
    try:
        return TypeAdapter(dict[str, bool]).validate_python(json.loads(path.read_bytes())["green"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--parity: {path} cannot be used: {error!r}") from error


def choose(known: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """The rows of these names, in the order asked for: NAME, NAME@GPUS or NAME@GPUSxSAMPLES, such as 8b-bf16@4x128.

    Raises UsageError naming the known ones, or when a step's samples are no multiple of the group size and the GPUs.
    """
    by_name = {name: row for row in known for name in (row.name, *row.aliases)}
    chosen = []
    for name in names:
        matched = _NAME.fullmatch(name)
        if matched is None or matched["base"] not in by_name:
            raise UsageError(f"--rows: no row {name!r}; there are {', '.join(row.name for row in known)}")
        row = by_name[matched["base"]]
        num_gpus, num_samples = int(matched["gpus"] or 1), int(matched["samples"] or row.samples_per_step)
        per_group = LENGTHS[row.lengths].samples_per_group
        if num_samples % per_group or num_samples % num_gpus:
            raise UsageError(
                f"--rows: {name} asks for {num_samples} samples a step on {num_gpus} GPUs; take a multiple of "
                f"{per_group} that is divisible by the number of GPUs"
            )
        full_name = row.name + name.removeprefix(matched["base"])
        chosen.append(replace(row, name=full_name, num_gpus=num_gpus, samples_per_step=num_samples))
    return chosen


def mode_of(row: Row) -> str:
    """The arithmetic that the parity gate speaks of, one of its modes; the peer's own name for a peer."""
    if row.system != "flatout":
        return row.system
    asked = dict(override.split("=", 1) for override in row.settings["overrides"])
    storage = asked.get("base.storage", "model")
    suffix = "-fp8" if storage == "nf4" and asked.get("base.compute") == "fp8" else ""
    suffix = "-fp8-backward" if asked.get("base.backward") == "fp8" else suffix
    return ("bf16" if storage == "model" else storage) + suffix
