"""Turbo-Tune's training script, qwen3_sft.py: its flags become flatout's settings, and flatout trains."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from flatout import UsageError
from flatout.api.commands import exit_code_of
from flatout.api.settings import Config, make_config, read_json, require_packages
from flatout_migrate.doors import parser_of
from flatout_migrate.doors.launched import data_of, device, run, say, with_rows_per_step
from flatout_migrate.translation import Became, Given, defaults_of, read_table, rules_of, translate

# the script reads it from here
FSDP_JSON = Path("config/fsdp.json")


def micro_batch(given: Given) -> Became:
    """Translate rows of --max_length tokens."""
    return Became({"batch.micro_batch_tokens": int(given.number()) * int(given.number("max_length"))})


def to_config(given: Mapping[str, Any], overrides: Sequence[str] = (), *, counts_rows: bool = True) -> Config:
    """Return flatout's configuration for these flags. Raises a UsageError that names every flag it cannot honor.

    Without `counts_rows`, nothing is tokenized, and a batch of packed rows keeps its number of rows.
    """
    values = {name: value for name, value in given.items() if name not in ("dataset_path", "deepspeed_config")}
    if given.get("deepspeed_config"):
        values["deepspeed"] = _read_deepspeed(Path(given["deepspeed_config"]))
    if given.get("fsdp") and FSDP_JSON.is_file():
        values["fsdp_config"] = read_json(FSDP_JSON)
    translation = translate(values, rules_of("turbo_tune"), defaults=defaults_of("turbo_tune", given))
    settings = translation.checked("qwen3_sft.py")
    for outcome in translation.outcomes:
        if outcome.note and not outcome.is_default:
            say(f"--{outcome.name}: {outcome.describe()}")
    # question and answer with a space between, without a chat template
    data = data_of(given["dataset_path"], settings["data"].pop("max_tokens"), format="alpaca")
    settings = {
        "name": "turbo-tune",
        "device": device(),
        **settings,
        "data": {"too_long": "truncate", **settings["data"], **data, "template": "plain"},
    }
    if given.get("use_packing") and counts_rows:
        return with_rows_per_step(settings, overrides, settings["batch"]["samples_per_step"])
    return make_config(settings, overrides, origin="flags")


def _read_deepspeed(path: Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON, without the entries of zero1.json and zero3.json that cannot work."""
    content: dict[str, Any] = read_json(path)
    zero = content.get("zero_optimization") if isinstance(content, dict) else None
    if not isinstance(zero, dict):
        raise UsageError(f"--deepspeed_config {path}: expected an object with zero_optimization")
    for name, why in read_table("turbo_tune")["left out"].items():
        if zero.pop(name, None) is not None:
            say(f"--deepspeed_config: {name} is left out: {why}")
    return content


def main() -> int:
    """`qwen3_sft.py`: train, alone or as the rank that torchrun, accelerate or deepspeed started."""
    how = {"description": "Fine-tune.", "argument_default": argparse.SUPPRESS, "allow_abbrev": False}
    parser = parser_of("qwen3_sft.py", "overrides", **how)
    given = vars(parser.parse_intermixed_args())
    overrides, num_ranks = given.pop("overrides"), given.pop("check_for", None)
    if num_ranks is not None:
        # of all packages that are missing, before a launcher starts ranks, which repeat the notes on flags
        def check() -> int:
            require_packages(to_config(given, overrides, counts_rows=False), num_ranks)
            return 0

        with redirect_stdout(StringIO()):
            return exit_code_of(check)
    return run(lambda: to_config(given, overrides))


if __name__ == "__main__":
    raise SystemExit(main())
