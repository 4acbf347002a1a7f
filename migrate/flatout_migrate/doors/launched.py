"""What training scripts share that a launcher starts once for each rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flatout import UsageError, train
from flatout.api.commands import exit_code_of
from flatout.api.ranks import this_rank
from flatout.api.settings import Config, expand, make_config


def device() -> str:
    """Return the device: cpu if ACCELERATE_USE_CPU says so, which transformers and accelerate read too."""
    return "cpu" if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes") else "auto"


def say(text: str) -> None:
    """Print on the first rank."""
    if this_rank().is_first:
        print(text, flush=True)


def data_of(path: str, max_tokens: int, **source: Any) -> dict[str, Any]:
    """Return the `data` section for the rows of a file, folder or hub id, named as in its short form."""
    named = expand({"data": f"./{path}"})["data"]
    return {"name": named.get("name", "default"), "sources": [{"path": path, **source}], "max_tokens": max_tokens}


def with_rows_per_step(
    settings: Mapping[str, Any], overrides: Sequence[str], num_rows: int, *, per_rank: bool = False
) -> Config:
    """Return the configuration of steps with as many samples as fill `num_rows` rows of `data.max_tokens` on average.

    Other systems join samples to such rows, across which attention leaks; here samples stay apart. Raises UsageError.
    """
    from flatout.api.data import open_or_build

    config = make_config(settings, overrides, origin="flags")
    if (max_tokens := config.data.max_tokens) is None:
        raise UsageError("data.max_tokens: null: the batch is given in rows of so many tokens; set a number")
    num_rows *= max(this_rank().world, len(config.gpus or ())) if per_rank else 1
    store = open_or_build(config, say)
    samples = max(1, round(num_rows * max_tokens / float(store.lengths.mean())))
    batch = {**settings.get("batch", {}), "samples_per_step": samples}
    config = make_config({**settings, "batch": batch}, overrides, origin="flags")
    if config.batch.samples_per_step == samples:
        say(f"{num_rows:,} rows of {max_tokens:,} tokens: each step has {samples:,} samples, as many on average")
    return config


def run(make: Callable[[], Config]) -> int:
    """Train this configuration as a rank, or alone, and print what the run came to; return the exit code."""

    def train_it() -> int:
        say(repr(train(make())))
        return 0

    return exit_code_of(train_it)
