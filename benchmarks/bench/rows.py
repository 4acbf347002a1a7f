"""The named rows: what is measured, on which shape, with which settings; and the ratios that are asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from flatout.errors import UsageError

from .samples import CHAT, REASONING, UP_TO_2K, UP_TO_8K

LENGTHS = {"chat": CHAT, "reasoning": REASONING, "2k": UP_TO_2K, "8k": UP_TO_8K}
LengthsName = Literal["chat", "reasoning", "2k", "8k"]
SAMPLES_PER_STEP = CHAT.samples_per_group
_NAME = re.compile(r"(?P<base>[^@]+)(@(?P<gpus>[1-9]\d*)(x(?P<samples>[1-9]\d*))?)?")


@dataclass(frozen=True, slots=True)
class Row:
    """One measured configuration. `settings` are the trainer's own; ours are {"overrides": [...]}.

    The `samples_per_step` of an optimizer step are split over `num_gpus` processes. Their number is a multiple of the
    group size of `lengths`, a key of LENGTHS. `aliases` are names it had before. A row with `batches` stands for one of
    each, see `of_each_batch`. `family` is the name of the row that this one was made of.
    """

    name: str
    system: str
    shape: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    num_gpus: int = 1
    lengths: LengthsName = "chat"
    samples_per_step: int = SAMPLES_PER_STEP
    aliases: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    family: str = ""

    def of_each_batch(self) -> list[Row]:
        """This row, or with `batches` NAME-1, NAME-2, ..., whose settings have that batch."""
        if not self.batches:
            return [self]
        return [
            replace(
                self,
                name=f"{self.name}-{batch}",
                settings={**self.settings, "batch": batch},
                batches=(),
                family=self.name,
            )
            for batch in self.batches
        ]

    def with_overrides(self, overrides: Sequence[str]) -> Row:
        """This row of ours with more overrides, each in place of its own of the same setting."""
        keys = {override.partition("=")[0] for override in overrides}
        kept = [own for own in self.settings["overrides"] if own.partition("=")[0] not in keys]
        return replace(self, settings={"overrides": [*kept, *overrides]})

    @property
    def draws_weights(self) -> bool:
        """Whether flatout draws its weights in memory, so that it needs no file of them."""
        return "model.init=random" in self.settings.get("overrides", ())


@dataclass(frozen=True, slots=True)
class Target:
    """A target: `row` reaches at least `min_ratio` times the tokens/s of `peer`, or of the best of several, `NAME*`.

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


def _ours(name: str, shape: str, *overrides: str, aliases: tuple[str, ...] = (), lengths: LengthsName = "chat") -> Row:
    samples_per_step = LENGTHS[lengths].samples_per_group
    return Row(name, "flatout", shape, {"overrides": list(overrides)}, 1, lengths, samples_per_step, aliases)


_STORAGES: dict[str, list[str]] = {
    "bf16": [],
    "nf4": ["base.storage=nf4"],
    "full-8bit": ["method=full", "optim.lr=1e-5", "full.weights=bf16", "model.precision=bf16", "optim.name=adamw8bit"],
}
_ADAPTERS = ("bf16", "nf4")


def _on_one_small_gpu() -> Iterator[Row]:
    """Rows whose other settings are `auto`: how they fit depends on the GPU, or on --cap."""
    storages = {
        **dict.fromkeys(("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"), tuple(_STORAGES)),
        **dict.fromkeys(("qwen3-8b", "qwen3-14b", "llama-3.1-8b"), _ADAPTERS),
        "qwen3-32b": ("nf4",),
    }
    lengths: tuple[LengthsName, ...] = ("2k", "8k")
    for shape, names in storages.items():
        size = "llama-8b" if shape == "llama-3.1-8b" else shape.removeprefix("qwen3-")
        # few disks have room for the weights of 32B
        drawn = ["model.init=random"] if size == "32b" else []
        for name, length in product(names, lengths):
            yield _ours(f"{size}-{name}-{length}", shape, *_STORAGES[name], *drawn, lengths=length)


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
    _ours("llama-8b-reasoning-bf16", "llama-3.1-8b", lengths="reasoning"),
    _ours("llama-8b-reasoning-fp8", "llama-3.1-8b", "base.storage=fp8", lengths="reasoning"),
    _ours("gemma-1b-bf16", "gemma-3-1b", "batch.micro_batch_tokens=32768", "recompute=none"),
    *_on_one_small_gpu(),
)


def read_peers(folder: Path) -> Peers:
    """The rows of `folder/rows.json`. Raises UsageError for a file that is missing or malformed."""
    path = folder / "rows.json"
    try:
        peers = TypeAdapter(Peers).validate_json(path.read_bytes(), strict=False)
    except (OSError, ValidationError) as error:
        raise UsageError(f"--peers: {path} cannot be used: {error}") from error
    return replace(peers, rows=tuple(one for row in peers.rows for one in row.of_each_batch()))


def read_parity(path: Path) -> dict[str, bool]:
    """Whether each mode passed the parity gate, from the file that benchmarks/parity.py wrote. Raises UsageError."""
    try:
        return TypeAdapter(dict[str, bool]).validate_python(json.loads(path.read_bytes())["green"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--parity: {path} cannot be used: {error!r}") from error


def choose(known: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """The rows of these names, in the order asked for: NAME, NAME@GPUS or NAME@GPUSxSAMPLES, such as 8b-bf16@4x128.

    NAME* stands for all rows whose names begin so. Raises UsageError naming the known ones, or when a step's samples
    are no multiple of the group size and the GPUs.
    """
    by_name = {name: row for row in known for name in (row.name, *row.aliases)}
    begin_so = {
        name: [row.name for row in known if row.name.startswith(name[:-1])] for name in names if name.endswith("*")
    }
    chosen = []
    for name in [one for asked in names for one in begin_so.get(asked) or [asked]]:
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


def sweep(rows: Sequence[Row], text: str) -> list[Row]:
    """The rows, each of ours followed by one for every combination of the settings `A=1,2;B=3,4`: NAME[A=1,B=3].

    Raises UsageError for text without settings, and without a row of ours.
    """
    settings = []
    for part in text.split(";"):
        key, equals, values = part.strip().partition("=")
        if not (key and equals and values):
            raise UsageError(f"--sweep: {part!r} is no setting with values; expected such as recompute=none,full")
        # the commas of a list are its own
        settings.append([f"{key}={value}" for value in re.split(r",(?![^\[{]*[\]}])", values)])
    if not any(row.system == "flatout" for row in rows):
        raise UsageError("--sweep varies settings of flatout; name one of its rows in --rows")
    found = []
    for row in rows:
        found.append(row)
        if row.system == "flatout":
            found += [
                replace(row.with_overrides(chosen), name=f"{row.name}[{','.join(chosen)}]", family=row.name)
                for chosen in product(*settings)
            ]
    return found


def mode_of(row: Row) -> str:
    """The arithmetic that the parity gate speaks of, one of its modes; the peer's own name for a peer."""
    if row.system != "flatout":
        return row.system
    asked = dict(override.split("=", 1) for override in row.settings["overrides"])
    if asked.get("method") == "full":
        return "full"
    storage = asked.get("base.storage", "model")
    suffix = "-fp8" if storage == "nf4" and asked.get("base.compute") == "fp8" else ""
    suffix = "-fp8-backward" if asked.get("base.backward") == "fp8" else suffix
    return ("bf16" if storage == "model" else storage) + suffix
