"""What training scripts share that a launcher starts once for each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flatout.api.start import train
from flatout.cli.main import exit_code_of
from flatout.config.data import DataConfig
from flatout.config.read import make_config
from flatout.config.schema import Config
from flatout.environment import environment, set_environment
from flatout.errors import UsageError
from flatout.launch.launch_mode import slurm_rank
from flatout.parallel.rank import Rank

OVERRIDES_HELP = "settings of flatout, which replace those of the flags"


def device() -> str:
    """Return the device: cpu if ACCELERATE_USE_CPU says so, which transformers and accelerate read too."""
    return "cpu" if environment().get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes") else "auto"


def say(text: str) -> None:
    """Print on the first rank."""
    if Rank.from_env().is_first:
        print(text, flush=True)


def data_of(path: str, max_tokens: int, **source: Any) -> dict[str, Any]:
    """Return the `data` section for the rows of a file, folder or hub id, named as in its short form."""
    named = DataConfig.long_form(f"./{path}")
    return {"name": named.get("name", "default"), "sources": [{"path": path, **source}], "max_tokens": max_tokens}


def with_rows_per_step(
    settings: Mapping[str, Any], overrides: Sequence[str], num_rows: int, *, per_rank: bool = False
) -> Config:
    """Return the configuration of steps with as many samples as fill `num_rows` rows of `data.max_tokens` on average.

    Other systems join samples to such rows, across which attention leaks; here samples stay apart. Raises UsageError.
    """
    from flatout.data.build import open_or_build

    config = make_config(settings, overrides, origin="flags")
    if (max_tokens := config.data.max_tokens) is None:
        raise UsageError("data.max_tokens: null: the batch is given in rows of so many tokens; set a number")
    num_rows *= max(Rank.from_env().world, len(config.gpus or ())) if per_rank else 1
    store = open_or_build(config.data, config.model.name, log=say)
    samples = max(1, round(num_rows * max_tokens / float(store.lengths.mean())))
    batch = {**settings.get("batch", {}), "samples_per_step": samples}
    config = make_config({**settings, "batch": batch}, overrides, origin="flags")
    if config.batch.samples_per_step == samples:
        say(f"{num_rows:,} rows of {max_tokens:,} tokens: each step has {samples:,} samples, as many on average")
    return config


def run(make: Callable[[], Config]) -> int:
    """Train this configuration as a rank, or alone, and print what the run came to; return the exit code."""

    def train_it() -> int:
        env = environment()
        if "RANK" not in env and (ranks := slurm_rank(env)):
            # flatout would do the same, but later than the number of ranks is needed here
            set_environment(ranks)
        say(repr(train(make())))
        return 0

    return exit_code_of(train_it)
